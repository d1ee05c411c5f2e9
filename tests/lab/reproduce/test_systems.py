# SPDX-License-Identifier: Apache-2.0
"""The page of systems: every row says what is there, what came out and by which command, in names that exist."""

import re
import shlex
from pathlib import Path

import pytest

from fmtsim.lab.cli.main import main
from fmtsim.lab.reproduce.run import CLAIMS
from fmtsim.recipes.registry import get_recipe

PAGE = (Path(__file__).parents[3] / "docs" / "systems.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| (?!system |-)", line)
]
COMMANDS = sorted({command for row in ROWS for command in re.findall(r"`fmtsim ([^`]+)`", row[-1])})


def test_every_row_is_whole():
    assert len(ROWS) >= 22
    for row in ROWS:
        assert len(row) == 5 and all(row), row
        assert re.search(r"\b(shown|not tried|not ours)\b", row[3]), row
        assert "`fmtsim " in row[4], row


def test_verdicts_are_those_that_are_recorded():
    found = {name: verdict for row in ROWS for name, verdict in re.findall(r"`(\w+)`: ([a-z ]+)", row[3])}
    recorded = {claim.name: claim.recorded for claim in CLAIMS}
    assert found == {name: recorded[name] for name in found} and len(found) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command, capsys):
    """Claims are listed instead of run, and trainings describe their recipe."""
    words = shlex.split(command)
    if words[0] == "reproduce":
        words.append("--list")
    elif words[0] == "train":
        get_recipe(words[words.index("--recipe") + 1])
        words.append("--help")
    try:
        assert main(words) == 0
    except SystemExit as end:  # --help
        assert end.code == 0
