"""Two levels of scales, as their authors compute them: a float32 scale of the tensor, and a small one a block."""

from typing import Final

import torch
from torch import Tensor

from fmtsim.scaling.scales import Scales, _float32, in_format, reciprocal
from fmtsim.scaling.statistics import FLT_MAX
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.scaling import Scaling

_TORCHAO_LEAST: Final = 2.0**-6  # torchao 36027d8: block scales are never subnormal


def two_levels(a: Tensor, scaling: Scaling, top: float, times: float = 1.0, key: RandomKey | None = None) -> Scales:
    """Return block scales and the scale of the tensor.

    Args:
        a: float32 [outer blocks, inner blocks]: largest magnitudes of blocks.
        scaling: The rule, with ``tensor``.
        top: The element format's largest value, for a rule that names none.
        times: Candidate that block scales are multiplied with before they are stored.
        key: Random words of scales that are rounded stochastically.
    """
    assert scaling.tensor is not None
    m = _float32(top if scaling.top is None else scaling.top)
    c = _float32(scaling.scale.max if scaling.tensor.top is None else scaling.tensor.top)
    whole = a.amax() if a.numel() else a.new_zeros(())
    order = {"te": _te, "torchao": _torchao, "quartet2": _quartet2}[scaling.tensor.order]
    return order(a, whole, m, c, times, scaling, key)


def _te(a: Tensor, whole: Tensor, m: float, c: float, times: float, scaling: Scaling, key: RandomKey | None) -> Scales:
    """Follow docs/semantics.md, section 6."""
    encode = torch.div(torch.full_like(whole, _float32(c * m)), whole).clamp(max=FLT_MAX)
    encode = torch.where((whole == 0) | (encode == 0), 1.0, encode)
    tensor = reciprocal(encode)
    s = a * (encode * _float32(1.0 / m))
    s = s if times == 1 else s * _float32(times)
    stored = in_format(s.clamp(max=FLT_MAX), scaling.scale, scaling.scale_rounding, key)
    return Scales(stored, reciprocal(stored * tensor), tensor=tensor)


def _torchao(
    a: Tensor, whole: Tensor, m: float, c: float, times: float, scaling: Scaling, key: RandomKey | None
) -> Scales:
    tensor = torch.div(whole, torch.full_like(whole, _float32(c * m)))
    tensor = torch.where(tensor == 0, 1.0, tensor)
    s = torch.div(torch.div(a, torch.full_like(a, m)), tensor)
    s = s if times == 1 else s * _float32(times)
    stored = in_format(s.clamp(_TORCHAO_LEAST, c), scaling.scale, scaling.scale_rounding, key)
    return Scales(stored, torch.div(reciprocal(tensor).expand_as(stored), stored), tensor=tensor)


def _quartet2(
    a: Tensor, whole: Tensor, m: float, c: float, times: float, scaling: Scaling, key: RandomKey | None
) -> Scales:
    tensor = torch.div(torch.div(whole, torch.full_like(whole, c)), torch.full_like(whole, m))
    tensor = torch.where(tensor == 0, 1.0, tensor)
    s = torch.div(a, torch.full_like(a, m))
    s = torch.div(s if times == 1 else s * _float32(times), tensor)
    stored = in_format(s, scaling.scale, scaling.scale_rounding, key)
    stored = torch.where(stored == 0, 1.0, stored)
    return Scales(stored, stored * tensor, divides=True, tensor=tensor)
