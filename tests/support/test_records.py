# SPDX-License-Identifier: Apache-2.0
"""What fields of records hold, by their types, and what is said of what they do not."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import pytest

from fmtsim.support.errors import ArgumentError, FormatError
from fmtsim.support.records import check_items, check_types, parse_json, record_of
from tests.support.refusals import refused


@dataclass(frozen=True, kw_only=True)
class Part:
    size: int = 1

    def __post_init__(self) -> None:
        check_types(self, FormatError)


@dataclass(frozen=True, kw_only=True)
class Whole:
    number: int = 0
    ratio: float = 0.0
    flag: bool = False
    text: str = ""
    choice: Literal["a", "b", 1] | None = None
    pair: tuple[int, str] = (0, "")
    many: tuple[int, ...] = ()
    table: dict[str, int] | None = None
    items: list[int] | None = None
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    anything: Any = None

    def __post_init__(self) -> None:
        check_types(self)


WHOLE, PAIR = "pass a whole number of 64 bits", "pass a tuple (a whole number of 64 bits, text)"
CHOICE = "choose None, 'a', 'b', 1"


@pytest.mark.parametrize(
    ("name", "good", "bad", "allowed"),
    [
        ("number", [(1 << 63) - 1, -(1 << 63), numpy.int8(3)], [1 << 63, -(1 << 63) - 1, True, 1.0, "1", None], WHOLE),
        ("ratio", [1, 0.5, (1 << 63) - 1, float("nan")], [1 << 63, True, "1", None], "pass a number"),
        ("flag", [True], [1, 0, None, "True"], "pass True or False"),
        ("text", ["a", "ü", "𝟜"], ["\ud800", "a\udfff", b"a", None], "pass text"),
        ("choice", ["a", 1, None], ["c", 1.0, True, ["a"], 2], CHOICE),
        ("pair", [(1, "a"), (numpy.int64(1), "a")], [(1,), (1, "a", "a"), ("a", 1), [1, "a"], None, (1, 1)], PAIR),
        ("many", [(), (1,), (1, 2, 3)], [(1, "a"), ("a", 1), [1], 1], "pass a tuple (a whole number of 64 bits, ...)"),
        ("table", [{}, {"a": 1}, None], [{"a": "a"}, {1: 1}, {"a": 1, "b": "b"}, []], "pass a dict or None"),
        ("items", [[], [1, 2]], [[1, "a"], ["a", 1], (1,)], "pass a list or None"),
        ("part", [Part()], [Whole, {}, 1], "pass a Part or None"),
        ("anything", [Part, [1], "\ud800"], [], ""),
    ],
)
def test_what_fields_hold(name, good, bad, allowed):
    for value in good:
        held = getattr(Whole(**{name: value}), name)
        assert held == value or held != held
        assert type(held) is (int if isinstance(value, numpy.integer) else type(value))
    for value in bad:
        refused(rf"^Whole {name}=.* is not allowed; {re.escape(allowed)}$", Whole, **{name: value})


def test_numbers_of_numpy_in_tuples_become_ints():
    pair = Whole(pair=(numpy.int64(1), "a")).pair
    assert pair == (1, "a") and type(pair[0]) is int


def test_records_out_of_json():
    content = {"number": 1, "pair": [1, "a"], "many": [1, 2], "part": {"size": 2}, "parts": [{"size": 3}, {}]}
    expected = Whole(number=1, pair=(1, "a"), many=(1, 2), part=Part(size=2), parts=(Part(size=3), Part()))
    assert record_of(Whole, content, "file") == expected
    for wrong, message in (
        ({"part": {"size": "a"}}, f"file.part: Part size='a' is not allowed; {WHOLE}"),
        ({"parts": [{}, {"sizes": 1}]}, "file.parts[1]: a Part has no field 'sizes'; it has size"),
        ({"parts": {}}, "file.parts: {} is not a list; write [...]"),
        ({"part": 5}, "file: Whole part=5 is not allowed; pass a Part or None"),
        ({"pair": [1]}, f"file: Whole pair=(1,) is not allowed; {PAIR}"),
        ([], "file: [] is not an object; write the fields of a Whole, {...}"),
    ):
        refused(f"^{re.escape(message)}$", record_of, Whole, wrong, "file", error=(ArgumentError, FormatError))


def test_saved_items_have_their_types():
    types = {"a": int, "b": list[int]}
    check_items({"a": 1, "b": [1], "more": None}, types, "state")
    for value, message in (
        (3, "state is 3; pass the dict that was saved"),
        ({"a": 1}, "state has no 'b'; pass what was saved"),
        ({"a": True, "b": []}, "state has 'a': True; it should be a whole number of 64 bits"),
        ({"a": 1, "b": (1,)}, "state has 'b': (1,); it should be a list"),
    ):
        refused(f"^{re.escape(message)}$", check_items, value, types, "state")


def test_json_has_a_depth_and_names_things_once():
    deep = "[" * 64 + "]" * 64
    assert parse_json(deep) is not None
    for text, message in (
        (f"[{deep}]", "more than 64 objects or lists inside each other"),
        ('{"b": {"a": 1, "c": 2, "a": 3}}', "'a' stands twice in one object"),
        ("[NaN]", "NaN is not a number of JSON"),
        (b"[]", "b'[]' is not text"),
    ):
        refused(f"^{re.escape(message)}$", parse_json, text, error=ValueError)
