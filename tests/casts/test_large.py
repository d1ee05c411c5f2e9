# SPDX-License-Identifier: Apache-2.0
"""Tensors of more than 2**31 elements, and views whose rows lie as far apart: places do not fit into 32 bits."""

import pytest
import torch

import fmtsim
from fmtsim import compare, decode, encode, mm, mma, quantize, quantize_
from fmtsim.rounding.modes import get_rounding
from fmtsim.rounding.philox import random_integer
from tests.support.bits import assert_same_bits
from tests.support.operands import normal

MANY = (1 << 31) + 40
BF16 = torch.bfloat16

pytestmark = pytest.mark.slow  # gibibytes, of which few are touched


def far(x):
    """Return a matrix in rows that lie 2**31 + 5 elements apart; memory between them is never touched."""
    memory = torch.empty((x.shape[0] - 1) * ((1 << 31) + 5) + x.shape[1], dtype=x.dtype)
    return memory.as_strided(x.shape, ((1 << 31) + 5, 1)).copy_(x)


def same_everywhere(x, block):
    """Compare all blocks of a tensor with one block."""
    whole = x[: len(x) // len(block) * len(block)].view(-1, len(block))
    wide = torch.int16 if x.element_size() == 2 else torch.uint8
    assert all(bool((rows.view(wide) == block.view(wide)).all()) for rows in whole.split(1 << 20))
    assert torch.equal(x[whole.numel() :].view(wide), block[: len(x) - whole.numel()].view(wide))


@pytest.mark.parametrize("name", ["e4m3", "nvfp4", "nf4"])
def test_rows_far_apart(name):
    x = normal(2, 64).to(BF16)
    view, expected = far(x), quantize(x, name, out_dtype=BF16)
    assert_same_bits(quantize(view, name, out_dtype=BF16), expected)
    assert_same_bits(encode(view, name).decode(out_dtype=BF16), expected)
    assert compare(view, x).equal
    assert_same_bits(quantize(x, name, out=far(x)), expected)
    assert_same_bits(quantize_(view, name), expected)
    codes = encode(x.float(), "e3m2").unpacked()
    assert_same_bits(decode(far(codes), "e3m2"), decode(codes, "e3m2"))


@pytest.mark.parametrize("unit", ["hopper.wgmma", "exact", "fp32_fma", "cdna3.mfma"])
def test_products_of_rows_far_apart(unit):
    a, b = normal(2, 64, seed=1).half(), normal(2, 64, seed=2).half()
    expected = mm(a, b.t(), target=unit)
    assert_same_bits(mm(far(a), far(b).t(), target=unit), expected)
    assert_same_bits(mma(far(a), far(b), target=unit), mma(a, b, target=unit))
    assert_same_bits(fmtsim.linear(far(a), far(b), target=unit), expected)


def test_more_elements_than_32_bits_count():
    block = normal(64).to(BF16)
    x = block.expand(MANY // 64 + 1, 64).reshape(-1)[:MANY]
    same_everywhere(quantize_(x, "e4m3"), quantize(block, "e4m3", out_dtype=BF16))


def test_random_words_of_places_beyond_32_bits():
    rounding = get_rounding("stochastic", None)
    words = [random_integer(rounding, (7, 0), i) for i in range(MANY - 40, MANY)]
    x = torch.full((MANY,), 0.3, dtype=BF16)
    expected = quantize(x[-40:], "e4m3", rounding=rounding, random_words=torch.tensor(words))
    assert_same_bits(quantize_(x, "e4m3", rounding=rounding, generator=7)[-40:], expected)


def test_shapes_beyond_all_memory():
    x = torch.empty(1 << 33, 64, dtype=BF16, device="meta")
    assert quantize(x, "nvfp4").shape == x.shape and encode(x, "nvfp4").codes.shape == (1 << 33, 32)
    assert mm(x, torch.empty(64, 1 << 20, dtype=BF16, device="meta"), target="exact").shape == (1 << 33, 1 << 20)
    assert fmtsim.linear(x, torch.empty(3, 64, dtype=BF16, device="meta"), target="hopper.wgmma").shape == (1 << 33, 3)
