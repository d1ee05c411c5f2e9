# SPDX-License-Identifier: Apache-2.0
"""The steps that casts of the torch engine are made of, one by one: what equality of engines may leave in the shade."""

import math
from fractions import Fraction

import pytest
import torch

from fmtsim import torch_engine
from fmtsim.formats.registry import get_format
from fmtsim.rounding import elementary, philox
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.rounding.oracle import round_value, rounds_away
from fmtsim.scaling import blocks
from fmtsim.spec.cast import RandomKey
from fmtsim.support.errors import ArgumentError
from fmtsim.torch_engine import element_codes, reals, scaled_formats, verbs
from fmtsim.torch_engine.floats import DEEPEST, jam, round_off
from fmtsim.torch_engine.random_words import random_integers
from fmtsim.torch_engine.reals import exp, ln
from tests.support.bits import assert_same_bits, stored
from tests.support.casts import STOCHASTIC, cast_spec, check_parts
from tests.support.operands import DTYPES, wide_with_specials

pytestmark = pytest.mark.usefixtures("one_thread")
FP32, FP64 = get_format("fp32"), get_format("fp64")


def doubles(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# Rounding of integers.

SMALL = list(range(70))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "stochastic"])
def test_every_small_integer_is_rounded_by_the_table(mode, dtype):
    how, signs = Rounding(mode=mode), (False, True)
    for shift in range(6):
        for parity in (None, 0, 1):
            for negative in signs:
                n = torch.tensor(SMALL, dtype=dtype)
                added = None if parity is None else torch.full_like(n, parity)
                got = round_off(n, torch.full_like(n, shift), torch.full(n.shape, negative), how, None, added)
                for number, found in zip(SMALL, got.tolist(), strict=True):
                    whole, rest = number >> shift, number & ((1 << shift) - 1)
                    odd = (whole + (parity or 0)) % 2 == 1
                    assert found == whole + rounds_away(rest, 1 << shift, odd, negative, how, None), (number, shift)


@pytest.mark.parametrize("variant", ["a", "b", "c"])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_every_word_decides_by_the_table(variant, bits):
    """Among them sums of exactly one."""
    how = Rounding(mode="stochastic", random_bits=bits, variant=variant)
    for shift in range(7):
        for word in range(1 << bits):
            n = torch.tensor(SMALL)
            got = round_off(n, torch.full_like(n, shift), n < 0, how, torch.full_like(n, word))
            for number, found in zip(SMALL, got.tolist(), strict=True):
                whole, rest = number >> shift, number & ((1 << shift) - 1)
                assert found == whole + rounds_away(rest, 1 << shift, whole % 2 == 1, False, how, word)


def test_bits_that_are_shifted_out_stay_in_the_lowest():
    n = torch.tensor([0, 1, 2, 3, 4, 5, 6, 8, (1 << 60) + 1])
    for excess in (-3, 0, 1, 2, 3, 61, 62, 90):
        down = min(max(excess, 0), 62)
        exact = [(v >> down) | ((v >> down) << down != v) for v in n.tolist()]
        assert jam(n, torch.full_like(n, excess)).tolist() == exact
    assert DEEPEST == 61


# Real numbers.


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_widening_is_exact(dtype):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    codes = torch.arange(-(1 << 15), 1 << 15) if dtype.itemsize == 2 else torch.arange(-(1 << 15), 1 << 15) * 65537
    x = codes.to(bits).view(dtype)
    x = x[~x.isnan()]
    wide = reals.widen(x)
    assert wide.dtype == torch.float64 and wide.tolist() == x.tolist()
    assert_same_bits(reals.narrow(wide, dtype), x)
    assert reals.widen(torch.tensor([torch.nan], dtype=dtype)).isnan().all()
    nan = reals.narrow(doubles(math.nan, -math.nan), dtype)
    assert_same_bits(nan, stored(doubles(math.nan, math.nan), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrowing_rounds_once(dtype):
    """Ties, their neighbours and what lies below the smallest normal number, of either sign."""
    info = torch.finfo(dtype)
    powers = [info.smallest_normal * 2.0**e for e in range(-26, 4)] + [1.0, float(info.max), float(info.max) * 1.25]
    parts = [1, 1 + info.eps / 2, 1 + 3 * info.eps / 2, 1.5, 1.25, 1 + info.eps / 4]
    y = [sign * power * part for power in powers for part in parts for sign in (1, -1)]
    y += [math.nextafter(v, side) for v in y for side in (-math.inf, math.inf)] + [0.0, -0.0, math.inf, -math.inf]
    fmt = {torch.float32: FP32, torch.bfloat16: get_format("bf16"), torch.float16: get_format("fp16")}[dtype]
    exact = doubles(*(round_value(v, fmt, "nearest_even", "ieee") for v in y))
    assert_same_bits(reals.narrow(doubles(*y), dtype), exact.to(dtype), doubles(*y))
    if dtype == torch.float32:
        assert_same_bits(reals.round32(doubles(*y)), exact, doubles(*y))


def test_sums_rounded_to_odd():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2000, generator=generator, dtype=torch.float64) for _ in range(2))
    y = y * 2.0 ** torch.randint(-70, 3, (2000,), generator=generator)
    x = torch.cat([x, doubles(1.0, 1.0, -1.0, 1.0, 1.5, 0.0, 3.0)])
    y = torch.cat([y, doubles(2.0**-60, -(2.0**-60), 2.0**-60, 2.0**-52, -1.5, -0.0, -3.0)])
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    exact = [round_value(Fraction(a) + Fraction(b), FP64, "to_odd", "ieee") for a, b in pairs]
    assert reals.add_to_odd(x, y).tolist() == exact
    assert reals.add_to_odd(doubles(math.inf, -math.inf), doubles(1.0, 2.0)).tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("bits", [24, 29, 30, 53])
