# SPDX-License-Identifier: Apache-2.0
"""Whether rows keep their bits on a GPU as ``batch_invariance`` says: here on a stand-in for one."""

from dataclasses import replace

from fmtsim.gemm.products.resolver import resolve
from fmtsim.gemm.targets.doubts import without_doubts
from tests.support.fake_gpu import FakeGPU
from tests.support.targets import hopper
from tools import batch_rows


def rule(low, high, split):
    when = {"operation": ["linear", "mm"], "m": {"min": low, "max": high}}
    return {"when": when, "kernel": "tile64", "split": split, "basis": "recorded", "reason": "a test"}


def card(target, plan=lambda call, found: found.plan):
    """Return a GPU that multiplies as the target says; guesses are as good as any."""

    def resolved(call):
        with without_doubts():
            return resolve(replace(call, target=target))

    return FakeGPU(lambda call: resolved(call).datapath, lambda call: plan(call, resolved(call)))


def test_a_card_is_held_to_what_is_said():
    """No contradiction is found where a card does as its target says, and a planted one is."""
    target = hopper("two", {"tile64": {"k_tile": 64}}, [rule(1, 7, 4), rule(8, 14, 1)])
    options = {"dtypes": ("bf16",), "count": 5, "most_rows": 14, "largest": 3000}
    found, wrong = batch_rows.run(card(target), target, 3, 5, **options)
    assert not wrong and sum(found["bf16"].values()) > 20
    assert found["bf16"][True, True] and found["bf16"][False, False]
    other = card(target, lambda call, found: replace(found.plan, k_tile=64, split=2) if call.m == 2 else found.plan)
    _, wrong = batch_rows.run(other, target, 3, 5, **options)
    assert wrong and {first for *_, first, _, _ in wrong} | {second for *_, second, _ in wrong} >= {2}
