# SPDX-License-Identifier: Apache-2.0
"""Names, aliases, dtypes and spelled-out formats, and what is said where there is none."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from fmtsim.formats import registry
from fmtsim.formats.element import FloatFormat, IntFormat, LogFormat
from fmtsim.formats.registry import get_format, list_formats, register_format
from fmtsim.support.errors import FormatError
from tests.support.refusals import refused

E3M3 = FloatFormat(name="mine", exponent_bits=3, mantissa_bits=3, aliases=("my_e3m3",))


NAMES = (
    "bf16 fp16 tf32 fp32 fp64 e4m3 e4m3_ieee e4m3fnuz e4m3b11fnuz e5m2 e5m2fnuz e3m4 e2m3 e3m2 e2m1 e8m0 mxfp8_e4m3 "
    "mxfp8_e5m2 mxfp6_e2m3 mxfp6_e3m2 mxfp4 mxint8 nvfp4 int8 int4"
)

ALIASES = {
    "float8_e4m3fn": "e4m3", "e4m3fn": "e4m3", "float8_e4m3": "e4m3_ieee", "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e4m3b11fnuz": "e4m3b11fnuz", "float8_e5m2": "e5m2", "float8_e5m2fnuz": "e5m2fnuz", "float8_e3m4": "e3m4",
    "float6_e2m3fn": "e2m3", "float6_e3m2fn": "e3m2", "float4_e2m1fn": "e2m1", "fp4": "e2m1", "ue8m0": "e8m0",
    "float8_e8m0fnu": "e8m0", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32",
    "double": "fp64", "e8m7": "bf16", "e5m10": "fp16", "e8m10": "tf32", "mxfp8": "mxfp8_e4m3", "E4M3": "e4m3",
    " NVFP4 ": "nvfp4", "torch.float8_e5m2": "e5m2", "int8_asymmetric": "int8_full", "binary8p4se": "p3109_k8p4se",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES.split())
def test_promised_names(name):
    assert get_format(name).name == name
    assert name in list_formats()


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(alias):
    assert get_format(alias) is get_format(ALIASES[alias])


DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8",
    torch.uint8: "uint8", torch.float8_e4m3fn: "e4m3", torch.float8_e4m3fnuz: "e4m3fnuz", torch.float8_e5m2: "e5m2",
    torch.float8_e5m2fnuz: "e5m2fnuz", torch.float8_e8m0fnu: "e8m0", torch.float4_e2m1fn_x2: "e2m1",
    np.float32: "fp32", np.dtype("int16"): "int16", ml_dtypes.float8_e4m3: "e4m3_ieee", ml_dtypes.int4: "int4",
    np.dtype(ml_dtypes.float6_e3m2fn): "e3m2", ml_dtypes.bfloat16: "bf16",
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    assert get_format(dtype) is get_format(DTYPES[dtype])


def test_a_record_is_its_own_format():
    assert get_format(E3M3) is E3M3


@pytest.mark.parametrize("exponent_bits", range(1, 9))
@pytest.mark.parametrize("mantissa_bits", range(11))
def test_any_exmy(exponent_bits, mantissa_bits):
    name = f"e{exponent_bits}m{mantissa_bits}"
    fmt = get_format(name)
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (exponent_bits, mantissa_bits)
    if fmt.name != name or name in list_formats():
        return  # the catalogue's own
    specials = (fmt.nan, fmt.infinities)
    assert specials == (("ieee", True) if fmt.bits > 8 else ("top", False) if fmt.bits == 8 else ("none", False))
    assert fmt.exponent_bias == 2 ** (exponent_bits - 1) - 1
    assert get_format(name.upper()) == fmt


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int20", dict(bits=20)),
        ("int24_full", dict(bits=24, symmetric=False)),
        ("int20_asymmetric", dict(bits=20, symmetric=False)),
        ("int18_half", dict(bits=18, symmetric=False, half_offset=True)),
        ("uint20", dict(bits=20, signed=False, symmetric=False)),
        ("int6_f3", dict(bits=6, fraction_bits=3)),
        ("int6_full_f3", dict(bits=6, symmetric=False, fraction_bits=3)),
        ("uint6_f3", dict(bits=6, signed=False, symmetric=False, fraction_bits=3)),
    ],
)
def test_spelled_integers(name, expected):
    fmt = get_format(name)
    assert fmt == IntFormat(name=fmt.name, aliases=fmt.aliases, source=fmt.source, **expected)
    assert get_format(fmt.name) == fmt
    signed = (
        "two's complement without" if fmt.symmetric else "mid-rise" if fmt.half_offset else "two's complement, every"
    )
    assert fmt.source.startswith(signed if fmt.signed else "natural numbers")


def test_spelled_floats_that_saturate():
    fmt = get_format("e5m10_saturate")
    assert fmt == replace(get_format("fp16"), name=fmt.name, aliases=(), source=fmt.source, overflow="saturate")
    assert (fmt.default_overflow, get_format("e5m10").default_overflow) == ("saturate", "ieee")
    assert (get_format("e8m23_saturate").max, get_format("e8m23_saturate").infinities) == (get_format("fp32").max, True)


def test_spelled_logarithms():
    assert get_format("lns12_g128") == LogFormat(
        name="lns12_g128", bits=12, gamma=128, source=get_format("lns8_g8").source
    )
    assert (get_format("logfmt6").bits, get_format("logfmt6").block) == (6, (1, 128))


SPELLED = (
    "spelled out: 'e3m4', 'e3m4_finite', 'e3m4_1x64_amax', 'int6', 'int6_full', 'int6_half', 'uint6', 'lns8_g8', "
    "'logfmt8')"
)
ERRORS = {
    "e9m2": "e9m2: exponent_bits=9 is not allowed; choose 1 to 8, or register a FloatFormat of your own",
    "e0m3": "e0m3: exponent_bits=0 is not allowed; choose 1 to 8, or register a FloatFormat of your own",
    "e4m24": "e4m24: mantissa_bits=24 is not allowed; choose 0 to 23, or register a FloatFormat of your own",
    "int25": "format 'int25': bits=25 is not allowed; choose 2 to 24",
    "int1": "format 'int1': bits=1 is not allowed; choose 2 to 24",
    "uint4_half": "uint4_half: unsigned integers have no 'half' grid; choose uint4 or int4_half",
    "lns8_g3": "format 'lns8_g3': gamma=3 is not allowed; choose a power of two up to 2**24",
    "lns16_g128": "format 'lns16_g128': a largest value of 2**255.992 is not allowed; "
    "choose values within float32: raise gamma or lower bits",
    "logfmt2": "format 'logfmt2': bits=2 is not allowed; choose 3 to 16",
    "nvfp": "unknown format 'nvfp'; did you mean 'nvfp4' or 'nvfp4_row' or 'nvfp4_ggml'? (fmtsim.list_formats() has "
    f"all names; others are {SPELLED}",
    "zzzzz": f"unknown format 'zzzzz' (fmtsim.list_formats() has all names; others are {SPELLED}",
    torch.complex64: "dtype torch.complex64 has no format; pass a name from fmtsim.list_formats()",
    torch.bool: "dtype torch.bool has no format; pass a name from fmtsim.list_formats()",
    None: "format=None is not a name, a format record or a dtype; pass a name such as 'e4m3'",
    8: "format=8 is not a name, a format record or a dtype; pass a name such as 'e4m3'",
    int: "format=<class 'int'> is not a name, a format record or a dtype; pass a name such as 'e4m3'",
}


@pytest.mark.parametrize("name", ERRORS, ids=str)
def test_errors_of_get_format(name):
    refused(f"^{re.escape(ERRORS[name])}$", get_format, name, error=FormatError)


def test_list_formats_by_kind():
    kinds = ("float", "int", "codebook", "log", "block", "log_tile", "packed")
    assert sorted(sum((list_formats(kind) for kind in kinds), [])) == sorted(list_formats())
    assert "nvfp4" in list_formats("block") and "nvfp4" not in list_formats("float")
    assert list_formats("log_tile") == ["logfmt8", "logfmt10"]
    with pytest.raises(FormatError, match="^kind='posit' is not a kind of format; choose one of float, int, "):
        list_formats("posit")


def test_register(scratch):
    assert register_format(E3M3) is E3M3
    assert get_format("mine") is get_format("MY_E3M3") is E3M3
    assert list_formats()[-1] == "mine"
    assert register_format(E3M3) is E3M3  # once more changes nothing
    assert list_formats().count("mine") == 1


def test_a_registered_name_wins_over_its_spelling(scratch):
    assert get_format("e3m3").bias is None
    mine = FloatFormat(name="e3m3", exponent_bits=3, mantissa_bits=3, bias=5)
    register_format(mine)
    assert get_format("e3m3") is get_format("E3M3") is mine


def test_taken_names(scratch):
    register_format(E3M3)
    other = FloatFormat(name="other", exponent_bits=2, mantissa_bits=2, aliases=("e4m3fn",))
    taken = "^format name 'e4m3fn' is taken by FloatFormat.'e4m3': .*; choose another, or pass overwrite=True$"
    refused(taken, register_format, other, error=FormatError)
    assert "other" not in list_formats()
    register_format(other, overwrite=True)
    assert get_format("e4m3fn") is other and get_format("e4m3").max == 448  # an alias moved, the format stays
    changed = FloatFormat(name="mine", exponent_bits=2, mantissa_bits=3)
    refused("^format name 'mine' is taken by", register_format, changed, error=FormatError)
    register_format(changed, overwrite=True)
    assert get_format("mine") is changed
    with pytest.raises(FormatError, match="^unknown format 'my_e3m3'"):
        get_format("my_e3m3")  # a format that lost its name is forgotten with its aliases


def test_names_that_cannot_be_looked_up(scratch):
    with pytest.raises(
        FormatError, match="^format name 'my format' is not allowed; choose letters, digits and _ . [+] -$"
    ):
        register_format(FloatFormat(name="my format", exponent_bits=3, mantissa_bits=3))
    with pytest.raises(FormatError, match="^format name '' is not allowed"):
        register_format(FloatFormat(name="", exponent_bits=3, mantissa_bits=3))
    with pytest.raises(FormatError, match="^record='e4m3' is not a format; build one of FloatFormat, IntFormat, "):
        register_format("e4m3")


def test_names_by_family():
    families = {family: list_formats(family) for family in (*registry.FAMILIES, "log_tile")}
    assert {name for names in families.values() for name in names} == {*list_formats()}
    assert "q4_0" in families["ggml"] and "hif4" in families["scaled"] and "hif4" not in families["ggml"]
    assert families["fp6"] == ["e2m3", "e3m2"] and families["nvfp4"][:2] == ["nvfp4", "nvfp4_16x16"]
    assert "mxfp4" in families["mx"] and "e8m0" in families["scale"] and "bf16" in families["wide"]
    assert str(list_formats("fp4")) == "fp4: e2m1" and "\nnvfp4: nvfp4 nvfp4_16x16 " in str(list_formats())
    assert str(list_formats()).splitlines()[0].startswith("wide: fp64 fp32 ")


@pytest.mark.parametrize(("name", "hint"), [
    ("posits", r"list the values: fmtsim.formats.element.CodebookFormat\("), ("hif16", r"fields of varying width"),
    ("bfp16", r"'mxint8', or integers under one: 'int8_1x16_floor'"), ("msfp11", r"'msfp12', .*, 'int4_1x16_floor'"),
    ("unum", r"fields of varying width"), ("ternary", r"-1, 0 and 1 are 'int2'"),
    ("bf8", r"did you mean 'e5m2' or 'e5m2fnuz'\?"), ("fp6", r"did you mean 'e2m3' or 'e3m2' or 'mxfp6_e2m3'\?"),
])  # fmt: skip
def test_names_of_other_libraries_say_what_to_take(name, hint):
    refused(f"^unknown format '{name}'; .*{hint}", get_format, name, error=FormatError)
    assert get_format("int4_1x16_floor").power_of_two
