# SPDX-License-Identifier: Apache-2.0
"""Attention in 16 bits held to an oracle that has whole score matrices in numpy and shares no kernel with it."""

import math

import numpy as np
import pytest
import torch
from numpy import float32

import fmtsim
from fmtsim.machine import attention, mufu
from fmtsim.machine.arrays import apply, canonical, chain, fma, to_f32, tree
from tests.machine.cases import BF16, FP16, numbers
from tests.support.bits import assert_same_bits

LOG2E, LN2 = float32(math.log2(math.e)), float32(math.log(2.0))


def multiply(a: np.ndarray, b: np.ndarray, dtype: torch.dtype, c: np.ndarray | None = None) -> np.ndarray:
    """Return a b^T + c, one product after the other, by the engine of torch operations."""
    a16, b16 = (torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x in (a, b))
    total = [
        fmtsim.mma(x, y, None if c is None else torch.from_numpy(c[i]), target="hopper.wgmma", accumulate="fp32")
        for i, (x, y) in enumerate(zip(a16, b16, strict=True))
    ]
    return torch.stack(total).numpy()


def heads_of(x: torch.Tensor, heads: int, tile: int) -> np.ndarray:
    """Return float32 [batch * heads, length, D], the length filled up to whole tiles."""
    rows = to_f32(x.repeat_interleave(heads // x.shape[1], 1).flatten(0, 1))
    return np.pad(rows, [(0, 0), (0, -rows.shape[1] % tile), (0, 0)])


def flush(x: np.ndarray) -> np.ndarray:
    """Return zeros for subnormal numbers."""
    return np.where(np.abs(x) < float32(2.0**-126), x * float32(0.0), x)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).float().numpy()


def mask(scores: np.ndarray, queries: int, keys: int, causal: bool) -> np.ndarray:
    scores[:, :, keys:] = scores[:, queries:] = -np.inf
    if causal:
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    return scores


def oracle_forward(q, k, v, causal, scale):  # type: ignore[no-untyped-def]
    dtype, heads, (queries, keys) = q.dtype, q.shape[1], (q.shape[2], k.shape[2])
    q32, k32, v32 = heads_of(q, heads, 64), heads_of(k, heads, 128), heads_of(v, heads, 128)
    scores = multiply(q32, k32, dtype) * (float32(scale or q.shape[3] ** -0.5) * LOG2E)
    scores = mask(scores, scores.shape[1], keys, causal)
    largest, sums, acc = np.full((*scores.shape[:2], 1), -np.inf, np.float32), None, None
    for start in range(0, k32.shape[1], 128):
        x = scores[:, :, start : start + 128]
        new = np.maximum(largest, np.where(np.isnan(x), -np.inf, x).max(-1, keepdims=True))
        p, alpha = apply(mufu.ex2, x - new), apply(mufu.ex2, largest - new)
        # thread t of 4 adds columns 8 g + 2 t, + 1
        threads = p.reshape(*p.shape[:2], 16, 4, 2).swapaxes(2, 3).reshape(*p.shape[:2], 4, 32)
        sums = chain(threads) if sums is None else fma(sums, alpha, chain(threads))
        acc = multiply(p, v32[:, start : start + 128].mT, dtype, None if acc is None else flush(acc * alpha))
        largest = new
    total = ((sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3]))[..., None]
    lse = fma(largest, LN2, apply(mufu.lg2, total) * LN2)[..., 0]
    output = flush(acc * apply(mufu.rcp, total))[:, :queries].reshape(*q.shape[:3], -1)
    return canonical(torch.from_numpy(output).to(dtype)), lse[:, :queries].reshape(q.shape[:3])


