# SPDX-License-Identifier: Apache-2.0
"""Codes as torch, numpy, ml_dtypes and safetensors know them, and packed."""

import dataclasses
import re

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fmtsim.casts.quantize import quantize
from fmtsim.formats.interop import codes_to_tensor, numpy_dtype, safetensors_tag, torch_dtype
from fmtsim.formats.packing import code_dtype, pack, packed_size, unpack
from fmtsim.formats.registry import get_format
from fmtsim.support.errors import ArgumentError, CodeError, DtypeError, FormatError

VIEWS = {
    "fp64": (torch.float64, np.float64, "F64"), "fp32": (torch.float32, np.float32, "F32"),
    "fp16": (torch.float16, np.float16, "F16"), "bf16": (torch.bfloat16, ml_dtypes.bfloat16, "BF16"),
    "e4m3": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, "F8_E4M3"),
    "e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2, "F8_E5M2"),
    "e4m3fnuz": (torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz, "F8_E4M3FNUZ"),
    "e5m2fnuz": (torch.float8_e5m2fnuz, ml_dtypes.float8_e5m2fnuz, "F8_E5M2FNUZ"),
    "e8m0": (torch.float8_e8m0fnu, ml_dtypes.float8_e8m0fnu, "F8_E8M0"),
    "e4m3_ieee": (None, ml_dtypes.float8_e4m3, None), "e4m3b11fnuz": (None, ml_dtypes.float8_e4m3b11fnuz, None),
    "e3m4": (None, ml_dtypes.float8_e3m4, None), "e2m3": (None, ml_dtypes.float6_e2m3fn, "F6_E2M3"),
    "e3m2": (None, ml_dtypes.float6_e3m2fn, "F6_E3M2"),
    "e2m1": (torch.float4_e2m1fn_x2, ml_dtypes.float4_e2m1fn, "F4"), "int16": (torch.int16, np.int16, "I16"),
    "int8": (torch.int8, np.int8, "I8"), "int8_full": (torch.int8, np.int8, "I8"),
    "int4": (None, ml_dtypes.int4, None), "uint8": (torch.uint8, np.uint8, "U8"), "tf32": (None, None, None),
    "e3m4fn": (None, None, None), "int8_half": (None, None, None), "int8_f6": (None, None, None),
    "nf4": (None, None, None), "lns8_g8": (None, None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_dtypes_and_tags(name):
    fmt = get_format(name)
    ours = (torch_dtype(fmt), numpy_dtype(fmt), safetensors_tag(fmt))
    dtype, array_dtype, tag = VIEWS[name]
    assert ours == (dtype, None if array_dtype is None else np.dtype(array_dtype), tag)


def test_what_counts_is_the_code_not_the_name():
    fmt = dataclasses.replace(get_format("e4m3"), name="mine", aliases=(), bias=7, overflow="ieee", source="")
    assert torch_dtype(fmt) == torch.float8_e4m3fn
    assert torch_dtype(dataclasses.replace(fmt, bias=8)) is None
    assert torch_dtype(dataclasses.replace(fmt, has_subnormals=False)) is None


@pytest.mark.parametrize("name", [name for name, (dtype, _, _) in VIEWS.items() if dtype is not None])
def test_codes_as_a_tensor_are_its_bits(name):
    fmt = get_format(name)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (4, 16 * max(fmt.bits, 8) // 8), generator=generator).to(torch.uint8)
    tensor = codes_to_tensor(unpack(raw, fmt.bits, 32 if fmt.bits == 4 else 16), fmt)
    assert tensor.dtype == torch_dtype(fmt) and torch.equal(tensor.view(torch.uint8), raw)


def test_scalars():
    assert codes_to_tensor(torch.tensor(0xBF80), get_format("bf16")).item() == -1.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: codes_to_tensor(torch.zeros(2, dtype=torch.uint8), get_format("nf4")), DtypeError,
         f"torch {torch.__version__} has no dtype for nf4; keep the codes, or decode them"),
        (lambda: codes_to_tensor(torch.zeros(3, dtype=torch.uint8), get_format("e2m1")), DtypeError,
         "an odd number of e2m1 codes ((3,)) does not fill torch.float4_e2m1fn_x2; pad the last dim"),
        (lambda: codes_to_tensor(torch.tensor([70000]), get_format("bf16")), CodeError,
         "code 70000 does not fit 16 bits; expected 0 to 65535"),
        (lambda: torch_dtype(get_format("nvfp4")), FormatError, "BlockFormat('nvfp4': e2m1 in blocks of 1x16, scale "
         "e4m3 by amax + fp32 tensor scale) is not an element format; pass its element"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_how_torch_casts_to_e8m0():
    """What docs/semantics.md says of the dtype whose name is an alias: the codes are ours, the cast is not."""
    powers = torch.arange(1, 255, dtype=torch.int32) << 23
    ties, between = (powers | 0x400000).view(torch.float32), torch.cat([powers, powers | 0x3FFFFF, powers | 0x400001])
    tiny, huge = torch.tensor([2.0**-127, 1.01 * 2.0**-127]), torch.tensor([1.5 * 2.0**127, 3.4e38, torch.inf])

    def both(x):
        return quantize(x, "e8m0", out_dtype=torch.float32), x.to(torch.float8_e8m0fnu).float()

    ours, theirs = both(ties[:-1])
    assert len(ours) == 253 and int((ours != theirs).sum()) == 126
    assert torch.equal(theirs, ties[:-1] * (4 / 3))  # up, whatever the code
    ours, theirs = both(between[:-1].view(torch.float32))  # all but 1.5 * 2**127 and a place
    assert torch.equal(ours, theirs)
    ours, theirs = both(tiny)
    assert ours.tolist() == [2.0**-127, 2.0**-127] and theirs.tolist() == [2.0**-127, 2.0**-126]
    ours, theirs = both(huge)
    assert ours.tolist() == [2.0**127] * 3 and bool(theirs.isnan().all())
    ours, theirs = both(torch.tensor([-3.0]))
    assert ours.item() == 2.0**-127 and theirs.item() == 4.0


def stream(codes, bits):
    """Return the bytes of a row of codes, by Python's integers."""
    total = sum((code & ((1 << bits) - 1)) << (k * bits) for k, code in enumerate(codes))
    return list(total.to_bytes((len(codes) * bits + 7) // 8, "little"))


def random_codes(bits, count, generator):
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator)
    return (words if bits == 64 else words & ((1 << bits) - 1)).to(code_dtype(bits))


@pytest.mark.parametrize("bits", range(1, 65))
def test_every_width_and_count(bits):
    generator = torch.Generator().manual_seed(bits)
    for count in range(18):
        codes = torch.stack([random_codes(bits, count, generator) for _ in range(3)])
        if count:
            codes[0, -1] = -1 if bits == 64 else (1 << bits) - 1
        packed = pack(codes, bits)
        assert packed.dtype == torch.uint8 and packed.shape == (3, packed_size(count, bits)) and packed.is_contiguous()
        assert packed.tolist() == [stream(row, bits) for row in codes.tolist()]
        back = unpack(packed, bits, count)
        assert back.dtype == code_dtype(bits) and torch.equal(back, codes)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_round_trip(data):
    bits = data.draw(st.integers(1, 63))
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), max_size=40))
    packed = pack(torch.tensor(codes, dtype=torch.int64), bits)
    assert packed.tolist() == stream(codes, bits)
    assert unpack(packed, bits, len(codes)).tolist() == codes


