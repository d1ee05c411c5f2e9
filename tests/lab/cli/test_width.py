# SPDX-License-Identifier: Apache-2.0
"""What commands print fits into the width of a terminal, and goes whole into pipes and files."""

import shlex
import sys

import pytest

from fmtsim.lab.cli.main import main
from fmtsim.lab.cli.output import print_text

COMMANDS = (
    "formats", "table e4m3", "table fp16", "cast 0.1 -3e-5 --to e4m3 --to bf16 --rounding all",
    "explain 957 1 --format mxfp8_e4m3", "explain 0.1 --format nvfp4", "info", "doctor", "reproduce --list",
    "train --recipe list", "mm 16 16 64 --target h200", "invariance --target h200 --sizes 1..4",
    "doctor --gemm --target h200 --tokens 8",
)  # fmt: skip


@pytest.fixture
def printed(monkeypatch, capsys):
    """Run a command with standard output on a terminal of some columns, or on none."""

    def run(command: str, columns: int | None) -> list[str]:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None)
        monkeypatch.setenv("COLUMNS", str(columns or 60))
        assert main(shlex.split(command)) == 0
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_lines_fit_and_lose_no_word(command, printed):
    whole = [line for line in printed(command, None) if "products/s" not in line]  # seconds differ
    words = {word for line in whole for word in line.split() if word.strip("-|")}
    for columns in (60, 80, 120):
        lines = printed(command, columns)
        assert max(map(len, lines)) <= columns
        found = {word.rstrip(":;") for line in lines for word in line.split()}
        assert {word for word in words - found if word.rstrip(":;") not in found and len(word) <= 20} == set()


def test_output_into_a_pipe_is_whole(printed):
    assert max(map(len, printed("formats", None))) > 120
    assert printed("table e4m3", None)[12].count("|") == 3


def test_codes_stand_side_by_side_where_there_is_room(printed):
    assert [printed("table e4m3", columns)[-5].count("|") for columns in (60, 80, 120, 200)] == [0, 1, 2, 3]
    assert printed("table e2m1 --columns 2", 200)[-1].count("|") == 1


def test_long_lines_go_on_below_their_text(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    heading = "source  a rule that says much more than one line of 40 has room for"
    plain = "  a line that begins with two spaces, and goes on for long"
    print_text(lambda: f"{heading}\n\n{plain}")
    assert capsys.readouterr().out.splitlines() == [
        "source  a rule that says much more than",
        "        one line of 40 has room for",
        "",
        "  a line that begins with two spaces,",
        "  and goes on for long",
    ]
    monkeypatch.setenv("COLUMNS", "8")  # narrower than anything is laid out for
    print_text(lambda: "a" * 20)
    assert capsys.readouterr().out == "a" * 20 + "\n"
