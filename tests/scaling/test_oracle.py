# SPDX-License-Identifier: Apache-2.0
"""The scaling oracle against numbers computed by hand and formulas of the sources."""

import math
import struct
from dataclasses import replace

import numpy
import pytest
import torch

from fmtsim import cpu, torch_engine
from fmtsim.formats.block import BlockFormat, with_block
from fmtsim.formats.element import CodebookFormat, FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import TensorScale, block_scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.rounding.oracle import decode_value, encode_value, round_value
from fmtsim.scaling.oracle import Quantized, quantize_matrix
from fmtsim.spec.cast import CastSpec
from fmtsim.support.errors import ArgumentError

F32 = numpy.float32
FLT_MAX = (2.0 - 2.0**-23) * 2.0**127


def f32(x: float) -> float:
    """Round to binary32 by the machine: the second opinion on RN32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def row(values: list[float], name: str, **options: object) -> Quantized:
    return quantize_matrix([values], get_format(name), **options)  # type: ignore[arg-type]


def noise(height: int, width: int, seed: int) -> list[list[float]]:
    generator = numpy.random.default_rng(seed)
    rows = generator.standard_normal((height, width)) * 2.0 ** generator.integers(-6, 6, (height, width))
    return rows.astype(F32).astype(float).tolist()


# Power-of-two rules.


def scale_exponent(amax: float, element: str, rule: str) -> float:
    fmt = BlockFormat(name="probe", element=get_format(element), scaling=block_scaling((1, 8), rule))
    return math.log2(quantize_matrix([[amax, 0.0]], fmt).scales[0][0])


@pytest.mark.parametrize(
    ("amax", "element", "floor", "ceil", "even", "rceil"),
    [  # the element's largest exponents: e4m3 8 (448), e2m1 2 (6), int8_f6 0 (127/64)
        (448.0, "e4m3", 0, 1, 0, 0),
        (449.0, "e4m3", 0, 1, 0, 1),
        (480.0, "e4m3", 0, 1, 0, 1),  # even: half a place of e4m3 at 256 is 16, and 480 + 16 stays below 512
        (496.0, "e4m3", 0, 1, 1, 1),
        (256.0, "e4m3", 0, 0, 0, 0),
        (255.99998, "e4m3", -1, 0, 0, 0),
        (6.0, "e2m1", 0, 1, 0, 0),
        (6.0000005, "e2m1", 0, 1, 0, 1),
        (7.0, "e2m1", 0, 1, 1, 1),
        (4.0, "e2m1", 0, 0, 0, 0),
        (1.9921875, "int8_f6", 0, 1, 1, 1),
        (1.0, "int8_f6", 0, 0, 0, 0),
        (1.9843751192092896, "int8_f6", 0, 1, 0, 0),  # one step above 127/64: RN32 of the product is 1
        (2.0**-149, "e4m3", -127, -127, -127, -127),
        (FLT_MAX, "e2m1", 125, 126, 126, 126),
    ],
)
def test_power_of_two_rules(amax, element, floor, ceil, even, rceil):
    expected = {"floor": floor, "ceil": ceil, "even": even, "rceil": rceil}
    assert {rule: scale_exponent(amax, element, rule) for rule in expected} == expected


def test_rceil_rounds_its_product():
    """The reciprocal of 6 is above 1/6 in float32: 6 * 2**k needs the rounding of the product back to 2**k."""
    assert all(scale_exponent(math.ldexp(6.0, k), "e2m1", "rceil") == k for k in range(-100, 100))


def test_elements_of_power_of_two_blocks_by_hand():
    result = row([957.0, -1.0, 0.3, -0.0], "mxfp8_e4m3")  # floor(log2 957) - 8 = 1: scale 2
    assert result.scales == [[2.0]]
    assert result.values == [[896.0, -1.0, 0.3125, -0.0]]  # 478.5 saturates at 448; 0.15 -> 0.15625
    assert result.codes == [[0x7E, 0xB0, 0x22, 0x80]]
    assert result.tensor_scale is None and result.offsets is None


def test_a_block_of_zeros():
    result = row([0.0, -0.0], "mxfp4")
    assert result.scales == [[2.0**-127]] and result.codes == [[0, 8]]
    assert math.copysign(1.0, result.values[0][1]) == -1.0


def test_scale_clamped_at_both_ends():
    assert row([2.0**-140], "mxfp4").scales == [[2.0**-127]]
    assert row([2.0**-140], "mxfp4").values == [[0.0]]
    assert row([1e300], "mxfp4", input_dtype="float64").scales == [[2.0**127]]


def test_values_beyond_the_output_become_infinite():
    result = row([FLT_MAX, 1.0], "mxfp4", out_format=get_format("fp16"))
    assert result.values[0][0] == math.inf
    big = row([1e300], "mxfp4", input_dtype="float64")
    assert big.values == [[math.inf]]  # 6 * 2**127
    assert row([1e300], "mxfp4", input_dtype="float64", out_format=get_format("fp64")).values == [[6 * 2.0**127]]


# NaN and Inf.


def test_nan_where_the_element_has_it():
    result = row([1.0, math.nan, 448.0], "mxfp8_e4m3")
    assert result.scales == [[1.0]] and result.codes == [[0x38, 0x7F, 0x7E]]
    assert math.isnan(result.values[0][1]) and result.values[0][2] == 448.0


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int8_channel", "nf4_g64", "uint4_g32_zp"])
def test_nan_where_the_element_has_none(name):
    fmt = get_format(name)
    values = [1.0, -2.0, 0.5, 3.0]
    clean, dirty = row([*values, 3.0], name), row([*values, math.nan], name)
    assert math.isnan(dirty.scales[0][0]) and all(math.isnan(v) for v in dirty.values[0])
    assert dirty.codes[0][:4] == clean.codes[0][:4]
    assert dirty.codes[0][4] == encode_value(math.nan, fmt.element)
    assert dirty.offsets == clean.offsets


def test_infinities_take_the_scale_of_the_finite():
    result = row([1.0, math.inf, -math.inf, 6.0], "mxfp4")
    assert result.scales == [[1.0]] and result.values == [[1.0, 6.0, -6.0, 6.0]]
    ieee = row([1.0, math.inf, -math.inf], "mxfp8_e5m2", overflow="ieee")
    assert ieee.values == [[1.0, math.inf, -math.inf]]
    assert row([math.inf, 0.0], "mxfp4").scales == [[2.0**-127]]


# Real scales.


def at_ties(name: str, scale: float, largest: float) -> list[float]:
    """Return float32 numbers at and beside the ties of an element format under a scale: there every rounding shows."""
    fmt = get_format(name)
    codes = range(len(fmt.values) if hasattr(fmt, "values") else 1 << fmt.bits)
    values = sorted({v for v in (decode_value(code, fmt) for code in codes) if math.isfinite(v)})
    ties = [F32((low + high) / 2 * scale) for low, high in zip(values, values[1:], strict=False)][::3]
    beside = [x for tie in ties for x in (numpy.nextafter(tie, F32(-9e9)), tie, numpy.nextafter(tie, F32(9e9)))]
    return [float(x) for x in beside if abs(x) < largest]


@pytest.mark.parametrize("name", ["e4m3_1x128", "int8_channel", "e4m3_tensor", "int4_g32", "nf4_g64", "divide"])
def test_real_scales_by_machine_arithmetic(name):
    """The same formulas in numpy's float32: two ways to the same bits."""
    scaling = block_scaling((1, 16), arithmetic="divide")
    fmt = BlockFormat(name="b", element=get_format("e4m3"), scaling=scaling) if name == "divide" else get_format(name)
    for x in noise(6, 16, 3):
        a, m = F32(max(abs(v) for v in x)), F32(fmt.element.max)
        scale = F32(1) / (m / a) if fmt.arithmetic == "encode" else max(a / m, F32(2.0**-126))
        x += at_ties(fmt.element.name, float(scale), float(a))
        fmt = with_block(fmt, (1, None))
        r = m / a if fmt.arithmetic == "encode" else F32(1) / scale
        y = [F32(v) / scale if name == "divide" else F32(v) * r for v in x]
        elements = [round_value(float(v), fmt.element) for v in y]
        result = quantize_matrix([x], fmt)
        assert result.scales[0][0] == float(scale)
        assert result.values[0] == [float(F32(float(q) * float(scale))) for q in elements]


