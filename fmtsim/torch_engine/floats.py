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

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmtsim.formats.block import FP32
from fmtsim.formats.element import FloatFormat, Overflow
from fmtsim.rounding.modes import RULES, Mode, Rounding
from fmtsim.support.float64 import floor_log2
from fmtsim.support.float64 import from_bits as float64_of

NEAREST = Rounding()

DEEPEST = 61
"""Most bits below the last place that ``round_off`` takes; ``jam`` folds deeper ones into the lowest."""


def jam(significand: torch.Tensor, excess: torch.Tensor) -> torch.Tensor:
    """Shift right by ``excess`` bits and keep in the lowest bit whether any bit that left was set.

    No decision of ``round_off`` changes as long as the lowest bit stays below the last random bit and below the half.
    """
    excess = excess.clamp(0, 62)
    shifted = significand >> excess
    return shifted | ((shifted << excess) != significand).to(significand.dtype)


def round_off(
    significand: torch.Tensor,
    shift: torch.Tensor,
    negative: torch.Tensor,
    rounding: Rounding,
    words: torch.Tensor | None,
    parity: torch.Tensor | None = None,
) -> torch.Tensor:
    """Divide non-negative integers by ``2**shift`` and round the quotient to an integer.

    Args:
        significand: The magnitudes, int32 or int64; ``significand + 2**shift`` must not overflow.
        shift: Bits to drop, same dtype, broadcastable, at most 30 (int32) or ``DEEPEST`` (int64, and int32 of
            stochastic rounding, whose numbers are below 2**30).
        negative: Where the number is negative: up and down look at it.
        rounding: The mode.
        words: The random integers w of stochastic rounding, int64, else None.
        parity: Added to the quotient before asking whether its code is odd.
    """
    if rounding.mode == "stochastic":
        assert words is not None
        near = shift.clamp(max=30) if significand.dtype == torch.int32 else shift
        quotient = significand >> near
        # d = rest / 2**places is the discarded fraction, whose bits the words are added to
        rest, places = (significand - (quotient << near)).to(torch.int64), shift.to(torch.int64)
        bits = rounding.bits + (rounding.variant == "b")
        dropped = (places - bits).clamp(min=0)
        fraction = (rest >> dropped) << (bits - places).clamp(min=0)  # floor(d * 2**bits)
        if rounding.variant == "b":
            words = 2 * words + 1
        elif rounding.variant == "c":
            tail = rest & ((1 << dropped) - 1)
            half = (1 << dropped) >> 1  # 0 where nothing was dropped, and then so is the tail
            up = (tail > half) | ((tail == half) & (dropped > 0) & ((fraction & 1) == 1))
            fraction = fraction + up.to(fraction.dtype)
        return quotient + (fraction + words >= (1 << bits)).to(quotient.dtype)
    if rounding.mode == "toward_zero":
        return significand >> shift
    below = (1 << shift) - 1  # all dropped bits set: adding it moves every inexact number up, and no exact one

    def odd() -> torch.Tensor:
        quotient = significand >> shift
        return (quotient if parity is None else quotient + parity) & 1

    if rounding.mode == "nearest_even":
        bias = torch.minimum((below >> 1) + odd(), below)  # the minimum keeps shift 0 exact
    else:  # what moves a magnitude never, above the half, from the half on, always
        addends = (lambda: 0, lambda: below >> 1, lambda: (below + 1) >> 1, lambda: below)
        bias = by_threshold(rounding.mode, lambda threshold: addends[threshold](), lambda: odd() == 1, negative)
    return (significand + bias) >> shift


def by_threshold(
    mode: Mode, of: Callable[[int], Any], odd: Callable[[], torch.Tensor], negative: torch.Tensor | None
) -> Any:
    """Return for each element ``of(t)``, where t is the threshold from which on a mode moves its magnitude.

    Args:
        mode: A deterministic mode.
        of: What is wanted for a threshold of ``Rule.threshold``: a tensor, or a number for all elements.
        odd: Returns where the candidate is odd; called only for modes whose rule has parity.
        negative: Where numbers are negative; None is enough for modes whose rule has no sign.
    """
    rule = RULES[mode]

    def by_sign(odd: bool) -> Any:
        plus, minus = rule.threshold(odd, False), rule.threshold(odd, True)
        return of(plus) if plus == minus else torch.where(negative, of(minus), of(plus))  # type: ignore[arg-type]

    return torch.where(odd(), by_sign(True), by_sign(False)) if rule.looks_at_parity else by_sign(False)


FP64 = FloatFormat(name="fp64", exponent_bits=11, mantissa_bits=52, source="IEEE 754-2019, 3.6")
BF16 = FloatFormat(name="bf16", exponent_bits=8, mantissa_bits=7, source="IEEE 754-2019 rules on the top half of fp32")
FP16 = FloatFormat(name="fp16", exponent_bits=5, mantissa_bits=10, source="IEEE 754-2019, 3.6")

LAYOUTS: dict[torch.dtype, FloatFormat] = {
    torch.float16: FP16,
    torch.bfloat16: BF16,
    torch.float32: FP32,
    torch.float64: FP64,
}
"""What the bits of a tensor of each supported dtype mean."""

BIT_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

_ZERO_EXPONENT = -4096  # below every exponent in use, so that zero never looks like a normal number


