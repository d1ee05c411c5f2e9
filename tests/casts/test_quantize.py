# SPDX-License-Identifier: Apache-2.0
"""quantize by example: known values, dtypes of results, spellings of formats, blocks and scale rules."""

import itertools

import pytest
import torch

import fmtsim
from fmtsim import quantize
from tests.support.bits import assert_same_bits, differing, same_bits, stored
from tests.support.operands import DTYPES, normal, wide

ELEMENTS = ["e4m3", "int8", "nf4", "lns8_g8"]
SCALED = ["mxfp4", "nvfp4", "e4m3_128x128", "int8_channel", "uint4_g32_zp", "logfmt8"]


pytestmark = pytest.mark.usefixtures("one_thread")


# Results.


def test_a_few_known_values():
    x = torch.tensor([0.1, 500.0, -0.0, float("nan"), float("inf"), 464.0, 2.0**-10])
    expected = torch.tensor([0.1015625, 448.0, -0.0, float("nan"), 448.0, 448.0, 0.0])
    assert_same_bits(quantize(x, "e4m3"), expected, x, what="e4m3")
    ieee = quantize(x, "e5m2", overflow="ieee")
    assert ieee.tolist()[4] == float("inf")
    assert quantize(torch.tensor([7.0, 3.5, -3.5]), torch.float8_e5m2).tolist() == [7.0, 3.5, -3.5]


@pytest.mark.parametrize("name", [*ELEMENTS, *SCALED])
def test_quantising_twice_changes_nothing_in_element_formats(name):
    x = wide(4, 128)
    once = quantize(x, name, pad=True)
    twice = quantize(once, name, pad=True)
    if name in ELEMENTS or name == "mxfp4":
        assert_same_bits(twice, once, x, what=name)
    else:
        assert (twice - once).abs().max() <= (once - x).abs().max()


# Result dtype (docs/semantics.md, section 10).

RESULT = [
    ("e4m3", "float32", "float32"), ("e4m3", "bfloat16", "bfloat16"), ("e4m3", "float16", "float16"),
    ("e4m3", "float64", "float64"), ("e5m2", "float16", "float16"), ("e5m6", "bfloat16", "bfloat16"),
    ("e4m7", "bfloat16", "bfloat16"), ("e4m8", "bfloat16", "float32"), ("bf16", "float16", "float32"),
    ("fp16", "bfloat16", "float32"), ("tf32", "bfloat16", "float32"), ("fp32", "float16", "float32"),
    ("fp64", "bfloat16", "float64"), ("fp64", "float32", "float64"), ("int8", "bfloat16", "bfloat16"),
    ("int16", "float16", "float32"), ("nf4", "float16", "float32"), ("lns8_g8", "bfloat16", "float32"),
    ("e8m0", "bfloat16", "bfloat16"), ("e8m0", "float16", "float32"), ("mxfp4", "bfloat16", "bfloat16"),
    ("mxfp4", "float16", "float32"), ("mxfp8_e4m3", "bfloat16", "bfloat16"), ("mxint8", "bfloat16", "bfloat16"),
    ("mxfp4", "float64", "float64"), ("nvfp4", "bfloat16", "float32"), ("nvfp4", "float64", "float64"),
    ("int8_channel", "float16", "float32"), ("logfmt8", "bfloat16", "float32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "expected"), RESULT)
def test_result_dtype(name, given, expected):
    x = wide(2, 128, dtype=DTYPES[given])
    y = quantize(x, name)
    assert (y.dtype, y.shape, y.device) == (DTYPES[expected], x.shape, x.device)
    exact = quantize(x, name, out_dtype=torch.float64)
    assert_same_bits(y, exact.to(y.dtype), x, what=name)
    fmt = fmtsim.get_format(name)
    if (
        not isinstance(fmt, fmtsim.formats.block.LogTileFormat)
        and getattr(fmt, "power_of_two", True)
        and name != "lns8_g8"
    ):
        assert_same_bits(y.double(), exact, x, what=f"{name} loses nothing in {expected}")


@pytest.mark.parametrize("name", ["e4m3", "fp16", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("out_dtype", DTYPES.values(), ids=list(DTYPES))
def test_out_dtype_rounds_once(name, out_dtype):
    """Out dtypes are met from the exact value: not from what x's own dtype would make of it."""
    x = torch.cat([wide(2, 64, seed=3), torch.full((1, 64), 3e38), torch.full((1, 64), 1e-6)])
    y = quantize(x, name, out_dtype=out_dtype, overflow="ieee")
    assert y.dtype == out_dtype
    assert_same_bits(y, stored(quantize(x, name, out_dtype=torch.float64, overflow="ieee"), out_dtype), x, what=name)
    out = torch.empty(x.shape, dtype=out_dtype)
    assert_same_bits(quantize(x, name, out=out, overflow="ieee"), y, x, what=name)


def test_float64_is_rounded_once():
    """1 + 2^-4 + 2^-40 is above the tie of e4m3; rounded to float32 first it would be the tie, which goes to 1."""
    x = torch.tensor([1 + 2.0**-4 + 2.0**-40], dtype=torch.float64)
    assert quantize(x, "e4m3").tolist() == [1.125]
    assert quantize(x.float(), "e4m3").tolist() == [1.0]
    assert quantize(x.repeat(32), "mxfp8_e4m3").tolist() == [1.125] * 32


def test_names_records_and_dtypes_are_the_same_format():
    x = wide(4, 64)
    expected = quantize(x, "e4m3")
    for format in (fmtsim.get_format("e4m3"), torch.float8_e4m3fn, "float8_e4m3fn", "E4M3"):
        assert_same_bits(quantize(x, format), expected, what="e4m3")
    rounding = fmtsim.Rounding(mode="to_odd")
    assert_same_bits(quantize(x, "e4m3", rounding=rounding), quantize(x, "e4m3", rounding="to_odd"), what="to_odd")


# Block formats: any dim, blocks that a tensor does not fill, other blocks and scale rules.


@pytest.mark.parametrize("name", SCALED)
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


@pytest.mark.parametrize("name", SCALED)
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
    for name in SCALED:
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


def test_rounding_goes_by_position():
    x = torch.tensor([1.3, -1.7, 300.0])
    expected = fmtsim.quantize(x, "e4m3", rounding="toward_zero")
    assert torch.equal(fmtsim.quantize(x, "e4m3", "toward_zero"), expected)
    assert torch.equal(fmtsim.encode(x, "e4m3", "toward_zero").decode(), expected)
    assert torch.equal(fmtsim.quantize_(x.clone(), "e4m3", "toward_zero"), expected)
