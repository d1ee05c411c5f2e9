# SPDX-License-Identifier: Apache-2.0
"""Attention row by row, held to an oracle of products by ``fmtsim.mma`` and of float64 between them."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

import fmtsim
from fmtsim.machine import attention_rows, mufu
from fmtsim.machine.arrays import apply
from fmtsim.support.errors import ArgumentError
from tests.machine.cases import BF16, FP16, digest, numbers

F32 = np.float32
NAMES = {BF16: "bf16", FP16: "fp16"}


def product(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """Return a b^T + acc, one instruction of 16 of k after the other."""
    for i in range(0, a.shape[-1], 16):
        operands = [x[..., i : i + 16].contiguous() for x in (a, b)]
        acc = fmtsim.mma(*operands, acc, target="hopper.mma", formats=NAMES[a.dtype], accumulate="fp32")
    return acc


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    # exact products in float64; the sum's second rounding changes a bit of float32 in 1 of 2^29 cases
    return (a.astype(np.float64) * b + c).astype(F32)


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float) -> tuple:
    """Return (output, logsumexp) of one head: q [queries, D], k and v [keys, D], bias [queries, keys]."""
    queries, keys = len(q), len(k)
    tile = 128 if queries > 1 else 32 if keys <= 32 else 64
    k, v = (functional.pad(x, (0, 0, 0, -keys % tile)) for x in (k, v))
    scores = product(q, k, torch.zeros(queries, len(k))).numpy()
    if bias is None:
        x = scores * F32(scale) * F32(math.log2(math.e))
    else:
        b = functional.pad(bias.float(), (0, -keys % tile)).numpy()
        x = fused(scores, np.float64(F32(scale)), b) * F32(math.log2(math.e))
    x[:, keys:] = -np.inf
    largest, sums = np.full((queries, 1), -np.inf, F32), np.zeros((queries, 4), F32)
    acc = torch.zeros(queries, v.shape[1])
    for first in range(0, len(k), tile):
        part = x[:, first : first + tile]
        new = np.maximum(largest, part.max(1, keepdims=True))
        p, alpha = apply(mufu.ex2, part - new), apply(mufu.ex2, largest - new)
        threads = p.reshape(queries, tile // 8, 4, 2).swapaxes(1, 2).reshape(queries, 4, -1)
        tile_sums = np.zeros((queries, 4), F32)
        for i in range(threads.shape[2]):
            tile_sums += threads[..., i]
        sums = fused(sums, alpha.astype(np.float64), tile_sums)
        acc = product(
            torch.from_numpy(p).to(q.dtype), v[first : first + tile].T.contiguous(), acc * torch.from_numpy(alpha)
        )
        largest = new
    total = (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])
    ln2, m, log = np.float64(F32(math.log(2))), largest[:, 0], apply(mufu.lg2, total)
    logsumexp = fused(log, ln2, m * F32(ln2)) if queries == 1 else fused(m, ln2, log * F32(ln2))
    output = (acc.numpy() * apply(mufu.rcp, total)[:, None]).astype(F32)
    return torch.from_numpy(output).to(q.dtype), torch.from_numpy(logsumexp)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("queries", "keys", "d", "biased"), [(1, 20, 32, False), (1, 150, 64, False),
                                                              (1, 70, 128, True), (9, 200, 64, True)])  # fmt: skip
@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling"])
def test_rows_are_the_oracles(dtype, queries, keys, d, biased, kind):
    q, k, v = (
        numbers(i, (1, 2, n, d), kind if i == 7 else "normal", dtype) for i, n in ((7, queries), (8, keys), (9, keys))
    )
    bias = numbers(10, (1, 2, queries, keys), "wide", dtype) if biased else None
    output, logsumexp = attention_rows.forward(q, k, v, bias, 0.3)
    for head in range(2):
        expected = oracle(q[0, head], k[0, head], v[0, head], None if bias is None else bias[0, head], 0.3)
        assert digest(output[0, head], logsumexp[0, head]) == digest(*expected)


@pytest.mark.parametrize("planted", ["a bit of P", "a last place of the scale"])
def test_a_planted_error_is_seen(monkeypatch, planted):
    q, k, v = (numbers(i, (1, 1, n, 64), "normal", BF16) for i, n in ((1, 1), (2, 60), (3, 60)))
    expected = oracle(q[0, 0], k[0, 0], v[0, 0], None, 0.3)
    scale = 0.3
    if planted == "a bit of P":
        monkeypatch.setitem(attention_rows.MIN_EXPONENTS, BF16, (-126, 8))
    else:
        scale = float(np.nextafter(F32(0.3), F32(1)))
    output, logsumexp = attention_rows.forward(q, k, v, None, scale)
    assert digest(output[0, 0], logsumexp[0, 0]) != digest(*expected)
    assert torch.allclose(output[0, 0].float(), expected[0].float(), atol=0.02)


def test_special_numbers_reach_the_output():
    q, k, v = (numbers(i, (1, 1, n, 32), "normal", BF16) for i, n in ((1, 1), (2, 40), (3, 40)))
    v[0, 0, 5, 3], k[0, 0, 7, 0] = math.inf, 0.0
    output, _ = attention_rows.forward(q, k, v, None, None)
    assert output[0, 0, 0].isinf().nonzero().flatten().tolist() == [3]
    q[0, 0, 0, 0] = math.nan
    assert attention_rows.forward(q, k, v, None, None)[0].isnan().all()


def test_a_row_that_is_masked_whole():
    q = numbers(1, (1, 1, 3, 32), "normal", FP16)
    boolean = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    with fmtsim.simulate(strict=True):
        y = functional.scaled_dot_product_attention(q, q, q, attn_mask=boolean)
        z = functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.full((3, 3), -math.inf, dtype=FP16))
    # the card's bias of -65504 stays below every difference of scores: all three keys count
    assert y[0, 0, 1].abs().sum() > 0
    assert z.abs().sum() == 0


@pytest.mark.parametrize(
    ("heads", "keys", "known"), [(1, 256, True), (1, 257, False), (133, 128, True), (133, 129, False)]
)
def test_four_warps_have_no_bits(heads, keys, known):
    q, k = torch.ones(1, heads, 1, 8, dtype=BF16), torch.ones(1, heads, keys, 8, dtype=BF16)
    with fmtsim.simulate() as run:
        functional.scaled_dot_product_attention(q, k, k)
    assert bool(run.nondeterministic) != known
    if not known:
        assert f"one query and {keys} keys: four warps add their sums as they come" in run.summary


@pytest.mark.parametrize(("d", "dtype", "message"), [
    (20, BF16, "attention with heads of 20"),
    (32, torch.float32, "attention in torch.bfloat16 with a mask in torch.float32"),
])  # fmt: skip
def test_what_is_not_known_is_refused(d, dtype, message):
    q = torch.ones(1, 1, 4, d, dtype=BF16)
    with fmtsim.simulate(strict=True), pytest.raises(ArgumentError, match=message):
        functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4, dtype=dtype))


def test_gradients_of_rows_that_are_negative_throughout():
    # with 64 keys a GPU's gradient of such rows is NaN; with 96 it is a number
    for keys, unknown in ((64, 1), (96, 0)):
        q, k = (numbers(i, (1, 1, n, 32), "normal", BF16).requires_grad_() for i, n in ((1, 4), (2, keys)))
        bias = torch.zeros(4, keys, dtype=BF16)
        bias[1] = -100.0
        with fmtsim.simulate() as run:
            functional.scaled_dot_product_attention(q, k, k, attn_mask=bias).sum().backward()
        assert len(run.unknown) == unknown
        assert ("rows that a mask makes negative throughout" in run.summary) == bool(unknown)