def test_zero_and_tiny_blocks_of_real_scales():
    for name in ("e4m3_1x128", "e4m3_tensor", "int8_channel"):
        zero = row([0.0, -0.0], name)
        assert zero.scales == zero.factors == [[1.0]] and zero.values == [[0.0, 0.0]]
    tiny = row([1e-45, 0.0], "e4m3_1x128")
    assert tiny.scales == [[2.0**-126]]
    scaling = block_scaling((1, 8), scale=get_format("e4m3"), arithmetic="divide")
    subnormal_scale = BlockFormat(name="probe", element=get_format("e4m3"), scaling=scaling)
    result = quantize_matrix([[1e-6, 0.0]], subnormal_scale)  # 1e-6 / 448 is far below e4m3: scale 0, values 0
    assert result.scales == [[0.0]] and result.values == [[0.0, 0.0]] and result.codes == [[0x7E, 0]]
    infinite = replace(subnormal_scale, element=get_format("e5m2"))
    result = quantize_matrix([[1e-7, -math.inf]], infinite, overflow="ieee")
    assert result.scales == [[0.0]] and result.codes == [[0x7C, 0xFC]] and math.isnan(result.values[0][1])


def test_float64_is_multiplied_in_float64():
    """The scale is that of float32; the product is above a tie that float32 would make of it."""
    s = F32(1) / F32(127)
    x = [1.0, 2.5 / float(F32(1) / s) * (1 + 2.0**-40)]
    narrow, wide = (row([f32(v) for v in x], "int8_channel"), row(x, "int8_channel", input_dtype="float64"))
    assert narrow.scales == wide.scales == [[float(s)]]
    assert narrow.codes == [[127, 2]] and wide.codes == [[127, 3]]