def test_products_are_rounded_once(bits):
    generator = torch.Generator().manual_seed(bits)
    value = torch.randint(1 << (bits - 1), 1 << bits, (3000,), generator=generator).double()
    scale = torch.randint(1 << 23, 1 << 24, (3000,), generator=generator).double() * 2.0**-20
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        fmt = {torch.float32: FP32, torch.bfloat16: get_format("bf16"), torch.float64: FP64}[dtype]
        pairs = zip(value.tolist(), scale.tolist(), strict=True)
        exact = doubles(*(round_value(Fraction(a) * Fraction(b), fmt, "nearest_even", "ieee") for a, b in pairs))
        assert_same_bits(reals.product(value, scale, bits, dtype), exact.to(dtype), value, scale)
    special = doubles(0.0, -0.0, math.inf, -math.inf, math.nan)
    expected = torch.where(special.isnan(), torch.nan, special * 2).float()
    assert_same_bits(reals.product(special, doubles(2.0), 53, torch.float32), stored(expected.double(), torch.float32))


def test_a_product_near_a_tie_of_float32():
    """Rounded to float64 first, these would end on the tie and then on the wrong side of it."""
    value, scale = doubles((1 << 52) + (1 << 28) + 1, (1 << 52) + (1 << 28) - 1), doubles(1.0, 1.0)
    assert reals.product(value, scale, 53, torch.float32).tolist() == [2.0**52 + 2.0**29, 2.0**52]
    odd = doubles(float((1 << 30) - 1) * ((1 << 23) + 1))  # 53 bits: the product with 3 is not a float64
    exact = round_value(Fraction(int(odd[0])) * Fraction(12582913), FP32, "nearest_even", "ieee")
    assert reals.product(odd, doubles(12582913.0), 53, torch.float32).tolist() == [exact]


def test_numbers_below_every_comparison_do_not_vanish():
    x = doubles(5e-324, -5e-324, 0.0, -0.0, 2.0**-800, -(2.0**-780), 1.0)
    got = reals.tiny_kept(x, torch.tensor([127]))
    assert got[:2].tolist() == [2.0**-900, -(2.0**-900)] and [math.copysign(1, v) for v in got[2:4]] == [1, -1]
    assert got[2:].tolist() == [0.0, 0.0, 2.0**-900, -(2.0**-900), 2.0**-127]
    assert reals.tiny_kept(doubles(3 * 2.0**-770), torch.tensor([127])).tolist() == [3 * 2.0**-897]
    assert reals.tiny_kept(doubles(1.5), torch.tensor([-127])).tolist() == [1.5 * 2.0**127]
    assert reals.power_of_two(torch.tensor([-1022, 0, 1023])).tolist() == [2.0**-1022, 1.0, 2.0**1023]


def test_quotients_are_rounded_once():
    x = doubles(*range(1, 300))
    assert reals.divide(1.0, x).tolist() == [1.0 / v for v in range(1, 300)]
    assert reals.divide(x, 7.0).tolist() == [v / 7.0 for v in range(1, 300)]
    assert reals.divide(x, x.flip(0)).tolist() == [v / (300 - v) for v in range(1, 300)]


def test_logarithms_and_exponentials_step_by_step():
    generator = torch.Generator().manual_seed(3)
    m = torch.rand(2000, generator=generator, dtype=torch.float64) + 0.5
    x = torch.cat([m * 2.0 ** torch.randint(-1000, 1000, (2000,), generator=generator).double(), m])
    x = torch.cat([x, doubles(1.0, 2.0, 0.5, 2.0**-1022, 1.7976931348623157e308, elementary.SQRT_HALF)])
    assert ln(x).tolist() == [elementary.ln(v) for v in x.tolist()]
    y = (torch.rand(4000, generator=generator, dtype=torch.float64) - 0.5) * 1600
    ends = [elementary.EXP_OVERFLOW, elementary.EXP_UNDERFLOW]
    ends += [math.nextafter(v, side) for v in ends for side in (-math.inf, math.inf)]
    y = torch.cat([y, doubles(*ends, 0.0, -0.0, 1.0, -708.5, -720.25, math.inf, -math.inf, 1e300, -1e300)])
    assert exp(y).tolist() == [elementary.exp(v) for v in y.tolist()]
    assert exp(doubles(math.nan)).isnan().all()


