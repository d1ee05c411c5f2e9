# SPDX-License-Identifier: Apache-2.0
"""Codes of float32 numbers, and the values of codes.

Codes come from a format's values by their bits, or from any number by a table of its leading bits; values come back by
one lookup an element, and its block's scale.

**By bits.** The leading bits of a normal float32 value, less a constant, are its code in any narrower float format.
Below the smallest normal value the code counts last places: adding the power of two whose last place is the format's
puts that count into the low bits, and so it does for integers, all of whose values are subnormal.

**By table**, for codebooks, logarithmic formats and half-offset integers. A rounding that draws nothing is monotone:
sorted from -NaN to NaN, numbers have codes that change at single points. Of the numbers that share their leading 16
bits nearly always at most one such point parts two codes; a word for each such bucket names both, and where the first
one ends. The torch engine makes the words, so they are right for every format and rounding that they serve; a format
with three codes in a bucket has no table.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy import float32, float64, int32, uint32

from fmtsim import torch_engine
from fmtsim.cpu.cast.grid import FLT_MAX, shape_of
from fmtsim.cpu.runtime import pool
from fmtsim.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.formats.block import BlockFormat, Format
from fmtsim.formats.element import CodebookFormat, ElementFormat, FloatFormat, IntFormat, Overflow
from fmtsim.formats.representable import is_representable
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, EncodedParts

_MAGNITUDE = int32(0x7FFFFFFF)
_INF, _NAN = int32(0x7F800000), int32(0x7FC00000)
SHIFT = int32(31)  # numba shifts in 64 bits, LLVM in 32 where it sees that no place is lost


class Coding(NamedTuple):
    """How a format numbers its values.

    Attributes:
        drop: float32 mantissa bits that the format lacks.
        base: What the leading bits of a normal value exceed its code by.
        smallest: Bits of the smallest normal value.
        magic: The power of two whose last place is that of the subnormal values.
        sign_code: The sign bit of a code; 0 without one, and for two's complement.
        complement: -1 for two's complement, else 0.
        mask: All bits of a code.
        inf_code, nan_code: Codes of Inf and NaN.
    """

    drop: np.int32
    base: np.int32
    smallest: np.int32
    magic: np.float32
    sign_code: np.int32
    complement: np.int32
    mask: np.int32
    inf_code: np.int32
    nan_code: np.int32


@lru_cache(maxsize=1024)
def coding_of(fmt: ElementFormat) -> Coding | None:
    """Return how a format numbers its values, or None where float32 does not hold them or codes exceed 31 bits."""
    if not isinstance(fmt, FloatFormat | IntFormat) or fmt.bits > 31 or fmt.max > FLT_MAX:
        return None
    if isinstance(fmt, IntFormat) and fmt.half_offset:
        return None
    shape, is_float = shape_of(fmt), isinstance(fmt, FloatFormat)
    count = shape.min_exponent + 23 - shape.mantissa_bits
    lowest = -127 if shape.mantissa_bits == 0 else -126  # 2**-127 is subnormal in float32
    if shape.mantissa_bits > 22 or shape.min_exponent < lowest or not -126 <= count <= 127:
        return None
    field = shape.min_exponent + 127
    has_zero = not isinstance(fmt, FloatFormat) or fmt.has_zero
    return Coding(
        drop=np.int32(23 - shape.mantissa_bits),
        base=np.int32((field - has_zero) << shape.mantissa_bits),
        smallest=np.int32(min(field, 255) << 23),
        magic=np.float32(2.0**count),
        sign_code=np.int32(fmt.sign_mask if isinstance(fmt, FloatFormat) else 0),
        complement=np.int32(0 if is_float else -1),
        mask=np.int32((1 << fmt.bits) - 1),
        inf_code=np.int32((fmt.inf_code or 0) if isinstance(fmt, FloatFormat) else 0),
        nan_code=np.int32((fmt.nan_code or 0) if isinstance(fmt, FloatFormat) else 0),
    )


@device
def code_of_value(value, c):
    """Return the code of a float32 that is a value of the format, -0 only where the format has it."""
    bits = bits32(value)
    magnitude = bits & _MAGNITUDE
    sign = bits >> int32(31)
    # 1. the magnitude's code: last places below the smallest normal value, leading bits above
    count = int32(bits32(np.float32(float32_of(magnitude) + c.magic)) - bits32(c.magic))
    code = int32((magnitude >> (c.drop & SHIFT)) - c.base) if magnitude >= c.smallest else count
    if magnitude == _INF:
        code = c.inf_code
    # 2. the sign: two's complement, or a bit; NaN has neither
    twos = sign & c.complement
    code = (int32((code ^ twos) - twos) | (sign & c.sign_code)) & c.mask
    return c.nan_code if magnitude > _INF else code


@device
def value_of_code(code, c):
    """Return the float32 value of a code of a float format whose codes above Inf, or at ``nan_code``, are NaN."""
    code = int32(code)
    magnitude = code & (c.mask >> int32(1))
    normal = int32((magnitude + c.base) << (c.drop & SHIFT))
    count = bits32(np.float32(float32_of(int32(bits32(c.magic) + magnitude)) - c.magic))
    bits = normal if normal >= c.smallest else count
    if c.inf_code != int32(0) and magnitude == c.inf_code:
        bits = _INF
    if magnitude > c.inf_code if c.inf_code != int32(0) else magnitude == c.nan_code:
        bits = _NAN
    value = float32_of(bits)
    return -value if code & c.sign_code else value


@kernel
def code_flat(values, codes, c):
    """Write the codes of float32 values of a format."""
    for i in range(values.size):
        codes[i] = code_of_value(values[i], c)


_BUCKETS = 1 << 16
_LAST = 0xFFFF  # the last place of a bucket


@lru_cache(maxsize=32)
def table_of(fmt: ElementFormat, rounding: Rounding, overflow: Overflow) -> np.ndarray | None:
    """Return the words, uint32 [65536]: last place of the first code, first code, second code; or None.

    Bits 16 to 31 hold the place, bits 0 to 7 and 8 to 15 the codes. A bucket's index is its numbers' leading 16 bits.
    """
    if fmt.bits > 8 or rounding.mode == "stochastic":
        return None
    spec = CastSpec(format=fmt, rounding=rounding, overflow=overflow)

    def codes(numbers: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(numbers.astype(np.uint32).view(np.float32))
        return torch_engine.encode(x, spec, None).codes.numpy()

    # 1. the codes of each bucket's first and last number
    bases = np.arange(_BUCKETS, dtype=np.int64) << 16
    first, second = codes(bases), codes(bases + _LAST)
    # 2. bisection for the last number that has the first code
    below, above = np.zeros(_BUCKETS, np.int64), np.full(_BUCKETS, _LAST)  # places of the first and the second code
    mixed = np.flatnonzero(first != second)
    for _ in range(16):
        middle = (below[mixed] + above[mixed]) >> 1
        early = codes(bases[mixed] + middle) == first[mixed]
        below[mixed] = np.where(early, middle, below[mixed])
        above[mixed] = np.where(early, above[mixed], middle)
    # 3. the number behind it must have the second code, or there is a third
    if (codes(bases[mixed] + above[mixed]) != second[mixed]).any():
        return None
    below[first == second] = _LAST
    return (below << 16 | second.astype(np.int64) << 8 | first).astype(np.uint32)


@device
def code_of_number(x, words):
    """Return the code of a float32 number."""
    bits = uint32(bits32(x))
    word = words[bits >> uint32(16)]
    late = uint32((bits & uint32(_LAST)) > (word >> uint32(16)))
    return (word >> uint32(late << uint32(3))) & uint32(0xFF)


@kernel
def code_by_table(x, codes, words):
    """Write the codes of float32 numbers."""
    for i in range(x.size):
        codes[i] = code_of_number(x[i], words)


@kernel
def round_by_table(x, y, words, values):
    """Write the values that float32 numbers round to; ``values`` are those of all codes."""
    for i in range(x.size):
        y[i] = values[code_of_number(x[i], words)]


# Codes back to values.


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels compute for a tensor of that dtype."""
    return dtype if dtype == torch.float64 else torch.float32


