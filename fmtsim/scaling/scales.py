# SPDX-License-Identifier: Apache-2.0
"""From a block's statistic to its scale, and to the factor that its elements meet before they are rounded.

Every operation on real scales is one of float32, rounded to nearest even, in the order written here (the tables are in
docs/semantics.md, sections 5 to 7). What rounds a scale to the format that stores it is handed in: quantisers and the
torch engine share these steps.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fmtsim.formats.block import BlockFormat
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.formats.scaling import Scaling
from fmtsim.support.dispatch import is_recorded
from fmtsim.support.float64 import float64, floor_log2

FLT_MAX: Final = torch.finfo(torch.float32).max
FLT_MIN: Final = torch.finfo(torch.float32).tiny
_MANTISSA: Final = (1 << 23) - 1
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Store = Callable[[Tensor], Tensor]
"""Rounds float32 scales to the format that stores them, saturating."""


class Scales(NamedTuple):
    """Scales of the blocks of a matrix.

    Attributes:
        scale: float32 [outer blocks, inner blocks], in the format that stores them: a value is ``element * scale``.
        factor: float32, likewise: the element is the rounding of ``RN32(x * factor)``, or of ``RN32(x / factor)``.
        divides: Which of the two.
        tensor: float32: the second level of scale, 0-d or, where it is not the tensor's, like scale; or None.
        exponent: int64, where scales are powers of two: the element is the rounding of the exact ``x / 2**exponent``.
        offsets: int32 zero points, or None.
        level_amax: float32, like tensor: the largest magnitude that the second level was made of, or None.
    """

    scale: Tensor
    factor: Tensor
    divides: bool = False
    tensor: Tensor | None = None
    exponent: Tensor | None = None
    offsets: Tensor | None = None
    level_amax: Tensor | None = None


def one_level(a: Tensor, scaling: Scaling, top: float, store: Store, dtype: torch.dtype = torch.float32) -> Scales:
    """Return the scales of blocks with these statistics.

    Args:
        a: float32 [outer blocks, inner blocks], finite, from 0.
        scaling: The rule; its tensor scale, candidates and history are not looked at.
        top: The element format's largest value, for a rule that names none.
        store: See ``Store``.
        dtype: Of the tensor, for a rule that rounds to it.

    A statistic of 0 gives scale 1 (in the format that stores it) and factor 1.
    """
    # 1. the statistic, raised by eps, and what it becomes in the element format
    empty = a == 0
    if scaling.eps_rule == "statistic":
        a = a.clamp(min=scaling.eps)
    elif scaling.eps_rule == "sum":
        a = (a + float32(scaling.eps)).clamp(max=FLT_MAX)
    empty = empty & (a == 0)
    top32 = float32(float32(top if scaling.top is None else scaling.top) * 2.0**-scaling.margin)
    # 2. the scale as a real number, or the r = 1 / s that it is made of
    if scaling.arithmetic in ("encode", "double") and scaling.factor is None:
        # s, and the r = top / a that it is the reciprocal of
        r = (top32 / float64(a)).float() if scaling.arithmetic == "double" else quotient(torch.full_like(a, top32), a)
        r = torch.where(empty, 1.0, r.clamp(max=FLT_MAX))
        if scaling.power_of_two == "log2":
            # 2**floor(log2((1 / a) * top)), each step rounded to the dtype; between 2**-126 and 2**127
            rounded = torch.float32 if dtype == torch.float64 else dtype
            r = (quotient(torch.ones_like(a), a).to(rounded).float() * top32).to(rounded)
            r = torch.where(empty, 1.0, _exp2_log2(r, rounded))
        elif scaling.power_of_two is not None:
            r = torch.where(empty, 1.0, power_of_two(r, up=scaling.power_of_two == "floor"))
        s = reciprocal(r)
        if scaling.multiplier != 1:
            s = s * float32(scaling.multiplier)
            r = reciprocal(s)
    else:
        s, r = _decoding(a, scaling, top32, empty, store), None
    if scaling.allowed:
        steps = torch.tensor(scaling.allowed, dtype=torch.float32, device=s.device)
        s = steps[torch.searchsorted(steps, s.contiguous()).clamp(max=len(steps) - 1)]
    # 3. as it is stored
    is_fp32 = scaling.scale.name == "fp32"
    stored = s if is_fp32 else store(s)
    # 4. what elements meet: the stored scale, r itself, or the reciprocal of the stored scale
    if scaling.arithmetic == "divide":
        clipped = scaling.eps_rule == "inverse"
        divisor = s.clamp(min=scaling.eps) if clipped else torch.where(stored == 0, FLT_MIN, stored)
        return Scales(stored, divisor, divides=True)
    if r is not None and is_fp32 and not scaling.allowed:
        return Scales(stored, r)
    least = scaling.eps if scaling.eps_rule == "inverse" else 0.0
    return Scales(stored, reciprocal(stored.clamp(min=least)))


def exponent_scales(amax: Tensor, fmt: BlockFormat) -> Scales:
    """Return scales that are powers of two by the exact exponents of largest magnitudes, in the operand's dtype."""
    rule, element, (low, high) = fmt.scaling.exponent_rule, fmt.element, fmt.exponents
    top = element.max_exponent
    if rule == "rceil":
        amax, top = (amax.float().clamp(max=FLT_MAX) * float32(1.0 / element.max)).clamp(max=FLT_MAX), 0
    # 1. the exact exponent, and one more where the rule rounds up
    significand, exponent, places = _significands(amax)
    if rule in ("ceil", "rceil"):
        exponent = exponent + (significand != 1 << places).long()
    elif rule == "even":
        mantissa_bits = element.mantissa_bits if isinstance(element, FloatFormat | IntFormat) else 0
        half = 1 << (places - 1 - mantissa_bits) if mantissa_bits < places else 0
        exponent = exponent + (significand >= (2 << places) - half).long()
    # 2. less the element's own, in the range of the scale's format
    exponent = torch.where(amax == 0, low, (exponent - top).clamp(low, high))
    code = torch.where(exponent == -127, 1 << 22, (exponent + 127) << 23)  # a subnormal number, and normal ones
    scale = code.to(torch.int32).view(torch.float32)
    return Scales(scale, scale, exponent=exponent)


