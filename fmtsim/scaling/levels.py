# SPDX-License-Identifier: Apache-2.0
"""Two levels of scales: those of blocks, and the float32 scale of the tensor, of a row or of a window of blocks.

Libraries make them by different operations of float32; docs/semantics.md, section 6, has the table of orders.
"""

from typing import Final

import torch
from torch import Tensor

from fmtsim.formats.scaling import Scaling
from fmtsim.scaling.blocks import block_sizes, folded_sum, statistic
from fmtsim.scaling.scales import FLT_MAX, FLT_MIN, Scales, Store, float32, quotient, reciprocal, times_float32
from fmtsim.spec.operand import spread
from fmtsim.support.float64 import float64
from fmtsim.support.mufu_tables import approximate_reciprocal

_LEAST_AMAX: Final = 1e-12  # of a row or window in Transformer Engine's recipes
_LEAST_SCALE: Final = {"modelopt": 2.0**-9, "torchao": 2.0**-6}  # of a block, before it is stored
_SCALE_OF_ZERO: Final = 0.125  # compressed-tensors: epsilon of float8_e4m3fn


def tensor_factor(amax: Tensor, scaling: Scaling, top: float) -> Tensor:
    """Return ``1 / tensor scale`` by Transformer Engine's rule: it brings an amax to the top of both levels.

    Args:
        amax: float32, of any shape.
        scaling: A rule with ``tensor``.
        top: As in ``two_levels``.
    """
    m, c = _tops(scaling, top)
    encode = quotient(torch.full_like(amax, float32(c * m)), amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (encode == 0), 1.0, encode)


def two_levels(
    a: Tensor, scaling: Scaling, top: float, store: Store, times: float = 1.0, *, fixed_factor: Tensor | None = None
) -> Scales:  # fmt: skip
    """Return block scales and the float32 scale of the tensor, as their authors compute them.

    Args:
        a: float32 [outer blocks, inner blocks]: largest magnitudes of blocks.
        scaling: The rule, with ``tensor``.
        top: The element format's largest value, for a rule that names none.
        store: See ``Store``.
        times: Candidate that block scales are multiplied with before they are stored.
        fixed_factor: float32, 0-d: ``tensor_factor`` as calibration fixed it; None makes it from a.
    """
    assert scaling.tensor is not None
    (m, c), order = _tops(scaling, top), scaling.tensor.order
    maxima = torch.full_like(a, m)
    # the largest magnitude of the tensor, 0-d, or for each block that of the row or window that it lies in
    if scaling.blocks_per_level == (None, None):
        amax = a.amax() if a.numel() else a.new_zeros(())
    else:
        level_sizes = block_sizes(scaling.blocks_per_level, a.shape)
        amax = spread(statistic(a, scaling.blocks_per_level, "amax"), level_sizes, a.shape)
    # 1. by the factor that brings the amax to the tops of both levels: elements meet a product with a reciprocal
    if order in ("te", "te_quotient", "fouroversix"):
        raised = amax.clamp(min=_LEAST_AMAX) if order == "te_quotient" else amax
        encode = tensor_factor(raised, scaling, top) if fixed_factor is None else fixed_factor
        s = quotient(a, maxima) * encode if order == "fouroversix" else a * (encode * float32(1.0 / m))
        stored, tensor = store(times_float32(s, times).clamp(max=FLT_MAX)), reciprocal(encode)
        if order != "te_quotient":
            return Scales(stored, reciprocal(stored * tensor), tensor=tensor, level_amax=amax)
        factor = torch.where(stored == 0, 0.0, quotient(encode.expand_as(stored), stored).clamp(max=FLT_MAX))
        return Scales(stored, factor, tensor=_or_one(quotient(amax, torch.full_like(amax, float32(c * m)))))
    if order == "trtllm":
        encode = tensor_factor(amax, scaling, top) if fixed_factor is None else fixed_factor
        stored, factor = fast_math_levels(a, maxima, encode, store, times)
        return Scales(stored, factor.clamp(max=FLT_MAX), tensor=reciprocal(encode))
    if order == "compressed_tensors":
        encode = reciprocal(amax.clamp(min=FLT_MIN)) * float32(c * m)  # as torch divides a number by a tensor
        encode = torch.where(encode.isinf(), 1.0, encode)
        stored = store(times_float32(quotient(a, maxima) * encode, times))
        stored = torch.where(stored == 0, _SCALE_OF_ZERO, stored)
        divisor = quotient(stored, encode.expand_as(stored))
        return Scales(stored, torch.where(divisor == 0, FLT_MIN, divisor), divides=True, tensor=reciprocal(encode))
    # 2. by the scale of the tensor, its amax over both tops
    if order == "quartet2":
        tensor = _or_one(quotient(quotient(amax, torch.full_like(amax, c)), torch.full_like(amax, m)))
        stored = store(quotient(times_float32(quotient(a, maxima), times), tensor.expand_as(a)))
        stored = _or_one(stored)
        return Scales(stored, stored * tensor, divides=True, tensor=tensor)
    tensor = _or_one(quotient(amax, torch.full_like(amax, float32(c * m))))
    if order == "modelopt":
        s = _or_one(quotient(a, (tensor * m).expand_as(a)))
        stored = store(times_float32(s, times).clamp(_LEAST_SCALE[order], c))
        divisor = stored * tensor
        return Scales(stored, torch.where(divisor == 0, FLT_MIN, divisor), divides=True, tensor=tensor)
    s = quotient(quotient(a, maxima), tensor.expand_as(a))
    stored = store(times_float32(s, times).clamp(_LEAST_SCALE[order], c))
    factor = quotient(reciprocal(tensor).expand_as(stored), stored).clamp(max=FLT_MAX)
    return Scales(stored, factor, tensor=tensor)


