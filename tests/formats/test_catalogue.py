# SPDX-License-Identifier: Apache-2.0
"""Every constant of the catalogue against the documents, ml_dtypes and gfloat; scalings that no format has."""

import math
import re
import struct
from fractions import Fraction

import gfloat
import gfloat.formats as gf
import ml_dtypes  # noqa: F401  # registers its dtypes with numpy
import numpy as np
import pytest
import torch
from gfloat.types import Domain, Signedness

import fmtsim
from fmtsim.formats.block import BlockFormat, ScaledFormat
from fmtsim.formats.element import CodebookFormat, FloatFormat, IntFormat
from fmtsim.formats.interop import numpy_dtype
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.formats.scaling import Scaling, TensorScale, block_scaling
from fmtsim.rounding.oracle import round_value
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import FormatError

ML_DTYPES = {
    "bfloat16": "bf16", "float8_e3m4": "e3m4", "float8_e4m3": "e4m3_ieee", "float8_e4m3b11fnuz": "e4m3b11fnuz",
    "float8_e4m3fn": "e4m3", "float8_e4m3fnuz": "e4m3fnuz", "float8_e5m2": "e5m2", "float8_e5m2fnuz": "e5m2fnuz",
    "float8_e8m0fnu": "e8m0", "float6_e2m3fn": "e2m3", "float6_e3m2fn": "e3m2", "float4_e2m1fn": "e2m1",
    "int2": "int2", "int4": "int4", "uint2": "uint2", "uint4": "uint4", "float16": "fp16",
    "int8": "int8", "uint8": "uint8", "int16": "int16", "uint16": "uint16",
}  # fmt: skip


