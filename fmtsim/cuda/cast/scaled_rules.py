"""Quantisers with a scale rule as what the kernels of scaled operands take: macros, and structures as bytes."""

import math
import struct
from typing import Final, NamedTuple

import numpy as np

from fmtsim.cuda.cast.grid import BITS, FIXED, FLUSHING, MAGIC, Grid, grid_of
from fmtsim.cuda.runtime.program import Defines
from fmtsim.formats.block import FP32
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.gradient import ClipMask, Differentiable, StraightThrough, TrustMask
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.scaling import Scaling

MOMENTS: Final = ("std", "rms", "mean_abs")
_STATISTICS = ("amax", *MOMENTS)
_EPS_RULES = ("statistic", "sum", "scale")
_POWERS = (None, "floor", "ceil")
_TIES = {"nearest_even": 0, "stochastic": 0, "nearest_toward_zero": 1, "nearest_away": 2}
_RULE = struct.Struct("<8f 8f 8i")
_HISTORY = struct.Struct("<f3i4I")
_STEPS = 8
_FLT_MIN = 2.0**-126
_DIGITS = 8  # significant bits of bfloat16
_NO_GRID = bytes(112)


class Way(NamedTuple):
    """What a quantiser is to the kernels.

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
        values = {"INPUT": input_type, "PAIRS": 0, "TIES": self.ties, "FOLDS": int(fold), "MASKS": int(self.masks)}
        values |= {"WORDS": words, "DIVIDES": int(self.divides)}
        return (*self.grid.defines, *((name, str(value)) for name, value in values.items()))


def way_of(quantizer: Quantizer) -> Way | None:
    """Return what a quantiser is to the kernels, or None where they do not cover it."""
    scaling, element = quantizer.scaling, quantizer.format
    if scaling is None or not isinstance(element, FloatFormat | IntFormat) or _digits(element) > _DIGITS:
        return None
    if scaling.tensor or scaling.eden or scaling.candidates != (1.0,) or scaling.scale_rounding != "nearest_even":
        return None
    if scaling.input_scale or scaling.power_of_two == "log2" or scaling.eps_rule == "inverse":
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
    divides = (scaling.arithmetic == "divide" and scaling.history is None) * (2 if _inverts(scaling) else 1)
    rule = _rule(quantizer, scaling, stored[0], divides)
    return Way(rule, grid, stored[1], ties, masks, _folds(element, scaling), divides == 1)


def multiplier_of(scaling: Scaling) -> float:
    """Return the float32 that scales of a rule are multiplied with after they became powers of two."""
    return float(np.float32(scaling.multiplier))


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
    if isinstance(element, IntFormat):
        steps = max(abs(element.min), abs(element.max)) / element.eps * (2 if element.half_offset else 1)
        return max(int(steps).bit_length(), 1)
    within = element.min_exponent - element.mantissa_bits >= -133 and element.max_exponent <= 127
    return element.mantissa_bits + 1 if within else _DIGITS + 1


def _stored(scale: FloatFormat) -> tuple[int, bytes] | None:
    """Return how scales are rounded to their format: a method and the bytes of a ``struct Grid``."""
    if scale == FP32:
        return -1, _NO_GRID
    grid = grid_of(scale, Rounding(), "saturate")
    return (grid.method, grid.parameters) if grid and grid.method in (MAGIC, BITS, FLUSHING) else None


def _powers(scaling: Scaling) -> bool:
    """Say whether scales are powers of two before they are stored, the multiplier aside."""
    steps = scaling.allowed
    return all(math.frexp(step)[0] == 0.5 for step in steps) if steps else scaling.power_of_two is not None


def _inverts(scaling: Scaling) -> bool:
    """Say whether float32 holds 1 / scale exactly, so that dividing by a scale is multiplying with it."""
    within = all(2.0**-127 <= step <= 2.0**127 for step in scaling.allowed)
    kept = scaling.scale == FP32 or (scaling.scale.mantissa_bits == 0 and scaling.scale.min_exponent >= -127)
    return _powers(scaling) and within and kept and scaling.multiplier == 1


def _folds(element: FloatFormat | IntFormat, scaling: Scaling) -> bool:
    scale, powers = scaling.scale, _powers(scaling)
    if scaling.multiplier != 1:
        return powers and scale == FP32 and not scaling.allowed and scaling.multiplier < 2
    if scale.mantissa_bits == 0 or (powers and scale == FP32):
        return True
    low = element.min_exponent - element.mantissa_bits if isinstance(element, FloatFormat) else -element.fraction_bits
    fits = low + scale.min_exponent - scale.mantissa_bits >= -133
    return fits and _digits(element) + scale.mantissa_bits + 1 <= _DIGITS


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