def test_nibbles_share_a_byte_low_first():
    assert pack(torch.tensor([0x1, 0x2, 0xF]), 4).tolist() == [0x21, 0x0F]


def test_the_bits_that_fill_a_row_are_ignored():
    assert unpack(torch.tensor([0xFF, 0xFF], dtype=torch.uint8), 6, 2).tolist() == [63, 63]


def test_any_shape_strides_and_integer_dtype():
    codes = torch.arange(96).reshape(2, 3, 16) % 8
    for bits in (3, 12):
        expected = pack(codes, bits)
        assert expected.shape == (2, 3, 2 * bits)
        assert torch.equal(pack(codes.mT.contiguous().mT, bits), expected)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64):
            assert torch.equal(pack(codes.to(dtype), bits), expected)
        assert torch.equal(unpack(expected.mT.contiguous().mT, bits, 16), codes.to(code_dtype(bits)))
    wide = torch.tensor([-1, 2**63 - 1]).view(torch.uint64)
    assert unpack(pack(wide, 64), 64, 2).tolist() == [-1, 2**63 - 1]


def test_unpacking_8_bits_does_not_alias():
    packed = torch.zeros(4, dtype=torch.uint8)
    unpack(packed, 8, 4)[0] = 1
    assert packed[0] == 0


def test_code_dtypes():
    dtypes = [code_dtype(bits) for bits in (1, 8, 9, 15, 16, 31, 32, 64)]
    wide = [torch.int16] * 2 + [torch.int32] * 2 + [torch.int64] * 2
    assert dtypes == [torch.uint8, torch.uint8, *wide]


ONE = torch.tensor([1], dtype=torch.uint8)
INTEGERS = "expected an integer dtype such as torch.uint8"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pack(ONE, 0), ArgumentError, "bits=0 is not allowed; choose 1 to 64"),
        (lambda: unpack(ONE, 65, 1), ArgumentError, "bits=65 is not allowed; choose 1 to 64"),
        (lambda: pack(ONE[0], 4), ArgumentError, "codes have no dimension to pack along; reshape them to (1,)"),
        (lambda: pack(ONE.float(), 4), DtypeError, f"codes have dtype torch.float32; {INTEGERS}"),
        (lambda: pack(ONE.bool(), 4), DtypeError, f"codes have dtype torch.bool; {INTEGERS}"),
        (lambda: pack(torch.tensor([3, 16]), 4), CodeError, "code 16 does not fit 4 bits; expected 0 to 15"),
        (lambda: pack(torch.tensor([-1, 3]), 8), CodeError, "code -1 does not fit 8 bits; expected 0 to 255"),
        (lambda: pack(torch.tensor([-1]).view(torch.uint64), 63), CodeError,
         "codes of 2**63 and more do not fit 63 bits"),
        (lambda: unpack(ONE.int(), 4, 1), DtypeError, "packed codes have dtype torch.int32; expected torch.uint8"),
        (lambda: unpack(ONE, 4, -1), ArgumentError, "count=-1, packed shape (1,); expected count >= 0 and a last dim"),
        (lambda: unpack(ONE[0], 4, 1), ArgumentError, "count=1, packed shape (); expected count >= 0 and a last dim"),
        (lambda: unpack(ONE, 6, 5), CodeError, "rows of 1 bytes do not hold 5 codes of 6 bits; expected 4 bytes"),
    ],
)  # fmt: skip
def test_errors_of_packing(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()
