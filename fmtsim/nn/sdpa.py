"""Attention whose two products have quantised operands, block by block, as FlashAttention-3 runs it in FP8."""

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError, DtypeError
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.choice import draw_keys
from fmtsim.gemm.coding import holder
from fmtsim.gemm.matmul import bmm
from fmtsim.gemm.operand import Draws, Operand
from fmtsim.gemm.prepare import prepare
from fmtsim.gemm.streams import Generator
from fmtsim.ops import RandomKey
from fmtsim.recipes.spec import AttentionConfig
from fmtsim.scaling.cast import spread
from fmtsim.scaling.quantizer import Quantizer
from fmtsim.scaling.scale import Scaling
from fmtsim.scaling.transform import Hadamard

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LOG2E: Final = 1.4426950408889634


def flash_attention_3(
    *, unit: str | None = "hopper.wgmma", rotate: bool = True, blocks: bool = True
) -> AttentionConfig:
    """Return the FP8 attention of FlashAttention-3 (Shah et al., arXiv:2407.08608, section 3.3).

    Args:
        unit: The matrix unit of both products; None multiplies in float32.
        rotate: Incoherent processing: random signs and a Hadamard matrix over q and k.
        blocks: A scale for every 128 queries and keys; else one a head, as the released kernels take them.
    """
    e4m3 = get_format("e4m3")
    across, along = (Scaling(block=(128, None)), Scaling(block=(None, 128))) if blocks else (Scaling(), Scaling())
    turn = (Hadamard(size=None, signs="random"),) if rotate else ()
    qk = Quantizer(format=e4m3, scaling=across, transforms=turn)
    v = Quantizer(format=e4m3, scaling=along)
    return AttentionConfig(q=qk, k=qk, v=v, p=Quantizer(format=e4m3), offset=8, unit=unit)


def quantised_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: AttentionConfig,
    generator: Generator = None,
) -> Tensor:
    """Compute scaled dot product attention with quantised operands; arguments as in torch.nn.functional.

    For each head, with q, k and v quantised once (blocks of q and k along the features, of v along the keys; random
    signs of q and k are the same in all heads) and keys taken ``config.columns`` at a time, the last ones first:

    1. ``S = q k^T`` of the elements, times the scales of k, then of q; ``t = S * RN32(scale * log2(e))``, or
       ``(S * scale + mask) * log2(e)`` under a mask of numbers.
    2. ``m`` becomes the larger of itself and the rows' maxima of t, and what there is so far shrinks by
       ``2^(old m - m)``.
    3. ``P = 2^(t - (m - offset))``, at most ``2^offset``; l grows by the sum of P's row, unrounded.
    4. P is quantised (all heads of the block as one matrix), and ``P v`` of the elements, a chain from zero, times the
       scales of v, is added to the output in float32.

    The output is what is added up, over l. Everything outside the unit is float32; sums of rows, 2^x and, without a
    unit, products have the device's last bits.

    Args:
        query: ``[..., L, d]``, float16, bfloat16, float32 or float64 (computed in float32).
        key: ``[..., S, d]``.
        value: ``[..., S, dv]``.
        attn_mask: Boolean (True: takes part) or a number that is added to the scaled scores; broadcasts to
            ``[..., L, S]``.
        dropout_p: Zero; there is none under quantisation.
        is_causal: Query i sees keys up to i.
        scale: Of the scores, None for ``d ** -0.5``.
        enable_gqa: Fewer heads of key and value than of query.
        config: Quantisers, blocks, offset and unit.
        generator: Keys of random signs and stochastic rounding: None draws from torch's default generator, an int
            fixes them.

    Returns:
        ``[..., L, dv]`` in query's dtype. Rows that see no key are 0, as in FlashAttention. NaN spreads to its rows.
        The gradient is that of exact attention at the unrounded tensors (straight through all roundings), in float32:
        the source has no backward pass in FP8.

    Raises:
        ArgumentError: Shapes that do not fit, dropout, a mask that requires a gradient, or operands that the unit
            does not take: it needs an element format for each, and scales that are the same along a block's sums.
        DtypeError: Dtypes that differ or are not floating point.
    """
    if not isinstance(config, AttentionConfig):
        raise ArgumentError(f"config={config!r} is not an AttentionConfig; pass flash_attention_3() or build one")
    _check(query, key, value, attn_mask, dropout_p, is_causal)
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (query, key, value))
    mask = _additive(attn_mask, is_causal, (q.shape[-2], k.shape[-2]), q.device)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _Attention.apply(q, k, v, mask, factor, config, generator)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    """Quantise forwards; backwards, differentiate exact attention."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        factor: float,
        config: AttentionConfig,
        generator: Generator,
    ) -> Tensor:
        """Return ``[..., L, dv]`` in q's dtype."""
        lead, heads = q.shape[:-2], math.prod(q.shape[:-2])
        with torch.autocast(q.device.type, enabled=False):
            first, second, third = (t.reshape(heads, *t.shape[-2:]).float() for t in (q, k, v))
            shared = mask is None or mask.dim() == 2
            whole = mask if shared or mask is None else mask.expand(*lead, *mask.shape[-2:]).flatten(0, -3)
            y = _flash(first, second, third, whole, factor, config, _Words(config, generator, q.device))
        return y.reshape(*lead, *y.shape[-2:]).to(q.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the unrounded tensors."""
        *tensors, ctx.factor, _, _ = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of exact attention."""
        *saved, mask = ctx.saved_tensors
        with torch.autocast(g.device.type, enabled=False):
            q, k, v = (t.float() for t in saved)
            scores = q @ k.mT * ctx.factor
            weights = torch.softmax(scores if mask is None else scores + mask, -1).nan_to_num(0.0)
            dp = g.float() @ v.mT
            ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) * ctx.factor
            grads = (ds @ k, ds.mT @ q, weights.mT @ g.float())
        return *(d.to(t.dtype) for d, t in zip(grads, saved, strict=True)), None, None, None, None


