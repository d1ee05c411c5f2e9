# SPDX-License-Identifier: Apache-2.0
"""Attention whose products have quantised operands, block by block, as FlashAttention-3 runs it in FP8.

It is one differentiable step: eagerly, and as one operator a pass for torch.compile.
"""

import itertools
import math
import uuid
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_dense, check_flags, check_saved, check_together, random_keys
from fmtsim.casts.lanes import define_operator, once_only
from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.layers.watch import Observer, Watcher, Watchers, watchers_with
from fmtsim.nn.flash import CallKeys, Flash, Inputs, flash, flash_gradients
from fmtsim.recipes.attention_config import AttentionConfig, flash_attention_3
from fmtsim.scaling.repeats import Calls
from fmtsim.spec.cast import RandomKey
from fmtsim.support.dispatch import autocasts, constant_in_graphs, is_readable, without_autocast
from fmtsim.support.errors import ArgumentError, DtypeError, shown
from fmtsim.support.records import checked

__all__ = ["AttentionCall", "attend", "attention_call", "flash_attention_3", "quantised_attention", "run_attention"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ONCE: Final = (
    "quantised attention cannot be differentiated twice: the gradient of a quantised gradient is not defined; "
    "compute second derivatives on the unconverted model (fmtsim.revert)"
)
_calls: WeakValueDictionary[str, "AttentionCall"] = WeakValueDictionary()  # operators find calls by name here
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
            raise ArgumentError(
                f"config={shown(config)} is not an AttentionConfig; pass flash_attention_3() or build one"
            )
        self.config, self.generator = config, generator
        self.draws: Calls[Tensor] = Calls()  # states of the generator under activation checkpointing
        self.observer: Callable[[str], Observer | Watcher] | None = None  # as of a converted module, which has parts
        self.name = f"{_PROCESS}.{next(_numbers)}"  # operators take strings and no objects
        _calls[self.name] = self

    def __reduce__(self) -> Any:
        return AttentionCall, (self.config, self.generator)  # a copy has a name of its own


def attention_call(config: AttentionConfig, generator: Generator) -> AttentionCall | str:
    """Return what ``attend`` takes: in compiled code the name of an object that lives as long as the code."""
    return _call_name(config, generator) if torch.compiler.is_compiling() else AttentionCall(config, generator)


@cache
def _kept(config: AttentionConfig, generator: Generator) -> AttentionCall:
    return AttentionCall(config, generator)


@constant_in_graphs
def _call_name(config: AttentionConfig, generator: Generator) -> str:
    return _kept(config, generator).name


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
    3. ``P = 2^(t - (m - offset))``, at most ``2^offset``; l grows by the sum of P's row, unrounded (``rounded_sum``: of
       what 4 makes of it).
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
        the four products and their machine (``config.on`` gives all six to one; on a unit each is one chain over
        its sums, see AttentionConfig); the sum over do * O stays as it is. The forward pass is run again for it, with
        the same random numbers. FlashAttention-3 has no backward pass in FP8. Differentiating twice raises FmtsimError.

    Raises:
        ArgumentError: Shapes that do not fit, dropout, a mask that requires a gradient, or, before anything runs,
            operands that a unit does not take: a dtype that it lacks, scales that change along the sums of elements.
        DtypeError: Dtypes that differ or are not floating point.
    """
    call = attention_call(config, generator)
    return attend(call, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


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
    named = {"query": query, "key": key, "value": value}
    for name, t in (named if attn_mask is None else {**named, "attn_mask": attn_mask}).items():
        check_dense(name, t)
    check_together(**named, attn_mask=attn_mask)
    query, key, value = (_lowered(t) for t in (query, key, value))  # autocast casts them for torch's function, too
    if not torch.compiler.is_compiling():
        check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
        checked("dropout_p", dropout_p, float), checked("scale", scale, float | None)
    _check(query, key, value, attn_mask, dropout_p, is_causal)
    if enable_gqa:
        key, value = (t.repeat_interleave(_groups(query, t), -3) for t in (key, value))  # heads as many as query's
    # leading sizes of query, key and value together, with which a mask goes
    shapes = [t.shape[:-2] for t in (query, key, value)]
    try:
        lead = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ArgumentError(f"leading sizes {listed} of query, key and value do not broadcast") from None
    whole = (*lead, query.shape[-2], key.shape[-2])
    sizes = () if attn_mask is None else attn_mask.shape
    if len(sizes) > len(whole) or any(a not in (1, b) for a, b in zip(sizes[::-1], whole[::-1], strict=False)):
        raise ArgumentError(f"attn_mask of shape {tuple(sizes)} does not broadcast to {whole}")
    q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (query, key, value))
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        check_saved("quantised attention", q, k, v)
    if not (q.numel() and k.numel() and v.numel()):
        return q @ k.mT @ v  # nothing is added up
    # what is added to the scores, float32: of a boolean mask 0 and -inf
    mask = torch.ones(whole[-2:], dtype=torch.bool, device=q.device).tril() if is_causal else attn_mask
    hides = mask is not None and mask.dtype == torch.bool
    if mask is not None:
        mask = torch.where(mask, torch.zeros((), device=q.device), -math.inf) if hides else mask.float()
        mask = mask.expand(*mask.shape[:-2], *whole[-2:])
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return run_attention(Inputs(q, k, v, mask, hides, factor), call)


def _groups(query: Tensor, t: Tensor) -> int:
    """Return how many heads of query share one of key or value."""
    heads, fewer = (x.shape[-3] if x.dim() > 2 else 0 for x in (query, t))
    if not fewer or heads % fewer:
        raise ArgumentError(
            f"enable_gqa=True with {heads} heads of query and {fewer} of key or value; "
            "pass [..., heads, rows, features], heads of query a multiple of the others"
        )
    return heads // fewer


def _lowered(t: Tensor) -> Tensor:
    """Return a tensor in the dtype that autocast gives torch's function."""
    device = t.device.type
    if t.dtype not in _FLOATS or t.dtype == torch.float64 or not autocasts(device):
        return t
    return t.to(torch.get_autocast_dtype(device))


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> None:
    if q.dtype not in _FLOATS or not q.dtype == k.dtype == v.dtype:
        raise DtypeError(
            f"query, key and value have dtypes {q.dtype}, {k.dtype} and {v.dtype}; pass one floating-point dtype"
        )
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    if min(map(len, shapes)) < 2 or not q.shape[-1] or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ArgumentError(
            f"query, key and value of shapes {', '.join(map(str, shapes))} do not fit; "
            "pass [..., L, d], [..., S, d] and [..., S, dv]"
        )
    if dropout:
        raise ArgumentError(f"quantised attention has no dropout, but dropout_p={dropout:g}; pass 0")
    if mask is not None and causal:
        raise ArgumentError("is_causal=True with attn_mask= says it twice; pass one of them")
    if mask is not None and mask.dtype not in (torch.bool, *_FLOATS):
        raise DtypeError(f"attn_mask has dtype {mask.dtype}; pass bool, or a floating-point dtype")
    if mask is not None and mask.requires_grad:
        raise ArgumentError("quantised attention gives attn_mask no gradient; pass attn_mask.detach()")