def test_the_statistic_of_float64_is_that_of_float32():
    """RN32 of the amax, at most FLT_MAX, and RN32 of a largest value that float32 lacks."""
    assert row([1 + 2.0**-24 + 2.0**-40], "int8_channel", input_dtype="float64").scales == [
        [float(F32(1) / F32(127) * F32(1 + 2.0**-23))]
    ]
    assert row([1e300], "int8_channel", input_dtype="float64").scales == [[float(F32(FLT_MAX) / F32(127))]]
    book = BlockFormat(
        name="b",
        element=CodebookFormat(name="b", values=(0.0, 1 + 2.0**-30)),
        scaling=block_scaling((1, 8), arithmetic="divide"),
    )
    assert quantize_matrix([[3.0]], book).scales == [[3.0]]


# NVFP4, by the formulas of Transformer Engine in numpy's float32.


def transformer_engine_nvfp4(rows: list[list[float]]) -> tuple[list[list[float]], float, list[list[float]]]:
    """Return block scales, tensor scale and values of 1 x 16 blocks."""
    encode = F32(448 * 6) / F32(max(abs(v) for x in rows for v in x))
    decode = F32(1) / encode
    scales: list[list[float]] = []
    values: list[list[float]] = []
    for x in rows:
        blocks = [x[i : i + 16] for i in range(0, len(x), 16)]
        amaxes = [F32(max(abs(v) for v in block)) for block in blocks]
        scales.append([round_value(float(a * (encode * (F32(1) / F32(6)))), get_format("e4m3")) for a in amaxes])
        values.append([])
        for block, scale in zip(blocks, scales[-1], strict=True):
            factor = F32(1) / (F32(scale) * decode)
            elements = [round_value(float(F32(v) * factor), get_format("e2m1")) for v in block]
            values[-1] += [f32(q * scale * float(decode)) for q in elements]
    return scales, float(decode), values


@pytest.mark.parametrize("seed", range(4))
def test_nvfp4_is_transformer_engines(seed):
    rows = noise(5, 40 * 16, seed)
    # 1. blocks whose scales lie at and beside ties of E4M3, then elements at ties of E2M1 under the scales of blocks
    decode = float(F32(max(abs(v) for x in rows for v in x)) / F32(448 * 6))
    largest = [x for x in at_ties("e4m3", 6 * decode, decode * 448 * 6) if x > 6 * decode][:40]
    rows.append([v for x in largest for v in [x] + [0.0] * 15])
    scales, tensor_scale, _ = transformer_engine_nvfp4(rows)
    for x, row_scales in zip(rows[:5], scales, strict=False):
        for start, scale in zip(range(0, len(x), 16), row_scales, strict=True):
            x[start] = max(x[start : start + 16], key=abs)
            ties = at_ties("e2m1", scale * tensor_scale, abs(x[start]))
            x[start + 1 : start + 16] = (ties + x[start + 1 : start + 16])[:15]
    # 2. the oracle's
    scales, tensor_scale, values = transformer_engine_nvfp4(rows)
    result = quantize_matrix(rows, get_format("nvfp4"))
    assert (result.scales, result.tensor_scale, result.values) == (scales, tensor_scale, values)


