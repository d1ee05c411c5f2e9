# SPDX-License-Identifier: Apache-2.0
"""From values to codes: what turns the results of the fast kernels, which are values of a format, into its codes.

The leading bits of a normal float32 value, less a constant, are its code in any narrower float format. Below the
smallest normal value the code counts last places: adding the power of two whose last place is the format's puts that
count into the low bits, and so it does for integers, all of whose values are subnormal.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy import int32

from fmtsim.engines.cpu.cast.grid import shape_of
from fmtsim.engines.cpu.runtime.jit import bits32, device, float32_of, kernel
from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat

_MAGNITUDE = int32(0x7FFFFFFF)
_INF, _NAN = int32(0x7F800000), int32(0x7FC00000)
_FLT_MAX = 3.4028234663852886e38


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
    if not isinstance(fmt, FloatFormat | IntFormat) or fmt.bits > 31 or fmt.max > _FLT_MAX:
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
    count = int32(bits32(np.float32(float32_of(magnitude) + c.magic)) - bits32(c.magic))
    code = int32((magnitude >> c.drop) - c.base) if magnitude >= c.smallest else count
    if magnitude == _INF:
        code = c.inf_code
    twos = sign & c.complement
    code = (int32((code ^ twos) - twos) | (sign & c.sign_code)) & c.mask
    return c.nan_code if magnitude > _INF else code


@device
def value_of_code(code, c):
    """Return the float32 value of a code of a float format whose codes above Inf, or at ``nan_code``, are NaN."""
    code = int32(code)
    magnitude = code & (c.mask >> int32(1))
    normal = int32((magnitude + c.base) << c.drop)
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
