"""Gradients of quantised attention: four products, each with quantisers of its own or of the forward values."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from fmtsim.errors import ArgumentError
from fmtsim.gemm.layers.config import Gemm
from fmtsim.gemm.layers.passes import Observer
from fmtsim.nn.flash import CallKeys, Flash, Heads, See, product, quantised, seen
from fmtsim.recipes.attention import AttentionConfig
from fmtsim.scaling.transforms import rotated
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.transform import Hadamard


class _Source(NamedTuple):
    """A tensor of the forward pass that a backward product may take: as it was, and as it became.

    Attributes:
        original: float32 ``[heads, rows, inner]``, the product's sums along inner.
        forward: Elements and scales, likewise.
        quantizer: What made them.
        coded: Whether they are elements that a unit takes.
    """

    original: Tensor
    forward: Heads
    quantizer: Quantizer
    coded: bool


def flash_gradients(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    factor: float,
    config: AttentionConfig,
    call_keys: CallKeys,
    made: Flash,
    observer: Observer | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in float32.

    Args:
        tensors: float32: do ``[heads, L, dv]``, the gradient of the result, and unrounded q ``[heads, L, d]``, k
            ``[heads, S, d]`` and v ``[heads, S, dv]``.
        factor: What scores are multiplied with.
        config: The definition.
        call_keys: Random numbers, behind those of the forward pass.
        made: The forward pass with its weights.
        observer: Sees the operands that are quantised here, as ``"dv.b"``.
    """
    g, q, k, v = tensors
    coded = config.unit is not None
    weights = _Source(made.weights.mT, Heads(made.rounded.mT, None), config.p, False)
    dv = _run("dv", config.dv, (weights, g.mT), call_keys, observer)
    dv = dv if made.v.slope is None else dv * made.v.slope.mT
    values = _Source(v, made.v.transposed(), config.v, coded)
    dp = _run("dp", config.dp, (g, values), call_keys, observer)
    ds = made.weights * (dp - (g * made.out).sum(-1, keepdim=True))
    keys = _Source(k.mT, made.k.transposed(), config.k, coded)
    dq = _run("dq", config.dq, (ds, keys), call_keys, observer) * factor
    queries = _Source(q.mT, made.q.transposed(), config.q, coded)
    dk = _run("dk", config.dk, (ds.mT, queries), call_keys, observer) * factor
    dq = _back(dq, made.q.slope, config.q, config.dq.b, call_keys)
    return dq, _back(dk, made.k.slope, config.k, config.dk.b, call_keys), dv


def _run(
    name: str,
    gemm: Gemm,
    sides: tuple[Tensor | _Source, Tensor | _Source],
    call_keys: CallKeys,
    observer: Observer | None,
) -> Tensor:
    """Return ``a b^T`` of each head."""
    operands = [
        _operand(
            f"{name}.{side}",
            x,
            quantizer,
            gemm,
            call_keys,
            seen(observer if quantizer.format is not None else None, f"{name}.{side}"),
        )
        for side, x, quantizer in zip("ab", sides, (gemm.a, gemm.b), strict=True)
    ]
    (a, first), (b, second) = operands
    return product(a, b, (first, second), gemm.unit)


def _operand(
    where: str, x: Tensor | _Source, quantizer: Quantizer, gemm: Gemm, call_keys: CallKeys, see: See | None
) -> tuple[Heads, Quantizer]:
    """Return an operand along the sums of its product, and what made it."""
    draws = partial(call_keys.draws, backward=True)
    if isinstance(x, Tensor):
        return quantised(x.contiguous(), quantizer, gemm.unit, draws, see), quantizer
    if quantizer.source == "original":
        return quantised(x.original.contiguous(), quantizer, gemm.unit, draws, see), quantizer
    values = x.forward.values()
    if quantizer.source == "requantised":
        return quantised(values.contiguous(), quantizer, gemm.unit, draws, see), quantizer
    if gemm.unit is None:
        return Heads(values, None), quantizer
    if not x.coded:
        raise ArgumentError(
            f"AttentionConfig {where} takes forward values that are no elements of a unit (weights are normalised "
            f"afterwards, and forward products without unit= have none); give {where} a quantiser of its own, or leave "
            f"unit= out of {where[:2]}"
        )
    return x.forward, x.quantizer


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
