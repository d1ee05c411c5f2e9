# SPDX-License-Identifier: Apache-2.0
"""Bad input of the verbs: each error names the value, what is allowed and the next step, and nothing is written."""

import re

import numpy
import pytest
import torch

import fmtsim
from fmtsim import encode, quantize, quantize_
from fmtsim.rounding.modes import MODES
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError
from tests.support.refusals import refused

DTYPES = "choose float16, bfloat16, float32, float64 or a float8 dtype"
BLOCK = "is not a block; choose an int of 1 or more, or (outer, inner), in which None means the whole extent"
ROUNDINGS = ", ".join(MODES)
X = torch.linspace(-8.0, 8.0, 256).reshape(4, 64)

# x is [6, 64] of float32.
ARGUMENTS = [
    (FormatError, {"format": "e4m3x"}, "unknown format 'e4m3x'; did you mean 'e4m3'"),
    (FormatError, {"format": "e4m33"}, "e4m33: mantissa_bits=33 is not allowed; choose 0 to 23"),
    (FormatError, {"format": "nvfp5"}, "unknown format 'nvfp5'; did you mean 'nvfp4'"),
    (FormatError, {"format": "zzzz"}, "unknown format 'zzzz' (fmtsim.list_formats() has all names; others are spelled"),
    (FormatError, {"format": "e9m3"}, "e9m3: exponent_bits=9 is not allowed; choose 1 to 8"),
    (FormatError, {"format": 3}, "format=3 is not a name, a format record or a dtype; pass a name such as 'e4m3'"),
    (FormatError, {"format": None}, "format=None is not a name, a format record or a dtype; pass a name"),
    (FormatError, {"format": ["e4m3"]}, "format=['e4m3'] is not a name, a format record or a dtype; pass a name"),
    (FormatError, {"format": torch.bool}, "dtype torch.bool has no format; pass a name from fmtsim.list_formats()"),
    (FormatError, {"rounding": "nearest_evn"}, "unknown rounding 'nearest_evn'; did you mean 'nearest_even' or "),
    (FormatError, {"rounding": "xyz"}, f"unknown rounding 'xyz' (choose one of {ROUNDINGS})"),
    (FormatError, {"rounding": 3}, f"rounding=3 is not a name or a Rounding; choose one of {ROUNDINGS}"),
    (FormatError, {"rounding": ["up"]}, f"rounding=['up'] is not a name or a Rounding; choose one of {ROUNDINGS}"),
    (FormatError, {"random_bits": 8}, "random_bits and layout belong to rounding='stochastic', not 'nearest_even'"),
    (FormatError, {"rounding": "stochastic", "random_bits": 33}, "random_bits=33 is not allowed; choose 1 to 32"),
    (FormatError, {"rounding": "stochastic", "random_bits": 0}, "random_bits=0 is not allowed; choose 1 to 32"),
    (FormatError, {"rounding": "stochastic", "random_bits": 2.5}, "random_bits=2.5 is not allowed; choose 1 to 32"),
    (FormatError, {"rounding": "stochastic", "random_bits": "3"}, "random_bits='3' is not allowed; choose 1 to 32"),
    (FormatError, {"rounding": fmtsim.Rounding(mode="stochastic"), "random_bits": 8},
     "random_bits is given twice: in the Rounding record and as an argument; pass one of them"),
    (FormatError, {"overflow": "wrap"}, "unknown overflow 'wrap'; choose 'saturate', 'ieee' or None for the format's"),
    (FormatError, {"overflow": ["ieee"]}, "unknown overflow ['ieee']; choose 'saturate', 'ieee' or None"),
    (FormatError, {"format": "mxfp4", "scale_rule": "flor"}, "scale_rule='flor' is unknown; choose floor, ceil,"),
    (FormatError, {"format": "mxfp4", "scale_rule": ["up"]}, "scale_rule=['up'] is unknown; choose floor, ceil,"),
    (FormatError, {"scale_rule": "floor"}, "scale_rule='floor' needs a block; pass block_size= or a block format"),
    (FormatError, {"format": "logfmt8", "block_size": 64, "scale_rule": "floor"},
     "logfmt8 has no scale, so scale_rule='floor' does not apply; leave it out"),
    (FormatError, {"format": "nf4", "block_size": 64, "scale_rule": "even"}, "scale_rule='even' needs mantissa bits"),
    (ArgumentError, {"format": "mxfp4", "pad": "no"}, "pad='no' is not a flag; pass True or False"),
    (ArgumentError, {"dim": 2}, "dim=2 is not a dimension of x of shape (6, 64); choose -2 to 1"),
    (ArgumentError, {"dim": -3}, "dim=-3 is not a dimension of x of shape (6, 64); choose -2 to 1"),
    (ArgumentError, {"dim": 1.0}, "dim=1.0 is not a dimension of x of shape (6, 64); choose -2 to 1"),
    (ArgumentError, {"dim": None}, "dim=None is not a dimension of x of shape (6, 64); choose -2 to 1"),
    (ArgumentError, {"dim": (0, 1)}, "dim=(0, 1) is not a dimension of x of shape (6, 64); choose -2 to 1"),
    *[
        (ArgumentError, {"block_size": block}, f"block_size={block!r} {BLOCK}")
        for block in (0, -4, 32.0, True, "32", (), (1, 2, 3), (1, 0), (1.0, 32), [None, -1], (1, "32"), 1 << 63)
    ],
    (ArgumentError, {"format": "mxfp4", "block_size": 0}, f"block_size=0 {BLOCK}"),
    (ArgumentError, {"block_size": 24},
     "e4m3_1x24_amax: block_size=24 does not divide 64 (dim=-1); choose 16 or 32, or pass pad=True"),
    (ArgumentError, {"block_size": 128}, "block_size=128 does not divide 64 (dim=-1); choose 64, or pass pad=True"),
    (ArgumentError, {"format": "mxfp4", "dim": 0},
     "mxfp4: block_size=32 does not divide 6 (dim=0); choose 6, or pass pad=True"),
    (ArgumentError, {"format": "nvfp4", "dim": -2},
     "nvfp4: block_size=16 does not divide 6 (dim=-2); choose 6, or pass pad=True"),
    (ArgumentError, {"block_size": (4, 32)},
     "e4m3_4x32_amax: block rows=4 do not divide the 6 rows across dim=-1; choose 3 or 6, or pass pad=True"),
    (ArgumentError, {"format": "e4m3_128x128", "dim": 0, "block_size": (128, 6)},
     "block rows=128 do not divide the 64 rows across dim=0; choose 64, or pass pad=True"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "options", "message"), ARGUMENTS, ids=[repr(options) for _, options, _ in ARGUMENTS])
