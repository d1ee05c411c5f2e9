"""Quantised attention as one differentiable step: eagerly, and as one operator a pass for torch.compile."""

import itertools
import math
import uuid
from functools import cache
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fmtsim.arguments import random_keys
from fmtsim.autograd import OnceOnly
from fmtsim.dispatch import constant_in_graphs
from fmtsim.errors import ArgumentError
from fmtsim.gemm.layers.keys import Generator
from fmtsim.gemm.layers.passes import Observer
from fmtsim.nn.flash import CallKeys, Flash, flash
from fmtsim.nn.flash_backward import flash_gradients
from fmtsim.ops import define_operator
from fmtsim.recipes.attention import AttentionConfig
from fmtsim.scaling.repeats import Calls
from fmtsim.spec.cast import RandomKey

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


def call_of(config: AttentionConfig, generator: Generator) -> AttentionCall | str:
    """Return what ``attend`` takes: in compiled code the name of an object that lives as long as the code."""
    return _name_of(config, generator) if torch.compiler.is_compiling() else AttentionCall(config, generator)


@cache
def _kept(config: AttentionConfig, generator: Generator) -> AttentionCall:
    return AttentionCall(config, generator)


@constant_in_graphs
def _name_of(config: AttentionConfig, generator: Generator) -> str:
    return _kept(config, generator).name


def run_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, hides: bool, factor: float, call: AttentionCall | str
) -> Tensor:
    """Return ``[..., L, dv]`` in q's dtype, with the gradient that ``quantised_attention`` defines.

    Args:
        q: ``[..., L, d]``, floating point; k ``[..., S, d]`` and v ``[..., S, dv]`` alike in dtype and leading sizes.
        k: See q.
        v: See q.
        mask: float32, added to the scores, or None.
        hides: Whether the mask is known to hold nothing but 0 and -inf.
        factor: What scores are multiplied with.
        call: Config and generator, or the name of them in compiled code.
    """
    if not isinstance(call, AttentionCall):
        return torch.ops.fmtsim.attention_forward(q, k, v, mask, hides, factor, call)[0]  # type: ignore[no-any-return]
    if not torch.compiler.is_compiling():
        return _Attention.apply(q, k, v, mask, hides, factor, call)[0]  # type: ignore[no-any-return, no-untyped-call]
    if call.observer is not None:
        raise ArgumentError(
            "fmtsim.observe does not see into compiled code; observe the model that was given to torch.compile"
        )
    return torch.ops.fmtsim.attention_forward(q, k, v, mask, hides, factor, call.name)[0]  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    """Quantise forwards and, where the config says so, backwards."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, hides: bool, factor: float, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Return ``[..., L, dv]`` in q's dtype, and the key of the call's random numbers."""
        return _forward(q, k, v, mask, hides, factor, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the unrounded tensors."""
        *tensors, ctx.hides, ctx.factor, ctx.call = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of q, k and v."""
        q, k, v, mask, key = ctx.saved_tensors
        with torch.no_grad():
            grads = _gradients(g, q, k, v, mask, key, ctx.hides, ctx.factor, ctx.call)
        if torch.is_grad_enabled():  # create_graph=True: only then on
            grads = [OnceOnly.apply(d, _ONCE, g, q, k, v) for d in grads]
        return *grads, None, None, None, None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    hides: bool,
    factor: float,
    call: AttentionCall,
    *,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    random, generator = call.config.is_random, call.generator
    if random and isinstance(generator, torch.Generator):
        generator = call.draws.generator(generator, compiled=compiled)
    keys = random_keys(True, generator, None, q.device) if random else None
    key = torch.zeros(0, dtype=torch.int64) if keys is None else torch.tensor(keys.tolist())
    y = _run(q, k, v, mask, hides, factor, call.config, _call_keys(key), observer=call.observer).out
    return y.reshape(*q.shape[:-2], *y.shape[-2:]).to(q.dtype), key


def _gradients(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key: Tensor,
    hides: bool,
    factor: float,
    call: AttentionCall,
) -> list[Tensor]:
    call_keys = _call_keys(key)
    made = _run(q, k, v, mask, hides, factor, call.config, call_keys, keep=True)
    with torch.autocast(g.device.type, enabled=False):
        heads = _flat(g), _flat(q), _flat(k), _flat(v)
        grads = flash_gradients(heads, factor, call.config, call_keys, made, call.observer)
    return [d.reshape(t.shape).to(t.dtype) for d, t in zip(grads, (q, k, v), strict=True)]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    hides: bool,
    factor: float,
    config: AttentionConfig,
    call_keys: CallKeys,
    *,
    keep: bool = False,
    observer: Observer | None = None,
) -> Flash:
    shared = mask is None or mask.dim() == 2
    whole = mask if shared or mask is None else mask.expand(*q.shape[:-2], *mask.shape[-2:]).flatten(0, -3)
    with torch.autocast(q.device.type, enabled=False):
        return flash(
            _flat(q), _flat(k), _flat(v), whole, factor, config, call_keys, hides=hides, keep=keep, observer=observer
        )


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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.hides, ctx.factor, ctx.name = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (
        *torch.ops.fmtsim.attention_backward(g, *ctx.saved_tensors, ctx.hides, ctx.factor, ctx.name),
        None,
        None,
        None,
        None,
    )


define_operator(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, bool hides, float factor, str call) -> "
    "(Tensor, Tensor)",
    lambda q, k, v, mask, hides, factor, name: _forward(q, k, v, mask, hides, factor, _find(name), compiled=True),
    _fake_forward,
)
define_operator(
    "attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor key, bool hides, float factor, "
    "str call) -> (Tensor, Tensor, Tensor)",
    lambda g, q, k, v, mask, key, hides, factor, name: tuple(
        _gradients(g, q, k, v, mask, key, hides, factor, _find(name))
    ),
    lambda g, q, k, v, mask, key, hides, factor, name: tuple(t.new_empty(t.shape) for t in (q, k, v)),
)
torch.library.register_autograd("fmtsim::attention_forward", _backward, setup_context=_setup)
