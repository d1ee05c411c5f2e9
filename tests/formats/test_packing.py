"""Packed codes against big integers, and their way back."""

import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fmtsim.errors import ArgumentError, CodeError, DtypeError
from fmtsim.formats.packing import code_dtype, pack, packed_size, unpack


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
    codes = torch.arange(48).reshape(2, 3, 8) % 8
    expected = pack(codes, 3)
    assert expected.shape == (2, 3, 3)
    assert torch.equal(pack(codes.mT.contiguous().mT, 3), expected)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        assert torch.equal(pack(codes.to(dtype), 3), expected)
    assert torch.equal(unpack(expected.mT.contiguous().mT, 3, 8), codes.to(torch.uint8))
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
def test_errors(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()