def test_bad_arguments(error, options, message):
    x = torch.randn(6, 64)
    before = x.clone()
    for verb in (quantize, quantize_, encode):
        arguments = {"format": "e4m3", **options}
        with pytest.raises(error, match=re.escape(message)) as caught:
            verb(x, **arguments)
        assert torch.equal(x, before) and len(str(caught.value)) < 800 and "\n" not in str(caught.value)
        refused(re.escape(message), verb, x, error=error, **arguments)


def test_equal_arguments_of_other_types_are_still_wrong():
    """32 and 32.0 are one key of a dict; what the first may do, the second may not."""
    x = torch.randn(6, 64)
    quantize(x, "e4m3", block_size=32)
    refused(re.escape("block_size=32.0"), quantize, x, "e4m3", block_size=32.0)
    refused(r"dim=-2 is not a dimension of x of shape \(64,\); choose -1 to 0", quantize, x[0], "e4m3", dim=-2)


def test_the_suggested_blocks_fit():
    for extent in (6, 35, 64, 97, 120, 4100):
        x = torch.ones(2, extent)
        with pytest.raises(ArgumentError) as caught:
            quantize(x, "e4m3", block_size=32 if extent % 32 else 24)
        suggestion = re.search(r"choose (\d+)(?: or (\d+))?, or pass pad=True", str(caught.value))
        assert suggestion is not None
        for size in filter(None, suggestion.groups()):
            assert quantize(x, "e4m3", block_size=int(size)).shape == x.shape
    refused(r"does not divide 1 \(dim=-1\); pass pad=True$", quantize, torch.ones(3, 1), "mxfp4")


