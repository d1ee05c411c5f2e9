"""Block scales in kernels (docs/semantics.md, sections 5 to 7)."""

from typing import NamedTuple

import numpy as np
from numpy import float32, float64, int64

from fmtsim.cpu.cast.element import cast_value, floor_log2, power_of_two
from fmtsim.cpu.runtime.jit import bits64, device, float64_of, subroutine
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.spec import FloatFormat, IntFormat

FLOOR, CEIL, RCEIL, EVEN, AMAX = range(5)
DIVIDE, RECIPROCAL, ENCODE, TWO_LEVEL = range(4)
_RULES = {"floor": FLOOR, "ceil": CEIL, "rceil": RCEIL, "even": EVEN, "amax": AMAX}
_ARITHMETIC = {"divide": DIVIDE, "reciprocal": RECIPROCAL, "encode": ENCODE}

FLT_MAX = np.float32(3.4028234663852886e38)
_FLT_MIN = np.float32(1.1754943508222875e-38)
_ONE = np.float32(1)


class Scaling(NamedTuple):
    """How amax becomes a scale, as numbers.

    ``encode_scale`` and ``decode_scale`` are those of the whole tensor in a two-level format, else 1.
    """

    rule: int
    arithmetic: int
    max: np.float32
    reciprocal_max: np.float32
    max_exponent: int
    mantissa_bits: int
    plain: bool
    element_has_nan: bool
    encode_scale: np.float32
    decode_scale: np.float32


def scaling_of(fmt: BlockFormat, tensor_amax: float | None) -> Scaling:
    """Return the numbers of a block format; ``tensor_amax`` is the finite amax that two-level formats need."""
    largest = np.float32(fmt.element.max)
    encode_scale = decode_scale = _ONE
    if tensor_amax is not None:
        with np.errstate(all="ignore"):
            amax = min(np.float32(tensor_amax), FLT_MAX)
            quotient = np.float32(np.float32(fmt.scale.max) * largest) / amax if amax > 0 else _ONE
            encode_scale = min(quotient, FLT_MAX) if quotient > 0 else _ONE
            decode_scale = _ONE / encode_scale
    mantissa = fmt.element.mantissa_bits if isinstance(fmt.element, FloatFormat | IntFormat) else 0
    return Scaling(
        rule=_RULES[fmt.scale_rule],
        arithmetic=TWO_LEVEL if fmt.tensor_scale else _ARITHMETIC[fmt.arithmetic],
        max=largest,
        reciprocal_max=_ONE / largest,
        max_exponent=fmt.element.max_exponent,
        mantissa_bits=mantissa,
        plain=fmt.scale.name == "fp32",
        element_has_nan=fmt.element.has_nan,
        encode_scale=encode_scale,
        decode_scale=decode_scale,
    )


@subroutine
def scale_exponent(amax, p):
    """Return the exponent of a power-of-two scale from a finite float64 amax."""
    if amax == 0.0:
        return int64(-127)
    if p.rule == RCEIL:
        product = float64(float32(min(float32(amax), FLT_MAX) * p.reciprocal_max))
        if product == 0.0:
            return int64(-127)
        exponent = _ceil_log2(product)
    elif p.rule == CEIL:
        exponent = _ceil_log2(amax) - p.max_exponent
    else:
        exponent = floor_log2(amax)
        if p.rule == EVEN and _fraction_of(amax) >= 2.0 - power_of_two(int64(-p.mantissa_bits - 1)):
            exponent += 1
        exponent -= p.max_exponent
    return min(max(exponent, int64(-127)), int64(127))


@device
def _fraction_of(value):
    """Return the significand of a positive finite float64, in [1, 2)."""
    if bits64(value) >> 52 == 0:
        value *= 18014398509481984.0  # 2**54
    return float64_of((bits64(value) & int64((1 << 52) - 1)) | int64(1023) << 52)


@device
def _ceil_log2(value):
    exponent = floor_log2(value)
    return exponent if _fraction_of(value) == 1.0 else exponent + 1


@device
def _to_scale_format(scale, p, scale_element, scale_tables):
    if p.plain:
        return scale
    return float32(cast_value(float64(scale), int64(0), scale_element, scale_tables)[0])


@subroutine
def real_scale(amax, p, scale_element, scale_tables):
    """Return the scale, and what elements are multiplied with (divided by, under DIVIDE), both float32."""
    a = min(float32(amax), FLT_MAX)
    if p.arithmetic == TWO_LEVEL:
        wanted = float32(a * float32(p.encode_scale * p.reciprocal_max))
        scale = _to_scale_format(min(wanted, FLT_MAX), p, scale_element, scale_tables)
        return scale, _reciprocal(float32(scale * p.decode_scale))
    if a == float32(0):
        return _to_scale_format(_ONE, p, scale_element, scale_tables), _ONE
    if p.arithmetic == ENCODE:
        factor = min(float32(p.max / a), FLT_MAX)
        scale = _to_scale_format(_reciprocal(factor), p, scale_element, scale_tables)
        return scale, factor if p.plain else _reciprocal(scale)
    quotient = min(max(float32(a / p.max), _FLT_MIN), FLT_MAX)
    scale = _to_scale_format(quotient, p, scale_element, scale_tables)
    if p.arithmetic == DIVIDE:
        return scale, scale if scale > float32(0) else _FLT_MIN
    return scale, _reciprocal(scale)


@device
def _reciprocal(value):
    if value == float32(0):
        return FLT_MAX
    return min(float32(_ONE / value), FLT_MAX)