def _significands(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return significands from ``2**places`` on, exponents, and places, of numbers that are not negative, in int64."""
    wide = x.dtype == torch.float64
    bits, places, bias = (x.view(torch.int64), 52, 1023) if wide else (x.float().view(torch.int32).long(), 23, 127)
    lifted = (bits >> places).clamp(min=1)
    significand = bits - ((lifted - 1) << places)
    gap = places - floor_log2(significand.clamp(min=1))
    return significand << gap, lifted - bias - gap, places


def range_scales(low: Tensor, high: Tensor, max_code: int) -> Scales:
    """Return the scales and zero points of blocks that reach from ``-low`` to ``high``, both magnitudes."""
    below, above = low.float().clamp(max=FLT_MAX), high.float().clamp(max=FLT_MAX)
    extent = (above + below).clamp(max=FLT_MAX)
    s = quotient(extent, torch.full_like(extent, max_code)).clamp(min=FLT_MIN)
    s = torch.where(extent == 0, 1.0, s)
    zero = torch.round(quotient(below, s)).clamp(0, max_code).to(torch.int32)
    return Scales(s, reciprocal(s), offsets=zero)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """Return ``RN32(a / b)`` of float32 numbers, also in compiled code."""
    return quotient64(a, b) if is_recorded() else torch.div(a, b)


def quotient64(a: Tensor, b: Tensor) -> Tensor:
    """Do what ``quotient`` does by a quotient of float64: compilers for GPUs approximate those of float32.

    Rounding it once more changes nothing: no quotient of numbers of 24 bits lies nearer to the middle of two float32
    numbers, without being it, than float64 tells.
    """
    return (float64(a) / float64(b)).float()


def reciprocal(s: Tensor) -> Tensor:
    """Return ``RN32(1 / s)``, at most the largest float32."""
    return quotient(torch.ones_like(s), s).clamp(max=FLT_MAX)


def power_of_two(s: Tensor, up: bool) -> Tensor:
    """Return the power of two next to positive finite numbers, below or above; numbers below 2**-126 count as that."""
    bits = s.clamp(min=FLT_MIN).view(torch.int32)
    if up:
        bits = torch.clamp(bits + _MANTISSA, max=254 << 23)
    return (bits & ~_MANTISSA).view(torch.float32)


def _exp2_log2(r: Tensor, dtype: torch.dtype, *, up: bool = False) -> Tensor:
    """Return ``2**floor(log2(r))``, or of the ceiling, the logarithm rounded to a dtype; from 2**-126 to 2**127."""
    significand, exponent, _ = _significands(r)
    carries = _carries(dtype, r.device, up)[exponent + 149]
    exponent = torch.where(r == 0, -126, exponent + (significand >= carries).long()).clamp(-126, 127).to(torch.int32)
    return ((exponent + 127) << 23).view(torch.float32)


@lru_cache(maxsize=16)
def _carries(dtype: torch.dtype, device: torch.device, up: bool) -> Tensor:
    """Return for each exponent of float32 numbers the significand from which the integer of log2 is the next one."""

    def carries(significand: int, exponent: int) -> bool:
        logarithm = float(torch.tensor(math.log2(math.ldexp(significand, exponent - 23)), dtype=dtype, device="cpu"))
        return logarithm > exponent if up else logarithm >= exponent + 1

    significands = []
    for exponent in range(-149, 129):
        low, high = 1 << 23, 1 << 24
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if carries(middle, exponent) else (middle + 1, high)
        significands.append(low)
    return torch.tensor(significands, device=device)


@lru_cache(maxsize=256)
def float32(x: float) -> float:
    """Return the nearest float32."""
    return float(torch.tensor(x, dtype=torch.float32, device="cpu"))


def times_float32(s: Tensor, times: float) -> Tensor:
    """Return scales times a candidate, rounded to float32."""
    return s if times == 1 else s * float32(times)


def _decoding(a: Tensor, scaling: Scaling, top: float, empty: Tensor, store: Store) -> Tensor:
    if scaling.power_of_two == "log2":  # statistic, quotient and logarithm are rounded to the scale's format
        s = store(quotient(store(a), torch.full_like(a, top)))
        return torch.where(empty, 1.0, _exp2_log2(s, _DTYPES[scaling.scale.name], up=True))
    if scaling.factor is not None:
        s = a * float32(scaling.factor)
    elif scaling.arithmetic == "multiply":
        s = a * float32(1.0 / top)
    else:
        s = quotient(a, torch.full_like(a, top))
    if scaling.offset:
        s = s + float32(scaling.offset)
    s = s.clamp(min=max(FLT_MIN, scaling.eps if scaling.eps_rule == "scale" else 0.0), max=FLT_MAX)
    if scaling.power_of_two is not None:
        s = power_of_two(s, up=scaling.power_of_two == "ceil")
    if scaling.multiplier != 1:
        s = (s * float32(scaling.multiplier)).clamp(max=FLT_MAX)
    always = bool(scaling.offset) and scaling.factor is not None  # an offset keeps the scale of nothing above zero
    return s if always else torch.where(empty, 1.0, s)
