# SPDX-License-Identifier: Apache-2.0
"""Quantised attention as one differentiable step: eagerly, and as one operator a pass for torch.compile."""

import itertools
import math
import uuid
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fmtsim.casts.arguments import random_keys
from fmtsim.casts.autograd import OnceOnly
from fmtsim.casts.ops import define_operator
from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.layers.watch import Observer, Watcher, Watchers, watchers_with
from fmtsim.nn.flash import CallKeys, Flash, Inputs, flash
from fmtsim.nn.flash_backward import flash_gradients
from fmtsim.recipes.attention import AttentionConfig
from fmtsim.scaling.repeats import Calls
from fmtsim.spec.cast import RandomKey
from fmtsim.support.dispatch import constant_in_graphs, is_readable, without_autocast
from fmtsim.support.errors import ArgumentError, shown

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
            raise ArgumentError(
                f"config={shown(config)} is not an AttentionConfig; pass flash_attention_3() or build one"
            )
        self.config, self.generator = config, generator
        self.draws: Calls[Tensor] = Calls()  # states of the generator under activation checkpointing
        self.observer: Callable[[str], Observer | Watcher] | None = None  # as of a converted module, which has parts
        self.name = f"{_PROCESS}.{next(_numbers)}"
        _calls[self.name] = self

    def __reduce__(self) -> Any:
        return AttentionCall, (self.config, self.generator)  # a copy has a name of its own


def call_of(config: AttentionConfig, generator: Generator) -> AttentionCall | str:
    """Return what ``attend`` takes: in compiled code the name of an object that lives as long as the code."""
    return _name_of(config, generator) if torch.compiler.is_compiling() else AttentionCall(config, generator)


@cache
def _kept(config: AttentionConfig, generator: Generator) -> AttentionCall:
    return AttentionCall(config, generator)


@constant_in_graphs
def _name_of(config: AttentionConfig, generator: Generator) -> str:
    return _kept(config, generator).name


def run_attention(inputs: Inputs, call: AttentionCall | str) -> Tensor:
    """Return ``[..., L, dv]`` in q's dtype, with the gradient that ``quantised_attention`` defines.

    ``call`` is config and generator, or the name of them in compiled code.
    """
    if isinstance(call, AttentionCall):
        if not torch.compiler.is_compiling() and all(map(is_readable, inputs[:3])):
            watchers = watchers_with(None if call.observer is None else call.observer(""))
            run = lambda *inputs: _Attention.apply(*inputs, (call, watchers))[0]  # type: ignore[no-untyped-call]  # noqa: E731
            for watcher in watchers:
                run = partial(watcher.attention, run, call)
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
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of q, k and v."""
        q, k, v, mask, key = ctx.saved_tensors
        if isinstance(ctx.call, str):
            grads = torch.ops.fmtsim.attention_backward(g, q, k, v, mask, key, ctx.hides, ctx.factor, ctx.call)
            return (*grads, None, None, None, None)
        with torch.no_grad():
            grads = _gradients(g, Inputs(q, k, v, mask, ctx.hides, ctx.factor), key, *ctx.call)
        if torch.is_grad_enabled():  # create_graph=True: only then on
            grads = [OnceOnly.apply(d, _ONCE, g, q, k, v) for d in grads]
        return (*grads, None, None, None, None)


def _forward(
    inputs: Inputs, call: AttentionCall, watchers: Watchers = (), *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    q, random, generator = inputs.q, call.config.is_random, call.generator
    if random and isinstance(generator, torch.Generator):
        generator = call.draws.generator(generator, compiled=compiled)
    keys = random_keys(True, generator, None, q.device) if random else None
    key = torch.zeros(0, dtype=torch.int64) if keys is None else torch.tensor(keys.tolist())
    y = _run(inputs, call.config, _call_keys(key), watchers=watchers).out
    return y.reshape(*q.shape[:-2], *y.shape[-2:]).to(q.dtype), key


def _gradients(g: Tensor, inputs: Inputs, key: Tensor, call: AttentionCall, watchers: Watchers = ()) -> list[Tensor]:
    call_keys, tensors = _call_keys(key), inputs[:3]
    made = _run(inputs, call.config, call_keys, keep=True)
    with without_autocast(g.device):
        heads = _flat(g), _flat(inputs.q), _flat(inputs.k), _flat(inputs.v)
        grads = flash_gradients(heads, inputs.factor, call.config, call_keys, made, inputs.q.dtype, watchers)
    return [d.reshape(t.shape).to(t.dtype) for d, t in zip(grads, tensors, strict=True)]


def _run(
    inputs: Inputs, config: AttentionConfig, call_keys: CallKeys, *, keep: bool = False,
    watchers: Watchers = (),
) -> Flash:  # fmt: skip
    q, mask = inputs.q, inputs.mask
    if mask is not None and mask.dim() > 2:
        mask = mask.expand(*q.shape[:-2], *mask.shape[-2:]).flatten(0, -3)
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
    random = _find(name).config.is_random
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
