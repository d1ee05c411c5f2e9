"""Layers under a recipe as torch operators: torch.compile sees one node forward and one backward, and never inside.

A layer's definition, generator and memory are Python objects, which an operator cannot take: it gets the name under
which a ``Layer`` keeps them. What it draws and remembers is as invisible to the compiler as a print would be.
"""

import itertools
import math
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fmtsim.errors import ArgumentError
from fmtsim.gemm.config import LinearConfig
from fmtsim.gemm.emulated import autocast_to, layer_forward, layer_gradients
from fmtsim.gemm.operand import block_of
from fmtsim.gemm.passes import Kept, Pass, State, kept_of
from fmtsim.gemm.streams import Generator
from fmtsim.scaling.history import DelayedScale, FrozenScale
from fmtsim.scaling.transform import Hadamard

_FIELDS = len(Kept._fields)
_layers: WeakValueDictionary[str, "Layer"] = WeakValueDictionary()
_numbers = itertools.count()


class Layer:
    """Keep what one product's operator needs, under a name of its own for as long as this object lives.

    Args:
        config: The layer's definition; not a plain one.
        generator: Where random numbers come from.
        state: What delayed scaling remembers, by operand.
    """

    def __init__(self, config: LinearConfig, generator: Generator, state: State) -> None:
        self.config, self.generator, self.state = config, generator, state
        self.name = f"layer{next(_numbers)}"
        _layers[self.name] = self

    def __reduce__(self) -> Any:
        return Layer, (self.config, self.generator, self.state)  # a copy has a name of its own


def run_layer(x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
    """Return ``x w^T + bias`` as one operator; the bits are those of ``EmulatedGEMM.apply``."""
    x, w, bias = autocast_to(x, x), autocast_to(w, x), None if bias is None else autocast_to(bias, x)
    y: Tensor = torch.ops.fmtsim.recipe_forward(x, w, bias, layer.name)[0]
    return y


def _forward(x: Tensor, w: Tensor, bias: Tensor | None, name: str) -> list[Tensor]:
    layer = _find(name)
    y, *kept = layer_forward(x, w, bias, layer.config, layer.generator, None, layer.state)
    assert y is not None
    shared = {t.untyped_storage().data_ptr() for t in (x, w)}  # an operator returns no view of what it was given
    whole = [t for t in kept if t is not None]
    return [y, *(t.clone() if t.untyped_storage().data_ptr() in shared else t.contiguous() for t in whole)]


def _fake_forward(x: Tensor, w: Tensor, bias: Tensor | None, name: str) -> list[Tensor]:
    config = _find(name).config
    layout = _layout(config, x.dtype)
    made = [x.new_empty((*x.shape[:-1], w.shape[0]))]
    tokens = math.prod(x.shape[:-1])
    for i, dtype in enumerate(layout):
        of_x = i < _FIELDS
        if dtype is not None:
            rows = tokens if of_x else w.shape[0]
            shape = _shape(Kept._fields[i % _FIELDS], rows, w.shape[1], config.fprop.a if of_x else config.fprop.b)
            made.append(x.new_empty(shape, dtype=dtype))
    return made


def _shape(field: str, rows: int, columns: int, quantizer: Any) -> tuple[int, ...]:
    if field in ("elements", "slope"):
        return rows, columns
    if field != "scale":
        return ()
    outer, inner = block_of(quantizer)
    return 1 if outer is None else -(-rows // outer), 1 if inner is None else -(-columns // inner)


@lru_cache(maxsize=1024)
def _layout(config: LinearConfig, dtype: torch.dtype) -> tuple[torch.dtype | None, ...]:
    """Return the dtype of everything that the backward pass keeps, None for what there is not, from a small trial."""
    sizes = [t.size or 1 for q in config.operands.values() for t in q.transforms if isinstance(t, Hadamard)]
    groups = [q.scaling.eden or 1 for q in config.operands.values() if q.scaling is not None]
    side = math.lcm(128, *sizes, *groups)
    with _disable_current_modes(), torch.no_grad():  # the compiler asks, and its tensors hold no numbers
        x = torch.ones(side, side, dtype=dtype, device="cpu")
        memory: dict[str, DelayedScale | FrozenScale] = {
            name: DelayedScale(quantizer)
            for name, quantizer in config.operands.items()
            if quantizer.scaling is not None and quantizer.scaling.history is not None
        }
        run = Pass(config, 0, None, memory, backward=False)
        kept = (
            *kept_of(run.operand("x_f", x, -1), config.wgrad.b),
            *kept_of(run.operand("w_f", x, -1), config.dgrad.b),
        )
        return tuple(None if t is None else t.dtype for t in kept)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w, bias, ctx.name = inputs
    config = _find(ctx.name).config
    of_x, of_w = config.wgrad.b.source == "original", config.dgrad.b.source == "original"
    ctx.save_for_backward(x if of_x else None, w if of_w else None, *output[1:])
    ctx.x_shape, ctx.dtype, ctx.bias = x.shape, x.dtype, bias is not None


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    x, w, *kept = ctx.saved_tensors
    g = grads[0]
    needs = [bool(ctx.needs_input_grad[i]) for i in range(3)]
    if g is None or not any(needs):
        return None, None, None, None
    found = iter(torch.ops.fmtsim.recipe_backward(g, x, w, kept, ctx.name, ctx.x_shape, ctx.dtype, needs))
    return *(next(found) if needed else None for needed in needs), None


def _run_backward(  # type: ignore[no-untyped-def]
    g, x, w, kept, name, x_shape, dtype, needs
) -> list[Tensor]:
    layer = _find(name)
    present = iter(kept)
    whole = [None if found is None else next(present) for found in _layout(layer.config, dtype)]
    ctx = SimpleNamespace(
        config=layer.config, generator=layer.generator, observer=None, state=layer.state, dtypes=(dtype,) * 3,
        needs_input_grad=needs, x_shape=torch.Size(x_shape), w_shape=None,
    )  # fmt: skip
    with torch.autocast(g.device.type, enabled=False):
        found = layer_gradients(ctx, g, x, w, whole)
    return [d.contiguous() for d in found if d is not None]


def _fake_backward(g, x, w, kept, name, x_shape, dtype, needs) -> list[Tensor]:  # type: ignore[no-untyped-def]
    shapes = (tuple(x_shape), (g.shape[-1], x_shape[-1]), (g.shape[-1],))
    return [g.new_empty(shape, dtype=dtype) for shape, needed in zip(shapes, needs, strict=True) if needed]


def _find(name: str) -> Layer:
    layer = _layers.get(name)
    if layer is None:
        raise ArgumentError(f"{name} was compiled for a model that is gone; compile the converted model again")
    return layer


_library = torch.library.Library("fmtsim", "FRAGMENT")
_library.define("recipe_forward(Tensor x, Tensor w, Tensor? bias, str layer) -> Tensor[]")
_library.define(
    "recipe_backward(Tensor g, Tensor? x, Tensor? w, Tensor[] kept, str layer, SymInt[] x_shape, ScalarType dtype, "
    "bool[] needs) -> Tensor[]"
)
_library.impl("recipe_forward", _forward, "CompositeExplicitAutograd")
_library.impl("recipe_backward", _run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("fmtsim::recipe_forward", _fake_forward, lib=_library)
torch.library.register_fake("fmtsim::recipe_backward", _fake_backward, lib=_library)
torch.library.register_autograd("fmtsim::recipe_forward", _backward, setup_context=_setup, lib=_library)
