# SPDX-License-Identifier: Apache-2.0
"""Which casts of block formats the fast kernels take, and the macros that specialise them.

The fast kernels compute in float32 arithmetic that is exact (block.cuh); blocks with NaN, Inf or scales at
float32's limits they hand to the exact path themselves. Everything else about a cast is decided here, on the host.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from fmtsim.engines.cuda.cast.parameters import DTYPES, NARROW, macros
from fmtsim.engines.cuda.runtime import Defines
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.cast import Random as RandomSource

FLOAT32, BFLOAT16, CODES, PACKED = range(4)  # what a kernel writes
RULES = {"floor": 0, "ceil": 1, "rceil": 2, "even": 3, "amax": 4}
ARITHMETICS = {"divide": 0, "reciprocal": 1, "encode": 2}


class _ElementGrid(NamedTuple):
    """An element format as a float grid: the last place of magnitudes is ``2**(max(e, lowest) - mantissa)``."""

    mantissa: int
    lowest: int
    limit: float
    limit_negative: float
    integer: bool
    negative_zero: bool

    @property
    def digits(self) -> int:
        """Significant bits that hold every value."""
        if not self.integer:
            return self.mantissa + 1
        return max(int(self.limit * 2.0 ** (self.mantissa - self.lowest)).bit_length(), 1)


def output_of(dtype: torch.dtype) -> int | None:
    """Return what writes values of a dtype, None where no fast kernel does."""
    return DTYPES[dtype] if dtype in NARROW[:2] else None


def draws_words(spec: CastSpec, random: RandomSource) -> bool:
    """Say whether the fast kernels round as a cast asks: to nearest even, or by 32-bit words of a key."""
    rounding = spec.rounding
    if rounding.mode == "nearest_even":
        return True
    words = rounding.mode == "stochastic" and (rounding.bits, rounding.variant, rounding.layout) == (32, "a", "word")
    return words and isinstance(random, RandomKey)


@lru_cache(maxsize=1024)
def fast_macros(spec: CastSpec, dtype: torch.dtype, output: int, without_tensor_scale: bool = False) -> Defines | None:
    """Return the macros of the fast kernels that depend on formats, None where they cannot serve.

    Args:
        spec: The cast; how its random words are drawn is not looked at (``draws_words``).
        dtype: The input's.
        output: FLOAT32, BFLOAT16, CODES or PACKED.
        without_tensor_scale: Leave the scale of the tensor out of values.
    """
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    grid = _grid_of(fmt.element)
    if grid is None or dtype not in NARROW or fmt.zero_point or fmt.element.max_exponent > 60:
        return None
    if spec.overflow != "saturate" and not grid.integer:
        return None
    if output in (CODES, PACKED) and (fmt.bits > 8 or (output == PACKED and not _packs(fmt, dtype))):
        return None
    if output == BFLOAT16 and not _fits_bfloat16(fmt, grid, without_tensor_scale):
        return None
    stochastic = spec.rounding.mode == "stochastic"
    scale = _power_of_two_scale(fmt, grid, stochastic) if fmt.power_of_two else _real_scale(fmt, grid)
    if scale is None:
        return None
    return macros(
        INPUT=DTYPES[dtype],
        OUTPUT=output,
        STOCHASTIC=stochastic,
        RULE=RULES[fmt.scale_rule],
        ARITHMETIC=ARITHMETICS[fmt.arithmetic],
        TWO_LEVEL=fmt.tensor_scale,
        WITHOUT_TENSOR_SCALE=without_tensor_scale,
        CODE_BITS=fmt.bits,
        ELEMENT_MANTISSA=f"{grid.mantissa}u",
        ELEMENT_LOWEST=_field(grid.lowest),
        ELEMENT_LIMIT=float_bits(grid.limit),
        ELEMENT_LIMIT_NEGATIVE=float_bits(grid.limit_negative),
        ELEMENT_INTEGER=grid.integer,
        ELEMENT_NEGATIVE_ZERO=grid.negative_zero,
        ELEMENT_TOP=fmt.element.max_exponent,
        ELEMENT_MAX=float_bits(fmt.element.max),
        ELEMENT_RECIPROCAL=float_bits(np.float32(1) / np.float32(fmt.element.max)),
        **scale,
    )


@lru_cache(maxsize=1024)
def run_macros(fast: Defines, dtype: torch.dtype, vector: int, run: int, whole: bool = True) -> Defines:
    """Return the macros of the row kernel; RUN is 0 where a block is not a power of two or more than a warp holds.

    whole: The tensor fills lanes of 32 elements.
    """
    stochastic = ("STOCHASTIC", "1") in fast
    codes = ("OUTPUT", str(CODES)) in fast or ("OUTPUT", str(PACKED)) in fast
    if codes and dtype == torch.bfloat16 and vector == 8 and run in (16, 32) and whole and not stochastic:
        return (*fast, *macros(RUN=run, VECTOR=run, LAYOUT=2))
    strided = vector == 4 and dtype == torch.float32 or stochastic
    longest = 512 * vector // 4 if strided else 32 * vector
    served = run if run & (run - 1) == 0 and run <= longest else 0
    return (*fast, *macros(RUN=served, VECTOR=vector, LAYOUT=int(strided)))


@lru_cache(maxsize=1024)
def column_macros(fast: Defines, run: int, vector: int, transposed: bool, both: bool) -> Defines:
    """Return the macros of the column kernel."""
    return (*fast, *macros(RUN=run, ROW_RUN=min(run, 32), VECTOR=vector, TRANSPOSED=transposed, BOTH=both))


@lru_cache(maxsize=8)
def amax_macros(dtype: torch.dtype) -> Defines:
    """Return the macros of the kernels that find the amaxes of blocks."""
    return macros(INPUT=DTYPES[dtype], VECTOR=16 // dtype.itemsize)


def vector_of(dtype: torch.dtype, output: int, bits: int = 8) -> int:
    """Return the elements of a vector: neither side passes 16 bytes, but where narrow codes have to fill a word."""
    if output == PACKED and bits < 8:
        return 8
    return 16 // max(dtype.itemsize, {FLOAT32: 4, BFLOAT16: 2}.get(output, 1))


def float_bits(value: float | np.floating[Any]) -> str:
    """Return the bits of a float32 as a macro."""
    return f"{int(np.float32(value).view(np.uint32))}u"


def _field(exponent: int) -> str:
    return f"{(exponent + 127) << 23}u"


def _grid_of(element: ElementFormat) -> _ElementGrid | None:
    if isinstance(element, IntFormat):
        if not element.signed or element.half_offset or element.bits > 16:
            return None
        mantissa = element.bits + 1  # a float format whose values are all subnormal
        return _ElementGrid(mantissa, mantissa - element.fraction_bits, element.max, -element.min, True, False)
    if not isinstance(element, FloatFormat) or not (element.signed and element.has_zero and element.has_subnormals):
        return None
    if not 1 <= element.mantissa_bits <= 10 or element.min_exponent < -60:
        return None
    ends = element.max, element.max
    return _ElementGrid(element.mantissa_bits, element.min_exponent, *ends, False, element.has_negative_zero)


def _power_of_two_scale(fmt: BlockFormat, grid: _ElementGrid, stochastic: bool) -> dict[str, object] | None:
    """Return the macros of power-of-two rules: the exponents under which float32 arithmetic stays normal."""
    top = fmt.element.max_exponent
    if fmt.scale_rule == "even" and grid.mantissa > 22:
        return None
    first = max(-126 - grid.lowest, -125 - top, -125)
    if not grid.integer and top == grid.lowest + 2:  # block_codes.cuh: the inverse of the smallest value
        first = max(first, grid.mantissa - grid.lowest - 127)
    if stochastic:
        first = max(first, grid.mantissa - 117 - grid.lowest)  # grid.cuh: 2^-32 of a place is a number
    last = min(127 - max(top, grid.lowest) - (23 - grid.mantissa), 126 - top, 126)
    even = fmt.element.mantissa_bits if isinstance(fmt.element, FloatFormat | IntFormat) else 0
    stored = int(fmt.scale.bits <= 8)
    return {"SCALE_FIRST": first, "SCALE_LAST": last, "EVEN_MANTISSA": even, "SCALE_STORED": stored}


def _real_scale(fmt: BlockFormat, grid: _ElementGrid) -> dict[str, object] | None:
    """Return the macros of real scales: the scale format's own rounding by a magic addition."""
    scale = fmt.scale
    if scale.name == "fp32":
        return None if fmt.tensor_scale else {"SCALE_PLAIN": 1, "SCALE_STORED": 0}
    within = scale.min_exponent >= -100 and scale.max_exponent + 24 - scale.mantissa_bits <= 127
    if not (scale.has_subnormals and within) or (fmt.tensor_scale and grid.mantissa + scale.mantissa_bits + 2 > 24):
        return None
    return {
        "SCALE_PLAIN": 0,
        "SCALE_MANTISSA": f"{scale.mantissa_bits}u",
        "SCALE_LOWEST": _field(scale.min_exponent),
        "SCALE_LIMIT": float_bits(scale.max),
        "SCALE_NAN": scale.nan_code or 0,
        "SCALE_STORED": 2 if scale.bits <= 8 else 0,
    }


def _fits_bfloat16(fmt: BlockFormat, grid: _ElementGrid, without_tensor_scale: bool) -> bool:
    """Say whether bfloat16 holds the values exactly: of power-of-two rules, and of real ones without a tensor scale."""
    if fmt.power_of_two:
        return grid.digits <= 8
    scale = fmt.scale
    small = grid.lowest - grid.mantissa + scale.min_exponent - scale.mantissa_bits >= -133
    return without_tensor_scale and fmt.tensor_scale and grid.digits + scale.mantissa_bits + 1 <= 8 and small


def _packs(fmt: BlockFormat, dtype: torch.dtype) -> bool:
    """Say whether the kernel writes codes and scales as ``Encoded`` keeps them."""
    scale = fmt.scale
    if vector_of(dtype, PACKED, fmt.bits) * fmt.bits % 8:
        return False
    if fmt.power_of_two and scale.bits <= 8:
        return scale.exponent_bias == 127 and scale.min_exponent == -127 and scale.nan_code == 255
    return scale.bits <= 8 or scale.name == "fp32"
