# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-2's order held to an oracle of whole matrices in numpy, one block of queries after the other."""

import math

import numpy as np
import pytest
import torch
from numpy import float32

import fmtsim
from fmtsim.machine import attention_flash, library, mufu
from fmtsim.machine.arrays import apply, canonical, fma, to_f32
from fmtsim.machine.unknown import Guess, Nondeterministic, UnknownOrder
from tests.machine.cases import BF16, FP16, numbers
from tests.support.bits import assert_same_bits

LN2, LOG2E = float32(math.log(2.0)), float32(math.log2(math.e))


def multiply(a, b, dtype, c=None):  # type: ignore[no-untyped-def]
    """Return a b^T + c of matrices by the engine of torch operations."""
    a16, b16 = (torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x in (a, b))
    return fmtsim.mma(
        a16, b16, None if c is None else torch.from_numpy(c), target="hopper.mma", accumulate="fp32"
    ).numpy()


def whole(x, rows):  # type: ignore[no-untyped-def]
    return np.pad(x, [(0, -len(x) % rows), (0, 0)])


def oracle_head(q, k, v, g, dtype, causal, scale):  # type: ignore[no-untyped-def]
    """Return (output, logsumexp, dq, dk, dv) of one head, float32 matrices; dk and dv of so many queries and keys."""
    (queries, d), keys, tile = q.shape, len(k), 128 if q.shape[1] <= 64 else 64
    factor, rounded = float32(d**-0.5 if scale is None else scale), lambda x: to_f32(torch.from_numpy(x).to(dtype))
    log2_factor, outputs, sums = float32(float(factor) * math.log2(math.e)), [], []
    hidden = np.tri(queries, keys) == 0 if causal else np.zeros((queries, keys), bool)
    for start in range(0, queries, 128):
        rows, acc, largest, total = q[start : start + 128], None, float32(-np.inf), None
        for column in reversed(range(0, min(keys, start + 128) if causal else keys, tile)):
            s = multiply(rows, k[column : column + tile], dtype)
            s[hidden[start : start + 128, column : column + tile]] = -np.inf
            new = np.fmax(largest, np.fmax.reduce(s, 1, keepdims=True))
            finite = np.where(new == -np.inf, float32(0), new)
            p, alpha = (
                apply(library.exp2, x)
                for x in (s * log2_factor - finite * log2_factor, (largest - finite) * log2_factor)
            )
            total = np.zeros((len(rows), 4), np.float32) if total is None else total * alpha
            for j in range(p.shape[1]):
                total[:, j // 2 % 4] += p[:, j]
            acc, largest = multiply(p, v[column : column + tile].T, dtype, None if acc is None else acc * alpha), new
        total = (total[:, :1] + total[:, 2:3]) + (total[:, 1:2] + total[:, 3:])
        lost = ~(total > 0)
        outputs.append(rounded(acc * (float32(1) / np.where(lost, float32(1), total))))
        sums.append(np.where(lost, np.inf, fma(largest, factor, apply(mufu.lg2, total) * LN2)))
    output, lse = np.concatenate(outputs), np.concatenate(sums)
    # the gradients: blocks of queries from the last one on, whole blocks of keys
    block, key_block, threads = tile, 128 if d <= 128 else 64, 4 if 64 < d <= 96 else 8
    k, v, dq, dks, dvs = whole(k, key_block), whole(v, key_block), np.zeros((queries, d), np.float32), [], []
    for column in range(0, len(k), key_block):
        tile_k, tile_v, dk, dv = k[column : column + key_block], v[column : column + key_block], None, None
        for start in reversed(range(column // block * block if causal else 0, queries, block)):
            q_part, g_part, o_part = (whole(x[start : start + block], block) for x in (q, g, output))
            shift = np.pad(
                lse[start : start + block],
                [(0, block - len(lse[start : start + block])), (0, 0)],
                constant_values=np.inf,
            )
            partial = np.zeros((block, threads), np.float32)
            for j in range(d):
                partial[:, j // 8 % threads] = fma(g_part[:, j], o_part[:, j], partial[:, j // 8 % threads])
            while partial.shape[1] > 1:
                partial = partial[:, : partial.shape[1] // 2] + partial[:, partial.shape[1] // 2 :]
            s, dp = multiply(q_part, tile_k, dtype) * log2_factor - shift * LOG2E, multiply(g_part, tile_v, dtype)
            at = np.pad(hidden, [(0, block), (0, key_block)], constant_values=((False, False), (False, True)))
            s[at[start : start + block, column : column + key_block]] = -np.inf
            p = apply(library.exp2, s)
            ds = p * (dp - partial)
            dv, dk = multiply(p.T, g_part.T, dtype, dv), multiply(ds.T, q_part.T, dtype, dk)
            dq[start : start + block] += multiply(ds, tile_k.T, dtype)[: queries - start]
        dks.append(dk * factor)
        dvs.append(dv)
    return output, lse[:, 0], rounded(dq * factor), *(rounded(np.concatenate(x)[:keys]) for x in (dks, dvs))


def result(function, *arguments):  # type: ignore[no-untyped-def]
    try:
        return function(*arguments)
    except (Guess, Nondeterministic) as reason:
        return reason.args[1]


@np.errstate(all="ignore")
@pytest.mark.parametrize("kind", ["normal", "wide", "subnormal", "rare"])
@pytest.mark.parametrize(
    ("queries", "keys", "d", "causal"),
    [(50, 50, 19, True), (130, 130, 20, True), (129, 300, 12, False), (140, 140, 100, True), (3, 70, 70, False), (66, 66, 132, True)],
)  # fmt: skip
def test_attention_has_the_bits_of_whole_matrices(queries, keys, d, causal, kind, monkeypatch):
    monkeypatch.setattr(attention_flash, "_FULL", 0)  # keys are not shared among blocks of threads
    dtype, scale, group = (BF16, FP16)[d % 3 % 2], 0.3 if d == 20 else None, 2 if d == 12 else 1
    made = [
        numbers(n, (1, 2 if n % 3 else 2 // group, rows, d), kind if kind != "rare" else "normal", dtype)
        for n, rows in ((1, queries), (3, keys), (6, keys), (4, queries))
    ]
    if kind == "rare":
        for x in made:
            x[0, 0, -1, 3] = math.inf
        made[0][0, 0, 0] = math.nan
    q, k, v, g = made
    output, lse = result(attention_flash.forward, q, k, v, causal, scale)
    gradients = result(attention_flash.backward, g, q, k, v, output, lse, causal, scale)
    heads = [[to_f32(x[0, head * x.shape[1] // 2]) for x in made] for head in range(2)]
    expected = [np.stack(x) for x in zip(*(oracle_head(*head, dtype, causal, scale) for head in heads), strict=True)]
    if group == 2:
        expected[3:] = [x[:1] + x[1:] for x in expected[3:]]
    assert_same_bits(canonical(lse), canonical(torch.from_numpy(expected.pop(1))[None]))
    for x, y in zip((output, *gradients), expected, strict=True):
        assert_same_bits(x.contiguous(), canonical(torch.from_numpy(y)[None].to(dtype)))
        assert kind == "rare" or bool(x.isfinite().all())
