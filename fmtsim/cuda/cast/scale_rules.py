# SPDX-License-Identifier: Apache-2.0
"""Scaled casts that the fast kernels take, as the macros and structures that describe these to them.

Kernels of block formats are specialised by macros and compute in float32 arithmetic that is exact (block.cuh); blocks
with NaN, Inf or scales at float32's limits they hand to the exact path themselves. To kernels of quantisers a scale
rule is data (``struct Rule`` of scale.cuh).
"""

import math
import struct
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from fmtsim.cuda.cast.parameters import BITS, DTYPES, FIXED, FLUSHING, MAGIC, NARROW, Grid, grid_of, macros
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.block import FP32, BlockFormat
from fmtsim.formats.element import ElementFormat, FloatFormat, IntFormat
from fmtsim.formats.scaling import Scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.cast import Random as RandomSource
from fmtsim.spec.quantizer import ClipMask, Differentiable, Quantizer, StraightThrough, TrustMask

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


def output_of(dtype: torch.dtype) -> int | None:
    """Return the macro OUTPUT for values of a dtype, None where no fast kernel writes it."""
    return DTYPES[dtype] if dtype in NARROW[:2] else None


def draws_words(spec: CastSpec, random: RandomSource) -> bool:
    """Return True if the fast kernels round as a cast asks: to nearest even, or by 32-bit words of a key."""
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
    if not fmt.is_direct or grid is None or dtype not in NARROW or fmt.zero_point:
        return None
    if fmt.element.max_exponent > 60:
        return None
    if spec.overflow != "saturate" and not grid.integer:
        return None
    if output in (CODES, PACKED) and (fmt.bits > 8 or (output == PACKED and not _packs(fmt, dtype))):
        return None
    if output == BFLOAT16 and not _fits_bfloat16(fmt, without_tensor_scale):
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


def vector_width(dtype: torch.dtype, output: int, bits: int = 8) -> int:
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
    if not grid.integer and top == grid.lowest + 2:  # block_rows.cu: the inverse of the smallest value
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


def _fits_bfloat16(fmt: BlockFormat, without_tensor_scale: bool) -> bool:
    """Return True if bfloat16 holds the values: of power-of-two rules, and of two levels without the tensor's scale."""
    assert isinstance(fmt.element, FloatFormat | IntFormat)
    if fmt.power_of_two:
        return _digits(fmt.element) <= _DIGITS
    return without_tensor_scale and fmt.tensor_scale and _holds_products(fmt.element, fmt.scale)


def _packs(fmt: BlockFormat, dtype: torch.dtype) -> bool:
    """Return True if the kernel writes codes and scales as ``Encoded`` keeps them."""
    scale = fmt.scale
    if vector_width(dtype, PACKED, fmt.bits) * fmt.bits % 8:
        return False
    if fmt.power_of_two and scale.bits <= 8:
        return scale.exponent_bias == 127 and scale.min_exponent == -127 and scale.nan_code == 255
    return scale.bits <= 8 or scale.name == "fp32"


# Scale rules as data.

MOMENTS: Final = ("std", "rms", "mean_abs")
_STATISTICS = ("amax", *MOMENTS)
_EPS_RULES = ("statistic", "sum", "scale", "inverse")
_POWERS = (None, "floor", "ceil")
_TIES = {"nearest_even": 0, "stochastic": 0, "nearest_toward_zero": 1, "nearest_away": 2}
_RULE = struct.Struct("<8f 8f 8i")
NO_RULE: Final = bytes(_RULE.size)
_HISTORY = struct.Struct("<f3i4I")
_STEPS = 8
_FLT_MIN = 2.0**-126
_DIGITS = 8  # significant bits of bfloat16
_NO_GRID = bytes(112)


class KernelRule(NamedTuple):
    """A quantiser with a scale rule as kernels take it.

    Attributes:
        rule: The bytes of ``struct Rule``.
        grid: Of the elements.
        scale_grid: The bytes of ``struct Grid`` of the scales.
        ties: The macro TIES.
        masks: Whether the gradient has a mask.
        folds: Whether bfloat16 holds element times block scale, the multiplier aside.
        divides: The macro DIVIDES.
    """

    rule: bytes
    grid: Grid
    scale_grid: bytes
    ties: int
    masks: bool
    folds: bool
    divides: bool

    def defines(self, input_type: int, words: int, fold: bool) -> Defines:
        """Return the macros of scaled.cuh."""
        casts = macros(INPUT=input_type, PAIRS=0, TIES=self.ties, FOLDS=fold, MASKS=self.masks, WORDS=words)
        return (*self.grid.defines, *casts, *macros(DIVIDES=self.divides))