class _Words:
    """Give every use of random numbers in a call a key of its own, all signs one; draw none where none are used."""

    def __init__(self, config: AttentionConfig, generator: Generator, device: torch.device) -> None:
        quantizers = (config.q, config.k, config.v, config.p)
        used = any(map(_is_random, quantizers))
        keys = draw_keys(True, generator, None, device) if used else None
        self._key = None if keys is None else RandomKey(*keys.tolist())
        self._used = 0

    def draws(self) -> Draws:
        """Return keys for one operand."""
        if self._key is None:
            return Draws()
        seed, offset = self._key
        self._used += 2
        return Draws(RandomKey(seed, offset + self._used), RandomKey(seed, offset + self._used + 1), self._key)


class _Heads(NamedTuple):
    """A quantised operand of all heads: elements, or values where no unit multiplies, and the scales left to apply.

    Attributes:
        elements: float32 ``[heads, rows, inner]``.
        scale: float32, broadcasts to that; None where elements are values.
    """

    elements: Tensor
    scale: Tensor | None


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: float, config: AttentionConfig, words: _Words
) -> Tensor:
    """Return the attention of float32 heads ``[heads, rows, features]``."""
    unit = config.unit
    left, right = _quantised(q, config.q, unit, words), _quantised(k, config.k, unit, words)
    values = _quantised(v.mT, config.v, unit, words)
    m = q.new_full((*q.shape[:2], 1), -math.inf)
    total, out = torch.zeros_like(m), q.new_zeros(*q.shape[:2], v.shape[-1])
    for first in reversed(range(0, k.shape[1], config.columns)):
        keys = slice(first, first + config.columns)
        s = _product(left, _part(right, keys, 1), (config.q, config.k), unit)
        t = _exponents(s, mask if mask is None else mask[..., keys], factor)
        new = torch.maximum(m, t.amax(-1, keepdim=True))
        base = torch.where(new == -math.inf, 0.0, new)  # a row that has seen no key yet
        shrink, p = torch.exp2(m - base), torch.exp2(t - (base - config.offset))
        weights = _quantised(p.reshape(1, -1, p.shape[-1]), config.p, unit, words)
        weights = _Heads(weights.elements.reshape(p.shape), _shaped(weights.scale, p))
        part = _product(weights, _part(values, keys, 2), (config.p, config.v), unit)
        m, total, out = new, total * shrink + p.sum(-1, keepdim=True), out * shrink + part
    return torch.where(total == 0, 0.0, out / total)


def _quantised(x: Tensor, quantizer: Quantizer, unit: Any, words: _Words) -> _Heads:
    """Quantise each head; all at once where no block reaches from one into the next."""
    heads, rows, inner = x.shape
    scaling = quantizer.scaling
    apart = scaling is None or (scaling.block[0] is not None and rows % scaling.block[0] == 0 and not scaling.tensor)
    if apart and isinstance(quantizer.format, FloatFormat | None):
        x, heads = x.reshape(1, heads * rows, inner), 1
    made = [prepare(x[head], quantizer, words.draws()) for head in range(heads)]
    shape = (-1, rows, inner)
    if unit is None:
        return _Heads(torch.stack([one.values(torch.float32) for one in made]).reshape(shape), None)
    elements = torch.stack([one.elements for one in made]).reshape(shape)
    if made[0].scale is None:
        return _Heads(elements, None)
    return _Heads(elements, torch.stack([_spread(one) for one in made]).reshape(shape))


