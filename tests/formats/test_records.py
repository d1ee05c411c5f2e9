# SPDX-License-Identifier: Apache-2.0
"""Which records of formats exist: every limit from both of its sides, and what is said beyond it."""

import re

import numpy
import pytest
import torch

from fmtsim.formats.block import BlockFormat, LogTileFormat, scaled, with_block
from fmtsim.formats.element import CodebookFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import History, Scaling, TensorScale, block_scaling
from fmtsim.support.errors import FormatError


def floating(**fields):
    return FloatFormat(name="f", **{"exponent_bits": 4, "mantissa_bits": 3} | fields)


def alone(**fields):
    """Return a format of powers of two without a zero."""
    own = {"exponent_bits": 8, "mantissa_bits": 0, "signed": False, "nan": "top", "infinities": False}
    return floating(**own | {"has_zero": False, "has_subnormals": False} | fields)


def integer(**fields):
    return IntFormat(name="i", **{"bits": 8} | fields)


def book(*values, **fields):
    return CodebookFormat(name="c", values=values, **fields)


def log(**fields):
    return LogFormat(name="l", **{"bits": 8, "gamma": 8} | fields)


def block(element="e4m3", **fields):
    name, scale = fields.pop("rule", "amax"), fields.pop("scale", None)
    more = {} if scale is None else {"scale": get_format(scale)}
    return BlockFormat(name="b", element=get_format(element), scaling=block_scaling((1, 32), name, **more, **fields))


ALLOWED = {
    "one exponent bit": lambda: floating(exponent_bits=1, nan="none", infinities=False),
    "eleven exponent bits": lambda: floating(exponent_bits=11),
    "no mantissa bits": lambda: floating(mantissa_bits=0, nan="top"),
    "52 mantissa bits": lambda: floating(exponent_bits=11, mantissa_bits=52),
    "an unsigned NaN at the top": lambda: floating(signed=False, nan="top"),
    "a code of magnitude 1 alone": lambda: floating(exponent_bits=1, mantissa_bits=0, nan="none", infinities=False),
    "a largest exponent of 1023": lambda: floating(bias=-1009),
    "a least exponent of -1074": lambda: floating(bias=1072),
    "an error for NaN": lambda: floating(nan="none", infinities=False, nan_policy="error"),
    "no zero": lambda: alone(),
    "1 bit": lambda: integer(bits=1, signed=False, symmetric=False),
    "2 bits": lambda: integer(bits=2),
    "24 bits": lambda: integer(bits=24),
    "32 places": lambda: integer(fraction_bits=32),
    "half offset": lambda: integer(half_offset=True, symmetric=False),
    "two values": lambda: book(0.0, 1.0),
    "NaN": lambda: book(0.0, 1.0, 0.0, nan_code=2),
    "infinities": lambda: book(-2.0, -1.0, 1.0, 2.0, 1.0, nan_code=4, infinities=True),
    "thresholds": lambda: book(0.0, 1.0, thresholds=(0.0,)),
    "65536 values": lambda: book(*map(float, range(1 << 16))),
    "log of 2 bits": lambda: log(bits=2),
    "log of 16 bits": lambda: log(bits=16, gamma=256),
    "127 octaves": lambda: log(bits=8, gamma=1),
    "gamma 1": lambda: log(bits=3, gamma=1),
    "tile of 3 bits": lambda: LogTileFormat(name="t", bits=3),
    "tile of 16 bits": lambda: LogTileFormat(name="t", bits=16, block=(1, 1)),
    "a scale of 8 exponent bits": lambda: block(rule="ceil", scale="bf16"),
    "a scale of 8 bits": lambda: block(scale="e5m2"),
    "even of integers": lambda: block("int8", rule="even"),
    "a zero point": lambda: block("uint8", zero_point=True),
    "two levels": lambda: block("e2m1", scale="e4m3", arithmetic="encode", tensor=TensorScale()),
    "blocks of 2**63 - 1": lambda: Scaling(block=(1, (1 << 63) - 1)),
    "a history of 1": lambda: History(length=1, refresh_every=1, immediate=0),
    "a fixed history": lambda: History(fixed=True),
    "equal steps": lambda: Scaling(allowed=(1.0, 1.0)),
    "an int top": lambda: Scaling(top=448),
    "previous with a history": lambda: Scaling(empty="previous", history=History()),
    "log2 of encode": lambda: Scaling(power_of_two="log2"),
    "inverse of reciprocal": lambda: Scaling(arithmetic="reciprocal", eps_rule="inverse"),
}  # fmt: skip


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed(case):
    assert ALLOWED[case]() == ALLOWED[case]()