# name: bits, max, smallest normal, smallest subnormal, as the documents print them
FACTS = {
    "fp64": (64, 1.7976931348623157e308, 2.2250738585072014e-308, 5e-324),
    "fp32": (32, (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-149),
    "tf32": (19, (2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-136),
    "bf16": (16, (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133), "fp16": (16, 65504.0, 2.0**-14, 2.0**-24),
    "e4m3": (8, 448.0, 2.0**-6, 2.0**-9), "e4m3_ieee": (8, 240.0, 2.0**-6, 2.0**-9),
    "e4m3fnuz": (8, 240.0, 2.0**-7, 2.0**-10), "e4m3b11fnuz": (8, 30.0, 2.0**-10, 2.0**-13),
    "e5m2": (8, 57344.0, 2.0**-14, 2.0**-16), "e5m2fnuz": (8, 57344.0, 2.0**-15, 2.0**-17),
    "e3m4": (8, 15.5, 0.25, 2.0**-6), "e3m4fn": (8, 30.0, 0.25, 2.0**-6), "e5m6": (12, 65024.0, 2.0**-14, 2.0**-20),
    "e2m3": (6, 7.5, 1.0, 0.125), "e3m2": (6, 28.0, 0.25, 0.0625), "e2m1": (4, 6.0, 1.0, 0.5),
    "e8m0": (8, 2.0**127, 2.0**-127, 2.0**-127), "ue4m3": (7, 448.0, 2.0**-6, 2.0**-9),
    "ue5m3": (8, 114688.0, 2.0**-14, 2.0**-17), "p3109_k8p1se": (8, 2.0**62, 2.0**-63, 2.0**-63),
    "p3109_k8p3se": (8, 49152.0, 2.0**-15, 2.0**-17), "p3109_k8p3sf": (8, 57344.0, 2.0**-15, 2.0**-17),
    "p3109_k8p4se": (8, 224.0, 2.0**-7, 2.0**-10), "p3109_k8p4sf": (8, 240.0, 2.0**-7, 2.0**-10),
    "p3109_k6p3se": (6, 12.0, 2.0**-3, 2.0**-5), "p3109_k6p3sf": (6, 14.0, 2.0**-3, 2.0**-5),
    "p3109_k6p4sf": (6, 3.75, 0.5, 2.0**-4), "p3109_k4p2sf": (4, 3.0, 0.5, 0.25), "p3109_k3p2sf": (3, 1.5, 1.0, 0.5),
}  # fmt: skip


def differences(ours, theirs):
    """Return the codes whose values differ in value, in the sign of zero or in being NaN."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [
        code
        for code, (a, b) in pairs
        if (math.isnan(a), math.isnan(b)) != (True, True) and (a != b or math.copysign(1, a) != math.copysign(1, b))
    ]


def all_values(fmt):
    return [fmt.value(code) for code in range(1 << fmt.bits)]


@pytest.mark.parametrize("name", FACTS)
def test_constants_of_the_documents(name):
    fmt = get_format(name)
    assert (fmt.bits, fmt.max, fmt.min_normal, fmt.min_subnormal) == FACTS[name]


@pytest.mark.parametrize("dtype", ML_DTYPES)
def test_every_code_decodes_as_in_ml_dtypes(dtype):
    fmt = get_format(ML_DTYPES[dtype])
    theirs = np.dtype(dtype)
    codes = np.arange(1 << fmt.bits, dtype=f"u{theirs.itemsize}")
    with np.errstate(invalid="ignore"):  # converting a signalling NaN is no surprise here
        values = codes.view(theirs).astype(np.float64)
    assert differences(all_values(fmt), values.tolist()) == []
    assert get_format(theirs) == fmt
    assert numpy_dtype(fmt) == theirs


@pytest.mark.parametrize("name", [name for name in list_formats("float") if name.startswith("p3109")])
def test_every_p3109_code_decodes_as_in_gfloat(name):
    fmt = get_format(name)
    width, precision, signed, extended = int(name[7]), int(name[9]), name[10] == "s", name[11] == "e"
    info = gf.format_info_p3109(
        width,
        precision,
        Signedness.Signed if signed else Signedness.Unsigned,
        Domain.Extended if extended else Domain.Finite,
    )
    assert info.name == name
    assert (fmt.bits, fmt.exponent_bias, fmt.max, fmt.min) == (width, info.bias, info.max, info.min)
    theirs = [gfloat.decode_float(info, code).fval for code in range(1 << width)]
    assert differences(all_values(fmt), theirs) == []
    assert get_format(f"binary{name[7:].replace('p', 'p', 1)}".replace("binaryk", "binary")) is fmt


def test_p3109_has_every_precision_with_an_exponent():
    names = [name for name in list_formats("float") if name.startswith("p3109")]
    assert len(names) == 2 * sum(width - 1 + width for width in range(3, 9))


@pytest.mark.parametrize(("name", "layout"), [("fp32", "<If"), ("fp64", "<Qd")])
def test_wide_codes_decode_as_the_machine_does(name, layout):
    fmt = get_format(name)
    generator = np.random.default_rng(0)
    codes = [0, 1, fmt.sign_mask, fmt.max_code, fmt.inf_code, fmt.nan_code, fmt.sign_mask | fmt.inf_code]
    codes += [int.from_bytes(generator.bytes(fmt.bits // 8), "little") for _ in range(2000)]
    theirs = [struct.unpack("<" + layout[2], struct.pack("<" + layout[1], code))[0] for code in codes]
    assert differences([fmt.value(code) for code in codes], theirs) == []


def test_unsigned_scales_have_the_codes_of_e4m3():
    signed, unsigned = get_format("e4m3"), get_format("ue4m3")
    assert differences(all_values(unsigned), all_values(signed)[:128]) == []
    assert math.isnan(get_format("ue5m3").value(0xFF)) and get_format("ue5m3").max_code == 0xFE


@pytest.mark.parametrize("bits", range(2, 17))
def test_integer_grids(bits):
    half = 1 << (bits - 1)
    plain, full, middle = (get_format(f"int{bits}{grid}") for grid in ("", "_full", "_half"))
    assert (plain.min, plain.max) == (1 - half, half - 1)
    assert (full.min, full.max) == (-half, half - 1)
    assert (middle.min, middle.max) == (0.5 - half, half - 0.5)
    assert get_format(f"int{bits}_asymmetric") is full
    assert plain.value(half) == -half  # the unused code still decodes
    assert (get_format(f"uint{bits}").min, get_format(f"uint{bits}").max) == (0, 2 * half - 1)


def test_the_element_of_mxint8_counts_sixty_fourths():
    fmt = get_format("mxint8").element
    assert (fmt.max, fmt.min, fmt.eps) == (1.984375, -1.984375, 2.0**-6)


def test_nf4_values():
    """Appendix E of QLoRA prints them."""
    assert get_format("nf4").values == (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    )  # fmt: skip


def test_bnb_fp4_is_sign_and_magnitude_in_twelfths():
    values = get_format("bnb_fp4").values
    magnitudes = [float(np.float32(x / 12)) for x in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
    assert values == (*magnitudes, *(-value if value else 0.0 for value in magnitudes))
    assert values[1] == float(np.float32(0.005208333333))


@pytest.mark.parametrize(("name", "signed"), [("bnb_dynamic8", True), ("bnb_dynamic8_unsigned", False)])
def test_bnb_dynamic8_against_its_construction_in_torch(name, signed):
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        centres = (10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += centres + [-centre for centre in centres] * signed
    # torch.linspace fuses or does not fuse its multiply-add, as the machine has it: one float32 step apart
    np.testing.assert_array_max_ulp(np.float32(get_format(name).values), np.float32(sorted(values)), maxulp=2)


@pytest.mark.parametrize(("name", "first"), [("bnb_dynamic8", 1), ("bnb_dynamic8_unsigned", 2)])
def test_bnb_dynamic8_by_fractions(name, first):
    """Every step of the construction rounded to float32 once, as linspace with a fused multiply-add has it."""

    def f32(x):
        return Fraction(round_value(x, get_format("fp32")))

    values, low = {Fraction(0), Fraction(1)}, f32(Fraction(1, 10))
    for decade in range(7):
        cells = first << decade
        step, factor = f32(f32(1 - low) / cells), f32(Fraction(10) ** (decade - 6))
        half = (cells + 1) // 2  # of the edges, counted from below
        edges = [f32(low + step * k if k < half else 1 - step * (cells - k)) for k in range(cells + 1)]
        centres = [f32(factor * (f32(a + b) / 2)) for a, b in zip(edges, edges[1:], strict=False)]
        values |= {*centres, *(-centre for centre in centres if first == 1)}
    assert [Fraction(value) for value in get_format(name).values] == sorted(values)


def test_bnb_dynamic8_facts():
    signed = get_format("bnb_dynamic8").values
    unsigned = get_format("bnb_dynamic8_unsigned").values
    assert len(signed) == len(set(signed)) == len(unsigned) == len(set(unsigned)) == 256
    assert sum(value < 0 for value in signed) == 127 and sum(value > 0 for value in signed) == 128
    assert (signed[0], signed[-2], signed[-1]) == (-0.992968738079071, 0.992968738079071, 1.0)
    assert min(value for value in signed if value > 0) == 5.500000384017767e-07
    assert (unsigned[0], unsigned[1]) == (0.0, 3.2500003044333425e-07)
    assert unsigned[-2:] == (0.9964843988418579, 1.0)


def test_logarithmic_formats():
    fmt = get_format("lns8_g8")
    assert fmt.value(0) == 1.0 and fmt.value(8) == 2.0 and fmt.value(0x80 | 16) == -4.0
    assert fmt.max == np.float32(2.0 ** (127 / 8))
    assert get_format("lns16_g2048").max == np.float32(2.0 ** (32767 / 2048))


# name: element, block, scale, rule, arithmetic, tensor scale, zero point, bits an element
MX = ((1, 32), "e8m0", "floor", None, False, False)
ROW, TENSOR = (1, None), (None, None)
BLOCKS = {
    "mxfp8_e4m3": ("e4m3", *MX, 8.25),
    "mxfp8_e5m2": ("e5m2", *MX, 8.25),
    "mxfp6_e2m3": ("e2m3", *MX, 6.25),
    "mxfp6_e3m2": ("e3m2", *MX, 6.25),
    "mxfp4": ("e2m1", *MX, 4.25),
    "mxint8": ("int8_f6", *MX, 8.25),
    "mxfp8_e4m3_rceil": ("e4m3", (1, 32), "e8m0", "rceil", None, False, False, 8.25),
    "mxfp8_e5m2_rceil": ("e5m2", (1, 32), "e8m0", "rceil", None, False, False, 8.25),
    "nvfp4": ("e2m1", (1, 16), "e4m3", "amax", "encode", True, False, 4.5),
    "nvfp4_16x16": ("e2m1", (16, 16), "e4m3", "amax", "encode", True, False, 4 + 8 / 256),
    "nvfp4_e5m3": ("e2m1", (1, 16), "ue5m3", "amax", "divide", False, False, 4.5),
    **{f"{name}_{metric}": (element, (1, 16), "e4m3", "amax", "encode", True, False, bits + 0.5)
       for name, element, bits in (("if4", "e2m1", 4), ("if6_e2m3", "e2m3", 6), ("if6_e3m2", "e3m2", 6))
       for metric in ("mse", "mae")},
    **{name: ("e2m1", (1, 16), "e4m3", "amax", "encode", True, False, bits)
       for name, bits in (("nvfp4_row", 4.5), ("nvfp4_per_token", 4.5), ("nvfp4_1x64", 5.0),
                          ("nvfp4_double_scale", 4.75), ("nvfp4_trtllm", 4.5),
                          ("nvfp4_modelopt", 4.5),
                          ("nvfp4_compressed_tensors", 4.5), ("nvfp4_torchao", 4.5))},
    **{f"nvint{n}": (f"int{n}", (1, 16), "e4m3", "amax", "encode", True, False, n + 0.5) for n in (3, 4, 6)},
    **{f"nvfp4_{name}": ("e2m1", block, "e4m3", "amax", "encode", True, False, bits)
       for metric in ("mae", "mse") for name, block, bits in (
           (f"four_six_{metric}", (1, 16), 4.5), (f"four_six_{metric}_256", (1, 16), 4.5),
           (f"16x16_four_six_{metric}_256", (16, 16), 4 + 8 / 256))},
    "msfp12": ("e1m2_finite", (1, 16), "e8m0", "floor", None, False, False, 4.5),
    "msfp16": ("e1m6_finite", (1, 16), "e8m0", "floor", None, False, False, 8.5),
    "e4m3_1x128": ("e4m3", (1, 128), "fp32", "amax", "reciprocal", False, False, 8.25),
    "e4m3_1x128_pow2": ("e4m3", (1, 128), "e8m0", "rceil", None, False, False, 8.0625),
    "e4m3_128x128": ("e4m3", (128, 128), "fp32", "amax", "reciprocal", False, False, 8 + 32 / 16384),
    "e4m3_128x128_pow2": ("e4m3", (128, 128), "e8m0", "rceil", None, False, False, 8 + 8 / 16384),
    "e4m3_tensor": ("e4m3", TENSOR, "fp32", "amax", "encode", False, False, 8.0),
    "e4m3_channel": ("e4m3", ROW, "fp32", "amax", "reciprocal", False, False, 8.0),
    "e5m2_tensor": ("e5m2", TENSOR, "fp32", "amax", "encode", False, False, 8.0),
    "e5m2_channel": ("e5m2", ROW, "fp32", "amax", "reciprocal", False, False, 8.0),
    "int8_channel": ("int8", ROW, "fp32", "amax", "reciprocal", False, False, 8.0),
    "int8_tensor": ("int8", TENSOR, "fp32", "amax", "reciprocal", False, False, 8.0),
    "int4_channel": ("int4", ROW, "fp32", "amax", "reciprocal", False, False, 4.0),
    "int4_g32": ("int4", (1, 32), "fp32", "amax", "reciprocal", False, False, 5.0),
    "int4_g64": ("int4", (1, 64), "fp32", "amax", "reciprocal", False, False, 4.5),
    "int4_g128": ("int4", (1, 128), "fp32", "amax", "reciprocal", False, False, 4.25),
    "uint8_channel_zp": ("uint8", ROW, "fp32", "amax", "reciprocal", False, True, 8.0),
    "uint8_tensor_zp": ("uint8", TENSOR, "fp32", "amax", "reciprocal", False, True, 8.0),
    "uint4_g32_zp": ("uint4", (1, 32), "fp32", "amax", "reciprocal", False, True, 6.0),
    "uint4_g64_zp": ("uint4", (1, 64), "fp32", "amax", "reciprocal", False, True, 5.0),
    "uint4_g128_zp": ("uint4", (1, 128), "fp32", "amax", "reciprocal", False, True, 4.5),
    "nf4_g64": ("nf4", (1, 64), "fp32", "amax", "reciprocal", False, False, 4.5),
    "bnb_fp4_g64": ("bnb_fp4", (1, 64), "fp32", "amax", "reciprocal", False, False, 4.5),
    "bnb_dynamic8_g256": ("bnb_dynamic8", (1, 256), "fp32", "amax", "reciprocal", False, False, 8.125),
    "bnb_dynamic8_unsigned_g256": (
        "bnb_dynamic8_unsigned", (1, 256), "fp32", "amax", "reciprocal", False, False, 8.125),
    "lns8_channel": ("lns8_g8", ROW, "fp32", "amax", "reciprocal", False, False, 8.0),
    "lns8_tensor": ("lns8_g8", TENSOR, "fp32", "amax", "reciprocal", False, False, 8.0),
}  # fmt: skip


def test_every_block_format_has_a_row():
    assert list(BLOCKS) == list_formats("block")
    assert [len(list_formats(kind)) for kind in ("float", "int", "codebook", "log")] == [
        20 + 120,
        3 * 15 + 16 + 1,
        10,
        2,
    ]


@pytest.mark.parametrize("name", BLOCKS)
def test_block_formats(name):
    fmt = get_format(name)
    element, block, scale, rule, arithmetic, tensor_scale, zero_point, bits = BLOCKS[name]
    assert (fmt.element, fmt.block, fmt.scale) == (get_format(element), block, get_format(scale))
    assert (fmt.scale_rule, fmt.tensor_scale, fmt.zero_point) == (rule, tensor_scale, zero_point)
    assert arithmetic in (None, fmt.arithmetic)
    assert fmt.bits_per_element == bits


@pytest.mark.parametrize(("name", "magnitude_bits"), [("msfp12", 3), ("msfp16", 7)])
def test_msfp_counts_last_places_of_the_largest_exponent(name, magnitude_bits):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    x[3, 4], x[5] = 2.0**-20, torch.arange(16) * 0.125  # lost to zero; ties
    expected = []
    for row in x.double().tolist():
        step = Fraction(2) ** (math.frexp(max(map(abs, row)))[1] - magnitude_bits)
        counts = [min(round(abs(Fraction(v)) / step), (1 << magnitude_bits) - 1) for v in row]
        expected.append([math.copysign(float(n * step), v) for n, v in zip(counts, row, strict=True)])
    assert differences(fmtsim.quantize(x, name).flatten().tolist(), torch.tensor(expected).flatten().tolist()) == []


def test_every_row_has_a_source_and_a_lower_case_name():
    for name in list_formats():
        fmt = get_format(name)
        assert fmt.name == name == name.lower()
        assert len(fmt.source) > 15, name
        if isinstance(fmt, FloatFormat) and fmt.bits <= 8:
            zeros = [math.copysign(1.0, value) for value in map(fmt.value, range(1 << fmt.bits)) if value == 0]
            assert fmt.has_negative_zero == (-1.0 in zeros), name
        assert isinstance(fmt, FloatFormat | IntFormat | CodebookFormat | ScaledFormat) or "lns" in name


E4M3 = get_format("e4m3")
SCALINGS = {  # what a block format cannot have, and what is said about it
    "not one": ("e4m3", (1, 32), "scaling=(1, 32) is not a Scaling; choose Scaling(block"),
    "a quantizer's": ("e4m3", Scaling(statistic="std"),
                     "scaling=[std of the tensor]: a block format takes no statistic='std'; choose 'amax', or a Qua"),
    "arithmetic": ("e4m3", Scaling(arithmetic="decode_divides"),
                   "scaling=[amax of the tensor]: a block format takes no arithmetic='decode_divides'; choose 'div"),
    "even": ("nf4", block_scaling((1, 32), "even"), "scale_rule='even' needs mantissa bits; choose floor or amax"),
    "no mantissa": ("e4m3", Scaling(scale=get_format("e8m0")), "scale_rule='amax' needs a scale with mantissa bits"),
    "wide": ("e4m3", Scaling(scale=get_format("tf32")), "scale format tf32 is not supported; choose fp32, bf16, fp16"),
    "two levels": ("e2m1", block_scaling((1, 16), "floor", arithmetic="encode", tensor=TensorScale()),
                   "a tensor scale stands alone; "),
    "zero point": ("int4", Scaling(zero_point=True), "zero_point=True does not fit; choose an unsigned integer "),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALINGS)
def test_scalings_that_no_block_format_has(case):
    element, scaling, message = SCALINGS[case]
    with pytest.raises(FormatError, match="^" + re.escape(f"format 'b': {message}")):
        BlockFormat(name="b", element=get_format(element), scaling=scaling)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            block_scaling((1, 32), "floor"),
            r"takes no exponent_rule='floor'; choose None, or pass BlockFormat\(element=, ",
        ),
        (Scaling(zero_point=True), "takes no zero_point=True; choose False, or pass BlockFormat"),
        (Scaling(arithmetic="decode_divides"), "takes no arithmetic='decode_divides'; choose 'divide', 'reciprocal'"),
        (Scaling(empty="zero"), "takes no empty='zero'; choose 'one', 'previous', or"),
        (
            Scaling(empty="previous"),
            "empty='previous' without a history is not allowed; choose history=, or empty='one'",
        ),
    ],
)
def test_scalings_that_no_quantizer_has(scaling, message):
    with pytest.raises(FormatError, match=message):
        Quantizer(format=E4M3, scaling=scaling)