# Random words.

LAYOUTS = [
    Rounding(mode="stochastic"), Rounding(mode="stochastic", random_bits=1),
    *(Rounding(mode="stochastic", random_bits=bits, layout="cvt_rs") for bits in (8, 13, 16)),
]  # fmt: skip


@pytest.mark.parametrize("rounding", LAYOUTS, ids=lambda rounding: f"{rounding.layout} {rounding.bits}")
@pytest.mark.parametrize("start", [0, 256, 1 << 38])
def test_words_of_a_stream_from_any_group_on(rounding, start):
    key = RandomKey(-5, (1 << 63) + 9)
    for count in (1, 63, 64, 65, 300):
        got = random_integers(key, rounding, start, count, "cpu")
        assert got.tolist() == [philox.random_integer(rounding, key, start + i) for i in range(count)]


# Pieces.

PIECES = ["e4m3", "int8", "nf4", "mxfp4", "nvfp4", "nvfp4_16x16", "int8_channel", "uint8_channel_zp", "e4m3_tensor",
          "logfmt8"]  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("size", [64, 256])
def test_the_size_of_a_piece_does_not_matter(name, size, monkeypatch):
    """Words are drawn from the start of a piece, statistics of a row are gathered from several."""
    x, key = wide_with_specials(17, 150, seed=4), RandomKey(3, 4)
    x[2, 140], x[5, 149] = 1e6, -1e6  # largest magnitudes at the end of a row

    def done():
        results = []
        for rounding in (Rounding(), *STOCHASTIC[:1]):
            spec = cast_spec(name, rounding)
            parts = torch_engine.encode(x, spec, key)
            back, direct = torch.empty_like(x), torch.empty_like(x)
            torch_engine.decode(parts, spec, back)
            torch_engine.quantize(x, spec, key, direct)
            results.append((parts, back, direct))
        return results

    whole = done()
    for module in (blocks, verbs, scaled_formats):
        monkeypatch.setattr(module, "chunk_size", lambda device: size)
    for (parts, *rest), (expected, *others) in zip(done(), whole, strict=True):
        check_parts(name, parts, expected, x)
        for got, other in zip(rest, others, strict=True):
            assert_same_bits(got, other, x)


def test_a_chunk_holds_whole_groups_of_words():
    assert blocks.chunk_size(torch.device("cpu")) == 1 << 16 and blocks.chunk_size(torch.device("cuda")) == 1 << 22


@pytest.mark.parametrize("name", ["e4m3", "mxfp4", "logfmt8"])
def test_random_rounding_without_words_is_refused(name):
    x, spec = torch.ones(3), cast_spec(name, "stochastic")
    message = "^rounding='stochastic' needs random words; pass a RandomKey or a tensor of integers$"
    with pytest.raises(ArgumentError, match=message):
        torch_engine.encode(x, spec, None)
    with pytest.raises(ArgumentError, match=message):
        torch_engine.quantize(x, spec, None, torch.empty(3))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "uint8_channel_zp", "logfmt8", "int8_tensor"])
def test_parts_of_empty_tensors(name):
    for shape, grid in (((0, 32), (0, None)), ((3, 0), (None, 0)), ((0,), (None, 0))):
        parts = torch_engine.encode(torch.empty(shape), cast_spec(name), None)
        fmt = get_format(name)
        rows, columns = fmt.block
        expected = (0 if grid[0] == 0 else 1 if rows is None else -(-shape[0] // rows) if len(shape) > 1 else 1,
                    0 if grid[1] == 0 else 1 if columns is None else -(-shape[-1] // columns))  # fmt: skip
        assert parts.scales is not None and parts.scales.shape == expected and parts.scales.dtype == torch.float32
        assert (parts.tensor_scale is None) == (name != "nvfp4")
        assert parts.tensor_scale is None or parts.tensor_scale.item() == 1.0
        dtype = {"uint8_channel_zp": torch.int32, "logfmt8": torch.float32}.get(name)
        assert (parts.offsets if dtype is None else parts.offsets.dtype) is dtype
        assert parts.offsets is None or parts.offsets.shape == expected


def test_how_many_bits_a_value_may_have():
    bits = {"e4m3": 4, "int8": 9, "int24_half": 25, "nf4": 24, "lns8_g8": 24, "fp64": 53}
    assert {name: element_codes.significant_bits(get_format(name)) for name in bits} == bits
