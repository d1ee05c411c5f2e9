# SPDX-License-Identifier: Apache-2.0
"""``launch(watch_sum=...)``: the order of additions, evaluated here in NumPy and against orders written by hand."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.machine.ptx import watched_sum
from fmtsim.support.errors import ArgumentError

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def row_mean(x, y, mean, n, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        total = tl.sum(tl.load(x + tl.program_id(0) * n + i, i < n, 0.0))
        tl.store(y + tl.program_id(0), total)
        tl.store(mean + tl.program_id(0), total / n)

    @triton.jit
    def columns(x, y, R, C, BR: tl.constexpr, BC: tl.constexpr):
        c = tl.program_id(0) * BC + tl.arange(0, BC)
        total = tl.zeros((BC,), tl.float32)
        for r0 in range(0, R, BR):
            total += tl.sum(tl.load(x + (r0 + tl.arange(0, BR))[:, None] * C + c[None]), 0)
        tl.store(y + c, total)

    @triton.jit
    def matmul(a, b, bias, c, K, N, B: tl.constexpr, BK: tl.constexpr):
        m, n = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
        total = tl.zeros((B, B), tl.float32)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            total = tl.dot(tl.load(a + m[:, None] * K + k[None]), tl.load(b + k[:, None] * N + n[None]), total)
        tl.store(c + m[:, None] * N + n[None], total + tl.load(bias + n)[None])

    @triton.jit
    def scalar_dot(x, w, y, n):
        total = 0.0
        for i in range(n):
            total += tl.load(x + n - 1 - i) * tl.load(w + n - 1 - i)
        tl.store(y, total)

    @triton.jit
    def atomic(x, y, SIZE: tl.constexpr):
        tl.atomic_add(y, tl.sum(tl.load(x + tl.program_id(0) * SIZE + tl.arange(0, SIZE))))

    @triton.jit
    def largest(x, y, SIZE: tl.constexpr):
        tl.store(y, tl.max(tl.load(x + tl.arange(0, SIZE)), 0))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def replayed(found, terms: torch.Tensor) -> float:
    """Add in NumPy, two numbers at a time."""
    values = list(terms.flatten().numpy())
    for first, second in found.additions:
        values.append(values[first] + values[second])
    assert all(isinstance(value, np.float32) for value in values)
    return float(values[-1])


@pytest.mark.parametrize("warps", [1, 4])
def test_rows(warps):
    x, y, mean = random(3, 500), torch.empty(3), torch.empty(3)
    launch = {"SIZE": 512, "num_warps": warps}
    found = fmtsim.launch(row_mean, 3, x, y, mean, 500, **launch, watch_sum=(y[1], x[1])).watched_sum
    assert found.leaves == found.count == 500 and len(found.additions) == 499 and found.rounding == "float32 sums"
    assert replayed(found, x[1]) == y[1].item()
    other = random(500) * 3
    fmtsim.launch(row_mean, 1, other, again := torch.empty(3), mean, 500, **launch)
    assert replayed(found, other) == again[0].item()
    # the steps of the warps: a thread's own, five of its lanes, then the warps'
    ways = [how for how, *_ in found.steps]
    shuffles = [f"across threads: shuffle {step}" for step in (16, 8, 4, 2, 1)]
    inner = ["across threads: shared memory, shuffle 2", "across threads: shuffle 1"] if warps == 4 else []
    assert ways == ["in a thread", *shuffles, *inner] and sum(count for _, count, *_ in found.steps) == 499
    assert found.steps[0][3].startswith("0 + 128 + 256 + 384" if warps == 4 else "0 + 32 + 64 + 96")
    # the mean is the sum, scaled: the sum's bits are what is shown
    record = fmtsim.launch(row_mean, 3, x, y, mean, 500, **launch, watch_sum=[mean[1], x[1]])
    assert record.watched_sum.additions == found.additions
    assert "mean[1] is made of the sum of 500 elements of x[1, :]: float32 sums, in this order" in str(record)


def test_columns_over_warps():
    x, y = random(64, 32), torch.empty(32)
    found = fmtsim.launch(columns, 2, x, y, 64, 32, BR=32, BC=16, num_warps=4, watch_sum=(y[5], x[:, 5])).watched_sum
    assert replayed(found, x[:, 5]) == y[5].item() and found.terms == "x[:, 5]"
    assert "across threads: shared memory" in str(found)


@pytest.mark.parametrize(("dtype", "k"), [(torch.float16, 16), (torch.bfloat16, 16), (torch.float32, 8)])
def test_tensor_cores(dtype, k):
    a, b = random(32, 32).to(dtype), random(33, 32)[:32].to(dtype)
    bias, c = random(32), torch.empty(32, 32)
    found = fmtsim.launch(matmul, (2, 2), a, b, bias, c, 32, 32, B=16, BK=16, watch_sum=(c[17, 3], b[:, 3])).watched_sum
    chains = [{*range(first, first + k)} | ({32 + first // k - 1} if first else set()) for first in range(0, 32, k)]
    assert [set(addition) for addition in found.additions] == chains and found.rounding == "sums of the matrix unit"
    assert "{0-7} + {8-15} + {16-23} + {24-31}" in str(found) if k == 8 else "{0-15} + {16-31}" in str(found)


def test_products_that_are_fused():
    x, w, y = random(20), random(21)[:20], torch.empty(1)
    exact = np.float64
    for fused in (True, False):
        record = fmtsim.launch(scalar_dot, 1, x, w, y, 20, enable_fp_fusion=fused, watch_sum=(y, x))
        found = record.watched_sum
        assert [set(addition) for addition in found.additions] == [{19, 18}, *({17 - i, 20 + i} for i in range(18))]
        assert found.rounding == ("fused products, float32 sums" if fused else "float32 products, float32 sums")
        total = np.float32(0)
        for i in range(19, -1, -1):  # 24 and 24 bits; float64 rounds some of these sums, none of them at a tie
            product = exact(x[i].item()) * exact(w[i].item())
            total = np.float32((product if fused else np.float32(product)) + exact(total))
        assert total == y.item()


def test_an_order_with_other_bits_is_not_shown(monkeypatch):
    x, y = random(1, 64), torch.empty(1)
    arguments = (row_mean, 1, x, y, torch.empty(1), 64)
    part = fmtsim.launch(*arguments, SIZE=64, watch_sum=(y, x[0, :32])).watched_sum
    assert str(part).startswith("y[0] is made of the sum of 32 elements of x[0, :]")  # which a warp makes
    part = fmtsim.launch(*arguments, SIZE=64, watch_sum=(y, x[0, ::3])).watched_sum
    assert "the order is not shown" in str(part) and part.additions == ()
    values = watched_sum._values  # private: what is planted is an error of the evaluation
    monkeypatch.setattr(watched_sum, "_values", lambda *given: torch.nextafter(values(*given), torch.tensor(torch.inf)))
    planted = fmtsim.launch(*arguments, SIZE=64, watch_sum=(y, x)).watched_sum
    assert "additions in this order have other bits" in planted.reason


def test_refused():
    x, y = random(4, 64), torch.zeros(4)
    for kernel, grid, watch, message in (
        (atomic, 4, (y[0], x), r"y\[0\] has no certain order: .*atomic sums of floats"),
        (largest, 1, (y[0], x[0]), r"y\[0\] is not a sum of x\[0, :\], or of its products"),
        (largest, 2, (y[1], x[0]), "no block writes element"),
        (largest, 1, (y[0], y[1:]), r"views of two tensors .* watch_sum=\(y\[1\], x\[1\]\)"),
        (largest, 1, (y, x[0]), "takes one element"),
        (largest, 1, (y[0], random(64)), "takes one element"),
        (largest, 1, (y[0], x[0] > 0), "takes one element"),
        (largest, 1, y[0], "give an element and its terms"),
        (largest, 1, (y[0],), "give an element and its terms"),
    ):
        with pytest.raises(ArgumentError, match=message):
            fmtsim.launch(kernel, grid, x, y, SIZE=64, watch_sum=watch)
    with pytest.raises(ArgumentError, match="torch.bfloat16; got torch.int32 in torch.float32"):
        fmtsim.launch(largest, 1, ones := torch.ones(64, dtype=torch.int32), y, SIZE=64, watch_sum=(y[0], ones))
