# SPDX-License-Identifier: Apache-2.0
"""Conversion between floating-point formats on bit patterns (docs/semantics.md, sections 1 and 2).

A tensor of a torch dtype is itself a tensor of codes, of the layout of its dtype. So one function does everything:
rounding to a format, decoding, and the final cast to the output dtype are conversions between two records.

Steps of ``convert``, for a target with M mantissa bits and smallest normal exponent emin::

    1. sign, significand, e     |x| = significand * 2**(e - P); an exponent argument s turns e into e - s
    2. shift = P - M + max(emin - e, 0)      bits below the last place (P + emin - e where subnormals are flushed)
    3. n = significand / 2**shift, rounded by the mode
    4. code = (max(e, emin) - emin) * 2**M + n      the carry of n = 2**(M + 1) runs into the exponent field
    5. overflow, then the sign, then NaN
"""

import torch

from fmtsim.engines.torch_engine.carry import DEEPEST, jam, round_off
from fmtsim.engines.torch_engine.storage import LAYOUTS, Parts, bits_of, unpack
from fmtsim.formats.spec import FloatFormat, Overflow
from fmtsim.rounding.modes import Rounding


def encode(
    x: torch.Tensor,
    fmt: FloatFormat,
    rounding: Rounding,
    overflow: Overflow,
    words: torch.Tensor | None = None,
    exponent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round float16, bfloat16, float32 or float64 elements to codes of a format; arguments as in ``convert``."""
    return convert(bits_of(x), LAYOUTS[x.dtype], fmt, rounding, overflow, words, exponent)


def convert(
    codes: torch.Tensor,
    source: FloatFormat,
    target: FloatFormat,
    rounding: Rounding,
    overflow: Overflow,
    words: torch.Tensor | None = None,
    exponent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round the values of codes to another format, once.

    Args:
        codes: Codes of ``source`` in an integer dtype that holds them; a sign-extended dtype is fine.
        source: Their format.
        target: The format of the result.
        rounding: How values are rounded.
        overflow: What happens beyond the largest value.
        words: Random integers of codes' shape, int64, for stochastic rounding.
        exponent: int tensor s, broadcastable: the values are divided by ``2**s`` before rounding, exactly.

    Returns:
        Codes of ``target`` in int32 or int64, non-negative unless the format has 64 bits. NaN gives ``nan_code``, or
        the code of the largest value in a format without NaN.
    """
    dtype = _working_dtype(source, target)
    flushed_early = not target.has_subnormals and target.min_exponent <= source.min_exponent
    normalise = exponent is not None or target.min_exponent < source.min_exponent or flushed_early
    parts = unpack(codes, source, dtype, normalise)
    if exponent is not None:
        parts = parts._replace(exponent=parts.exponent - exponent.to(dtype))
    magnitude = _round(parts, target, rounding, words)
    magnitude, nan = _limit(magnitude, parts, target, rounding, overflow)
    return _finish(magnitude, parts.negative, nan, target)


def _working_dtype(source: FloatFormat, target: FloatFormat) -> torch.dtype:
    """Return int32 where no step can leave it, else int64."""
    narrow = source.mantissa_bits <= 23 and source.bits <= 32
    narrow = narrow and target.mantissa_bits <= 23 and target.exponent_bits + target.mantissa_bits <= 28
    return torch.int32 if narrow else torch.int64


def _round(parts: Parts, target: FloatFormat, rounding: Rounding, words: torch.Tensor | None) -> torch.Tensor:
    """Return the magnitude's code as if the exponent field had no end, steps 2 to 4."""
    mantissa_bits, emin = target.mantissa_bits, target.min_exponent
    precision = max(parts.precision, mantissa_bits)
    significand = (
        parts.significand << (precision - parts.precision) if precision > parts.precision else parts.significand
    )
    exponent = parts.exponent.clamp(max=target.max_exponent + 1)  # further up nothing changes: it is beyond the largest
    deficit = (emin - exponent).clamp(min=0)
    shift = deficit + (precision - mantissa_bits)
    if not target.has_subnormals:
        flushed = deficit > 0
        shift = torch.where(flushed, deficit + precision, shift)
    field = (exponent - emin).clamp(min=0)
    if rounding.mode == "stochastic":
        if significand.dtype == torch.int64:  # of int32 nothing reaches so deep that random words see it
            significand = jam(significand, shift - DEEPEST)
        shift = shift.clamp(max=DEEPEST)
    else:
        shift = shift.clamp(max=precision + 2)  # deeper, the fraction is below 1/2 and not 0 either way
    parity = None
    if mantissa_bits == 0:
        parity = field if target.has_zero else field + 1
    quotient = round_off(significand, shift, parts.negative, rounding, words, parity)
    code = (field << mantissa_bits) + quotient
    if not target.has_zero:
        return (code - 1).clamp(min=0)
    return code if target.has_subnormals else torch.where(flushed, quotient << mantissa_bits, code)


def _limit(
    magnitude: torch.Tensor, parts: Parts, target: FloatFormat, rounding: Rounding, overflow: Overflow
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the overflow rule; return the magnitudes and where the result is NaN."""
    largest, nan = target.max_code, parts.nan
    if overflow == "saturate":
        return torch.where(parts.infinite, largest, magnitude.clamp(max=largest)), nan
    over = magnitude > largest
    magnitude = magnitude.clamp(max=largest)
    leaves = parts.infinite | (over & leaves_range(parts.negative, rounding))
    if target.inf_code is not None:
        magnitude = torch.where(leaves, target.inf_code, magnitude)
    else:  # in a format without NaN either, NaN means the largest value; the sign is put back in _finish
        magnitude = torch.where(parts.infinite, largest, magnitude)
        nan = nan | leaves if target.has_nan else nan
    if not target.signed:
        nonzero = parts.infinite | (parts.significand != 0)
        nan = nan | (parts.negative & nonzero) if target.has_nan else nan
    return magnitude, nan


def leaves_range(negative: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return True where a finite value beyond the largest becomes an infinity under the IEEE rule."""
    plus, minus = (rounding.rule.leaves_range(sign) for sign in (False, True))
    return torch.full_like(negative, plus) if plus == minus else negative == minus


def _finish(magnitude: torch.Tensor, negative: torch.Tensor, nan: torch.Tensor, target: FloatFormat) -> torch.Tensor:
    """Put sign and NaN onto the magnitudes."""
    if not target.signed:
        code = torch.where(negative, 0, magnitude)
    else:
        if not target.has_negative_zero:
            negative = negative & (magnitude != 0)
        sign = target.sign_mask if target.bits < 64 else -(1 << 63)
        code = torch.where(negative, magnitude | sign, magnitude)
    return torch.where(nan, target.max_code if target.nan_code is None else target.nan_code, code)