def test_any_short_block_is_an_error_in_any_rank():
    for shape, dim in (((33,), 0), ((33, 2), -2), ((2, 33, 2), 1), ((0, 33), 1)):
        with pytest.raises(
            ArgumentError, match=rf"mxfp4: block_size=32 does not divide 33 \(dim={dim}\); choose 11 or 33"
        ):
            quantize(torch.ones(shape), "mxfp4", dim=dim)


TENSORS = [
    (DtypeError, torch.ones(3, dtype=torch.int16), f"x has dtype torch.int16; {DTYPES} (convert it with .float())"),
    *((DtypeError, torch.ones(3, dtype=dtype),
       f"x has dtype {dtype}; {DTYPES} (convert it with .double(), which is exact below 2**53)")
      for dtype in (torch.int32, torch.int64)),
    (DtypeError, torch.ones(3, dtype=torch.uint8), f"x has dtype torch.uint8; {DTYPES} (convert it with .float())"),
    (DtypeError, torch.ones(3, dtype=torch.bool), f"x has dtype torch.bool; {DTYPES} (convert it with .float())"),
    (DtypeError, torch.ones(3, dtype=torch.complex64),
     f"x has dtype torch.complex64; {DTYPES} (take the real and imaginary parts apart)"),
    (DtypeError, numpy.arange(3), f"x has dtype int64; {DTYPES} (convert it with x.astype('float64'))"),
    (DtypeError, numpy.ones(3, dtype="complex64"),
     f"x has dtype complex64; {DTYPES} (take the real and imaginary parts apart)"),
    (ArgumentError, numpy.ma.ones(3), "x is a masked array, and the mask would be lost; pass x.filled(0)"),
    (DtypeError, [1.0, 2.0], "x is list, not a tensor; pass torch.tensor(x)"),
    (DtypeError, 1.5, "x is float, not a tensor; pass torch.tensor(x)"),
    (DtypeError, None, "x is NoneType, not a tensor; pass torch.tensor(x)"),
    (ArgumentError, torch.ones(3, 3).to_sparse(),
     "x has layout torch.sparse_coo; pass a dense tensor, for example x.to_dense()"),
    (ArgumentError, torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
     "x is a nested tensor; pass its parts one by one (x.unbind()), or x.to_padded_tensor(0.0)"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "x", "message"), TENSORS, ids=[str(message)[:25] for _, _, message in TENSORS])
def test_bad_tensors(error, x, message):
    for verb in (quantize, quantize_, encode):
        with pytest.raises(error) as caught:
            verb(x, "e4m3")
        assert str(caught.value) == message


OUTS = [
    (DtypeError, [0.0], {}, "out is list, not a tensor; pass torch.tensor(out)"),
    (DtypeError, torch.empty(6, 64, dtype=torch.int8), {}, f"out has dtype torch.int8; {DTYPES}"),
    (DtypeError, numpy.ones((6, 64)), {}, "out is ndarray, not a tensor; pass torch.tensor(out)"),
    (DtypeError, torch.empty(6, 64), {"out_dtype": torch.float16},
     "out has dtype torch.float32 but out_dtype=torch.float16; leave out_dtype out"),
    (ArgumentError, torch.empty(64, 6), {},
     "out is torch.strided (64, 6) on cpu; x is torch.strided (6, 64) on cpu; pass torch.empty_like(x)"),
    (ArgumentError, torch.empty(1, 6, 64), {},
     "out is torch.strided (1, 6, 64) on cpu; x is torch.strided (6, 64) on cpu; pass torch.empty_like(x)"),
    (ArgumentError, torch.empty(0), {},
     "out is torch.strided (0,) on cpu; x is torch.strided (6, 64) on cpu; pass torch.empty_like(x)"),
    (ArgumentError, torch.empty(6, 64, device="meta"), {},
     "out is torch.strided (6, 64) on meta; x is torch.strided (6, 64) on cpu; pass torch.empty_like(x)"),
    (ArgumentError, torch.empty(1, 64).expand(6, 64), {},
     "out of shape (6, 64) and strides (0, 1) holds several elements in one place; "
     "pass out.contiguous(), or a tensor that was not expanded"),
    (ArgumentError, torch.zeros(6, 64, requires_grad=True), {},
     "out= does not support autograd; call quantize without out=, or under torch.no_grad()"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "out", "options", "message"), OUTS, ids=[message[:40] for *_, message in OUTS])
