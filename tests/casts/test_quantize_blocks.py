# SPDX-License-Identifier: Apache-2.0
"""quantize of block formats: along any dim, blocks that a tensor does not fill, blocks and scale rules of one's own."""

import itertools

import pytest
import torch

import fmtsim
from fmtsim import quantize
from tests.support.bits import assert_same_bits, differing, same_bits
from tests.support.operands import normal, wide

BLOCK_FORMATS = ["mxfp4", "nvfp4", "e4m3_128x128", "int8_channel", "uint4_g32_zp", "logfmt8"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_along_any_dim(name):
    """As if dim were moved last, the rest flattened, and everything moved back."""
    for shape in ((128,), (128, 128), (2, 128, 128), (2, 2, 128, 64), (128, 2, 1, 128)):
        x = wide(*shape, seed=len(shape))
        for dim in range(-len(shape), len(shape)):
            if shape[dim] < 64:
                continue
            moved = x.movedim(dim, -1)
            if moved.numel() // moved.shape[-1] % 128 and name == "e4m3_128x128":
                continue
            if moved.shape[-1] % 128 and name in ("logfmt8", "e4m3_128x128"):
                continue
            matrix = quantize(moved.reshape(-1, moved.shape[-1]), name)
            assert_same_bits(
                quantize(x, name, dim=dim), matrix.view(moved.shape).movedim(-1, dim), what=f"{name} {shape} dim={dim}"
            )


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("extent", [1, 5, 31, 33, 130])
def test_a_short_last_block_is_padded_with_zeros_and_cropped(name, extent):
    x = wide(3, extent, seed=extent)
    rows = 128 if name == "e4m3_128x128" else 3
    padded = torch.zeros(rows, -(-extent // 128) * 128)
    padded[:3, :extent] = x
    assert_same_bits(quantize(x, name, pad=True), quantize(padded, name)[:3, :extent], x, what=name)
    turned = quantize(x.T, name, pad=True, dim=0)
    assert_same_bits(turned, quantize(padded, name)[:3, :extent].T, what=name)


def test_pad_changes_nothing_where_blocks_fit():
    x = wide(128, 256)
    for name in BLOCK_FORMATS:
        assert_same_bits(quantize(x, name, pad=True), quantize(x, name), x, what=name)


def test_block_size_turns_an_element_format_into_a_scaled_one():
    x = wide(4, 64)
    by_hand = torch.cat([quantize(part, "int8_channel") for part in x.split(16, dim=1)], dim=1)
    assert_same_bits(quantize(x, "int8", block_size=16), by_hand, what="int")
    assert_same_bits(quantize(x, "int8", block_size=(1, 16)), by_hand, what="tuple")
    assert_same_bits(quantize(x, "int8", block_size=[1, 16]), by_hand, what="list")
    assert_same_bits(quantize(x, "int8", block_size=(1, None)), quantize(x, "int8_channel"), what="whole rows")
    assert_same_bits(quantize(x, "int8", block_size=(None, None)), quantize(x, "int8_tensor"), what="whole tensor")
    assert not same_bits(quantize(x, "int8", block_size=16), quantize(x, "int8", block_size=32))


def test_block_size_changes_the_block_of_a_block_format():
    x = wide(4, 64)
    by_hand = torch.cat([quantize(part, "mxfp4", block_size=(1, None)) for part in x.split(8, dim=1)], dim=1)
    assert_same_bits(quantize(x, "mxfp4", block_size=8), by_hand, what="mxfp4 in blocks of 8")
    assert not same_bits(quantize(x, "mxfp4", block_size=8), quantize(x, "mxfp4"))


def test_scale_rules():
    x = wide(8, 64, seed=2)
    results = {rule: quantize(x, "mxfp4", scale_rule=rule) for rule in ("floor", "ceil", "rceil", "even", "amax")}
    assert_same_bits(results["floor"], quantize(x, "mxfp4"), what="floor is the rule of mxfp4")
    for first, second in itertools.combinations(results, 2):
        assert differing(results[first], results[second]) or {first, second} == {"ceil", "rceil"}


def test_blocks_larger_than_the_tensor():
    x = normal(3, 16)
    for size in (16, 1 << 31, 1 << 40, (1 << 63) - 1):
        for name in ("e4m3", "int8", "e2m1"):
            whole = quantize(x, name, block_size=(1, None))
            assert_same_bits(quantize(x, name, block_size=size, pad=True), whole, what=str(size))
            encoded = fmtsim.encode(x, name, block_size=(size, size), pad=True)
            assert encoded.scales.shape == (1, 1)
            assert_same_bits(encoded.decode(), quantize(x, name, block_size=(None, None)), what=str(size))