def rule_of(quantizer: Quantizer) -> KernelRule | None:
    """Return a quantiser as kernels take it, None where they do not cover it."""
    scaling, element = quantizer.scaling, quantizer.format
    if scaling is None or not isinstance(element, FloatFormat | IntFormat) or _digits(element) > _DIGITS:
        return None
    if scaling.tensor or scaling.eden or scaling.candidates != (1.0,) or scaling.scale_rounding != "nearest_even":
        return None
    if scaling.input_scale or scaling.power_of_two == "log2" or (scaling.eps_rule == "inverse" and scaling.allowed):
        return None
    if scaling.statistic not in _STATISTICS or len(scaling.allowed) > _STEPS:
        return None
    if isinstance(quantizer.gradient, Differentiable) or quantizer.rounding.mode not in _TIES:
        return None
    ties = _TIES[quantizer.rounding.mode]
    rounding = Rounding() if ties else quantizer.rounding
    grid = grid_of(element, rounding, quantizer.overflow or element.default_overflow)
    stored = _stored(scaling.scale)
    if grid is None or stored is None or (ties and grid.method not in (MAGIC, FIXED)):
        return None
    masks = not isinstance(quantizer.gradient, StraightThrough)
    # dividing by a scale is multiplying with it where float32 holds 1 / scale exactly
    within = all(2.0**-127 <= step <= 2.0**127 for step in scaling.allowed)
    exact_scale = scaling.scale == FP32 or (scaling.scale.mantissa_bits == 0 and scaling.scale.min_exponent >= -127)
    inverts = _powers(scaling) and within and exact_scale and scaling.multiplier == 1 and scaling.eps_rule != "inverse"
    divides = (scaling.arithmetic == "divide" and scaling.history is None) * (2 if inverts else 1)
    rule = _rule(quantizer, scaling, stored[0], divides)
    return KernelRule(rule, grid, stored[1], ties, masks, _folds(element, scaling), divides == 1)


def history_bytes(scaling: Scaling, top: float, remembers: bool) -> bytes:
    """Return the bytes of ``struct History`` of a rule with a history; top: as in ``DelayedScale``."""
    history = scaling.history
    assert history is not None
    return _HISTORY.pack(
        np.float32(top * 2.0**-scaling.margin), _POWERS.index(scaling.power_of_two),
        history.algorithm == "most_recent", scaling.empty == "previous",
        history.length, history.refresh_every, history.immediate, remembers,
    )  # fmt: skip


def _digits(element: FloatFormat | IntFormat) -> int:
    """Return the significant bits that hold every value; more than bfloat16 has where its range is wider."""
    if isinstance(element, IntFormat):  # the lowest number is no longer than the highest, or a power of two
        return max(int(element.max / element.eps * (2 if element.half_offset else 1)).bit_length(), 1)
    within = element.min_exponent - element.mantissa_bits >= -133 and element.max_exponent <= 127
    return element.mantissa_bits + 1 if within else _DIGITS + 1


def _stored(scale: FloatFormat) -> tuple[int, bytes] | None:
    """Return the rounding of scales to their format: a method and the bytes of a ``struct Grid``."""
    if scale == FP32:
        return -1, _NO_GRID
    grid = grid_of(scale, Rounding(), "saturate")
    return (grid.method, grid.parameters) if grid and grid.method in (MAGIC, BITS, FLUSHING) else None


def _powers(scaling: Scaling) -> bool:
    """Return True if scales are powers of two before they are stored, the multiplier aside."""
    steps = scaling.allowed
    return all(math.frexp(step)[0] == 0.5 for step in steps) if steps else scaling.power_of_two is not None


def _folds(element: FloatFormat | IntFormat, scaling: Scaling) -> bool:
    scale, powers = scaling.scale, _powers(scaling)
    if scaling.multiplier != 1:
        return powers and scale == FP32 and not scaling.allowed and scaling.multiplier < 2
    if scale.mantissa_bits == 0 or (powers and scale == FP32):
        return True
    return _holds_products(element, scale)


def _holds_products(element: FloatFormat | IntFormat, scale: FloatFormat) -> bool:
    """Return True if bfloat16 holds the products of elements and scales of these formats."""
    low = element.min_exponent - element.mantissa_bits if isinstance(element, FloatFormat) else -element.fraction_bits
    small = low + scale.min_exponent - scale.mantissa_bits >= -133
    return small and _digits(element) + scale.mantissa_bits + 1 <= _DIGITS


def _rule(quantizer: Quantizer, scaling: Scaling, stored: int, divides: int) -> bytes:
    element, gradient = quantizer.format, quantizer.gradient
    assert isinstance(element, FloatFormat | IntFormat)
    top = np.float32(np.float32(element.max if scaling.top is None else scaling.top) * 2.0**-scaling.margin)
    limit, mask = 0.0, 0
    if isinstance(gradient, ClipMask):
        limit, mask = element.max, 1
    elif isinstance(gradient, TrustMask):
        limit, mask = gradient.limit, 2
    order = {"encode": 0, "double": 1, "multiply": 3}.get(scaling.arithmetic, 2)
    steps = scaling.allowed or (1.0,)
    return _RULE.pack(
        top, np.float32(1.0 / float(top)), np.float32(scaling.factor or 0.0), np.float32(scaling.offset),
        np.float32(scaling.eps), max(_FLT_MIN, np.float32(scaling.eps) if scaling.eps_rule == "scale" else 0.0),
        np.float32(scaling.multiplier), np.float32(limit),
        *(np.float32(steps[min(i, len(steps) - 1)]) for i in range(_STEPS)),
        _STATISTICS.index(scaling.statistic), _EPS_RULES.index(scaling.eps_rule), order,
        divides, _POWERS.index(scaling.power_of_two), stored, bool(scaling.allowed), mask,
    )  # fmt: skip