def _spread(operand: Operand) -> Tensor:
    assert operand.scale is not None
    if operand.tensor is not None:
        raise ArgumentError(f"no unit multiplies heads quantised as {operand.quantizer}; leave unit= out of the config")
    return spread(operand.scale, operand.sizes, operand.elements.shape)


def _shaped(x: Tensor | None, like: Tensor) -> Tensor | None:
    return None if x is None else x.reshape(like.shape)


def _part(heads: _Heads, keys: slice, dim: int) -> _Heads:
    """Return the keys of a block, which lie along the rows (1) or the inner axis (2)."""
    pick = (slice(None), keys) if dim == 1 else (slice(None), slice(None), keys)
    return _Heads(heads.elements[pick], None if heads.scale is None else heads.scale[pick])


def _product(a: _Heads, b: _Heads, quantizers: tuple[Quantizer, Quantizer], unit: Any) -> Tensor:
    """Return ``a b^T`` of each head, float32: of the elements, times b's scales, then a's."""
    if unit is None:
        return a.elements @ b.elements.mT
    formats = [quantizer.format for quantizer in quantizers]
    if not all(isinstance(fmt, FloatFormat) for fmt in formats) or any(q.then is not None for q in quantizers):
        raise ArgumentError(
            f"unit={unit!r} multiplies elements of floating-point formats; the config has {quantizers[0]} and "
            f"{quantizers[1]}; choose others, or leave unit= out"
        )
    left, right = (x.elements.to(holder(fmt)) for x, fmt in zip((a, b), formats, strict=True))  # type: ignore[arg-type]
    y = bmm(left, right.mT, unit=unit, a_format=formats[0], b_format=formats[1], out_dtype=torch.float32)
    y = y if b.scale is None else y * _outer(b.scale).mT
    return y if a.scale is None else y * _outer(a.scale)


def _outer(scale: Tensor) -> Tensor:
    """Return the scale of each row; raise where it changes along the sums of a product."""
    first = scale[..., :1]
    if not bool((scale == first).all()):
        raise ArgumentError(
            "a scale changes inside the sums of one product; choose blocks of whole rows of q, k and p, and of "
            "config.columns keys, or a multiple, of v"
        )
    return first


def _exponents(s: Tensor, mask: Tensor | None, factor: float) -> Tensor:
    """Return the logarithms to base 2 of the weights before normalisation."""
    if mask is None:
        return s * (factor * _LOG2E)
    hidden = bool(((mask == 0) | (mask == -math.inf)).all())  # a mask that only hides keys changes no score
    return s * (factor * _LOG2E) + mask if hidden else (s * factor + mask) * _LOG2E


def _is_random(quantizer: Quantizer) -> bool:
    signs = any(isinstance(turn, Hadamard) and turn.signs == "random" for turn in quantizer.transforms)
    scales = quantizer.scaling is not None and quantizer.scaling.scale_rounding == "stochastic"
    return signs or scales or quantizer.rounding.mode == "stochastic"


def _additive(mask: Tensor | None, causal: bool, sizes: tuple[int, int], device: torch.device) -> Tensor | None:
    """Return what is added to the scores, float32, or None."""
    if causal:
        mask = torch.ones(sizes, dtype=torch.bool, device=device).tril()
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.float().expand(*mask.shape[:-2], *sizes)
    empty = torch.zeros((), device=device)
    return torch.where(mask, empty, -math.inf).expand(*mask.shape[:-2], *sizes)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> None:
    if q.dtype not in _FLOATS or not q.dtype == k.dtype == v.dtype:
        raise DtypeError(
            f"query, key and value have dtypes {q.dtype}, {k.dtype} and {v.dtype}; pass one floating-point dtype"
        )
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    if min(map(len, shapes)) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ArgumentError(
            f"query, key and value of shapes {', '.join(map(str, shapes))} do not fit; "
            "pass [..., L, d], [..., S, d] and [..., S, dv]"
        )
    if dropout:
        raise ArgumentError(f"quantised attention has no dropout, but dropout_p={dropout:g}; pass 0")
    if mask is not None and causal:
        raise ArgumentError("is_causal=True with attn_mask= says it twice; pass one of them")
    if mask is not None and mask.requires_grad:
        raise ArgumentError("quantised attention gives attn_mask no gradient; pass attn_mask.detach()")
