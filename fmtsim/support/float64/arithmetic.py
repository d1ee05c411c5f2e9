# SPDX-License-Identifier: Apache-2.0
"""IEEE 754's operations on float64 numbers that are int64 bit patterns, to nearest even, in operations on integers.

Each takes numbers apart into ``significand * 2**scale``, computes exactly or with one sticky bit below all that
rounding looks at, and rounds once. Subnormal numbers are numbers like others; every NaN that comes about is ``NAN``.
"""

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

SIGN: Final = -(1 << 63)
MAGNITUDE: Final = (1 << 63) - 1
INFINITE: Final = 0x7FF << 52
NAN: Final = 0x7FF8 << 48

_GUARD: Final = 7  # bits below the last place of sums
_LEADING: Final = 60  # where significands have their leading bit before they are rounded
_ZERO: Final = -5000  # the scale of zero, below all others


class _Layout(NamedTuple):
    """Hold mantissa bits, the exponents of normal numbers, and the integer dtype of a floating-point dtype."""

    places: int
    lowest: int
    highest: int
    bits: torch.dtype

    @property
    def infinite(self) -> int:
        return (self.highest - self.lowest + 2) << self.places

    @property
    def sign(self) -> int:
        return SIGN if self.places == 52 else (self.highest - self.lowest + 3) << self.places


_FLOAT64: Final = _Layout(52, -1022, 1023, torch.int64)
_LAYOUTS: Final = {
    torch.float64: _FLOAT64,
    torch.float32: _Layout(23, -126, 127, torch.int32),
    torch.bfloat16: _Layout(7, -126, 127, torch.int16),
    torch.float16: _Layout(10, -14, 15, torch.int16),
}


def floor_log2(number: Tensor) -> Tensor:
    """Return ``floor(log2(number))`` of positive integers below ``2**62``, in their dtype.

    A number keeps its leading bit and loses the one below it, so that its rounding to float32 does not carry.
    """
    leading_bit = number & ~(number >> 1)
    return (leading_bit.to(torch.float32).view(torch.int32) >> 23).to(number.dtype) - 127


def is_nan(x: Tensor) -> Tensor:
    """Say which numbers are NaN."""
    return (x & MAGNITUDE) > INFINITE


def order(x: Tensor) -> Tensor:
    """Return integers in the order of the numbers, both zeros 0; NaN is beyond Inf of its sign."""
    return torch.where(x < 0, -(x & MAGNITUDE), x)


def from_order(x: Tensor) -> Tensor:
    """Return the numbers that ``order`` made integers of; zero is +0."""
    return torch.where(x < 0, -x | SIGN, x)


def widen(x: Tensor) -> Tensor:
    """Return the float64 patterns of floating-point elements, or of integers up to ``2**53``."""
    if not x.dtype.is_floating_point:
        whole = x.to(torch.int64)
        return _rounded(whole < 0, whole.abs(), torch.zeros_like(whole))
    x = x.to(torch.float32) if x.dtype.itemsize == 1 else x  # exact, and normal
    layout = _LAYOUTS[x.dtype]
    bits = x.view(layout.bits).to(torch.int64)
    magnitude = bits & (layout.infinite | ((1 << layout.places) - 1))
    lifted = (magnitude >> layout.places).clamp(min=1) - 1
    code = _rounded(bits < 0, magnitude - (lifted << layout.places), lifted + (layout.lowest - layout.places))
    special = torch.where(magnitude == layout.infinite, (bits & SIGN) | INFINITE, NAN)
    return torch.where(magnitude < layout.infinite, code, special)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers in another dtype: floats rounded to nearest even, integers cut off toward zero."""
    significand, scale = _unpacked(x)
    if not dtype.is_floating_point:
        whole = torch.where(scale < 0, significand >> (-scale).clamp(0, 62), significand << scale.clamp(0, 10))
        return torch.where(x < 0, -whole, whole).to(dtype)
    layout = _LAYOUTS[dtype]
    code = _rounded(x < 0, significand, scale, layout)
    infinite = torch.where(x < 0, layout.infinite | layout.sign, layout.infinite)
    code = torch.where((x & MAGNITUDE) == INFINITE, infinite, code)
    code = torch.where(is_nan(x), layout.infinite | 1 << (layout.places - 1), code)
    return code.to(layout.bits).view(dtype)


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x + y``."""
    swap = (x & MAGNITUDE) < (y & MAGNITUDE)
    x, y = torch.where(swap, y, x), torch.where(swap, x, y)
    (large, scale), (small, lower) = _unpacked(x), _unpacked(y)
    deeper, small = (scale - lower).clamp(0, 62), small << _GUARD
    moved = small >> deeper
    moved = moved | ((moved << deeper) != small).to(torch.int64)
    opposed = (x ^ y) < 0
    total = (large << _GUARD) + torch.where(opposed, -moved, moved)
    code = _rounded(torch.where(total == 0, (x & y) < 0, x < 0), total, scale - _GUARD)
    size = x & MAGNITUDE
    invalid = (size > INFINITE) | is_nan(y) | (opposed & ((y & MAGNITUDE) == INFINITE))
    return torch.where(invalid, NAN, torch.where(size == INFINITE, x, code))


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x * y``."""
    (x_bits, scale), (y_bits, other) = _unpacked(x), _unpacked(y)
    mask = (1 << 26) - 1
    (high, low), (upper, lower) = (
        (x_bits >> 26, x_bits & mask),
        (y_bits >> 26, y_bits & mask),
    )
    middle = high * lower + low * upper
    bottom = low * lower + ((middle & mask) << 26)
    top, rest = high * upper + (middle >> 26) + (bottom >> 52), bottom & ((1 << 52) - 1)
    significand = (top << 6) | (rest >> 46) | ((rest & ((1 << 46) - 1)) != 0).to(torch.int64)
    sign = (x ^ y) & SIGN
    code = _rounded(sign < 0, significand, scale + other + 46)
    sizes = x & MAGNITUDE, y & MAGNITUDE
    infinite = (sizes[0] == INFINITE) | (sizes[1] == INFINITE)
    invalid = is_nan(x) | is_nan(y) | (infinite & ((sizes[0] == 0) | (sizes[1] == 0)))
    return torch.where(invalid, NAN, torch.where(infinite, sign | INFINITE, code))


def divide(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x / y``, bit by bit: not every device divides int64."""
    x, y = torch.broadcast_tensors(x, y)
    (rest, scale), (divisor, other) = _unpacked(x), _unpacked(y)
    quotient = torch.zeros_like(rest)
    for _ in range(56):
        fits = rest >= divisor
        quotient = (quotient << 1) | fits.to(torch.int64)
        rest = torch.where(fits, rest - divisor, rest) << 1
    sign = (x ^ y) & SIGN
    code = _rounded(sign < 0, (quotient << 1) | (rest != 0).to(torch.int64), scale - other - 56)
    sizes = x & MAGNITUDE, y & MAGNITUDE
    code = torch.where(sizes[1] == INFINITE, sign, code)
    code = torch.where((sizes[0] == INFINITE) | (sizes[1] == 0), sign | INFINITE, code)
    both = (sizes[0] == sizes[1]) & ((sizes[0] == 0) | (sizes[0] == INFINITE))
    return torch.where(both | is_nan(x) | is_nan(y), NAN, code)


