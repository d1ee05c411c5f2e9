"""Which casts of block formats the fast kernels take, and the macros that specialise them.

The fast kernels compute in float32 arithmetic that is exact (block.cuh); blocks with NaN, Inf or scales at
float32's limits they hand to the exact path themselves. Everything else about a cast is decided here, on the host.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from fmtsim.cuda.cast.block_parameters import ARITHMETICS, RULES
from fmtsim.cuda.runtime.program import Defines
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.spec import ElementFormat, FloatFormat, IntFormat
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.cast import Random as RandomSource

INPUTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT32, BFLOAT16, CODES, PACKED = range(4)  # what a kernel writes


class _Grid(NamedTuple):
    """An element format as a float grid: the place of magnitudes is ``2**(max(e, lowest) - mantissa)``."""

    mantissa: int
    lowest: int
    limit: float
    limit_negative: float
    integer: bool
    negative_zero: bool


def output_of(dtype: torch.dtype) -> int | None:
    """Return what writes values of a dtype, None where no fast kernel does."""
    return {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}.get(dtype)


def is_drawn(spec: CastSpec, random: RandomSource) -> bool:
    """Say whether the fast kernels round as a cast asks: to nearest even, or by whole words of a key."""
    rounding = spec.rounding
    if rounding.mode == "nearest_even":
        return True
    whole = rounding.mode == "stochastic" and (rounding.bits, rounding.variant, rounding.layout) == (32, "a", "word")
    return whole and isinstance(random, RandomKey)


@lru_cache(maxsize=1024)
def fast_defines(spec: CastSpec, dtype: torch.dtype, output: int, bare: bool = False) -> Defines | None:
    """Return the macros of the fast kernels that depend on formats, None where they cannot serve.

    Args:
        spec: The cast; how its random words are drawn is not looked at (``is_drawn``).
        dtype: The input's.
        output: FLOAT32, BFLOAT16, CODES or PACKED.
        bare: Leave the scale of the whole tensor out of values (``fmtsim.cuda.operands``).
    """
    fmt = spec.format
    assert isinstance(fmt, BlockFormat)
    grid = _grid_of(fmt.element)
    if grid is None or dtype not in INPUTS or fmt.zero_point or fmt.element.max_exponent > 60:
        return None
    if spec.overflow != "saturate" and not grid.integer:
        return None
    if output in (CODES, PACKED) and (fmt.bits > 8 or (output == PACKED and not _packs(fmt, dtype))):
        return None
    if output == BFLOAT16 and not _fits_bfloat16(fmt, grid, bare):
        return None
    scale = (
        _power_of_two_scale(fmt, grid, spec.rounding.mode == "stochastic")
        if fmt.power_of_two
        else _real_scale(fmt, grid)
    )
    if scale is None:
        return None
    values = {
        "INPUT": INPUTS[dtype],
        "OUTPUT": output,
        "STOCHASTIC": int(spec.rounding.mode == "stochastic"),
        "RULE": RULES[fmt.scale_rule],
        "ARITHMETIC": ARITHMETICS[fmt.arithmetic],
        "TWO_LEVEL": int(fmt.tensor_scale),
        "WITHOUT_TENSOR_SCALE": int(bare),
        "CODE_BITS": fmt.bits,
        "ELEMENT_MANTISSA": f"{grid.mantissa}u",
        "ELEMENT_LOWEST": _field(grid.lowest),
        "ELEMENT_LIMIT": _bits(grid.limit),
        "ELEMENT_LIMIT_NEGATIVE": _bits(grid.limit_negative),
        "ELEMENT_INTEGER": int(grid.integer),
        "ELEMENT_NEGATIVE_ZERO": int(grid.negative_zero),
        "ELEMENT_TOP": fmt.element.max_exponent,
        "ELEMENT_MAX": _bits(fmt.element.max),
        "ELEMENT_RECIPROCAL": _bits(float(np.float32(1) / np.float32(fmt.element.max))),
        **scale,
    }
    return tuple((name, str(value)) for name, value in values.items())


def vector_of(dtype: torch.dtype, output: int, bits: int = 8) -> int:
    """Return the elements of a vector: neither side passes 16 bytes, but where narrow codes have to fill a word."""
    if output == PACKED and bits < 8:
        return 8
    return 16 // max(dtype.itemsize, {FLOAT32: 4, BFLOAT16: 2}.get(output, 1))


def _grid_of(element: ElementFormat) -> _Grid | None:
    if isinstance(element, IntFormat):
        if not element.signed or element.half_offset or element.bits > 16:
            return None
        mantissa = element.bits + 1  # a float format whose values are all subnormal
        return _Grid(mantissa, mantissa - element.fraction_bits, element.max, -element.min, True, False)
    if not isinstance(element, FloatFormat) or not (element.signed and element.has_zero and element.has_subnormals):
        return None
    if not 1 <= element.mantissa_bits <= 10 or element.min_exponent < -60:
        return None
    return _Grid(
        element.mantissa_bits, element.min_exponent, element.max, element.max, False, element.has_negative_zero
    )


def _power_of_two_scale(fmt: BlockFormat, grid: _Grid, stochastic: bool) -> dict[str, object] | None:
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
    return {
        "SCALE_FIRST": first,
        "SCALE_LAST": last,
        "EVEN_MANTISSA": even,
        "SCALE_STORED": int(fmt.scale.bits <= 8),
    }


def _real_scale(fmt: BlockFormat, grid: _Grid) -> dict[str, object] | None:
    """Return the macros of real scales: the scale format's own rounding by a magic addition."""
    scale = fmt.scale
    if scale.name == "fp32":
        return None if fmt.tensor_scale else {"SCALE_PLAIN": 1, "SCALE_STORED": 0}
    within = scale.min_exponent >= -100 and scale.max_exponent + 24 - scale.mantissa_bits <= 127
    if not (scale.has_subnormals and within):
        return None
    product = grid.mantissa + scale.mantissa_bits + 2
    if fmt.tensor_scale and product > 24:
        return None
    return {
        "SCALE_PLAIN": 0,
        "SCALE_MANTISSA": f"{scale.mantissa_bits}u",
        "SCALE_LOWEST": _field(scale.min_exponent),
        "SCALE_LIMIT": _bits(scale.max),
        "SCALE_NAN": scale.nan_code or 0,
        "SCALE_STORED": 2 if scale.bits <= 8 else 0,
    }


