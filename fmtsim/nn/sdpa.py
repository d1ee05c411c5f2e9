"""Attention whose products have quantised operands, block by block, as FlashAttention-3 runs it in FP8."""

import itertools
import math
import uuid
from functools import cache
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError, DtypeError
from fmtsim.gemm.choice import draw_keys
from fmtsim.gemm.once import OnceOnly
from fmtsim.gemm.passes import Observer
from fmtsim.gemm.streams import Generator
from fmtsim.nn.flash import Flash, Words, flash, is_random
from fmtsim.nn.flash_backward import flash_gradients
from fmtsim.ops import RandomKey
from fmtsim.recipes.attention import AttentionConfig, flash_attention_3
from fmtsim.scaling.repeats import Calls

__all__ = ["AttentionCall", "attend", "flash_attention_3", "quantised_attention"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ONCE: Final = (
    "quantised attention cannot be differentiated twice: the gradient of a quantised gradient is not defined; "
    "compute second derivatives on the unconverted model (fmtsim.revert)"
)
_calls: WeakValueDictionary[str, "AttentionCall"] = WeakValueDictionary()
_numbers = itertools.count()
# Compiled graphs are kept on disk by what they call: names of one process must mean nothing to the next.
_PROCESS = f"attention.{uuid.uuid4().hex[:12]}"


class AttentionCall:
    """Keep what an operator needs to know of quantised attention, under a name of its own while this object lives.

    Args:
        config: The definition.
        generator: Where random numbers come from.
    """

    def __init__(self, config: AttentionConfig, generator: Generator = None) -> None:
        if not isinstance(config, AttentionConfig):
            raise ArgumentError(f"config={config!r} is not an AttentionConfig; pass flash_attention_3() or build one")
        self.config, self.generator = config, generator
        self.draws: Calls[Tensor] = Calls()  # states of the generator under activation checkpointing
        self.observer: Observer | None = None  # set while fmtsim.observe is active
        self.name = f"{_PROCESS}.{next(_numbers)}"
        _calls[self.name] = self

    def __reduce__(self) -> Any:
        return AttentionCall, (self.config, self.generator)  # a copy has a name of its own


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
        ``[..., L, dv]`` in query's dtype, or in that of autocast, which query, key and value are cast to first. Rows
        that see no key are 0, as in FlashAttention. NaN spreads to its rows.

        Its gradient is that of what was computed, every rounding counting as the identity (or as its quantiser's
        ``gradient`` says). With P the normalised weights before they were rounded, P' those after, q', k' and v' the
        rounded operands (q' and k' rotated), O the float32 result before its last rounding and all products in
        float32: ``dv = P'^T do``, ``dp = do v'^T``, ``ds = P * (dp - sum(do * O))`` by rows, ``dq = scale ds k'`` and
        ``dk = scale ds^T q'``, these two rotated back. ``config.dv``, ``dp``, ``dq`` and ``dk`` change the operands of
        the four products; the sum over do * O stays as it is. The forward pass is run again for it, with the same
        random numbers. FlashAttention-3 has no backward pass in FP8. Differentiating twice raises FmtsimError.

    Raises:
        ArgumentError: Shapes that do not fit, dropout, a mask that requires a gradient, or operands that the unit
            does not take: it needs an element format for each, and scales that are the same along a block's sums.
        DtypeError: Dtypes that differ or are not floating point.
    """
    call = call_of(config, generator)
    return attend(call, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def call_of(config: AttentionConfig, generator: Generator) -> AttentionCall | str:
    """Return what ``attend`` takes: in compiled code the name of an object that lives as long as the code."""
    return _name_of(config, generator) if torch.compiler.is_compiling() else AttentionCall(config, generator)


@cache
def _kept(config: AttentionConfig, generator: Generator) -> AttentionCall:
    return AttentionCall(config, generator)


@torch._dynamo.assume_constant_result  # type: ignore[attr-defined]
def _name_of(config: AttentionConfig, generator: Generator) -> str:
    return _kept(config, generator).name


def attend(
    call: AttentionCall | str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return ``quantised_attention`` of a config and generator that are kept in an object, or of its name.

    ``torch.compile`` sees one operator forward and one backward, with the bits of eager execution.
    """
    query, key, value = (_lowered(t) for t in (query, key, value))
    _check(query, key, value, attn_mask, dropout_p, is_causal)
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (query, key, value))
    mask = _additive(attn_mask, is_causal, (q.shape[-2], k.shape[-2]), q.device)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not isinstance(call, AttentionCall):
        return torch.ops.fmtsim.attention_forward(q, k, v, mask, factor, call)[0]  # type: ignore[no-any-return]
    if not torch.compiler.is_compiling():
        return _Attention.apply(q, k, v, mask, factor, call)[0]  # type: ignore[no-any-return, no-untyped-call]
    if call.observer is not None:
        raise ArgumentError(
            "fmtsim.observe does not see into compiled code; observe the model that was given to torch.compile"
        )
    return torch.ops.fmtsim.attention_forward(q, k, v, mask, factor, call.name)[0]  # type: ignore[no-any-return]