def root(x: Tensor) -> Tensor:
    """Return the square root, correctly rounded; torch's own on a CPU is not always."""
    significand, scale = _unpacked(x)
    number, result, rest = significand << (scale & 1), torch.zeros_like(x), torch.zeros_like(x)
    for place in range(54, -56, -2):  # two bits of the number, zeros behind its last, make one of the root
        rest = (rest << 2) | ((number >> place) & 3 if place >= 0 else 0)
        tried = (result << 2) | 1
        fits = rest >= tried
        rest, result = torch.where(fits, rest - tried, rest), (result << 1) | fits.to(torch.int64)
    code = _rounded(torch.zeros_like(fits), (result << 1) | (rest != 0).to(torch.int64), (scale >> 1) - 28)
    code = torch.where((x == SIGN) | (x == INFINITE), x, code)
    return torch.where(is_nan(x) | ((x < 0) & (x != SIGN)), NAN, code)


def integral(x: Tensor, mode: Literal["trunc", "floor", "ceil", "round"]) -> Tensor:
    """Round to integers, ``"round"`` to nearest even; zeros keep the sign."""
    significand, scale = _unpacked(x)
    shift, negative = (-scale).clamp(0, 54), x < 0
    whole = significand >> shift
    rest = significand - (whole << shift)
    if mode == "round":
        half = (1 << shift) >> 1
        up = (rest > half) | ((rest == half) & (rest > 0) & ((whole & 1) == 1))
    else:
        up = (rest > 0) & {"trunc": torch.zeros_like(negative), "floor": negative, "ceil": ~negative}[mode]
    code = _rounded(negative, whole + up.to(torch.int64), torch.where(scale < 0, 0, scale))
    return torch.where((x & MAGNITUDE) < INFINITE, code, x)


def total(x: Tensor, dim: int) -> Tensor:
    """Add along a dimension, halves to halves; sums are exact or their order does not count."""
    x = x.movedim(dim, 0)
    zero = torch.zeros(x.shape[1:], dtype=torch.int64, device=x.device)
    while len(x) > 1:
        half = len(x) // 2
        added = add(x[:half], x[half : 2 * half])
        x = added if len(x) == 2 * half else torch.cat([added, x[-1:]])
    return add(zero, x[0]) if len(x) else zero


def compare(x: Tensor, y: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Compare numbers by a function of torch for integers; NaN compares false."""
    return how(order(x), order(y)) & ~(is_nan(x) | is_nan(y))


def extreme(x: Tensor, y: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the larger (``torch.ge``) or the smaller numbers (``torch.le``), NaN where there is one."""
    first = how(order(x), order(y)) & ~is_nan(y)
    return torch.where(is_nan(x) | first, x, y)


def _unpacked(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return significands of 53 bits, 0 for zero, and the scales of their last places; Inf and NaN mean nothing."""
    magnitude = bits & MAGNITUDE
    lifted = (magnitude >> 52).clamp(min=1)
    significand = magnitude - ((lifted - 1) << 52)
    gap = 52 - floor_log2(significand.clamp(min=1))
    return significand << gap, torch.where(significand == 0, _ZERO, lifted - 1075 - gap)


def _rounded(negative: Tensor, significand: Tensor, scale: Tensor, layout: _Layout = _FLOAT64) -> Tensor:
    """Round ``significand * 2**scale`` to nearest even and return codes of a layout; above its range is Inf.

    The significand is below ``2**61``; where it is not exact it has 55 bits or more, of which the lowest says so.
    """
    places, lowest, highest, _ = layout
    leading = floor_log2(significand.clamp(min=1))
    exponent = (scale + leading).clamp(max=highest + 1)
    shift = (_LEADING - places + (lowest - exponent).clamp(min=0)).clamp(max=62)
    lifted = significand << (_LEADING - leading)
    below = (1 << shift) - 1
    up = torch.minimum((below >> 1) + ((lifted >> shift) & 1), below)
    code = ((exponent - lowest).clamp(min=0) << places) + ((lifted + up) >> shift)
    code = torch.where(significand == 0, 0, code.clamp(max=layout.infinite))
    return torch.where(negative, code | layout.sign, code)