def _fits_bfloat16(fmt: BlockFormat, grid: _Grid, bare: bool) -> bool:
    """Say whether bfloat16 holds the values exactly: of power-of-two rules, and of real ones without a tensor scale."""
    digits = (
        max(int(grid.limit * 2.0 ** (grid.mantissa - grid.lowest)).bit_length(), 1)
        if grid.integer
        else grid.mantissa + 1
    )
    if fmt.power_of_two:
        return digits <= 8
    scale = fmt.scale
    small = grid.lowest - grid.mantissa + scale.min_exponent - scale.mantissa_bits >= -133
    return bare and fmt.tensor_scale and digits + scale.mantissa_bits + 1 <= 8 and small


def _packs(fmt: BlockFormat, dtype: torch.dtype) -> bool:
    """Say whether the kernel writes codes and scales as ``Encoded`` keeps them."""
    scale = fmt.scale
    if vector_of(dtype, PACKED, fmt.bits) * fmt.bits % 8:
        return False
    if fmt.power_of_two and scale.bits <= 8:
        return scale.exponent_bias == 127 and scale.min_exponent == -127 and scale.nan_code == 255
    return scale.bits <= 8 or scale.name == "fp32"


def _bits(value: float) -> str:
    return f"{int(np.float32(value).view(np.uint32))}u"


def _field(exponent: int) -> str:
    return f"{(exponent + 127) << 23}u"
