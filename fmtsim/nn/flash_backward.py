# SPDX-License-Identifier: Apache-2.0
"""Gradients of quantised attention: four products, each with quantisers of its own or of the forward values."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.gemm.layers.config import Gemm
from fmtsim.gemm.layers.watch import Watchers
from fmtsim.nn.flash import CallKeys, Flash, Heads, product, quantised
from fmtsim.recipes.attention import AttentionConfig
from fmtsim.scaling.cast import rotated
from fmtsim.spec.quantizer import Hadamard, Quantizer


class _Source(NamedTuple):
    """A tensor of the forward pass that a backward product may take: as it was, and as it became.

    Attributes:
        original: float32 ``[heads, rows, inner]``, the product's sums along inner.
        forward: Elements and scales, or values, likewise.
    """

    original: Tensor
    forward: Heads


def flash_gradients(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    factor: float,
    config: AttentionConfig,
    call_keys: CallKeys,
    made: Flash,
    dtype: torch.dtype,
    watchers: Watchers = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in float32.

    Args:
        tensors: float32: do ``[heads, L, dv]``, the gradient of the result, and unrounded q ``[heads, L, d]``, k
            ``[heads, S, d]`` and v ``[heads, S, dv]``.
        factor: What scores are multiplied with.
        config: The definition.
        call_keys: Random numbers, behind those of the forward pass.
        made: The forward pass with its weights.
        dtype: In which units multiply operands in high precision.
        watchers: See the operands that are quantised here, as ``"dv.b"``.
    """
    g, q, k, v = tensors

    def run(name: str, a: Tensor | _Source, b: Tensor | _Source) -> Tensor:
        gemm: Gemm = getattr(config, name)
        sides = zip("ab", (a, b), (gemm.a, gemm.b), strict=True)
        first, second = (
            _operand(f"{name}.{side}", x, by, gemm, call_keys, () if by.format is None else watchers)
            for side, x, by in sides
        )
        return product(first, second, gemm.unit, dtype)

    dv = run("dv", _Source(made.weights.mT, Heads(made.rounded.mT)), g.mT)
    dv = dv if made.v.slope is None else dv * made.v.slope.mT
    dp = run("dp", g, _Source(v, made.v.transposed()))
    ds = made.weights * (dp - (g * made.out).sum(-1, keepdim=True))
    dq = run("dq", ds, _Source(k.mT, made.k.transposed())) * factor
    dk = run("dk", ds.mT, _Source(q.mT, made.q.transposed())) * factor
    dq = _back(dq, made.q.slope, config.q, config.dq.b, call_keys)
    return dq, _back(dk, made.k.slope, config.k, config.dk.b, call_keys), dv


def _operand(
    name: str, x: Tensor | _Source, quantizer: Quantizer, gemm: Gemm, call_keys: CallKeys, watchers: Watchers
) -> Heads:
    """Return an operand along the sums of its product."""
    if isinstance(x, Tensor):
        t = x
    elif quantizer.source == "forward":
        return x.forward
    else:
        t = x.original if quantizer.source == "original" else x.forward.values()
    draws = partial(call_keys.draws, backward=True)
    return quantised(name, t.contiguous(), quantizer, gemm.unit is not None, draws, watchers)


def _back(y: Tensor, slope: Tensor | None, quantizer: Quantizer, other: Quantizer, call_keys: CallKeys) -> Tensor:
    """Turn the gradient of a rounded, rotated operand into that of the tensor itself.

    Args:
        y: The product.
        slope: Of the rounding.
        quantizer: What made the operand.
        other: Quantiser of the product's second operand; where it is made of the original, nothing is rotated.
        call_keys: Give the signs.
    """
    rotated_forward = other.source != "original"
    if slope is not None and rotated_forward:
        y = y * slope
    for transform in reversed(quantizer.transforms if rotated_forward else ()):
        if isinstance(transform, Hadamard):
            shape = y.shape
            y = rotated(y.reshape(-1, shape[-1]), transform, call_keys.signs, inverse=True).reshape(shape)
    return y