def _lowered(t: Tensor) -> Tensor:
    """Return a tensor in the dtype that autocast gives torch's function."""
    device = t.device.type
    if t.dtype not in _FLOATS or t.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return t
    return t.to(torch.get_autocast_dtype(device))


class _Attention(torch.autograd.Function):
    """Quantise forwards and, where the config says so, backwards."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: float, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Return ``[..., L, dv]`` in q's dtype, and the key of the call's random numbers."""
        return _forward(q, k, v, mask, factor, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the unrounded tensors."""
        *tensors, ctx.factor, ctx.call = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of q, k and v."""
        q, k, v, mask, key = ctx.saved_tensors
        with torch.no_grad():
            grads = _gradients(g, q, k, v, mask, key, ctx.factor, ctx.call)
        if torch.is_grad_enabled():  # create_graph=True: only then on
            grads = [OnceOnly.apply(d, _ONCE, g, q, k, v) for d in grads]
        return *grads, None, None, None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    factor: float,
    call: AttentionCall,
    *,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    random, generator = any(map(is_random, call.config.operands.values())), call.generator
    if random and isinstance(generator, torch.Generator):
        generator = call.draws.generator(generator, compiled=compiled)
    keys = draw_keys(True, generator, None, q.device) if random else None
    key = torch.zeros(0, dtype=torch.int64) if keys is None else torch.tensor(keys.tolist())
    y = _run(q, k, v, mask, factor, call.config, _words(key), observer=call.observer).out
    return y.reshape(*q.shape[:-2], *y.shape[-2:]).to(q.dtype), key


def _gradients(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key: Tensor,
    factor: float,
    call: AttentionCall,
) -> list[Tensor]:
    words = _words(key)
    made = _run(q, k, v, mask, factor, call.config, words, keep=True)
    with torch.autocast(g.device.type, enabled=False):
        heads = _flat(g), _flat(q), _flat(k), _flat(v)
        grads = flash_gradients(heads, factor, call.config, words, made, call.observer)
    return [d.reshape(t.shape).to(t.dtype) for d, t in zip(grads, (q, k, v), strict=True)]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    factor: float,
    config: AttentionConfig,
    words: Words,
    *,
    keep: bool = False,
    observer: Observer | None = None,
) -> Flash:
    shared = mask is None or mask.dim() == 2
    whole = mask if shared or mask is None else mask.expand(*q.shape[:-2], *mask.shape[-2:]).flatten(0, -3)
    with torch.autocast(q.device.type, enabled=False):
        return flash(_flat(q), _flat(k), _flat(v), whole, factor, config, words, keep=keep, observer=observer)


def _flat(t: Tensor) -> Tensor:
    return t.reshape(math.prod(t.shape[:-2]), *t.shape[-2:]).float()


def _words(key: Tensor) -> Words:
    return Words(RandomKey(*key.tolist()) if key.numel() else None)


def _find(name: str) -> AttentionCall:
    call = _calls.get(name)
    if call is None:
        raise ArgumentError(f"{name} was compiled for a model that is gone; compile the converted model again")
    return call


def _fake_forward(q, k, v, mask, factor, name):  # type: ignore[no-untyped-def]
    random = any(map(is_random, _find(name).config.operands.values()))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), torch.empty(2 if random else 0, dtype=torch.int64)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.factor, ctx.name = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *torch.ops.fmtsim.attention_backward(g, *ctx.saved_tensors, ctx.factor, ctx.name), None, None, None


_library = torch.library.Library("fmtsim", "FRAGMENT")
_library.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, float factor, str call) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor key, float factor, str call) -> "
    "(Tensor, Tensor, Tensor)"
)
_library.impl(
    "attention_forward",
    lambda q, k, v, mask, factor, name: _forward(q, k, v, mask, factor, _find(name), compiled=True),
    "CompositeExplicitAutograd",
)
_library.impl(
    "attention_backward",
    lambda g, q, k, v, mask, key, factor, name: tuple(_gradients(g, q, k, v, mask, key, factor, _find(name))),
    "CompositeExplicitAutograd",
)
torch.library.register_fake("fmtsim::attention_forward", _fake_forward, lib=_library)
torch.library.register_fake(
    "fmtsim::attention_backward",
    lambda g, q, k, v, mask, key, factor, name: tuple(t.new_empty(t.shape) for t in (q, k, v)),
    lib=_library,
)
torch.library.register_autograd("fmtsim::attention_forward", _backward, setup_context=_setup, lib=_library)


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
