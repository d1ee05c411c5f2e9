"""How the largest magnitude of a block becomes its scale (docs/semantics.md, sections 5 to 7)."""

from typing import NamedTuple

import torch

from fmtsim.formats.block import BlockFormat
from fmtsim.formats.scaling import ScaleRule
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.torch_engine import elements, floats
from fmtsim.torch_engine.carry import NEAREST
from fmtsim.torch_engine.reals import (
    FLT_MIN,
    clamped32,
    divide,
    narrow,
    power_of_two,
    round32,
    round32_scalar,
    widen,
)
from fmtsim.torch_engine.storage import LAYOUTS, bits_of, unpack


class Scaling(NamedTuple):
    """Hold the scales of a tensor's blocks and what its elements go through before they are rounded.

    scales: float32 ``[rows, columns]``, what ``EncodedParts`` stores.
    exponent: int64, the elements are divided by ``2**exponent`` exactly; None for real scales.
    multiplier: float64, the elements are multiplied by it and rounded; None for the other two ways.
    divisor: float64, the elements are divided by it and rounded; None for the other two ways.
    tensor_scale: float32, 0-d, of two-level formats, else None.
    offsets: int32 zero points, else None.
    """

    scales: torch.Tensor
    exponent: torch.Tensor | None = None
    multiplier: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


def scale_blocks(amax: torch.Tensor, fmt: BlockFormat) -> Scaling:
    """Return the scaling of blocks whose largest finite magnitudes are ``amax``, in the dtype of the operand."""
    if fmt.power_of_two:
        exponent = _scale_exponents(amax, fmt)
        return Scaling(_stored(power_of_two(exponent)), exponent=exponent)
    a = clamped32(widen(amax))
    if fmt.tensor_scale:
        return _two_level(a, fmt)
    return _one_level(a, fmt)


def scale_ranges(low: torch.Tensor, high: torch.Tensor, element: IntFormat) -> Scaling:
    """Return the scaling with zero points of blocks that reach from ``-low`` to ``high``, both magnitudes."""
    below, above = clamped32(widen(low)), clamped32(widen(high))
    extent = clamped32(above + below)
    largest = float(element.max_code)
    s = round32(divide(extent, largest)).clamp(min=FLT_MIN)
    s = torch.where(extent == 0, 1.0, s)
    zero = torch.round(round32(divide(below, s))).clamp(0, largest).to(torch.int32)
    return Scaling(_stored(s), multiplier=_reciprocal(s), offsets=zero)


def _scale_exponents(amax: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Return the exponents of the power-of-two rules, int64 between -127 and 127."""
    if fmt.scale_rule == "rceil":
        ratio = round32(clamped32(widen(amax)) * round32_scalar(1.0 / fmt.element.max))
        s = _log2(ratio, "ceil", 0)
        empty = (ratio == 0) | _is_zero(amax)
    else:
        mantissa_bits = fmt.element.mantissa_bits if isinstance(fmt.element, FloatFormat | IntFormat) else 0
        s = _log2(amax, fmt.scale_rule, mantissa_bits) - fmt.element.max_exponent
        empty = _is_zero(amax)
    return torch.where(empty, -127, s.clamp(-127, 127))


def _is_zero(x: torch.Tensor) -> torch.Tensor:
    """Say where non-negative elements are zero, by their bits: a subnormal is not."""
    return bits_of(x) == 0


def _log2(x: torch.Tensor, rule: ScaleRule, mantissa_bits: int) -> torch.Tensor:
    """Return the exact floor or ceiling of log2 of positive elements, or the floor after rounding half a place up."""
    parts = unpack(bits_of(x), LAYOUTS[x.dtype], torch.int64, normalise=True)
    if rule == "ceil":
        return parts.exponent + (parts.significand != 1 << parts.precision).to(torch.int64)
    if rule == "even" and mantissa_bits < parts.precision:  # below that the half place cannot carry
        raised = parts.significand + (1 << (parts.precision - mantissa_bits - 1))
        return parts.exponent + (raised >> (parts.precision + 1))
    return parts.exponent


def _one_level(a: torch.Tensor, fmt: BlockFormat) -> Scaling:
    m = round32_scalar(fmt.element.max)
    empty = a == 0
    a = torch.where(empty, 1.0, a)
    if fmt.arithmetic == "encode":
        r0 = clamped32(divide(m, a))
        s = _to_scale(round32(divide(1.0, r0)), fmt.scale)
        multiplier = r0 if _is_float32(fmt.scale) else _reciprocal(s)
    else:
        s = _to_scale(clamped32(divide(a, m)).clamp(min=FLT_MIN), fmt.scale)
        multiplier = _reciprocal(s)
    s = torch.where(empty, _to_scale(torch.ones_like(s), fmt.scale), s)
    if fmt.arithmetic == "divide":
        divisor = torch.where(empty, 1.0, torch.where(s == 0, FLT_MIN, s))
        return Scaling(_stored(s), divisor=divisor)
    return Scaling(_stored(s), multiplier=torch.where(empty, 1.0, multiplier))


def _two_level(a: torch.Tensor, fmt: BlockFormat) -> Scaling:
    """Scale by Transformer Engine's NVFP4 arithmetic, section 6."""
    m, c = round32_scalar(fmt.element.max), round32_scalar(fmt.scale.max)
    largest = a.amax()
    encode = clamped32(divide(round32_scalar(c * m), torch.where(largest == 0, 1.0, largest)))
    encode = torch.where((largest == 0) | (encode == 0), 1.0, encode)
    decode = round32(divide(1.0, encode))
    factor = round32(encode * round32_scalar(1.0 / m))
    s = _to_scale(clamped32(a * factor), fmt.scale)
    multiplier = _reciprocal(round32(s * decode))
    return Scaling(_stored(s), multiplier=multiplier, tensor_scale=_stored(decode))


def _reciprocal(s: torch.Tensor) -> torch.Tensor:
    """Return ``min(RN32(1 / s), FLT_MAX)``; a scale of 0 gives FLT_MAX."""
    return clamped32(divide(1.0, s))


def _to_scale(s: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """Round float64 scales to a scale format, nearest even and saturating; the values stay float64."""
    if _is_float32(fmt):
        return clamped32(s)
    return elements.decode(floats.encode(s, fmt, NEAREST, "saturate"), fmt, torch.float64)


def _is_float32(fmt: FloatFormat) -> bool:
    return fmt.exponent_bits == 8 and fmt.mantissa_bits == 23


def _stored(s: torch.Tensor) -> torch.Tensor:
    return narrow(s, torch.float32)