def run_attention(inputs: Inputs, call: AttentionCall | str) -> Tensor:
    """Return ``[..., L, dv]`` in q's dtype, with the gradient that ``quantised_attention`` defines.

    ``call`` is config and generator, or the name of them in compiled code.
    """
    if isinstance(call, AttentionCall):
        if not torch.compiler.is_compiling() and all(map(is_readable, inputs[:3])):
            watchers = watchers_with(None if call.observer is None else call.observer(""))
            run = lambda *inputs: _Attention.apply(*inputs, (call, watchers))[0]  # type: ignore[no-untyped-call]  # noqa: E731
            for watcher in watchers:
                run = partial(watcher.attention, run, call)  # each watcher runs the one before
            return run(*inputs)  # type: ignore[no-any-return]
        if call.observer is not None:
            raise ArgumentError(
                "fmtsim.observe does not see into compiled code; observe the model that was given to torch.compile"
            )
        call = call.name
    return torch.ops.fmtsim.attention_forward(*inputs, call)[0]  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    """Quantise forwards and, where the config says so, backwards.

    The last argument is the AttentionCall and who looks on; that of the operators is the AttentionCall's name.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        """Return ``[..., L, dv]`` in q's dtype, and the key of the call's random numbers."""
        *inputs, (call, watchers) = arguments
        return _forward(Inputs(*inputs), call, watchers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the unrounded tensors."""
        *tensors, ctx.hides, ctx.factor, ctx.call = inputs
        ctx.save_for_backward(*tensors, output[1])  # backward quantises them again, with the same random key

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of q, k and v."""
        q, k, v, mask, key = ctx.saved_tensors
        if isinstance(ctx.call, str):
            grads = torch.ops.fmtsim.attention_backward(g, q, k, v, mask, key, ctx.hides, ctx.factor, ctx.call)
            return (*grads, None, None, None, None)
        with torch.no_grad():
            grads = _gradients(g, Inputs(q, k, v, mask, ctx.hides, ctx.factor), key, *ctx.call)
        return (*once_only(_ONCE, grads, g, q, k, v), None, None, None, None)


def _forward(
    inputs: Inputs, call: AttentionCall, watchers: Watchers = (), *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    q, random, generator = inputs.q, call.config.is_random, call.generator
    if random and isinstance(generator, torch.Generator):
        generator = call.draws.generator(generator, compiled=compiled)  # a checkpoint's second run draws alike
    keys = random_keys(True, generator, None, q.device) if random else None
    key = torch.zeros(0, dtype=torch.int64) if keys is None else torch.tensor(keys.tolist())
    y = _run(inputs, call.config, _call_keys(key), watchers=watchers).out
    return y.reshape(*q.shape[:-2], *y.shape[-2:]).to(q.dtype), key


def _gradients(g: Tensor, inputs: Inputs, key: Tensor, call: AttentionCall, watchers: Watchers = ()) -> list[Tensor]:
    call_keys, tensors = _call_keys(key), inputs[:3]
    forward = _run(inputs, call.config, call_keys, keep=True)  # runs again: forward did not keep the weights
    with without_autocast(g.device):
        heads = _flat(g), _flat(inputs.q), _flat(inputs.k), _flat(inputs.v)
        grads = flash_gradients(heads, inputs.factor, call.config, call_keys, forward, inputs.q.dtype, watchers)
    return [d.reshape(t.shape).to(t.dtype) for d, t in zip(grads, tensors, strict=True)]


def _run(
    inputs: Inputs, config: AttentionConfig, call_keys: CallKeys, *, keep: bool = False,
    watchers: Watchers = (),
) -> Flash:  # fmt: skip
    q, mask = inputs.q, inputs.mask
    if mask is not None and mask.dim() > 2:
        mask = mask.expand(*q.shape[:-2], *mask.shape[-2:]).flatten(0, -3)  # [heads, L, S]; two dimensions broadcast
    with without_autocast(q.device):
        heads = inputs._replace(q=_flat(q), k=_flat(inputs.k), v=_flat(inputs.v), mask=mask)
        return flash(heads, config, call_keys, q.dtype, keep=keep, watchers=watchers)


def _flat(t: Tensor) -> Tensor:
    return t.reshape(math.prod(t.shape[:-2]), *t.shape[-2:]).float()


def _call_keys(key: Tensor) -> CallKeys:
    return CallKeys(RandomKey(*key.tolist()) if key.numel() else None)


def _find(name: str) -> AttentionCall:
    call = _calls.get(name)
    if call is None:
        raise ArgumentError(f"{name} was compiled for a model that is gone; compile the converted model again")
    return call


def _fake_forward(q, k, v, mask, hides, factor, name):  # type: ignore[no-untyped-def]
    random = _find(name).config.is_random  # the key is seed and offset, or empty
    return q.new_empty((*q.shape[:-1], v.shape[-1])), torch.empty(2 if random else 0, dtype=torch.int64)


define_operator(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, bool hides, float factor, str call) -> "
    "(Tensor, Tensor)",
    lambda *inputs: _forward(Inputs(*inputs[:-1]), _find(inputs[-1]), compiled=True),
    _fake_forward,
)
define_operator(
    "attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor key, bool hides, float factor, "
    "str call) -> (Tensor, Tensor, Tensor)",
    lambda g, q, k, v, mask, key, hides, factor, name: tuple(
        _gradients(g, Inputs(q, k, v, mask, hides, factor), key, _find(name))
    ),
    lambda g, q, k, v, mask, key, hides, factor, name: tuple(t.new_empty(t.shape) for t in (q, k, v)),
)
torch.library.register_autograd(
    "fmtsim::attention_forward", _Attention.backward, setup_context=_Attention.setup_context
)