def test_nvfp4_by_hand():
    """amax 2688 makes S_enc = 1; a block with amax 6 has scale 1, one with amax 2688 has scale 448."""
    result = row([2688.0, 448.0] + [0.0] * 14 + [6.0, -5.0, 2.5, 0.25] + [0.0] * 12, "nvfp4")
    assert result.tensor_scale == 1.0 and result.scales == [[448.0, 1.0]]
    assert result.values[0][:2] == [2688.0, 448.0] and result.values[0][16:20] == [6.0, -4.0, 2.0, 0.0]
    assert result.codes[0][16:20] == [7, 14, 4, 0]


def test_nvfp4_of_zeros_and_of_vanishing_blocks():
    element = FloatFormat(name="tiny", exponent_bits=2, mantissa_bits=1, bias=60, nan="none")
    scaling = block_scaling((1, 2), "amax", arithmetic="encode", scale=get_format("e4m3"), tensor=TensorScale())
    tiny = BlockFormat(name="tiny_two_level", element=element, scaling=scaling)
    assert quantize_matrix([[3e38]], tiny).tensor_scale == 1.0  # the quotient is 0 in float32
    zero = row([0.0, -0.0], "nvfp4")
    assert zero.tensor_scale == 1.0 and zero.scales == [[0.0]] and zero.codes == [[0, 8]]
    result = row([1e30] * 16 + [1.0, -1.0], "nvfp4")  # the second block's scale underflows: largest codes, zero values
    assert result.scales[0][1] == 0.0 and result.codes[0][16:] == [7, 15]
    assert [math.copysign(1.0, v) * (v == 0.0) for v in result.values[0][16:]] == [1.0, -1.0]


def test_two_levels_of_elements_beyond_float32():
    """m and c m are Inf in float32: S_enc is FLT_MAX, block scales are 0. The last S_enc would be 0 and is 1."""
    for bias, matrix in (
        (-110, [[1.0, -3.0e38, 0.0, 2.0**-149]]), (-96, [[1.0, -5.0, 0.25, 0.0]]), (-110, [[0.0]]), (70, [[1.0, 3e38]]),
    ):  # fmt: skip
        element = FloatFormat(name="far", exponent_bits=5, mantissa_bits=1, bias=bias, nan="none")
        scaling = block_scaling((1, 2), "amax", arithmetic="encode", scale=get_format("e4m3"), tensor=TensorScale())
        fmt = BlockFormat(name="far_two_level", element=element, scaling=scaling)
        assert element.max * 448 > FLT_MAX or element.max * 448 / 3e38 < 2.0**-150
        result = quantize_matrix(matrix, fmt)
        spec = CastSpec(format=fmt, rounding=Rounding(), overflow="saturate")
        for engine in (torch_engine, cpu):
            x, values = torch.tensor(matrix), torch.empty(len(matrix), len(matrix[0]))
            parts = engine.encode(x, spec, None)
            assert parts.codes.tolist() == result.codes and parts.scales.tolist() == result.scales
            assert float(parts.tensor_scale) == result.tensor_scale
            engine.quantize(x, spec, None, values)
            assert values.tolist() == result.values


# Zero points.


def test_zero_points_by_hand():
    result = row([-1.0, 0.0, 0.5, 2.0], "uint4_g32_zp")  # range 3, step 0.2, zero point 5
    assert result.scales == [[f32(3 / 15)]] and result.offsets == [[5]]
    assert result.codes == [[0, 5, 7, 15]]  # 0.5 / 0.2 = 2.5 rounds to 2
    assert result.values[0] == [f32(n * f32(0.2)) for n in (-5, 0, 2, 10)]


def test_zero_points_are_rounded_to_nearest_and_scales_are_no_subnormals():
    near = row([-1.0, 1.6], "uint4_g32_zp")  # the step is 0.1733, and 1 / 0.1733 = 5.77
    assert near.offsets == [[6]] and near.codes == [[0, 15]]
    assert row([1e-40, 0.0], "uint4_g32_zp").scales == [[2.0**-126]]


def test_zero_points_of_one_sign():
    assert row([3.0, 15.0], "uint4_g32_zp")[:4] == ([[3, 15]], [[1.0]], None, [[0]])
    assert row([-3.0, -15.0], "uint4_g32_zp")[:4] == ([[12, 0]], [[1.0]], None, [[15]])
    zero = row([0.0, -0.0], "uint4_g32_zp")
    assert zero.scales == [[1.0]] and zero.codes == [[0, 0]] and math.copysign(1.0, zero.values[0][1]) == 1.0
    edge = row([-FLT_MAX, FLT_MAX, math.inf, -math.inf], "uint4_g32_zp")
    assert edge.codes[0][1:] == [15, 15, 0] and edge.scales == [[float(F32(FLT_MAX) / F32(15))]]


# LogFMT.