def narrows(fmt: Format, dtype: torch.dtype) -> bool:
    """Return True if a dtype of 16 bits does not hold every value of a format, so that values are rounded to it."""
    return dtype.itemsize == 2 and not is_representable(fmt, dtype)


def store(result: torch.Tensor, out: torch.Tensor) -> None:
    """Write values into a tensor of any of the four dtypes, rounded to nearest even where they do not fit exactly.

    torch's vectorised conversion to bfloat16 gives NaN all ones; every NaN here is the canonical one.
    """
    out.copy_(result)
    if out.dtype != result.dtype and out.numel() and bool(result.amax().isnan()):  # a third of the time of isnan()
        out.masked_fill_(result.isnan(), torch.nan)


@lru_cache(maxsize=256)
def values_of(fmt: ElementFormat) -> np.ndarray:
    """Return the values of all codes, float64."""
    count = len(fmt.values) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits
    return np.array([fmt.value(code) for code in range(count)], np.float64)


@kernel
def decode_flat(codes, values, y):
    """Look up the values of codes."""
    for i in range(codes.size):
        y[i] = values[codes[i]]


@kernel
def decode_rows(codes, values, scales, offsets, shifted, decode_scale, odd, y, outer, inner, first, last):
    """Decode rows ``first ... last - 1`` of a matrix of blocks; ``decode_scale`` is 1 without a tensor scale.

    ``odd`` asks for float32 rounded to odd: rounded again to 16 bits it is what one rounding gives.
    """
    for r in range(first, last):
        for block in range(scales.shape[1]):
            start, stop = block * inner, min((block + 1) * inner, codes.shape[1])
            block_codes, block_y = codes[r, start:stop], y[r, start:stop]  # of one stride: the loop is vectorised
            scale = float64(scales[r // outer, block])
            zero = float64(offsets[r // outer, block]) if shifted else 0.0
            for k in range(block_codes.size):
                # exact in float64, or rounded once there for a tensor scale; - 0.0 keeps -0
                result = (values[block_codes[k]] - zero) * scale * decode_scale
                result = float64(_odd(result)) if odd else result
                block_y[k] = result if result == result else np.nan


@device
def _odd(value):
    """Round a float64 to float32 toward zero, with the lowest bit set where that loses something."""
    # 1. toward zero: the next lower magnitude where the nearest float32 is above
    near = float32(value)
    bits = bits32(near) - int32(abs(float64(near)) > abs(value))
    # 2. inexact: set the lowest bit
    return near if float64(near) == value or value != value else float32_of(int32(bits | int32(1)))


def decode(parts: EncodedParts, spec: CastSpec, out: torch.Tensor) -> None:
    """Write the values of codes into out, of any of the four dtypes."""
    fmt = spec.format
    target = torch.empty(out.shape, dtype=wider(out.dtype))
    if out.is_contiguous() and out.dtype == target.dtype:
        target = out
    if isinstance(fmt, BlockFormat):
        target = _decode_blocks(parts, fmt, spec.dim, target, odd=narrows(fmt, out.dtype))
    else:
        values = torch.from_numpy(values_of(fmt))  # type: ignore[arg-type]
        look_up(parts.codes.contiguous().view(-1), values, target.view(-1))
    if target is not out:
        store(target, out)


def look_up(codes: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values of integer codes to out; all are contiguous and have one dimension."""
    table = values.numpy()
    pool.run(
        lambda start, stop: decode_flat(codes[start:stop].numpy(), table, out[start:stop].numpy()),
        codes.numel(),
        align=64,
    )


def _decode_blocks(parts: EncodedParts, fmt: BlockFormat, dim: int, target: torch.Tensor, *, odd: bool) -> torch.Tensor:
    """Return the values, in ``target`` where its layout is the operand matrix's."""
    codes = parts.codes.reshape(1) if parts.codes.dim() == 0 else parts.codes
    moved = codes.movedim(dim, -1)
    if not codes.numel():
        return target
    matrix = moved.reshape(-1, moved.shape[-1]).contiguous()
    y = target.view(matrix.shape) if dim == -1 else torch.empty(matrix.shape, dtype=target.dtype)
    rows, columns = matrix.shape
    outer, inner = fmt.block[0] or rows, fmt.block[1] or columns
    assert parts.scales is not None
    offsets = parts.offsets if parts.offsets is not None else torch.zeros((1, 1), dtype=torch.int32)
    tensor_scale = 1.0 if parts.tensor_scale is None else float(parts.tensor_scale)
    arrays = matrix.numpy(), values_of(fmt.element), parts.scales.contiguous().numpy(), offsets.contiguous().numpy()
    how = fmt.zero_point, tensor_scale, odd, y.numpy(), outer, inner
    pool.run(lambda first, last: decode_rows(*arrays, *how, first, last), rows, align=1, weight=columns)
    return target if dim == -1 else y.view(moved.shape).movedim(-1, dim)
