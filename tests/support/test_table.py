# SPDX-License-Identifier: Apache-2.0
"""Text in columns."""

import math
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import pytest

from fmtsim.support.table import (
    Column,
    Facts,
    Record,
    Result,
    Rows,
    aligned,
    facts_html,
    filled,
    html,
    markdown,
    number_text,
    page,
    page_width,
    ruled,
    table_of,
)

ROWS = [("layer", "dB", "with"), ("up", "31.5", ""), ("down", "8", "gptq")]


def test_aligned():
    assert aligned(ROWS) == ["layer  dB    with", "up     31.5", "down   8     gptq"]
    assert aligned(ROWS, left=(0, 2)) == ["layer    dB  with", "up     31.5", "down      8  gptq"]
    assert aligned(ROWS, left=())[1:] == ["   up  31.5", " down     8  gptq"]
    assert aligned(ROWS[:1]) == ["layer  dB  with"]


def test_ruled_lines_are_as_long_as_the_longest():
    assert ruled(ROWS)[1] == "-" * 17 and ruled(ROWS[:1]) == ["layer  dB  with", "-" * 15]


def test_filled_drops_columns_without_cells():
    rows = [("a", "", "1"), ("b", "", "")]
    assert filled(("x", "y", "z"), rows) == [["x", "z"], ["a", "1"], ["b", ""]]
    assert aligned(filled(("x", "y"), [])) == [""]


def test_tables_of_notebooks_and_pages():
    head, row = "<th style='text-align:left'>layer</th>", "<td style='text-align:right'>&lt;1&gt;</td>"
    table = html([("layer", "dB"), ("up", "<1>")], left=(0,))
    assert table == (
        f"<table><tr>{head}<th style='text-align:right'>dB</th></tr>"
        f"<tr><td style='text-align:left'>up</td>{row}</tr></table>"
    )
    assert html([("a",), ("b",)]).count("text-align:left") == 2
    assert facts_html([("a&b", "<c>")]) == (
        "<table><tr><th style='text-align:left'>a&amp;b</th><td style='text-align:left'>&lt;c&gt;</td></tr></table>"
    )
    assert markdown([("a", "b"), ("1|2", "3")]) == "| a | b |\n|---|---|\n| 1\\|2 | 3 |"
    assert markdown([("a", "b")], left=()).endswith("|--:|--:|")


def test_a_record_shows_one_content_as_text_and_in_html():
    class Found(Result):
        def _content(self):
            return "a <b>", "", Rows(ROWS, left=(0,)), Facts([("k", "<v>")]), Rows(ROWS[:1]), "end", "of it"

    record = Found()
    assert str(record) == "\n".join(["a <b>", "", *ruled(ROWS, (0,)), "k  <v>", "end", "of it"]) == repr(record)
    facts = facts_html([("k", "<v>")])
    assert record._repr_html_() == f"a &lt;b&gt;{html(ROWS, (0,))}{facts}end<br>of it"


def test_columns_are_declared_once_for_text_html_and_csv():
    columns = (Column("layer", "name"), Column("dB", lambda row: row.value, ">.1f", absent="-"), Column("", "empty"))
    rows = [SimpleNamespace(name="up,down", value=31.54, empty=""), SimpleNamespace(name="x", value=None, empty=None)]
    assert table_of(columns, rows) == ([["layer", "dB", ""], ["up,down", "31.5", ""], ["x", "-", ""]], [0, 2])
    assert table_of(columns, rows, filled=True) == ([["layer", "dB"], ["up,down", "31.5"], ["x", "-"]], [0])

    class Found(Result):
        def _content(self):
            return "text", table_of(columns[:2], rows), Facts([("k", "v")])

    assert Found().to_csv() == 'layer,dB\n"up,down",31.5\nx,-\n\nk,v\n'


def test_a_record_becomes_json_types():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Part(Record):
        x: float
        _derived = ("twice",)

        @property
        def twice(self):
            return 2 * self.x

    @dataclass
    class Whole(Record):
        parts: tuple[Part, ...]
        by_name: dict

    assert Part(x=1.5).to_dict() == {"x": 1.5, "twice": 3.0}
    whole = Whole((Part(x=math.inf),), {1: Fraction(1, 3), "n": None})
    assert whole.to_dict() == {"parts": [{"x": "inf"}], "by_name": {"1": "1/3", "n": None}}


def test_numbers_in_few_digits():
    numbers = (0.1, 448.0, -0.0, float("inf"), float("nan"), Fraction(1, 4), Fraction(1, 3), None, Fraction(10) ** 400)
    assert [number_text(number)[:12] for number in numbers] == [
        "0.1", "448", "-0", "inf", "nan", "0.25", "~0.333333333", "-", "100000000000",
    ]  # fmt: skip


WIDE = [
    ("layer", "dB", "bits", "why it is not converted"),
    ("up", "31.5", "0 1111 110", "its bias is shared with down"),
    ("down", "8", "0 0000 000", ""),
]


def test_a_narrow_page_wraps_texts_and_keeps_numbers_whole():
    with page(44):
        assert ruled(WIDE, left=(0, 2, 3), columns=True) == [
            "layer    dB  bits        why it is not", "                         converted",
            "-----  ----  ----------  -------------------", "up     31.5  0 1111 110  its bias is shared",
            "                         with down", "down      8  0 0000 000",
        ]  # fmt: skip
        assert page_width() == 44
    assert page_width() is None and ruled(WIDE)[0] == "layer  dB    bits        why it is not converted"


def test_columns_without_room_move_below_their_rows():
    with page(24):
        assert ruled(WIDE, left=(0, 2, 3)) == [
            "layer    dB  bits", "-----------------------", "up     31.5  0 1111 110", "    why it is not",
            "    converted: its bias", "    is shared with down", "down      8  0 0000 000",
        ]  # fmt: skip
        assert aligned([("", "", "x"), ("1" * 9, "2" * 9, "3" * 9)], left=())[1:] == [
            "111111111  222222222",
            "    x: 333333333",
        ]
    with page(20):  # would make rows tall
        rows = [("n", "call", "what changes"), ("1", "mm", " ".join(["word"] * 20))]
        assert [line.strip() for line in ruled(rows)[2:4]] == ["1  mm", "what changes:"]


@pytest.mark.parametrize("width", [20, 24, 33, 60, None])
def test_no_line_is_wider_than_the_page_and_no_word_is_lost(width):
    words = [cell.split() for row in WIDE for cell in row]
    with page(width):
        lines = ruled(WIDE, left=(0, 2, 3)) + aligned([("source", "a paper, section 3"), ("max", "448")])
    assert width is None or max(map(len, lines)) <= width
    text = " ".join(lines)
    assert all(word in text for cell in words for word in cell)


def test_a_page_ends_with_its_block():
    with pytest.raises(ZeroDivisionError), page(10):
        raise ZeroDivisionError
    assert page_width() is None
