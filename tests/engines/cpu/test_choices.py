# SPDX-License-Identifier: Apache-2.0
"""The kernels and constants that the CPU engine chooses are what was recorded: a change is meant, or it is an error."""

import pytest

from tests.engines.cpu import choices


@pytest.mark.parametrize("part", choices.PARTS)
def test_choices_are_those_that_were_recorded(part):
    recorded = [line for line in choices.FILE.read_text().splitlines() if line.startswith(f"{part} ")]
    different = sorted(set(recorded) ^ set(choices.lines(part)))
    assert not different, "\n".join(["see tests/engines/cpu/choices.py:", *different])


def test_a_planted_error_is_seen(monkeypatch):
    before = list(choices.casts())
    monkeypatch.setattr(choices.scaled, "_LOWEST_PLACE", -1)
    assert list(choices.casts()) != before