def test_bad_outs(error, out, options, message):
    with pytest.raises(error) as caught:
        quantize(torch.ones(6, 64), "e4m3", out=out, **options)
    assert str(caught.value) == message


def test_out_of_a_tensor_that_requires_grad():
    x, out = torch.ones(3, requires_grad=True), torch.zeros(3)
    message = "^out= does not support autograd; call quantize without out=, or under torch.no_grad\\(\\)$"
    refused(message, quantize, x, "e4m3", out=out)
    refused(message, quantize_, x, "e4m3")
    assert out.tolist() == [0.0] * 3
    with torch.no_grad():
        assert quantize(x, "e4m3", out=out).tolist() == [1.0] * 3


@pytest.mark.parametrize("out_dtype", [torch.int8, torch.bool, torch.complex64, "float32", float])
def test_bad_out_dtypes(out_dtype):
    with pytest.raises(DtypeError) as caught:
        quantize(torch.ones(3), "e4m3", out_dtype=out_dtype)
    expected = (
        f"out_dtype={out_dtype!r} is not allowed; choose torch.float16, bfloat16, float32, float64 or a float8 dtype"
    )
    assert str(caught.value) == expected


FLOAT8 = [
    ("e5m2", torch.float8_e4m3fn, "it has no inf"),
    ("e4m3", torch.float8_e5m2, "it has no 416.0"),
    ("e2m1", torch.float8_e5m2fnuz, "it has no -0.0"),
    ("e2m1", torch.float8_e8m0fnu, "it has no 6.0"),
    ("bf16", torch.float8_e5m2, "it has no 3.3895313892515355e+38"),
    ("mxfp4", torch.float8_e4m3fn, "its scales reach beyond that; encode returns codes and scales apart"),
]


@pytest.mark.parametrize(("name", "dtype", "reason"), FLOAT8, ids=[f"{n} {str(d)[6:]}" for n, d, _ in FLOAT8])
def test_float8_that_does_not_hold_the_format(name, dtype, reason):
    expected = f"out_dtype={dtype} does not hold every value of {name} ({reason}); choose torch.float32"
    out = torch.zeros(32, dtype=dtype)
    for options in ({"out_dtype": dtype}, {"out": out}):
        with pytest.raises(DtypeError) as caught:
            quantize(torch.ones(32), name, **options)
        assert str(caught.value) == expected
    assert not out.view(torch.uint8).any()


