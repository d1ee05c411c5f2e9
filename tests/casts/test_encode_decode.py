# SPDX-License-Identifier: Apache-2.0
"""encode and decode as verbs: what they take, and that decoding gives what quantize gives."""

import copy
import pickle

import ml_dtypes
import numpy
import pytest
import torch

import fmtsim
from fmtsim import Encoded, decode, encode, get_format, quantize
from fmtsim.formats.element import CodebookFormat
from tests.support.bits import assert_same_bits
from tests.support.operands import wide

pytestmark = pytest.mark.usefixtures("one_thread")


# Plain codes.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
                                   torch.uint32, torch.uint64])  # fmt: skip
def test_codes_of_any_integer_dtype(dtype):
    codes = torch.tensor([0, 1, 8, 15], dtype=dtype)
    assert_same_bits(decode(codes, "e2m1"), torch.tensor([0.0, 0.5, -0.0, -6.0]), what=str(dtype))
    turned = torch.arange(6, dtype=torch.int64).view(2, 3).T.to(dtype)
    assert_same_bits(decode(turned, "e2m1"), torch.tensor([[0.0, 1.5], [0.5, 2.0], [1.0, 3.0]]), what=str(dtype))
    assert decode(torch.tensor(7, dtype=dtype), "e2m1").tolist() == 6.0
    assert decode(torch.empty(0, 3, dtype=dtype), "e2m1").shape == (0, 3)


def test_signed_integers_may_be_negative():
    assert decode(torch.tensor([-128, -1, 0, 127, 128, 255]), "int8").tolist() == [-128, -1, 0, 127, -128, -1]
    assert decode(torch.tensor([-8, -1, 7], dtype=torch.int8), "int4").tolist() == [-8, -1, 7]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
                                   torch.float8_e8m0fnu])  # fmt: skip
def test_torch_float8_tensors(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode(codes.view(dtype))
    theirs = codes.view(dtype).float()
    assert_same_bits(values[~values.isnan()], theirs[~values.isnan()], what=str(dtype))
    assert bool(theirs[values.isnan()].isnan().all())
    assert_same_bits(decode(codes.view(dtype), dtype), values, what=str(dtype))


def test_decode_of_an_encoded_tensor_checks_the_format():
    q = encode(wide(2, 32), "mxfp4")
    assert_same_bits(decode(q, "mxfp4"), q.decode(), what="named")
    with pytest.raises(fmtsim.errors.FormatError, match=r"^these codes are mxfp4, not nvfp4; leave format out$"):
        decode(q, "nvfp4")


WRONG_CODES = [
    ([256], torch.int64, "e4m3", "code 256 is outside e4m3; its codes are 0 to 255"),
    ([-1], torch.int64, "e4m3", "code -1 is outside e4m3; its codes are 0 to 255"),
    ([3, 16], torch.uint8, "e2m1", "code 16 is outside e2m1; its codes are 0 to 15"),
    ([-9], torch.int8, "int4", "code -9 is outside int4; its codes are -8 to 15"),
    ([16], torch.int8, "int4", "code 16 is outside int4; its codes are -8 to 15"),
    ([-1], torch.int8, "uint4", "code -1 is outside uint4; its codes are 0 to 15"),
    ([1 << 16], torch.int32, "bf16", "code 65536 is outside bf16; its codes are 0 to 65535"),
    ([1 << 32], torch.int64, "fp32", "code 4294967296 is outside fp32; its codes are 0 to 4294967295"),
]


@pytest.mark.parametrize(("codes", "dtype", "name", "message"), WRONG_CODES)
def test_codes_outside_the_format(codes, dtype, name, message):
    with pytest.raises(fmtsim.errors.CodeError) as caught:
        decode(torch.tensor(codes, dtype=dtype), name)
    assert str(caught.value) == message


def test_codes_beyond_a_codebook():
    fmt = CodebookFormat(name="three", values=(-1.0, 0.0, 2.0))
    assert decode(torch.tensor([2, 0, 1]), fmt).tolist() == [2.0, -1.0, 0.0]
    with pytest.raises(fmtsim.errors.CodeError, match=r"^code 3 is outside three; its codes are 0 to 2$"):
        decode(torch.tensor([3]), fmt)


def test_wide_codes():
    x = torch.tensor([1.5, -0.0, -torch.inf, 5e-324, -1e308], dtype=torch.float64)
    assert_same_bits(decode(x.view(torch.int64), "fp64"), x, what="fp64")
    single = torch.tensor([1.5, -0.0, -torch.inf, 1e-45, -3e38])
    assert_same_bits(decode(x.view(torch.uint64), "fp64"), x, what="fp64")
    assert_same_bits(decode(single.view(torch.uint32), "fp32"), single, what="fp32")
    assert_same_bits(decode(single.view(torch.int32).to(torch.int64) & 0xFFFFFFFF, "fp32"), single, what="fp32")


NOT_CODES = [
    ([1, 2], "e4m3", fmtsim.errors.DtypeError, "codes is list, not a tensor; pass torch.tensor(codes)"),
    (3, "e4m3", fmtsim.errors.DtypeError, "codes is int, not a tensor; pass torch.tensor(codes)"),
    (torch.ones(2), "e4m3", fmtsim.errors.DtypeError,
     "codes have dtype torch.float32; pass integers, or what fmtsim.encode returned"),
    (torch.ones(2), None, fmtsim.errors.DtypeError,
     "codes have dtype torch.float32; pass integers, or what fmtsim.encode returned"),
    (torch.ones(2, dtype=torch.bool), "e4m3", fmtsim.errors.DtypeError,
     "codes have dtype torch.bool; pass integers, or what fmtsim.encode returned"),
    (torch.ones(2, dtype=torch.complex64), "e4m3", fmtsim.errors.DtypeError,
     "codes have dtype torch.complex64; pass integers, or what fmtsim.encode returned"),
    (torch.ones(2).to(torch.float8_e5m2), "e4m3", fmtsim.errors.FormatError,
     "codes have dtype torch.float8_e5m2, which is e5m2, not e4m3; leave format out or pass codes.view(torch.uint8)"),
    (torch.ones(2).to(torch.float8_e5m2), "e2m1", fmtsim.errors.FormatError,
     "codes have dtype torch.float8_e5m2, which is e5m2, not e2m1; leave format out or pass codes.view(torch.uint8)"),
    (torch.ones(2, dtype=torch.uint8), None, fmtsim.errors.FormatError,
     "a plain tensor of codes does not say its format; pass format=, for example 'e4m3'"),
    (torch.ones(2, dtype=torch.uint8), "mxfp4", fmtsim.errors.FormatError,
     "mxfp4 needs scales; decode what encode returned, or name an element format"),
    (torch.ones(2, dtype=torch.uint8), "logfmt8", fmtsim.errors.FormatError,
     "logfmt8 needs scales; decode what encode returned, or name an element format"),
]  # fmt: skip


@pytest.mark.parametrize(("codes", "format", "error", "message"), NOT_CODES, ids=range(len(NOT_CODES)))
def test_what_decode_refuses(codes, format, error, message):
    with pytest.raises(error) as caught:
        decode(codes, format)
    assert str(caught.value) == message


@pytest.mark.parametrize("out_dtype", [torch.int8, torch.float4_e2m1fn_x2, "float32"])
def test_out_dtypes_that_decode_refuses(out_dtype):
    with pytest.raises(fmtsim.errors.DtypeError) as caught:
        decode(torch.tensor([1]), "e4m3", out_dtype=out_dtype)
    assert str(caught.value) == (
        f"out_dtype={out_dtype!r} is not allowed; choose torch.float16, bfloat16, float32, float64 or a float8 dtype"
    )
    with pytest.raises(fmtsim.errors.DtypeError, match="out_dtype=.* is not allowed; choose torch.float16"):
        decode(encode(wide(2), "e4m3"), out_dtype=out_dtype)


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "mxfp4"])
def test_arrays(name):
    """Arrays give the codes of tensors, float8 those of their values; arrays of codes give the values of tensors."""
    x = wide(4, 64, dtype=torch.float32)
    for given, same in (
        (x.numpy(), x),
        (x.numpy()[::-1, ::2], x.flip(0)[:, ::2]),
        (x.numpy().astype(ml_dtypes.bfloat16), x.bfloat16()),
        (x.to(torch.float8_e5m2), x.to(torch.float8_e5m2).float()),
        (
            x.to(torch.float8_e5m2).view(torch.uint8).numpy().view(ml_dtypes.float8_e5m2),
            x.to(torch.float8_e5m2).float(),
        ),
    ):
        ours, theirs = encode(given, name), encode(same, name)
        assert torch.equal(ours.codes, theirs.codes)
        assert_same_bits(ours.decode(), theirs.decode(), what=name)
    if name != "mxfp4":
        codes = torch.arange(1 << get_format(name).bits, dtype=torch.uint8)
        for integers in (codes.numpy(), codes.numpy().astype("int64"), codes.numpy().astype(">u2")):
            values = decode(integers, name, out_dtype="float64")
            assert_same_bits(torch.from_numpy(values), decode(codes, name, out_dtype=torch.float64), what=name)