class Parts(NamedTuple):
    """Hold the real numbers behind codes: ``|x| = significand * 2**(exponent - precision)``.

    ``negative``, ``infinite`` and ``nan`` are boolean, ``significand`` and ``exponent`` integer tensors of one dtype;
    where ``infinite`` or ``nan`` holds, the two numbers mean nothing.
    """

    negative: torch.Tensor
    significand: torch.Tensor
    exponent: torch.Tensor
    precision: int
    infinite: torch.Tensor
    nan: torch.Tensor


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """View a float tensor as signed integers of its own width."""
    return x.view(BIT_DTYPES[x.dtype])


def from_bits(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn codes of a dtype's layout, in any integer dtype, into a float tensor."""
    codes = codes.to(BIT_DTYPES[dtype])
    return float64_of(codes) if dtype == torch.float64 else codes.view(dtype)


def unpack(codes: torch.Tensor, fmt: FloatFormat, dtype: torch.dtype, normalise: bool) -> Parts:
    """Split codes into sign, significand and exponent.

    Args:
        codes: Codes in any integer dtype of at least the format's width; bits above the format's are ignored.
        fmt: Their format.
        dtype: torch.int32 or torch.int64, of the results.
        normalise: Shift the significands of subnormals up to ``2**precision`` and more; without it subnormals keep the
            smallest normal's exponent. Zero has significand 0 and, when normalised, an exponent below all others.
    """
    codes = codes.to(dtype)
    if not fmt.signed:
        negative = torch.zeros_like(codes, dtype=torch.bool)
    elif fmt.bits == 8 * codes.element_size():
        negative = codes < 0
    else:
        negative = (codes & fmt.sign_mask) != 0
    magnitude = codes & fmt.magnitude_mask
    # where codes are infinite and where they are NaN
    nothing = torch.zeros_like(magnitude, dtype=torch.bool)
    infinite = nothing if fmt.inf_code is None else magnitude == fmt.inf_code
    if fmt.nan == "none":
        nan = nothing
    elif fmt.nan == "negative_zero":
        nan = (codes & (fmt.sign_mask | fmt.magnitude_mask)) == fmt.sign_mask
    else:
        nan = magnitude > (fmt.max_code if fmt.inf_code is None else fmt.inf_code)
    field = magnitude >> fmt.mantissa_bits
    if not fmt.has_zero:  # no mantissa either: every code is a power of two
        exponent = field - fmt.exponent_bias
        return Parts(negative, torch.ones_like(field), exponent, 0, infinite, nan)
    lifted = field.clamp(min=1)
    significand = magnitude - ((lifted - 1) << fmt.mantissa_bits)
    if not fmt.has_subnormals:
        significand = torch.where(field == 0, 0, significand)
    exponent = lifted - fmt.exponent_bias
    if normalise:
        gap = fmt.mantissa_bits - floor_log2(significand.clamp(min=1))
        significand, exponent = significand << gap, torch.where(significand == 0, _ZERO_EXPONENT, exponent - gap)
    return Parts(negative, significand, exponent, fmt.mantissa_bits, infinite, nan)


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
    # int32 where no step can leave it, else int64
    narrow = source.mantissa_bits <= 23 and source.bits <= 32
    narrow = narrow and target.mantissa_bits <= 23 and target.exponent_bits + target.mantissa_bits <= 28
    dtype = torch.int32 if narrow else torch.int64
    # 1. sign, significand and exponent
    flushed_early = not target.has_subnormals and target.min_exponent <= source.min_exponent
    normalise = exponent is not None or target.min_exponent < source.min_exponent or flushed_early
    parts = unpack(codes, source, dtype, normalise)
    if exponent is not None:
        parts = parts._replace(exponent=parts.exponent - exponent.to(dtype))
    # 2. the bits below the last place
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
    # 3. and 4. the magnitude's code as if the exponent field had no end
    parity = None
    if mantissa_bits == 0:
        parity = field if target.has_zero else field + 1
    quotient = round_off(significand, shift, parts.negative, rounding, words, parity)
    code = (field << mantissa_bits) + quotient
    if not target.has_zero:
        magnitude = (code - 1).clamp(min=0)
    else:
        magnitude = code if target.has_subnormals else torch.where(flushed, quotient << mantissa_bits, code)
    # 5. the overflow rule: the magnitudes, and where the result is NaN; then sign and NaN
    largest, nan = target.max_code, parts.nan
    if overflow == "saturate":
        magnitude = torch.where(parts.infinite, largest, magnitude.clamp(max=largest))
    else:
        over = magnitude > largest
        magnitude = magnitude.clamp(max=largest)
        leaves = parts.infinite | (over & leaves_range(parts.negative, rounding))
        if target.inf_code is not None:
            magnitude = torch.where(leaves, target.inf_code, magnitude)
        else:  # in a format without NaN either, NaN means the largest value; the sign is put back below
            magnitude = torch.where(parts.infinite, largest, magnitude)
            nan = nan | leaves if target.has_nan else nan
        if not target.signed:
            nonzero = parts.infinite | (parts.significand != 0)
            nan = nan | (parts.negative & nonzero) if target.has_nan else nan
    negative = parts.negative
    if not target.signed:
        code = torch.where(negative, 0, magnitude)
    else:
        if not target.has_negative_zero:
            negative = negative & (magnitude != 0)
        sign = target.sign_mask if target.bits < 64 else -(1 << 63)
        code = torch.where(negative, magnitude | sign, magnitude)
    return torch.where(nan, target.max_code if target.nan_code is None else target.nan_code, code)


def leaves_range(negative: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return True where a finite value beyond the largest becomes an infinity under the IEEE rule."""
    plus, minus = (rounding.rule.leaves_range(sign) for sign in (False, True))
    return torch.full_like(negative, plus) if plus == minus else negative == minus