ARRAYS = [
    ({"out": torch.ones(3)}, "out is Tensor and x an array; pass numpy.empty_like(x)"),
    ({"out": numpy.ones(3, dtype="int8")},
     f"out has dtype int8; {DTYPES} (convert it with out.astype('float32'))"),
    ({"out": numpy.ones(2)}, "out has shape (2,); x has (3,); pass numpy.empty_like(x)"),
    ({"out": numpy.broadcast_to(1.0, 3)}, "out is an array that cannot be written; pass out.copy(), or "
     "numpy.empty_like(x)"),
    ({"out": numpy.ones(3), "out_dtype": "float32"},
     "out has dtype float64 but out_dtype='float32'; leave out_dtype out"),
    ({"out_dtype": "int8"}, f"out_dtype='int8' is not allowed; {DTYPES}"),
    ({"out_dtype": ">f4"}, f"out_dtype='>f4' is not allowed; {DTYPES}"),
    ({"out_dtype": "nonsense"}, f"out_dtype='nonsense' is not a dtype; {DTYPES}"),
    ({"out_dtype": torch.int8},
     "out_dtype=torch.int8 is not allowed; choose torch.float16, bfloat16, float32, float64 or a float8 dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), ARRAYS, ids=[message[:40] for _, message in ARRAYS])
def test_bad_arguments_beside_an_array(options, message):
    with pytest.raises((DtypeError, ArgumentError)) as caught:
        quantize(numpy.ones(3), "e4m3", **options)
    assert str(caught.value) == message


def test_arguments_that_do_not_exist():
    refused("axis", quantize, torch.ones(3), "e4m3", axis=0, error=TypeError)
    refused("out", quantize_, torch.ones(3), "e4m3", out=torch.ones(3), error=TypeError)


def test_nothing_is_half_written():
    """A refused call leaves out as it was, also where the data themselves are refused."""
    out = torch.full((6, 64), 7.0)
    words = torch.zeros(6, 64, dtype=torch.int64)
    words[-1, -1] = 1 << 40
    for options in ({"rounding": "stochastic", "random_words": words}, {"block_size": 24}, {"format": "e4m33"}):
        with pytest.raises(fmtsim.FmtsimError):
            quantize(torch.ones(6, 64), **{"format": "e4m3", "out": out, **options})
    assert bool((out == 7.0).all())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(torch.nn.LazyLinear(4).weight, "e4m3"), ArgumentError, "x belongs to a lazy module .* once"),
        (lambda: quantize("e4m3", X), DtypeError, "x is str, not a tensor; the tensor comes first"),
        (
            lambda: fmtsim.ptq("int8_static", torch.nn.Linear(4, 4)),
            ArgumentError,
            "ptq takes a torch.nn.Module, not str",
        ),
        (
            lambda: fmtsim.get_unit("H200"),
            ArgumentError,
            "unknown unit 'H200'; get_target has GPUs with their libraries",
        ),
        (lambda: fmtsim.Scaling(block=32), FormatError, r"block=32 is not .*, or None; block=\(1, 32\) is 32 of a row"),
        (
            lambda: fmtsim.BlockFormat("b", "mxfp4", fmtsim.Scaling()),
            FormatError,
            "element=.* is not allowed; pass a Fl",
        ),
        (lambda: fmtsim.BlockFormat("b", "e2m", fmtsim.Scaling()), FormatError, "unknown format 'e2m'; did you mean"),
        (
            lambda: fmtsim.load_state(torch.nn.Linear(4, 4), "m.pt"),
            ArgumentError,
            "not str; read the file by torch.load",
        ),
        (
            lambda: fmtsim.convert(torch.nn.Linear(4, 4), "e4m3", total_steps=0),
            ArgumentError,
            "total_steps=0 is not a nu",
        ),
        (
            lambda: encode(X, "e4m3").cpu(),
            AttributeError,
            r"no attribute 'cpu'; decode\(\) is the tensor, to\(device\) mov",
        ),
        (lambda: encode(X, "e4m3").foo, AttributeError, "^Encoded has no attribute 'foo'$"),
        (lambda: fmtsim.observe(X.to("meta"), "e4m3"), ArgumentError, "x is on meta, .*pass a tensor on a device"),
        (lambda: fmtsim.observe(X.bool(), "e4m3"), DtypeError, "x has dtype torch.bool; .*convert it with"),
        (lambda: fmtsim.export("m", "folder", "torchao"), ArgumentError, "export takes a torch.nn.Module, not str"),
        (
            lambda: fmtsim.convert(torch.nn.Linear(4, 4), format="e4m3", rules=X),
            ArgumentError,
            "is not a list of Rules",
        ),
    ],
)
def test_what_no_verb_can_take_names_the_next_step(call, error, message):
    refused(message, call, error=error)


def test_a_block_format_takes_the_name_of_its_elements():
    fmt = fmtsim.BlockFormat("b", "e2m1", fmtsim.Scaling(block=(1, 32)))
    assert fmt == fmtsim.BlockFormat("b", fmtsim.get_format("e2m1"), fmtsim.Scaling(block=(1, 32)))


def test_float8_tensors_are_observed_and_float4_codes_identified():
    codes = X.to(torch.float8_e4m3fn)
    assert fmtsim.observe(codes, "e5m2").to_dict() == fmtsim.observe(codes.float(), "e5m2").to_dict()
    packed = encode(X, "e2m1").codes.view(torch.float4_e2m1fn_x2)
    assert any(one.format.name == "e2m1" for one in fmtsim.identify_cast(X, packed).explanations)
