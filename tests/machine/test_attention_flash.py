# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-2's order held to an oracle in numpy, which goes through blocks of queries and keys one by one."""

import math

import numpy as np
import pytest
import torch
from numpy import float32
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fmtsim
from fmtsim.machine import attention_flash, library, mufu
from fmtsim.machine.arrays import apply, canonical, fma, to_f32
from fmtsim.machine.unknown import BySource, Guess, Nondeterministic
from tests.machine.cases import BF16, FP16, numbers
from tests.support.bits import assert_same_bits


def oracle(q, k, v, g, dtype, causal, scale):  # type: ignore[no-untyped-def]
    """Return (output, logsumexp, dq, dk, dv) of one head, float32 matrices."""

    def multiply(a, b, c=None):  # type: ignore[no-untyped-def]
        a16, b16 = (torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x in (a, b))
        c = None if c is None else torch.from_numpy(c)
        return fmtsim.mma(a16, b16, c, target="hopper.mma", accumulate="fp32").numpy()

    (queries, d), keys, tile = q.shape, len(k), 128 if q.shape[1] <= 64 else 64
    factor = float32(d**-0.5 if scale is None else scale)
    log2_factor, zero, one = float32(float(factor) * math.log2(math.e)), float32(0), float32(1)
    # rows and columns behind the last one too: no row is hidden there, each column is
    hidden = np.pad(np.tri(queries, keys) == 0 if causal else np.zeros((queries, keys)) > 0, [(0, 128), (0, 0)])
    hidden = np.pad(hidden, [(0, 0), (0, 128)], constant_values=True)
    output, lse = np.zeros_like(q), np.full((queries + 128, 1), np.inf, np.float32)
    for start in range(0, queries, 128):
        rows, acc, largest, total = slice(start, min(start + 128, queries)), None, float32(-np.inf), zero
        for column in reversed(range(0, min(keys, start + 128) if causal else keys, tile)):
            columns = slice(column, min(column + tile, keys))
            s = np.where(hidden[rows, columns], -np.inf, multiply(q[rows], k[columns])).astype(np.float32)
            new = np.fmax(largest, np.fmax.reduce(s, 1, keepdims=True))
            known = np.where(new == -np.inf, zero, new)
            p, alpha = apply(library.exp2, s * log2_factor - known * log2_factor), (largest - known) * log2_factor
            alpha, largest = apply(library.exp2, alpha), new
            total = np.zeros((len(s), 4), np.float32) if acc is None else total
            for j in range(p.shape[1]):
                shrink = alpha[:, 0] if acc is not None and j in (0, 2, 4, 6) else one
                total[:, j // 2 % 4] = fma(total[:, j // 2 % 4], shrink, p[:, j])
            acc = multiply(p, v[columns].T, None if acc is None else acc * alpha)
        total = (total[:, :1] + total[:, 2:3]) + (total[:, 1:2] + total[:, 3:])
        output[rows] = acc * (one / np.where(total > 0, total, one))
        log = fma(largest, factor, apply(mufu.lg2, total) * float32(math.log(2)))
        lse[rows] = np.where(total > 0, log, np.inf)
    output = to_f32(torch.from_numpy(output).to(dtype))
    # the gradients: blocks of queries from the last one on, all blocks filled up with zeros
    key_tile, threads = 128 if d <= 128 else 64, 4 if 64 < d <= 96 else 8
    q, k, v, g, o = (np.pad(x, [(0, 128), (0, 0)]) for x in (q, k, v, g, output))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(k)
    for column in range(0, keys, key_tile):
        columns = slice(column, column + key_tile)
        for start in reversed(range(column // tile * tile if causal else 0, queries, tile)):
            rows, partial = slice(start, start + tile), np.zeros((tile, threads), np.float32)
            for j in range(d):
                partial[:, j // 8 % threads] = fma(g[rows, j], o[rows, j], partial[:, j // 8 % threads])
            while partial.shape[1] > 1:
                partial = sum(np.split(partial, 2, 1))
            s = multiply(q[rows], k[columns]) * log2_factor - lse[rows] * float32(math.log2(math.e))
            p = apply(library.exp2, np.where(hidden[rows, columns], -np.inf, s))
            ds = p * (multiply(g[rows], v[columns]) - partial)
            dv[columns] = multiply(p.T, g[rows].T, dv[columns].copy())
            dk[columns] = multiply(ds.T, q[rows].T, dk[columns].copy())
            dq[rows] += multiply(ds, k[columns].T)
    return output, lse[:queries, 0], (dq * factor)[:queries], (dk * factor)[:keys], dv[:keys]


def result(function, *arguments):  # type: ignore[no-untyped-def]
    try:
        return function(*arguments)
    except (BySource, Guess, Nondeterministic) as reason:
        return reason.args[1]


@np.errstate(all="ignore")
@pytest.mark.parametrize("kind", ["normal", "near", "subnormal", "rare"])
@pytest.mark.parametrize("lengths", [(50, 50), (130, 130), (129, 300), (140, 140), (45, 70), (66, 66)])
def test_attention_has_the_bits_of_blocks_of_matrices(lengths, kind, monkeypatch):
    monkeypatch.setattr(attention_flash, "_FULL", 0)  # keys are not shared among blocks of threads
    d, group = {50: 19, 130: 20, 129: 12, 140: 100, 45: 70, 66: 132}[lengths[0]], 2 if lengths[0] in (129, 140) else 1
    dtype, causal, scale = (BF16, FP16)[d % 3 % 2], lengths[0] == lengths[1], 0.45 if d == 20 else None
    shapes = [(1, heads, lengths[i], d) for heads, i in ((2, 0), (2 // group, 1), (2 // group, 1), (2, 0))]
    made = [numbers(n, shape, kind if kind == "subnormal" else "normal", dtype) for n, shape in enumerate(shapes)]
    if kind == "near":  # dP and D cancel
        made[2] = made[2] / 64 + 4
    if kind == "rare":
        made[0][0, 0, 0] = math.nan
        for x in made:
            x[0, -1, -1, 3] = math.inf
    output, lse = result(attention_flash.forward, *made[:3], causal, scale)
    gradients = result(attention_flash.backward, made[3], *made[:3], output, lse, causal, scale)
    heads = [oracle(*(to_f32(x[0, i * x.shape[1] // 2]) for x in made), dtype, causal, scale) for i in range(2)]
    expected = [torch.from_numpy(np.stack(x))[None] for x in zip(*heads, strict=True)]
    if group == 2:
        expected[3:] = [x.to(dtype).float().sum(1, keepdim=True) for x in expected[3:]]
    assert_same_bits(canonical(lse), canonical(expected.pop(1)))
    for x, y in zip((output, *gradients), expected, strict=True):
        assert_same_bits(x.contiguous(), canonical(y.to(dtype)))
        assert kind in ("subnormal", "rare") or bool(x.isfinite().all())


def test_what_was_not_compared_or_is_not_known_is_named():
    def run(queries=50, keys=50, head=20, **how):  # type: ignore[no-untyped-def]
        q, k = (torch.ones(1, 2, n, head, dtype=BF16, requires_grad=True) for n in (queries, keys))
        with fmtsim.simulate() as run:
            torch.autograd.grad(functional.scaled_dot_product_attention(q, k, k.detach(), **how), (q, k), q.detach())
        return run

    assert not {*run().by_source, *run().guess, *run().unknown, *run().nondeterministic}
    assert not {*run(130, 130, is_causal=True).by_source, *run(50, 40).by_source}
    assert len(run(head=70).guess) == len(run(50, 64).by_source) == 2
    long = run(300, 300, is_causal=True)
    assert len(long.unknown) == len(long.nondeterministic) == 1
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert not {*run().guess, *run().unknown} and run(head=24).unknown
    for how in ({"dropout_p": 0.1}, {"attn_mask": torch.zeros(50, 50, dtype=BF16)}, {"is_causal": True, "keys": 64}):
        assert run(**how).unknown and not any("flash" in name for name in run(**how).exact)


def test_a_gpu_s_operator_has_heads_that_are_filled_up():
    q, g = (numbers(n, (1, 2, 70, 50), "normal", BF16) for n in (1, 2))
    wide, wide_g = (functional.pad(x, (0, 6)) for x in (q, g))
    aten, how = torch.ops.aten, {"scale": 50**-0.5}
    with fmtsim.simulate(strict=True):
        leaf = q.clone().requires_grad_()
        y = functional.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True)
        y.backward(g)
        results = aten._scaled_dot_product_flash_attention(wide, wide, wide, 0.0, True, **how)
        output, lse, *_, seed, offset, _ = results
        state = output, lse, None, None, 70, 70, 0.0, True, seed, offset
        gradients = aten._scaled_dot_product_flash_attention_backward(wide_g, wide, wide, wide, *state, **how)
        total = gradients[0] + gradients[1] + gradients[2]
    assert_same_bits(output[..., :50], y.detach())
    assert torch.equal(total[..., 50:], torch.zeros_like(total[..., 50:]))
    with pytest.raises(fmtsim.errors.ArgumentError, match="attention with dropout"), fmtsim.simulate(strict=True):
        aten._scaled_dot_product_flash_attention(wide, wide, wide, 0.1, True)