def oracle_backward(g, q, k, v, output, lse, causal, scale):  # type: ignore[no-untyped-def]
    dtype, heads, (queries, keys) = q.dtype, q.shape[1], (q.shape[2], k.shape[2])
    factor = float32(scale or q.shape[3] ** -0.5)
    g32, q32, k32, v32, o32 = (heads_of(x, heads, 64) for x in (g, q, k, v, output))
    lse = np.pad(lse.reshape(-1, queries, 1), [(0, 0), (0, -queries % 64), (0, 0)])
    pairs = (g32 * o32).reshape(*o32.shape[:2], -1, 4, 2)
    chunks = chain(pairs[..., 0] + pairs[..., 1])
    delta = tree(np.pad(chunks, [(0, 0), (0, 0), (0, 32 - chunks.shape[-1])]))[..., None]
    p = apply(mufu.ex2, mask(fma(multiply(q32, k32, dtype), factor, -lse) * LOG2E, queries, keys, causal))
    ds = rounded(flush(flush(p * (multiply(g32, v32, dtype) - delta)) * factor), dtype)
    dv = multiply(rounded(p, dtype).mT, g32.mT, dtype)
    dk = multiply(ds.mT, q32.mT, dtype)
    blocks = [slice(start, start + 128) for start in reversed(range(0, k32.shape[1], 128))]
    dq = chain(np.stack([multiply(ds[:, :, b], k32[:, b].mT, dtype) for b in blocks], -1))
    results = [canonical(torch.from_numpy(dq[:, :queries]).to(dtype).view(q.shape))]
    for x, like in ((dk, k), (dv, v)):
        total = x[:, :keys]
        if heads > k.shape[1]:  # the heads of a group, rounded, from zero
            groups = flush(rounded(total, dtype)).reshape(-1, heads // k.shape[1], keys, like.shape[3])
            total = np.zeros_like(groups[:, 0])
            for head in range(groups.shape[1]):
                total = flush(total + groups[:, head])
        results.append(canonical(torch.from_numpy(total).to(dtype).view(like.shape)))
    return results


def operand(seed, shape, kind, dtype):  # type: ignore[no-untyped-def]
    x = numbers(seed, shape, "normal" if kind == "rare" else kind, dtype)
    if kind == "rare":
        x.view(-1)[[7, x.numel() // 2]] = torch.tensor([math.inf, -0.0], dtype=dtype)
        x.view(-1)[-1] = math.nan
    return x


KINDS = ("normal", "wide", "cancelling", "subnormal", "rare")
SHAPES = ((2, 2, 130, 130, 64, 64), (2, 1, 300, 300, 32, 32), (1, 1, 257, 130, 32, 32), (2, 1, 66, 70, 40, 24))


@np.errstate(all="ignore")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_has_the_bits_of_whole_matrices(kind, causal, every):
    """Normal numbers in every shape, other kinds in one of them in turn; every kind in every shape is slow."""
    for seed, (heads, key_heads, queries, keys, d, values) in enumerate(SHAPES):
        if kind != "normal" and not every and seed != (KINDS.index(kind) + causal) % len(SHAPES):
            continue
        dtype, scale = (BF16, FP16)[seed % 2], (None, None, 0.3, None)[seed]
        q, g = (operand(seed + n, (1, heads, queries, size), kind, dtype) for n, size in ((0, d), (10, values)))
        k, v = (operand(seed + n, (1, key_heads, keys, size), kind, dtype) for n, size in ((20, d), (30, values)))
        output, lse = attention.forward(q, k, v, None, 0.0, causal, scale)
        expected, expected_lse = oracle_forward(q, k, v, causal, scale)
        assert_same_bits(output, expected)
        assert_same_bits(canonical(lse), canonical(torch.from_numpy(expected_lse)))
        if keys <= 256 or causal:
            gradients = attention.backward(g, q, k, v, output, lse, None, 0.0, causal, scale)
            for x, y in zip(gradients, oracle_backward(g, q, k, v, output, lse.numpy(), causal, scale), strict=True):
                assert_same_bits(x, y)


def test_tiles_above_the_diagonal_matter_where_v_is_infinite():
    q, v = numbers(1, (1, 1, 200, 32), "normal", BF16), numbers(2, (1, 1, 200, 32), "normal", BF16)
    v[0, 0, 199] = math.inf
    output, _ = attention.forward(q, q, v, None, 0.0, True, None)
    assert output[0, 0, :100].isnan().all()  # 0 times Inf


def test_an_order_of_tiles_that_differs_is_seen():
    q, k, v = (numbers(n, (1, 1, 256, 64), "normal", BF16) for n in range(3))
    output, _ = attention.forward(q, k, v, None, 0.0, False, None)
    swapped = [torch.cat([x[:, :, 128:], x[:, :, :128]], 2) for x in (k, v)]
    other, _ = attention.forward(q, *swapped, None, 0.0, False, None)
    assert not torch.equal(output, other)
    assert torch.allclose(output.float(), other.float(), atol=0.02)
