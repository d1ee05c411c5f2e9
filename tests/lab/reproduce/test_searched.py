# SPDX-License-Identifier: Apache-2.0
"""The experiment of FLIQS, short: every number is there, differences are of what they say, and all have one cost."""

import pytest

from fmtsim.lab.reproduce import searched
from fmtsim.lab.reproduce.searched import CLAIMS, _Run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_numbers_and_budgets(monkeypatch):
    found, budgets = [], []
    right, search = _Run.right, searched.search_while_training
    monkeypatch.setattr(_Run, "right", lambda self, model: found.append(right(self, model)) or found[-1])

    def watched(*args, **how):
        result = search(*args, **how)
        budgets.append((result.budget, bool(result.widths)))
        return result

    monkeypatch.setattr(searched, "search_while_training", watched)
    small = dict(CLAIMS[0].settings) | {"steps": 8}
    numbers = searched.searched(lambda part: None, **small).numbers
    assert {one.name for claim in CLAIMS for one in claim.expected} == set(numbers)
    uniform, mixed, high, afterwards, joint = found[:5]
    assert numbers["high precision, right, %"] == high and numbers["integers, uniform, right, %"] == uniform
    assert numbers["integers: in flight - uniform, points"] == mixed - uniform
    assert numbers["integers: in flight - search afterwards, points"] == mixed - afterwards
    assert numbers["integers with widths - uniform, points"] == joint - uniform
    assert numbers["integers with widths - without, points"] == joint - mixed
    adds = 64 * (64 * 9 * 8 + 16 * 72 * 16 + 256 * 32 + 32 * 8)  # of a batch, in the network that is not wide
    assert budgets == [(adds * 16, False), (adds * 16, True), (adds * 16, False)]
