# SPDX-License-Identifier: Apache-2.0
"""The verbs on numpy arrays and on torch's float8 tensors: bits against the tensors of floats, and ml_dtypes' casts."""

import re

import ml_dtypes
import numpy
import pytest
import torch

import fmtsim
from fmtsim import get_format, list_formats, quantize, quantize_
from fmtsim.formats.element import ElementFormat
from fmtsim.formats.representable import FLOAT8_DTYPES
from tests.support.bits import assert_same_bits
from tests.support.operands import wide

NUMPY = {
    torch.float16: numpy.float16, torch.bfloat16: ml_dtypes.bfloat16, torch.float32: numpy.float32,
    torch.float64: numpy.float64, **{dtype: getattr(ml_dtypes, str(dtype)[6:]) for dtype in FLOAT8_DTYPES},
}  # fmt: skip
BYTES = torch.arange(256, dtype=torch.uint8)
SPECIAL = torch.tensor([0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-30, -500.0, 70000.0])


def raw(x: torch.Tensor) -> numpy.ndarray:
    """Return the bytes of a tensor's elements, in a row-major order."""
    return x.contiguous().view(torch.uint8).numpy().reshape(-1)


def array(x: torch.Tensor) -> numpy.ndarray:
    """Return a tensor as an array of the same bits."""
    return raw(x).view(NUMPY[x.dtype]).reshape(x.shape)


def assert_same_array(ours: object, theirs: torch.Tensor, what: str) -> None:
    assert isinstance(ours, numpy.ndarray) and ours.dtype == NUMPY[theirs.dtype] and ours.shape == theirs.shape, what
    assert numpy.ascontiguousarray(ours).tobytes() == raw(theirs).tobytes(), what


@pytest.mark.parametrize("dtype", NUMPY, ids=str)
@pytest.mark.parametrize("name", ["e4m3", "e2m1", "mxfp4", "nvfp4", "int8", "fp64"])
def test_arrays_have_the_bits_and_the_dtype_of_tensors(dtype, name):
    x = (
        BYTES.view(dtype).reshape(4, 64)
        if dtype.itemsize == 1
        else torch.cat([wide(247), SPECIAL]).to(dtype).view(4, 64)
    )
    theirs = quantize(x, name)
    assert_same_array(quantize(array(x), name), theirs, name)
    read_only = array(x).copy()
    read_only.flags.writeable = False
    assert_same_array(quantize(read_only, name), theirs, name)
    assert_same_array(quantize(array(x).T, name, dim=0).T, theirs, name)
    if dtype.itemsize > 1:
        swapped = array(x.flip(0))[::-1]
        assert_same_array(quantize(swapped, name), theirs, name)


def test_layouts_and_byte_orders_of_arrays():
    x = wide(6, 64)
    base = numpy.zeros((6, 64), dtype=[("odd", "u1"), ("x", "f4")])
    base["x"] = x.numpy()
    for given in (x.numpy().astype(">f4"), base["x"], numpy.asfortranarray(x.numpy())):
        assert_same_array(quantize(given, "e4m3"), quantize(x, "e4m3"), str(given.dtype))
    assert quantize(numpy.array(1.3), "e2m1").shape == ()
    assert quantize(numpy.ones((0, 3)), "e4m3").shape == (0, 3)


