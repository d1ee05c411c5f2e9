# SPDX-License-Identifier: Apache-2.0
"""Attention row by row: special numbers, and what is refused; its bits on an H200 are cases of test_machine.py."""

import math

import pytest
import torch
from torch.nn import functional

import fmtsim
from fmtsim.machine import attention_rows
from fmtsim.support.errors import ArgumentError
from tests.machine.cases import BF16, FP16, numbers


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