def test_logfmt_by_library_logarithms():
    """Steps and values agree with the machine's log and exp to float32's accuracy, codes up to one step at ties."""
    x = noise(1, 32, 8)[0]
    result = row(x, "logfmt8")
    magnitudes = [abs(v) for v in x]
    low, high = math.log(min(magnitudes)), math.log(max(magnitudes))
    assert result.offsets[0][0] == f32(low)
    assert result.scales[0][0] == pytest.approx((high - low) / 126, rel=1e-6)  # the last bit may differ: libm's log
    steps = [(math.log(abs(v)) - low) / ((high - low) / 126) + 1 for v in x]
    assert all(abs((code & 127) - exact) <= 0.5 + 0.05 for code, exact in zip(result.codes[0], steps, strict=True))
    assert [code >> 7 for code in result.codes[0]] == [int(v < 0) for v in x]


def test_logfmt_spans_32_octaves():
    result = row([1.0, 2.0**-40, -0.4 * 2.0**-32, -0.6 * 2.0**-32, -0.0], "logfmt8")
    assert result.offsets[0][0] == f32(-32 * math.log(2))
    assert result.codes[0] == [127, 0, 128, 129, 128]  # the smallest value is 2**-32, zero is below it
    assert result.values[0][0] == pytest.approx(1.0, rel=2e-6)  # low and step are float32


def test_logfmt_of_one_magnitude_and_of_none():
    one = row([3.0, -3.0, 0.0], "logfmt8")
    assert (
        one.factors == [[1]]
        and one.codes == [[1, 129, 0]]
        and one.values[0][0] == -one.values[0][1] == pytest.approx(3.0, rel=1e-6)
    )
    none = row([0.0, -0.0, math.inf], "logfmt8")
    assert none.codes == [[0, 128, 0]] and none.scales == [[0.0]] == none.offsets


def test_equal_values_of_a_tile_share_the_first_code():
    """Between two neighbours of float32 a tile has many ranks and two values: codes and parities are the first's."""
    above = 1 + 2.0**-23
    for last in (above, 1 + 2.0**-22):
        middle = (above + last) / 2 if last != above else 1 + 2.0**-24
        x = [1.0, last, middle]
        result = row(x, "logfmt8", input_dtype="float64", rounding="nearest_even")
        values = [f32(math.exp(result.scales[0][0] * k)) for k in range(127)]  # of the codes from 1 on
        low = f32(middle - 2.0**-24)
        first, second = 1 + values.index(low), 1 + values.index(last)
        assert result.codes[0][:2] == [1, second] and result.values[0][:2] == [1.0, last]
        assert result.codes[0][2] == (second if first % 2 else first)


def test_logfmt_to_odd():
    assert all(code % 2 for code in row(noise(1, 32, 8)[0], "logfmt8", rounding="to_odd").codes[0])


def test_logfmt_whose_last_value_lies_beyond_float32():
    """Inf is nearest to nothing."""
    codes = {"nearest_even": [6, 14], "nearest_away": [6, 14], "up": [7, 14], "down": [6, 15], "to_odd": [7, 15]}
    for mode, expected in codes.items():
        assert row([FLT_MAX, -FLT_MAX, 1.6072715374895832e38], "logfmt4", rounding=mode).codes[0][:2] == expected, mode


def test_logfmt_with_nan_and_infinity():
    result = row([1.0, -math.inf, 4.0], "logfmt8")
    assert result.codes == [[1, 255, 127]]
    dirty = row([1.0, math.nan, 4.0], "logfmt8")
    assert math.isnan(dirty.offsets[0][0]) and all(math.isnan(v) for v in dirty.values[0])
    assert dirty.codes == [[1, 127, 127]] and dirty.scales == result.scales


# Blocks.


def test_blocks_are_short_at_the_edges():
    fmt = BlockFormat(name="probe", element=get_format("e2m1"), scaling=block_scaling((2, 4), "floor"))
    rows = [[float(1 << (j // 4 + 3 * (i // 2))) for j in range(9)] for i in range(3)]
    result = quantize_matrix(rows, fmt)
    assert result.scales == [[0.25, 0.5, 1.0], [2.0, 4.0, 8.0]]
    assert result.values == rows
    assert quantize_matrix([[]], fmt).scales == [[]] and quantize_matrix([], fmt).codes == []


@pytest.mark.parametrize("name", ["mxfp4", "uint4_g32_zp", "logfmt8"])
def test_missing_words_are_an_error(name):
    with pytest.raises(ArgumentError, match="word=None does not fit"):
        row([1.0], name, rounding="stochastic")
