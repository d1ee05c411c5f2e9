"""From a block's statistic to its scale, and to the number that its elements meet before they are rounded.

Every operation is one of float32, rounded to nearest even, in the order written here (the table is in
docs/semantics.md, section 5).
"""

from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fmtsim.formats.block import FP32
from fmtsim.formats.spec import FloatFormat
from fmtsim.quantize import quantize
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.statistics import FLT_MAX
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.quantizer import scaling_for
from fmtsim.spec.scaling import Scaling

FLT_MIN: Final = torch.finfo(torch.float32).tiny
_MANTISSA: Final = (1 << 23) - 1


class Scales(NamedTuple):
    """Scales of the blocks of a matrix.

    Attributes:
        scale: float32 [outer blocks, inner blocks], in the format that stores them: a value is ``element * scale``.
        factor: float32, likewise: the element is the rounding of ``RN32(x * factor)``, or of ``RN32(x / factor)``.
        divides: Which of the two.
        tensor: float32, 0-d: the second level of scale, or None.
    """

    scale: Tensor
    factor: Tensor
    divides: bool = False
    tensor: Tensor | None = None


def scales(
    a: Tensor, scaling: Scaling, top: float, key: RandomKey | None = None, dtype: torch.dtype = torch.float32
) -> Scales:
    """Return the scales of blocks with these statistics.

    Args:
        a: float32 [outer blocks, inner blocks], finite, from 0.
        scaling: The rule; its tensor scale, candidates and history are not looked at.
        top: The element format's largest value, for a rule that names none.
        key: Random words of a scale that is rounded stochastically.
        dtype: Of the tensor, for a rule that rounds to it.

    A statistic of 0 gives scale 1 (in the format that stores it) and factor 1.
    """
    scaling = scaling_for(scaling, dtype)
    empty = a == 0
    a = _raised(a, scaling)
    empty = empty & (a == 0)
    top32 = _float32(_float32(top if scaling.top is None else scaling.top) * 2.0**-scaling.margin)
    if scaling.arithmetic in ("encode", "double") and scaling.factor is None:
        s, r = _encoding(a, scaling, top32, empty, dtype)
    else:
        s, r = _decoding(a, scaling, top32, empty), None
    stored = store(s, scaling, key)
    if scaling.arithmetic == "divide":
        return Scales(stored, torch.where(stored == 0, FLT_MIN, stored), divides=True)
    exact = r is not None and scaling.scale == FP32 and not scaling.allowed
    least = scaling.eps if scaling.eps_rule == "inverse" else 0.0
    return Scales(stored, r if exact and r is not None else reciprocal(stored.clamp(min=least)))


def store(s: Tensor, scaling: Scaling, key: RandomKey | None = None) -> Tensor:
    """Return scales as the rule stores them: the least allowed one that is not below, then in the scale's format."""
    if scaling.allowed:
        steps = torch.tensor(scaling.allowed, dtype=torch.float32, device=s.device)
        s = steps[torch.searchsorted(steps, s.contiguous()).clamp(max=len(steps) - 1)]
    return s if scaling.scale == FP32 else in_format(s, scaling.scale, scaling.scale_rounding, key)


def in_format(s: Tensor, fmt: FloatFormat, rounding: str = "nearest_even", key: RandomKey | None = None) -> Tensor:
    """Round scales to a format, saturating."""
    mode = Rounding(mode=rounding)  # type: ignore[arg-type]  # the record has checked it
    return quantize(s, fmt, rounding=mode, overflow="saturate", generator=key, out_dtype=torch.float32)


def reciprocal(s: Tensor) -> Tensor:
    """Return ``RN32(1 / s)``, at most the largest float32."""
    return torch.div(torch.ones_like(s), s).clamp(max=FLT_MAX)


def power_of_two(s: Tensor, up: bool) -> Tensor:
    """Return the power of two next to positive finite numbers, below or above; numbers below 2**-126 count as that."""
    bits = s.clamp(min=FLT_MIN).view(torch.int32)
    if up:
        bits = torch.clamp(bits + _MANTISSA, max=254 << 23)
    return (bits & ~_MANTISSA).view(torch.float32)


def _power_by_log2(a: Tensor, top: float, dtype: torch.dtype) -> Tensor:
    """Return ``2**floor(log2((1 / a) * top))``, each step rounded to a dtype; between 2**-126 and 2**127."""
    dtype = torch.float32 if dtype == torch.float64 else dtype
    r = (torch.div(torch.ones_like(a), a).to(dtype).float() * top).to(dtype)
    logarithm = r.double().log2().to(dtype)
    exponent = logarithm.float().floor().clamp(-126, 127).to(torch.int32)
    return ((exponent + 127) << 23).view(torch.float32)


def _raised(a: Tensor, scaling: Scaling) -> Tensor:
    if scaling.eps_rule == "statistic":
        return a.clamp(min=scaling.eps)
    return (a + _float32(scaling.eps)).clamp(max=FLT_MAX) if scaling.eps_rule == "sum" else a


def _encoding(a: Tensor, scaling: Scaling, top: float, empty: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return s and the r = top / a that it is the reciprocal of."""
    r = (top / a.double()).float() if scaling.arithmetic == "double" else torch.div(torch.full_like(a, top), a)
    r = torch.where(empty, 1.0, r.clamp(max=FLT_MAX))
    if scaling.power_of_two == "log2":
        r = torch.where(empty, 1.0, _power_by_log2(a, top, dtype))
    elif scaling.power_of_two is not None:
        r = torch.where(empty, 1.0, power_of_two(r, up=scaling.power_of_two == "floor"))
    s = reciprocal(r)
    if scaling.multiplier != 1:
        s = s * _float32(scaling.multiplier)
        r = reciprocal(s)
    return s, r


def _decoding(a: Tensor, scaling: Scaling, top: float, empty: Tensor) -> Tensor:
    if scaling.factor is not None:
        s = a * _float32(scaling.factor)
    elif scaling.arithmetic == "multiply":
        s = a * _float32(1.0 / top)
    else:
        s = torch.div(a, torch.full_like(a, top))
    if scaling.offset:
        s = s + _float32(scaling.offset)
    s = s.clamp(min=max(FLT_MIN, scaling.eps if scaling.eps_rule == "scale" else 0.0), max=FLT_MAX)
    if scaling.power_of_two is not None:
        s = power_of_two(s, up=scaling.power_of_two == "ceil")
    if scaling.multiplier != 1:
        s = (s * _float32(scaling.multiplier)).clamp(max=FLT_MAX)
    always = bool(scaling.offset) and scaling.factor is not None  # an offset keeps the scale of nothing above zero
    return s if always else torch.where(empty, 1.0, s)


@lru_cache(maxsize=256)
def _float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).float())