E4M3_SCALE = {"scale": "e4m3", "arithmetic": "encode", "tensor": TensorScale()}
NO_PLACE = "a tensor scale stands alone; choose 'amax', 'encode' and TensorScale()"
NO_ZERO_POINT = "zero_point=True does not fit; choose an unsigned integer element without fraction bits, scale fp32 and"
REFUSED = [
    (lambda: floating(exponent_bits=0), "exponent_bits=0 is not allowed; choose 1 to 11"),
    (lambda: floating(exponent_bits=12), "exponent_bits=12 is not allowed; choose 1 to 11"),
    (lambda: floating(mantissa_bits=-1), "mantissa_bits=-1 is not allowed; choose 0 to 52"),
    (lambda: floating(mantissa_bits=53), "mantissa_bits=53 is not allowed; choose 0 to 52"),
    (lambda: floating(nan="bottom"), "nan='bottom' is not allowed; choose 'ieee', 'top', 'negative_zero', 'none'"),
    (lambda: floating(infinities=False), "nan='ieee' with infinities=False is not allowed; choose infinities=True"),
    (lambda: floating(mantissa_bits=0), "nan='ieee' with mantissa_bits=0 is not allowed; choose nan='top' or"),
    (lambda: floating(nan="negative_zero", signed=False), "nan='negative_zero' with signed=False is not allowed"),
    (lambda: alone(signed=True), "has_zero=False is not allowed; choose has_zero=True, or signed=False"),
    (lambda: alone(has_subnormals=True), "has_zero=False is not allowed; choose has_zero=True, or signed=False"),
    (lambda: alone(mantissa_bits=1), "has_zero=False is not allowed; choose has_zero=True, or signed=False"),
    (lambda: floating(overflow="wrap"), "overflow='wrap' is not allowed; choose None, 'saturate', 'ieee'"),
    (lambda: floating(nan_policy="zero"), "nan_policy='zero' is not allowed; choose 'max', 'error'"),
    (lambda: floating(exponent_bits=1, mantissa_bits=0, nan="top", infinities=False), "no finite value above zero is"),
    (lambda: floating(bias=-1010), "exponents 1008 to 1024 is not allowed; choose values within float64"),
    (lambda: floating(bias=1073), "exponents -1075 to -1059 is not allowed; choose values within float64"),
    (lambda: integer(bits=0, signed=False, symmetric=False), "bits=0 is not allowed; choose 1 to 24"),
    (lambda: integer(bits=1), "bits=1 is not allowed; choose 2 to 24"),
    (lambda: integer(bits=25), "bits=25 is not allowed; choose 2 to 24"),
    (lambda: integer(fraction_bits=-1), "fraction_bits=-1 is not allowed; choose 0 to 32"),
    (lambda: integer(fraction_bits=33), "fraction_bits=33 is not allowed; choose 0 to 32"),
    (lambda: integer(signed=False), "symmetric=True is not allowed; choose symmetric=False for an unsigned or a half"),
    (lambda: integer(half_offset=True), "symmetric=True is not allowed; choose symmetric=False for an unsigned or"),
    (lambda: integer(half_offset=True, signed=False, symmetric=False), "half_offset=True with signed=False is not"),
    (lambda: integer(nan_policy="zero"), "nan_policy='zero' is not allowed; choose 'max', 'error'"),
    (lambda: book(1.0), "1 values is not allowed; choose 2 to 65536 values"),
    (lambda: book(*map(float, range((1 << 16) + 1))), "65537 values is not allowed; choose 2 to 65536 values"),
    (lambda: book(0.0, float("inf")), "values with NaN or Inf is not allowed; choose finite values"),
    (lambda: book(1.0, 1.0), "a single distinct value is not allowed; choose at least two"),
    (lambda: book(0.0, 1.0, nan_code=1), "nan_code=1 is not allowed; choose a code whose place in values repeats the"),
    (lambda: book(0.0, 1.0, 0.0, nan_code=3), "nan_code=3 is not allowed; choose a code whose place in values repea"),
    (lambda: book(-1.0, 1.0, infinities=True), "infinities=True with nan_code=None is not allowed; choose a nan_code"),
    (lambda: book(0.0, 1.0, 2.0, 0.0, nan_code=3, infinities=True), "infinities=True is not allowed; choose lists"),
    (lambda: book(0.0, 1.0, thresholds=(0.1, 0.2)), "2 thresholds is not allowed; choose 1 ascending ones, or none"),
    (lambda: book(0.0, 1.0, 2.0, thresholds=(1.0, 0.5)), "2 thresholds is not allowed; choose 2 ascending ones, or"),
    (lambda: book(0.0, 1.0, nan_policy="zero"), "nan_policy='zero' is not allowed; choose 'max', 'error'"),
    (lambda: log(bits=1), "bits=1 is not allowed; choose 2 to 16"),
    (lambda: log(bits=17, gamma=1024), "bits=17 is not allowed; choose 2 to 16"),
    (lambda: log(gamma=0), "gamma=0 is not allowed; choose a power of two up to 2**24"),
    (lambda: log(gamma=6), "gamma=6 is not allowed; choose a power of two up to 2**24"),
    (lambda: log(gamma=1 << 25), "gamma=33554432 is not allowed; choose a power of two up to 2**24"),
    (lambda: log(bits=9, gamma=1), "a largest value of 2**255 is not allowed; choose values within float32"),
    (lambda: log(nan_policy="zero"), "nan_policy='zero' is not allowed; choose 'max', 'error'"),
    (lambda: LogTileFormat(name="t", bits=2), "bits=2 is not allowed; choose 3 to 16"),
    (lambda: LogTileFormat(name="t", bits=17), "bits=17 is not allowed; choose 3 to 16"),
    (lambda: LogTileFormat(name="t", bits=8, block=(1, 0)), "block=(1, 0) is not allowed; choose (outer, inner) sizes"),
    (lambda: Scaling(block=(1 << 63, 1)), "Scaling block=(9223372036854775808, 1) is not allowed; choose (outer,"),
    (lambda: Scaling(block=(1, 2, 3)), "Scaling block=(1, 2, 3) is not allowed; choose (outer, inner) sizes of 1 or"),
    (lambda: Scaling(block=(1, True)), "Scaling block=(1, True) is not allowed; choose (outer, inner) sizes of 1 or"),
    (lambda: block(scale="e4m4"), "scale format e4m4 is not supported; choose fp32, bf16, fp16 or one of 8 bits or"),
    (lambda: block("lns8_g8", rule="even"), "scale_rule='even' needs mantissa bits; choose floor or amax"),
    (lambda: block("e2m1", **E4M3_SCALE | {"arithmetic": "divide"}), "tensor= with arithmetic='divide' is not"),
    (lambda: block("e2m1", **E4M3_SCALE | {"candidates": (1.0, 1.5)}),
     "candidates alone; choose TensorScale(order='fouroversix'), or pass a Quantizer"),
    (lambda: block("e2m1", **E4M3_SCALE | {"tensor": TensorScale(block=(1, 40))}),
     "TensorScale(block=(1, 40)) with block=(1, 32) is not allowed; choose a TensorScale"),
    (lambda: TensorScale(block=(0, 1)), "TensorScale block=(0, 1) is not allowed; choose (outer, inner) sizes of 1"),
    (lambda: block("e2m1", rule="floor", arithmetic="encode", tensor=TensorScale()), NO_PLACE),
    (lambda: block("e4m3", zero_point=True), NO_ZERO_POINT),
    (lambda: block("int8", zero_point=True), NO_ZERO_POINT),
    (lambda: block("uint8_f2", zero_point=True), NO_ZERO_POINT),
    (lambda: block("uint8", zero_point=True, rule="floor"), NO_ZERO_POINT),
    (lambda: block("uint8", zero_point=True, scale="bf16"), NO_ZERO_POINT),
    (lambda: block("uint8", zero_point=True, **E4M3_SCALE), NO_ZERO_POINT),
    (lambda: History(length=0), "History length=0 is not allowed; choose a whole number from 1"),
    (lambda: History(length=True), "History length=True is not allowed; pass a whole number of 64 bits"),
    (lambda: History(refresh_every=0), "History refresh_every=0 is not allowed; choose a whole number from 1"),
    (lambda: History(immediate=-1), "History immediate=-1 is not allowed; choose a whole number from 0"),
    (lambda: History(algorithm="mean"), "History algorithm='mean' is not allowed; choose 'max', 'most_recent'"),
    (lambda: History(fixed=True, immediate=1), "fixed=True with immediate=1 is not allowed; choose immediate=0"),
    (lambda: TensorScale(top=0.0), "TensorScale top=0.0 is not allowed; choose a finite number above 0"),
    (lambda: TensorScale(top=float("inf")), "TensorScale top=inf is not allowed; choose a finite number above 0"),
    (lambda: TensorScale(top="6"), "TensorScale top='6' is not allowed; pass a number or None"),
    (lambda: TensorScale(order="amd"), "TensorScale order='amd' is not allowed; choose 'te', 'te_quotient', 'fouro"),
    *((lambda name=name: Scaling(**{name: "odd"}), f"Scaling {name}='odd' is not allowed; choose ")
      for name in ("exponent_rule", "statistic", "eps_rule", "arithmetic", "empty", "power_of_two", "scale_rounding",
                   "metric")),
    *((lambda name=name: Scaling(**{name: 0}), f"Scaling {name}=0 is not allowed; choose a finite number above 0")
      for name in ("factor", "top", "multiplier")),
    (lambda: Scaling(candidates=(1.0, -1.0)), "Scaling candidates and allowed=-1.0 is not allowed; choose a finite"),
    (lambda: Scaling(allowed=(0.0,)), "Scaling candidates and allowed=0.0 is not allowed; choose a finite number"),
    (lambda: Scaling(allowed=(2.0, 1.0)), "Scaling allowed=(2.0, 1.0) is not allowed; choose an ascending tuple"),
    (lambda: Scaling(eps=-1.0), "eps=-1.0, offset=0.0 is not allowed; choose numbers from 0"),
    (lambda: Scaling(offset=-1.0), "eps=0.0, offset=-1.0 is not allowed; choose numbers from 0"),
    (lambda: Scaling(candidates=()), "no candidates is not allowed; choose (1.0,) or several"),
    *((lambda fields=fields: Scaling(scale=get_format("e4m3"), tensor=TensorScale(), **fields),
       f"tensor= with {next(iter(fields))}=") for fields in (
           {"multiplier": 2.0}, {"margin": 1}, {"factor": 0.5}, {"offset": 0.5}, {"eps": 0.5}, {"power_of_two": "ceil"},
           {"allowed": (1.0,)})),
    (lambda: Scaling(tensor=TensorScale()), "tensor= with scale fp32 is not allowed; choose a scale such as e4m3"),
    (lambda: Scaling(factor=1.0, top=1.0), "factor= and top= together is not allowed; choose one: a factor, or what"),
    (lambda: Scaling(eps_rule="inverse"), "eps_rule='inverse' of this rule is not allowed; choose arithmetic='recip"),
    (lambda: Scaling(eps_rule="inverse", arithmetic="reciprocal", candidates=(1.0, 2.0)), "eps_rule='inverse' of this"),
    (lambda: Scaling(power_of_two="log2", arithmetic="divide", scale=get_format("e8m0")), "power_of_two='log2' of"),
    (lambda: Scaling(power_of_two="log2", factor=1.0), "power_of_two='log2' of this rule is not allowed; choose arith"),
    *((lambda fields=fields, more=more: Scaling(**fields, **more), "input_scale, 'log2' or 'inverse' with tensor= or")
      for more in ({"tensor": TensorScale(), "scale": get_format("e4m3")}, {"history": History()})
      for fields in ({"input_scale": True}, {"power_of_two": "log2"},
                     {"eps_rule": "inverse", "arithmetic": "reciprocal"})),
    (lambda: Scaling(history=History(), block=(1, None)), "history= with block=(1, None) is not allowed; choose block"),
    (lambda: block_scaling((1, 8), "half"), "scale_rule='half' is unknown; choose floor, ceil, rceil, even, amax"),
    (lambda: block_scaling((1, 8), 3), "scale_rule=3 is unknown; choose floor, ceil, rceil, even, amax"),
    (lambda: floating().value(-1), "code -1 is outside f (0 to 255)"),
    (lambda: floating().value(256), "code 256 is outside f (0 to 255)"),
    (lambda: integer().value(256), "code 256 is outside i (0 to 255)"),
    (lambda: log().value(256), "code 256 is outside l (0 to 255)"),
    (lambda: book(0.0, 1.0, 2.0).value(3), "code 3 is outside c (0 to 2)"),
    (lambda: book(0.0, 1.0, 2.0).value(-1), "code -1 is outside c (0 to 2)"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(make, message):
    with pytest.raises(FormatError, match=rf"^(format '\w': |\w+Format )?{re.escape(message)}"):
        make()


def test_what_follows_from_a_record():
    """Defaults and derived numbers of records that no listed format shows."""
    tiny = alone(exponent_bits=3, bias=2)
    assert (tiny.min, tiny.max, tiny.min_exponent, tiny.max_code, tiny.nan_code) == (0.25, 16.0, -2, 6, 7)
    assert [tiny.value(code) for code in range(7)] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    unsigned = floating(signed=False, nan="none", infinities=False)
    assert (unsigned.min, unsigned.max, unsigned.sign_mask, unsigned.inf_code, unsigned.nan_code) == (
        0, 480, 0, None, None,
    )  # fmt: skip
    flushed = floating(has_subnormals=False)
    assert (flushed.min_subnormal, flushed.min_normal, flushed.value(7), flushed.value(8)) == (2**-6, 2**-6, 0.0, 2**-6)
    assert (floating().eps, floating().max_exponent, floating().has_negative_zero) == (0.125, 7, True)
    assert [floating(exponent_bits=e).default_overflow for e in (4, 5)] == ["saturate", "ieee"]
    assert floating(overflow="ieee").default_overflow == "ieee"
    assert floating(exponent_bits=3, mantissa_bits=1).nan_code == 0b1111 and floating().nan_code == 0b1111100
    assert (integer().mantissa_bits, integer(bits=1, signed=False, symmetric=False).mantissa_bits) == (6, 0)
    half = integer(bits=4, half_offset=True, symmetric=False, fraction_bits=1)
    assert (half.min, half.max, half.value(8), half.value(7), half.min_code, half.max_code) == (
        -3.75, 3.75, -3.75, 3.75, -8, 7,
    )  # fmt: skip
    assert [book(*map(float, range(n))).bits for n in (2, 3, 4, 5, 256, 257)] == [1, 2, 2, 3, 8, 9]
    lopsided = book(-3.0, 1.0)
    assert (lopsided.min, lopsided.max, lopsided.max_exponent, lopsided.has_nan) == (-3.0, 3.0, 1, False)
    four = LogTileFormat(name="t", bits=4, block=(2, 8))
    assert (four.max_code, four.bits_per_element, four.default_overflow) == (7, 8.0, "saturate")
    assert four.code_fields == (("sign", 1), ("logarithm", 3))
    assert repr(four) == "LogTileFormat('t': 4 bits, 7 logarithmic steps a tile of 2x8)"


def test_formats_with_another_block():
    e4m3, mx, nv, tile = (get_format(name) for name in ("e4m3", "mxfp4", "nvfp4", "logfmt8"))
    assert with_block(e4m3, None) is e4m3 and with_block(mx, None, None) is mx
    assert with_block(e4m3, 16) == scaled(e4m3, (1, 16)) and with_block(e4m3, 16).scaling == block_scaling((1, 16))
    assert with_block(e4m3, (2, 16), "even").scaling == block_scaling((2, 16), "even")
    assert with_block(e4m3, (2, None), "even").name == "e4m3_2xall_even"
    assert repr(with_block(e4m3, (2, None))) == (
        "BlockFormat('e4m3_2xall_amax': e4m3 in blocks of 2xall, scale fp32 by amax)"
    )
    assert repr(get_format("int8_tensor")) == "BlockFormat('int8_tensor': int8 in one block, scale fp32 by amax)"
    powers = BlockFormat(name="p", element=e4m3, scaling=Scaling(power_of_two="ceil"))
    assert repr(powers).endswith("scale fp32 by amax, a power of two by ceil)")
    assert ("scale", "fp32 by amax, a power of two by ceil") in powers.facts()
    assert with_block(mx, 16).scaling == block_scaling((1, 16), "floor")
    assert with_block(mx, None, "ceil").scaling == block_scaling((1, 32), "ceil")
    assert with_block(mx, None, "amax").scaling == block_scaling((1, 32))
    wide = block(rule="floor", scale="bf16")
    assert with_block(wide, None, "ceil").scale == get_format("bf16")  # powers of two stay in their format,
    assert with_block(nv, 32).scaling == block_scaling((1, 32), scale=e4m3, arithmetic="encode", tensor=TensorScale())
    assert with_block(nv, 32, "amax").scale == e4m3  # and so do real scales
    assert with_block(get_format("int8_channel"), None, "floor").scale == get_format("e8m0")
    assert with_block(tile, 64).block == (1, 64) and with_block(tile, (2, 2)).bits == 8
    with pytest.raises(FormatError, match="^logfmt8 has no scale, so scale_rule='floor' does not apply; leave it out$"):
        with_block(tile, None, "floor")
    with pytest.raises(FormatError, match="^scale_rule='floor' needs a block; pass block_size= or a block format"):
        with_block(e4m3, None, "floor")


def test_whole_numbers_of_numpy_are_ints():
    made = FloatFormat(name="mine", exponent_bits=numpy.int64(4), mantissa_bits=numpy.uint8(3))
    assert made == FloatFormat(name="mine", exponent_bits=4, mantissa_bits=3) and type(made.exponent_bits) is int
    rule = Scaling(block=(numpy.int64(1), numpy.int32(16)))
    assert rule == Scaling(block=(1, 16)) and [type(size) for size in rule.block] == [int, int]
    assert repr(with_block(made, numpy.int64(32))) == repr(with_block(made, 32))
    for wrong in (numpy.float64(4), numpy.bool_(True), True, numpy.array(4), torch.tensor(4)):
        with pytest.raises(FormatError, match="is not allowed; pass a whole number of 64 bits"):
            FloatFormat(name="mine", exponent_bits=wrong, mantissa_bits=3)