def fast_math_levels(
    a: Tensor, maxima: Tensor, encode: Tensor, store: Store, times: float = 1.0
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return block scales and what elements are multiplied with, as TensorRT-LLM computes them with fast math."""
    s = encode * (a * approximate_reciprocal(maxima))
    stored = store(times_float32(s, times).clamp(max=FLT_MAX))
    return stored, approximate_reciprocal(stored * approximate_reciprocal(encode))


def packed_level(tensor: Tensor, scaling: Scaling) -> Tensor:
    """Return a second level, a number a block, with one number for all blocks that share it; 0-d stays as it is."""
    outer, inner = block_sizes(scaling.blocks_per_level, tensor.shape) if tensor.dim() else (1, 1)
    return tensor[::outer, ::inner].contiguous() if tensor.dim() else tensor


def block_level(tensor: Tensor, scaling: Scaling, blocks: torch.Size) -> Tensor:
    """Undo ``packed_level`` for a number of blocks, outer and inner."""
    return spread(tensor, block_sizes(scaling.blocks_per_level, blocks), blocks) if tensor.dim() else tensor


def errors(
    x: Tensor, q: Tensor, scales: Scales, scaling: Scaling, top: float, height: int, step: float = 1.0
) -> Tensor:
    """Return the errors of blocks by which a rule compares candidates: ``[...]``.

    Args:
        x, q: float32 [outer blocks, inner blocks, elements of a block]: the elements, and what was rounded from them.
        scales: Of the blocks.
        scaling: The rule.
        top: As in ``two_levels``.
        height: Rows of a block.
        step: Float32: what q counts, in the order ``"fouroversix"``.

    Errors are float64 sums of neighbours (``folded_sum``). The order ``"fouroversix"`` has float32: a value is
    ``q * s * amax / (c m)``, a row's errors are added from left to right, and rows as ``folded_sum`` adds.
    """
    s, amax = scales.scale.unsqueeze(-1), scales.level_amax
    if scaling.tensor is None or scaling.tensor.order != "fouroversix":
        tensor = scales.tensor if scales.tensor is None or not scales.tensor.dim() else scales.tensor.unsqueeze(-1)
        exact = float64(q) * s if tensor is None else float64(q) * s * tensor
        off = float64(exact.float()) - float64(x)
        return folded_sum(off.abs() if scaling.metric == "mae" else off * off)
    assert amax is not None
    m, c = _tops(scaling, top)
    y = times_float32(q * s * (amax.unsqueeze(-1) if amax.dim() else amax), step)
    off = quotient(y, torch.full_like(y, float32(c * m))) - x
    off = (off.abs() if scaling.metric == "mae" else off * off).unflatten(-1, (height, -1))
    total = torch.zeros_like(off[..., 0])
    for column in off.unbind(-1):
        total = total + column
    return folded_sum(total)


def _tops(scaling: Scaling, top: float) -> tuple[float, float]:
    """Return what an amax becomes in the element format and in the format of block scales, both float32."""
    assert scaling.tensor is not None
    m, c = scaling.top, scaling.tensor.top
    return float32(top if m is None else m), float32(scaling.scale.max if c is None else c)


def _or_one(s: Tensor) -> Tensor:
    return torch.where(s == 0, 1.0, s)
