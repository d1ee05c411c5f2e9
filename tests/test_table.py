"""Text in columns."""

from fmtsim.table import aligned, filled, ruled

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