def test_options_and_outs_of_arrays():
    x, words = wide(4, 64), torch.arange(256).view(4, 64)
    options = {"rounding": "stochastic", "random_bits": 8}
    theirs = quantize(x, "e4m3", random_words=words, **options)
    assert_same_array(quantize(array(x), "e4m3", random_words=words.numpy(), **options), theirs, "words")
    assert_same_array(
        quantize(array(x), "e4m3", generator=3, **options), quantize(x, "e4m3", generator=3, **options), ""
    )
    for dtype, name in NUMPY.items():
        if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu):
            continue
        theirs = quantize(x, "e2m1", out_dtype=dtype)
        for spelling in (name, numpy.dtype(name), dtype):
            assert_same_array(quantize(array(x), "e2m1", out_dtype=spelling), theirs, str(dtype))
        out = numpy.zeros((4, 64), dtype=name)
        assert quantize(array(x), "e2m1", out=out) is out
        assert_same_array(out, theirs, str(dtype))
    own = array(x).copy()
    assert quantize_(own, "e4m3") is own
    assert_same_array(own, quantize(x, "e4m3"), "in place")
    turned = array(x).copy()
    quantize(turned, "e4m3", out=turned[::-1, ::-1])  # which overlaps it
    assert_same_array(turned[::-1, ::-1], quantize(x, "e4m3"), "overlap")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_results_have_the_bits_of_ml_dtypes(dtype):
    name = "e4m3" if dtype == torch.float8_e4m3fn else "e5m2"
    x = torch.cat([wide(4096), SPECIAL, torch.arange(-300.0, 300.0)])
    small = x[(x.abs() <= get_format(name).max) | x.isnan()]
    theirs = small.numpy().astype(NUMPY[dtype])
    theirs[numpy.isnan(small.numpy())] = numpy.nan  # positive
    assert_same_array(theirs, quantize(small, name, out_dtype=dtype), name)
    assert quantize(small, name, out_dtype=dtype).dtype == dtype


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
def test_float8_results_hold_every_value_of_their_formats(dtype):
    """Where the dtype is taken, encoding its numbers again shows the codes, -0 and NaN of the result in float32."""
    x = torch.cat([wide(500), SPECIAL, torch.arange(-10.0, 10.0)])
    taken = set()
    for name in list_formats():
        fmt = get_format(name)
        if not isinstance(fmt, ElementFormat):
            continue
        try:
            ours = quantize(x, fmt, out_dtype=dtype)
        except fmtsim.errors.DtypeError:
            continue
        taken.add(fmt.name)
        expected = fmtsim.encode(quantize(x, fmt), dtype).codes
        assert torch.equal(ours.view(torch.uint8), expected), name
        assert_same_bits(fmtsim.decode(ours), quantize(x, fmt), what=name)
    assert get_format(dtype).name in taken
    assert ("e2m1" in taken) == (dtype in (torch.float8_e4m3fn, torch.float8_e5m2))


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
def test_decoding_gives_float8(dtype):
    """Every code of every format, as integers, packed and in arrays: the dtype's codes of the values in float32."""
    for name in list_formats():
        fmt = get_format(name)
        if not isinstance(fmt, ElementFormat) or fmt.bits > 8:
            continue
        codes = torch.arange(len(getattr(fmt, "values", range(1 << fmt.bits))))
        values = fmtsim.decode(codes, fmt)
        try:
            quantize(values, fmt, out_dtype=dtype)
        except fmtsim.errors.DtypeError as refusal:
            with pytest.raises(fmtsim.errors.DtypeError, match=re.escape(str(refusal))):
                fmtsim.decode(codes, fmt, out_dtype=dtype)
            with pytest.raises(fmtsim.errors.DtypeError, match=re.escape(str(refusal))):
                fmtsim.encode(values, fmt).decode(dtype)
            continue
        expected = fmtsim.encode(
            values, dtype, overflow="ieee"
        ).codes  # of codes that symmetric integers leave unused as well
        assert torch.equal(fmtsim.decode(codes, fmt, out_dtype=dtype).view(torch.uint8), expected), name
        out = torch.empty(len(codes), dtype=dtype)
        packed = fmtsim.encode(values, fmt)
        assert packed.decode(out=out) is out
        assert torch.equal(out.view(torch.uint8), fmtsim.encode(packed.decode(), dtype, overflow="ieee").codes), name
        ours = fmtsim.decode(codes.numpy(), fmt, out_dtype=dtype)
        assert_same_array(ours, fmtsim.decode(codes, fmt, out_dtype=dtype), name)
    own = BYTES.view(dtype)
    assert fmtsim.decode(own, out_dtype=dtype).dtype == dtype
    with pytest.raises(fmtsim.errors.DtypeError, match="every value of mxfp4 .its scales reach beyond that; encode"):
        fmtsim.encode(torch.ones(32), "mxfp4").decode(dtype)
    if dtype == torch.float8_e5m2:
        assert (
            fmtsim.decode(torch.tensor([0xFE, 0x7F]), dtype, out_dtype=dtype).view(torch.uint8).tolist() == [0x7E] * 2
        )
        compiled = torch.compile(lambda codes: fmtsim.decode(codes, "e2m1", out_dtype=dtype), backend="eager")
        assert torch.equal(compiled(torch.arange(16)).view(torch.uint8),
                           fmtsim.decode(torch.arange(16), "e2m1", out_dtype=dtype).view(torch.uint8))  # fmt: skip


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
def test_float8_tensors_have_their_values(dtype):
    x = BYTES.view(dtype).view(4, 64)
    for name in ("e4m3", "e5m2", "e2m1", "mxfp4", "nvfp4", "int4", "fp32"):
        wide_result, ours = quantize(fmtsim.decode(x), name, generator=1, rounding="stochastic"), None
        ours = quantize(x, name, generator=1, rounding="stochastic")
        assert ours.dtype in (dtype, torch.float32)
        assert_same_bits(fmtsim.decode(ours) if ours.dtype == dtype else ours, wide_result, what=name)
    assert quantize(x, dtype).dtype == dtype and quantize(x, "fp32").dtype == torch.float32
    assert quantize(x, dtype, out_dtype=torch.float16).dtype == torch.float16
    own = x.clone()
    assert quantize_(own, dtype) is own
    assert_same_bits(fmtsim.decode(own), quantize(fmtsim.decode(x), dtype), what="in place")


def test_gradients_pass_through_float8():
    x = torch.randn(8, requires_grad=True)
    quantize(x, "e5m2", out_dtype=torch.float8_e5m2).float().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0] * 8


def test_a_float8_result_under_vmap_and_meta():
    x = torch.cat([wide(62), SPECIAL[2:4]]).view(2, 32)
    each = torch.vmap(lambda row: quantize(row, "e5m2", out_dtype=torch.float8_e5m2))(x)
    assert torch.equal(each.view(torch.uint8), quantize(x, "e5m2", out_dtype=torch.float8_e5m2).view(torch.uint8))
    assert quantize(x.to("meta"), "e5m2", out_dtype=torch.float8_e5m2).dtype == torch.float8_e5m2


def test_torch_compile_traces_float8_whole():
    x = torch.cat([wide(62), SPECIAL[2:4]])
    there = torch.compile(lambda x: quantize(x, "e5m2", out_dtype=torch.float8_e5m2), fullgraph=True, backend="eager")
    back = torch.compile(lambda x: quantize(x, "e2m1"), fullgraph=True, backend="eager")
    small = quantize(x, "e5m2", out_dtype=torch.float8_e5m2)
    assert torch.equal(there(x).view(torch.uint8), small.view(torch.uint8))
    assert torch.equal(back(small).view(torch.uint8), quantize(small, "e2m1").view(torch.uint8))
