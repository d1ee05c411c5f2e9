# SPDX-License-Identifier: Apache-2.0
"""Orders of sums, scans and norms against threads one by one, and that errors in them are seen by the record."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy import float32

from fmtsim.machine import batch_norm, group_norm, norm, reduce, scan, softmax
from fmtsim.machine.reduce import Plan, moments, sums
from fmtsim.machine.simulate import simulate
from fmtsim.support.errors import ArgumentError
from tests.machine.cases import BF16, F32, digest, numbers
from tests.machine.reduction_cases import reduced_cases

RECORD = json.loads((Path(__file__).parent / "data" / "h200.json").read_text("utf-8"))["cases"]


def differing(kind: str, step: int) -> int:
    """Return how many of every ``step``-th recorded case of a kind have other bits."""
    cases = [case for case in reduced_cases() if case.name.split()[0] == kind][::step]
    with simulate(target="h200", strict=True):
        return sum(digest(*case.call("cpu")) != RECORD[case.name] for case in cases)


def _plant(module, name: str, change: Callable) -> Callable:  # type: ignore[no-untyped-def]
    return lambda patch: patch.setattr(module, name, change(getattr(module, name)))


@pytest.mark.parametrize(
    ("kind", "step", "plant"),
    [
        ("sums", 29, _plant(reduce, "_THREADS", lambda count: count // 2)),
        (
            "sums",
            29,
            _plant(reduce, "_sorted", lambda _: lambda shape, x, y: sorted(range(len(y)), key=lambda d: y[d])),
        ),
        ("variances", 29, _plant(reduce, "_THREADS", lambda count: count // 2)),
        ("spatial", 9, _plant(softmax, "HALVES", lambda _: softmax.WARPS)),
        ("scan", 9, _plant(torch, "stack", lambda stack: lambda rows, dim: stack(rows[::-1], dim))),
        ("group_norm", 9, _plant(group_norm, "threads_of_a_row", lambda _: lambda count: Plan(32))),
        ("batch_norm", 19, _plant(batch_norm, "_ROWS_A_THREAD", lambda count: 2 * count)),
        ("batch_norm", 19, _plant(batch_norm, "_exchanged", lambda _: batch_norm._halved)),
        (
            "instance_norm",
            3,
            _plant(
                batch_norm,
                "_cudnn_sums",
                lambda total: (
                    lambda x, factors, threads, vector=1, pairs=False: total(x, factors, threads, vector, not pairs)
                ),
            ),
        ),
        ("odd_norm", 9, _plant(norm, "_ODD", lambda _: Plan(32, 8))),
    ],
)
def test_planted_errors_are_seen(kind, step, plant, monkeypatch):
    plant(monkeypatch)
    assert differing(kind, step)


def test_what_is_not_known_is_refused():
    """Every call whose bits are not those of the card is named: none is computed in silence."""
    for case in list(reduced_cases(known=False))[::7]:
        with pytest.raises(ArgumentError, match="not known"), simulate(target="h200", strict=True):
            case.call("cpu")


# Threads one by one, in Python: an oracle that shares nothing with the kernels.
def _by_threads(row: np.ndarray, start: int, plan: Plan, empty, update, combine):  # type: ignore[no-untyped-def]
    """Return what the threads of a plan make of a row by updates and combinations in their order."""
    threads = plan.width * plan.height * plan.blocks
    state = [[empty] * plan.accumulators for _ in range(threads)]
    vector = plan.accumulators if plan.loads else 1
    head = -start % vector
    tail = len(row) - (len(row) - head) % vector
    for j, x in enumerate(row):
        if plan.loads and not head <= j < tail:
            thread, a = (start + j) % vector if j < head else j - tail, 0
        elif plan.loads:
            thread, a = (j - head) // vector % threads, (j - head) % vector
        else:
            thread, a = j % threads, j // threads % plan.accumulators
        state[thread][a] = update(state[thread][a], x)
    values = []
    for accumulators in state:
        value = accumulators[0]
        for other in accumulators[1:]:
            value = combine(value, other)
        values.append(value)

    def halve(part):  # type: ignore[no-untyped-def]
        while len(part) > 1:
            part = [combine(a, b) for a, b in zip(part[: len(part) // 2], part[len(part) // 2 :], strict=True)]
        return part[0]

    def block(lanes, x_first):  # type: ignore[no-untyped-def]
        lines = [lanes[y * plan.width : (y + 1) * plan.width] for y in range(plan.height)]
        return halve([halve(line) for line in (lines if x_first else zip(*lines, strict=True))])

    size = plan.width * plan.height
    results = [block(values[b * size : (b + 1) * size], True) for b in range(plan.blocks)]
    if plan.blocks == 1:
        return results[0]
    lanes = [empty] * size
    for b, result in enumerate(results):
        lanes[b % size] = combine(lanes[b % size], result)
    return block(lanes, False)


PLANS = (
    Plan(1, 4, 1, 4),
    Plan(8, 4, 1, 4),
    Plan(32, 2, 1, 4, True),
    Plan(16, 1, 3, 8, True),
    Plan(4, 2, 11, 2),
    Plan(1, 4, 9, 4),
)


@pytest.mark.parametrize("plan", PLANS)
def test_sums_and_moments_are_those_of_the_threads_of_a_plan(plan):
    x, z = (numbers(seed, (5, 777), "wide", F32).numpy() for seed in (1, 2))
    starts = np.array([0, 3, 5, 8, 1])

    def fused(total, pair):  # type: ignore[no-untyped-def]
        return float32(float(pair[0]) * float(pair[1]) + float(total))  # exact product, and a sum of 53 bits

    def welford(state, value):  # type: ignore[no-untyped-def]
        mean, m2, count = state
        new = mean + (value - mean) / (count + 1)
        return new, m2 + (value - mean) * (value - new), count + 1

    def merge(a, b):  # type: ignore[no-untyped-def]
        if not a[2] or not b[2]:
            return a if a[2] else b
        total, delta = a[2] + b[2], b[0] - a[0]
        return a[0] + delta * b[2] / total, a[1] + b[1] + delta * delta * a[2] * b[2] / total, total

    found, products, (means, squares) = sums(x, plan, None, starts), sums(x, plan, z, starts), moments(x, plan, starts)
    for i, start in enumerate(starts):
        first = start % plan.accumulators if plan.loads else 0
        add = lambda a, b: a + b  # noqa: E731
        assert found[i] == _by_threads(x[i], first, plan, float32(0), add, add)
        exact = _by_threads(list(zip(x[i], z[i], strict=True)), first, plan, float32(0), fused, add)
        assert products[i] == pytest.approx(exact, rel=1e-5)
        mean, m2, _ = _by_threads(x[i].astype(float), first, plan, (0.0, 0.0, 0), welford, merge)
        assert means[i] == pytest.approx(mean, rel=1e-4, abs=1e-5) and squares[i] == pytest.approx(m2, rel=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_dimensions_are_those_of_memory_in_any_permutation(order):
    """A sum over the dimensions that lie innermost is one over rows, however they are permuted."""
    x = numbers(1, (6, 5, 8, 20), "cancelling", BF16).permute(order)
    back = [order.index(d) for d in range(4)]
    found = reduce.reduce(x, [back[2], back[3]], False, False, F32)
    rows = reduce.reduce(x.permute(back).reshape(30, 160), [1], False, False, F32).reshape(6, 5)
    assert torch.equal(found if back[0] < back[1] else found.t(), rows)


@pytest.mark.parametrize("shape", [(3, 50), (1000, 3), (2, 40, 5)])
def test_scans_are_sums_that_round_to_the_dtype(shape):
    x = numbers(1, shape, "normal", BF16)
    found = scan.scan(x, 1, None, False)
    exact = x.double().cumsum(1)
    assert (found.double() - exact).abs().max() <= exact.abs().max() * 2.0**-8 * shape[1]
    if len(shape) == 3:
        total, rows = torch.zeros(2, 5, dtype=BF16), []
        for row in x.unbind(1):
            total = (total.float() + row.float()).bfloat16()
            rows.append(total)
        assert torch.equal(found, torch.stack(rows, 1))


def test_zeros_keep_their_sign_without_a_bias():
    """A layer norm without a bias adds no zero to what it scales."""
    x, weight = torch.ones(1, 8), -torch.ones(8)
    assert norm.layer_norm(x, [8], weight, None, 1e-5)[0].signbit().all()
    assert not norm.layer_norm(x, [8], weight, torch.zeros(8), 1e-5)[0].signbit().any()


def test_cumulative_sums_of_integers_are_exact():
    x = torch.tensor([[3.0, 2.0, 300.0], [1.0, 0.0, 7.0]])
    with simulate(target="h200", strict=True):
        assert torch.cumsum(x, 1, dtype=torch.int32).tolist() == [[3, 5, 305], [1, 1, 8]]
        assert torch.cumsum(x[0].int(), 0).tolist() == [3, 5, 305]
