# SPDX-License-Identifier: Apache-2.0
"""The gate of sizes: what is counted, and that each kind of growth is seen."""

from collections import Counter

import pytest

from tools import size

LINES = Counter({"fmtsim/gemm": 90, "fmtsim/lab/cli": 40, "tests/gemm": 60, "tools": 5})
COUNTED = {"public names": 3, "commands": 2}
BOUNDS = {
    "rooms": {"fmtsim/gemm": 100, "fmtsim/lab/cli": 50, "tests/gemm": 80, "tools": 5},
    "sums": {"wheel": 150, "downstairs": 100, "lab and integrations": 50, "tests": 80, "words in docs": 7,
             "public names": 3, "commands": 2},
    "words": {"README.md": 4}, "reasons": {},
}  # fmt: skip
WORDS = Counter({"docs": 4, "docs/howto": 3, "README.md": 4})


def test_rooms_lines_and_words(tmp_path, monkeypatch):
    files = ("fmtsim/a/b/c.py", "fmtsim/lab/cli/x.py", "fmtsim/x.py", "tools/a/b.py")
    assert list(map(size.room_of, files)) == ["fmtsim/a", "fmtsim/lab/cli", "fmtsim", "tools"]
    assert [size.lines_of(text) for text in (b"", b"a", b"a\n", b"a\nb", b"\n\n")] == [0, 1, 1, 2, 2]
    files = {"fmtsim/a/b.py": b"x\n" * 3, "fmtsim/a/b.txt": b"x\n", "docs/a.md": b"two words", "README.md": b"one"}
    lines, words = size.measure(files, files.__getitem__)
    assert lines == {"fmtsim/a": 3} and words == {"docs": 2, "README.md": 1}


def test_within_the_bounds(capsys):
    assert size.check(LINES, WORDS, COUNTED, BOUNDS) == []
    assert "fmtsim/gemm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "words", "counted", "said"),
    [
        ({"fmtsim/gemm": 101}, {}, {}, ["fmtsim/gemm: 101, at most 100", "downstairs: 101, at most 100"]),
        ({"tests/gemm": 75}, {}, {}, ["tests/gemm: 0.83 of its code, above 0.8 without a reason in size.toml"]),
        ({"fmtsim/new": 1}, {}, {}, ["fmtsim/new has no bound; add one to size.toml"]),
        ({}, {"docs": 5}, {}, ["words in docs: 8, at most 7"]),
        ({}, {"README.md": 5}, {}, ["words in README.md: 5, at most 4"]),
        ({}, {}, {"commands": 3}, ["commands: 3, at most 2"]),
    ],
)
def test_growth_is_seen(lines, words, counted, said):
    assert size.check(Counter(LINES | lines), Counter(WORDS | words), COUNTED | counted, BOUNDS) == said


def test_rooms_may_trade_lines_but_not_gain_any():
    rooms = BOUNDS["rooms"] | {"fmtsim/gemm": 101}
    assert size.check(LINES, WORDS, COUNTED, BOUNDS | {"rooms": rooms}) == [
        "the bounds of rooms add up to 151 for wheel, at most 150",
        "the bounds of rooms add up to 101 for downstairs, at most 100",
    ]


def test_this_tree_is_within_its_bounds():
    assert size.counts().keys() == {"public names", "commands"} and size.main.__doc__
