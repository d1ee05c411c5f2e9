# SPDX-License-Identifier: Apache-2.0
"""The table of rounding modes, and that engines know modes by its numbers."""

import itertools
import re
from pathlib import Path

import pytest

import fmtsim
from fmtsim.rounding.modes import CODES, MODES, RULES

CASES = list(itertools.product((False, True), repeat=4))


@pytest.mark.parametrize("mode", MODES)
def test_a_code_is_the_truth_table_of_a_condition(mode):
    rule = RULES[mode]
    for half, sticky, odd, negative in CASES:
        moves = (half or sticky) and rule.condition(half, sticky, odd, negative)
        assert CODES[mode] >> (8 * half + 4 * sticky + 2 * odd + negative) & 1 == moves
    assert CODES[mode] >> 16 == rule.random == (mode == "stochastic")


@pytest.mark.parametrize("mode", MODES)
def test_what_moves_up_keeps_moving_with_more_behind_it(mode):
    """Engines add a number that depends on the threshold alone, so a condition is monotone in the fraction."""
    rule = RULES[mode]
    for odd, negative in itertools.product((False, True), repeat=2):
        moves = [
            rule.condition(half, sticky, odd, negative) for half, sticky in ((False, True), (True, False), (True, True))
        ]
        assert moves == sorted(moves) and rule.threshold(odd, negative) == sum(moves)


def test_modes_have_codes_of_their_own():
    assert tuple(RULES) == MODES and len(set(CODES.values())) == len(MODES)


def test_the_kernels_of_a_gpu_name_modes_by_the_same_codes():
    text = (Path(fmtsim.__file__).parent / "cuda/include/rounding.cuh").read_text("utf-8")
    named = {mode.lower(): int(code, 16) for mode, code in re.findall(r"#define MODE_(\w+) (0x[0-9a-f]+)", text)}
    assert len(named) >= 5 and named == {mode: CODES[mode] for mode in named}
