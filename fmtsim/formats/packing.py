# SPDX-License-Identifier: Apache-2.0
"""Tensors as bytes, and codes of any width as a dense stream of bits: what memory and files hold of encoded tensors."""

import math

import torch

from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import ArgumentError, CodeError, DtypeError

_WIDE_VIEWS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
_GROUPS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes of a group of so many codes, each in a byte
_UNSIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
_SIGNED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def tensor_bytes(x: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements, of any dtype and device, in row-major order."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_of_bytes(data: bytes | bytearray | memoryview, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return the elements whose bytes these are, 1-D on the CPU, in the memory of ``data`` where that is writable.

    >>> tensor_of_bytes(tensor_bytes(torch.tensor([1.0, -2.0])), torch.float32)
    tensor([ 1., -2.])
    """
    if not len(data):
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=dtype)


def code_dtype(bits: int) -> torch.dtype:
    """Return the integer dtype that holds unpacked codes of that width as non-negative numbers.

    Codes of 64 bits fill int64 and are the one case that may be negative.
    """
    for limit, dtype in ((8, torch.uint8), (15, torch.int16), (31, torch.int32)):
        if bits <= limit:
            return dtype
    return torch.int64


def packed_size(count: int, bits: int) -> int:
    """Return the bytes of a row of ``count`` codes of ``bits`` bits."""
    return (count * bits + 7) // 8


def pack(codes: torch.Tensor, bits: int, *, validated: bool = False) -> torch.Tensor:
    """Pack codes along the last dimension into little-endian bytes.

    Element k of a row holds bits ``[k * bits, (k + 1) * bits)`` of the row's stream, bit 0 is the lowest bit of byte
    0, and zeros fill each row to whole bytes. Two 4-bit codes share a byte, the even element in the low nibble.

    Args:
        codes: Integers in ``[0, 2**bits)`` of any integer dtype, ``[..., count]``; 64-bit codes may be negative int64.
        bits: Width of a code, 1 to 64.
        validated: Every code is known to fit, which saves looking.

    Returns:
        uint8 ``[..., packed_size(count, bits)]``, contiguous, on the device of ``codes``.

    Raises:
        ArgumentError: ``bits`` is outside 1 to 64 or ``codes`` has no dimension.
        DtypeError: ``codes`` are not integers.
        CodeError: A code does not fit ``bits``.
    """
    _require_bits(bits)
    # Take the codes into a dtype that torch computes with, and check their range where elements can be seen.
    if codes.dtype not in _SIGNED and codes.dtype not in _UNSIGNED:
        raise DtypeError(f"codes have dtype {codes.dtype}; expected an integer dtype such as torch.uint8")
    if codes.dim() == 0:
        raise ArgumentError("codes have no dimension to pack along; reshape them to (1,)")
    looked_at = not validated and bits < 64 and codes.numel() > 0 and is_readable(codes)
    if codes.dtype == torch.uint64 and looked_at and int(codes.view(torch.int64).min()) < 0:
        raise CodeError(f"codes of 2**63 and more do not fit {bits} bits")
    codes = codes.to(_UNSIGNED.get(codes.dtype, codes.dtype))
    if looked_at and not (codes.dtype == torch.uint8 and bits >= 8):
        low, high = (int(bound) for bound in torch.aminmax(codes))
        if low < 0 or high >> bits:
            wrong = low if low < 0 else high
            raise CodeError(f"code {wrong} does not fit {bits} bits; expected 0 to {(1 << bits) - 1}")
    if bits == 8:
        return codes.to(torch.uint8).contiguous()
    if bits in _WIDE_VIEWS:
        wide = codes.to(_WIDE_VIEWS[bits]).contiguous()
        wide = wide.reshape(-1).reshape(codes.shape) if codes.numel() else wide  # a last stride of 1 for one column too
        return wide.view(torch.uint8)
    group = 8 // math.gcd(bits, 8)  # codes that end on a byte boundary together
    count = codes.shape[-1]
    narrow = bits < 8
    work_dtype = torch.uint8 if narrow else torch.int32 if bits < 24 else torch.int64  # a code and a shifted byte fit
    padded = torch.nn.functional.pad(codes.to(work_dtype), (0, -count % group))
    if narrow:
        return _pack_bytes(padded, bits, group)[..., : packed_size(count, bits)].contiguous()
    grouped = padded.unflatten(-1, (padded.shape[-1] // group, group))
    packed = torch.stack([_byte(grouped, j, bits) for j in range(group * bits // 8)], dim=-1)
    return packed.to(torch.uint8).flatten(-2)[..., : packed_size(count, bits)].contiguous()


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Undo ``pack``: return ``count`` codes a row.

    Args:
        packed: uint8 ``[..., packed_size(count, bits)]``.
        bits: Width of a code, 1 to 64.
        count: Codes in a row.

    Returns:
        ``[..., count]`` of ``code_dtype(bits)``, on the device of ``packed``; the bits that fill a row are ignored.

    Raises:
        ArgumentError: ``bits`` is outside 1 to 64, ``count`` is negative or ``packed`` has no dimension.
        DtypeError: ``packed`` is not uint8.
        CodeError: The rows do not have the bytes that ``count`` codes take.
    """
    _require_bits(bits)
    if packed.dtype != torch.uint8:
        raise DtypeError(f"packed codes have dtype {packed.dtype}; expected torch.uint8")
    if count < 0 or packed.dim() == 0:
        raise ArgumentError(f"count={count}, packed shape {tuple(packed.shape)}; expected count >= 0 and a last dim")
    if packed.shape[-1] != packed_size(count, bits):
        raise CodeError(
            f"rows of {packed.shape[-1]} bytes do not hold {count} codes of {bits} bits; "
            f"expected {packed_size(count, bits)} bytes"
        )
    if bits == 8:
        return packed.clone()
    if bits in _WIDE_VIEWS:
        codes = packed.reshape(-1).view(_WIDE_VIEWS[bits]).reshape(*packed.shape[:-1], count).to(code_dtype(bits))
        return codes if bits == 64 else codes & ((1 << bits) - 1)
    group = 8 // math.gcd(bits, 8)
    size = group * bits // 8
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % size))
    grouped = padded.unflatten(-1, (padded.shape[-1] // size, size))
    if bits < 8:
        # Undo _pack_bytes: bytes [..., count / group, group bits / 8] are uint8 codes [..., count].
        size, dtype, mask = grouped.shape[-1], _GROUPS[group], (1 << bits) - 1
        if size == 1:
            words = grouped.flatten().to(dtype)
        else:
            words = torch.nn.functional.pad(grouped, (0, group - size)).flatten().view(dtype)
        codes = words & mask
        for k in range(1, group):
            codes |= (words << (8 - bits) * k) & (mask << 8 * k)
        return codes.view(torch.uint8).view(*grouped.shape[:-2], grouped.shape[-2] * group)[..., :count].contiguous()
    grouped = grouped.to(torch.int32 if bits < 24 else torch.int64)
    codes = torch.stack([_code(grouped, k, bits) for k in range(group)], dim=-1)
    return codes.to(code_dtype(bits)).flatten(-2)[..., :count].contiguous()


def _pack_bytes(codes: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Return whole groups of 2, 4 or 8 codes, uint8 in memory of their own, packed: a group is moved as one integer."""
    words = codes.reshape(-1).view(_GROUPS[group])
    mask = (1 << bits) - 1
    packed = words & mask
    for k in range(1, group):
        packed |= (words >> (8 - bits) * k) & (mask << bits * k)
    return (
        packed.view(torch.uint8)
        .view(*codes.shape[:-1], codes.shape[-1] // group, group)[..., : group * bits // 8]
        .flatten(-2)
    )


def _byte(grouped: torch.Tensor, j: int, bits: int) -> torch.Tensor:
    """Return byte j of every group: the or of the codes that reach into bits ``[8j, 8j + 8)``."""
    byte = torch.zeros_like(grouped[..., 0])
    for k in range(8 * j // bits, (8 * j + 7) // bits + 1):
        shift = k * bits - 8 * j
        byte |= grouped[..., k] << max(shift, 0) >> max(-shift, 0)
    return byte & 0xFF


def _code(grouped: torch.Tensor, k: int, bits: int) -> torch.Tensor:
    """Return code k of every group: the or of the bytes that hold bits ``[k * bits, (k + 1) * bits)``."""
    code = torch.zeros_like(grouped[..., 0])
    for j in range(k * bits // 8, ((k + 1) * bits - 1) // 8 + 1):
        shift = 8 * j - k * bits
        code |= grouped[..., j] << max(shift, 0) >> max(-shift, 0)
    return code & ((1 << bits) - 1)


def _require_bits(bits: int) -> None:
    if not 1 <= bits <= 64:
        raise ArgumentError(f"bits={bits} is not allowed; choose 1 to 64")


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in the order in which cuBLAS and CUTLASS take those of blocks (SWIZZLE_32_4_4, "128x4").

    Scales are padded with zeros to tiles of 128 rows by 4 blocks, which follow each other along a row; row r of a tile
    lies at ``16 (r mod 32) + 4 (r div 32)``, its four blocks one after another (cuBLAS, 1D block scaling factors).

    Args:
        scale: [rows, blocks], codes or values of any dtype.

    Returns:
        ``[128 ceil(rows / 128) * 4 ceil(blocks / 4)]``, contiguous, of the dtype.

    >>> swizzled(torch.arange(8).view(2, 4)).view(32, 16)[:2, :4].tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    down, across = -(-scale.shape[0] // 128), -(-scale.shape[1] // 4)
    padded = scale.new_zeros(down * 128, across * 4)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    return padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).flatten()


def unswizzled(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Return [rows, blocks] scales from the order that ``swizzled`` makes, without its padding."""
    down, across = -(-rows // 128), -(-blocks // 4)
    tiles = scale.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :blocks]