def test_arrays_of_float8():
    codes = numpy.arange(256, dtype="uint8")
    assert_same_bits(
        torch.from_numpy(decode(codes.view(ml_dtypes.float8_e5m2))),
        decode(torch.from_numpy(codes), "e5m2"),
        what="e5m2",
    )
    with pytest.raises(fmtsim.errors.DtypeError, match="^codes have dtype float32; pass integers, float8, or what"):
        decode(numpy.ones(2, dtype="float32"), "e4m3")
    with pytest.raises(fmtsim.errors.ArgumentError, match="^codes is a masked array, and the mask would be lost"):
        decode(numpy.ma.ones(2, dtype="uint8"), "e4m3")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_encode_refuses_what_quantize_refuses(dtype):
    with pytest.raises(fmtsim.errors.DtypeError) as ours:
        encode(torch.ones(2).to(dtype), "e4m3")
    with pytest.raises(fmtsim.errors.DtypeError) as theirs:
        quantize(torch.ones(2).to(dtype), "e4m3")
    assert str(ours.value) == str(theirs.value)


# Encoded tensors as objects.


@pytest.mark.parametrize("name", ["e4m3", "e3m2", "nvfp4", "uint4_g32_zp", "logfmt8"])
def test_copies_and_pickles(name, tmp_path):
    q = encode(wide(5, 70), name, pad=True)
    torch.save(q, tmp_path / "q.pt")
    saved = torch.load(tmp_path / "q.pt", weights_only=False)
    for other in (pickle.loads(pickle.dumps(q)), copy.copy(q), copy.deepcopy(q), saved):
        assert isinstance(other, Encoded)
        assert (other.format, other.shape, other.dim, other.nbytes) == (q.format, q.shape, q.dim, q.nbytes)
        assert_same_bits(other.decode(), q.decode(), what=name)
