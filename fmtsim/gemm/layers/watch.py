# SPDX-License-Identifier: Apache-2.0
"""Observers of the products of layers and attention, and what they are shown.

Each is a ``Watcher``: statistics, calibration and users' functions (``CallObserver``) take operands before and after
quantisation, traces these and the products, ``attribute`` and the count of multiply-adds the calls. A watcher of a
forward call sees its backward pass, too, in whatever thread that runs. Compiled code shows nothing.

There are two scopes. ``watching`` is for all layers that this thread runs. The observer of one layer (an argument of
``EmulatedGEMM``, ``Emulation.observer``, ``AttentionCall.observer``) is told of every call of that layer, whichever
thread makes it: ``fmtsim.observe`` and calibration set it, and may enter and leave in different contexts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.gemm.layers.quantize_operand import quantize_operand, wide_dtype
from fmtsim.scaling.scaled_cast import transformed
from fmtsim.spec.operand import Keys, Operand, multiplied, spread
from fmtsim.spec.quantizer import Quantizer

Observer = Callable[[str, Tensor, Tensor, Quantizer, int], None]


class Seen(NamedTuple):
    """An operand that a pass is about to multiply.

    Attributes:
        name: ``x_f w_f g_d w_d g_w x_w``; of attention ``q k v p``, and ``dv.a`` ... ``dk.b``.
        original: The tensor as it came.
        quantized: What is multiplied.
        keys: Of its random numbers.
        dim: Of the original, along which the product sums.
        factor: What the original is multiplied with first (``fmtsim.spec.operand.multiplied``), or None.
    """

    name: str
    original: Tensor
    quantized: Operand
    keys: Keys = Keys()
    dim: int = -1
    factor: Tensor | None = None

    def rounded(self) -> tuple[Tensor, Tensor, int]:
        """Return the tensor that was rounded, its quantised values, and the dimension of both along which blocks run.

        The values are in a dtype that holds them.
        """
        # 1. values in a dtype that holds them; elements as they are where no scale is apart
        x, operand = self.original, self.quantized
        scaled = operand.scale is not None or operand.tensor_scale is not None
        plain = not scaled and operand.elements.element_size() > 1 and x.dtype != torch.float64
        values = operand.elements if plain else operand.values(wide_dtype(x.dtype))
        # 2. a cast alone rounds the tensor itself, along dim
        if self.quantized.quantizer.is_cast and self.factor is None:
            return x, values if self.dim == -1 else values.mT, self.dim
        x = multiplied(x, self.factor)
        # 3. else what was rounded is the tensor times its factor, transposed and rotated
        x = x if self.dim == -1 else x.mT
        for transform in self.quantized.quantizer.transforms:
            x, _ = transformed(x, transform, self.keys.signs)
        return x, values, -1

    def scales(self) -> Tensor | None:
        """Return the scale of each element of ``rounded``'s first tensor, None without a scale rule."""
        operand, quantizer = self.quantized, self.quantized.quantizer
        if quantizer.scaling is None:
            return None
        # kernels that multiplied scales into elements kept none: quantise again, scales apart
        if operand.scale is None and quantizer.scaling.history is None:  # kernels multiplied it in
            operand = quantize_operand(self.original, quantizer, self.keys, dim=self.dim, factor=self.factor)
        if operand.scale is None:
            return operand.tensor_scale
        # one scale for each element, times that of the tensor
        scale = spread(operand.scale, operand.block, operand.elements.shape)
        return scale if operand.tensor_scale is None else scale * operand.tensor_scale


class Watcher:
    """Watch products; a subclass overrides what it needs."""

    def layer(self, run: Callable[[Tensor, Tensor], Tensor], layer: Any, x: Tensor, w: Tensor) -> Tensor:
        """Run a layer forwards, on ``x [..., K]`` and ``w [N, K]``, and return its result."""
        return run(x, w)

    def attention(self, run: Callable[..., Tensor], call: Any, *inputs: Any) -> Tensor:
        """Run quantised attention forwards, on the fields of its ``Inputs``, and return its result."""
        return run(*inputs)

    def operand(self, seen: Seen) -> None:
        """See an operand."""

    def product(self, name: str, a: Operand, b: Operand, bias: Tensor | None, run: Callable[[], Tensor]) -> Tensor:
        """Run a layer's product and return it."""
        return run()

    def attention_product(self, name: str, a: Any, b: Any, y: Tensor, run: Callable[[Any, Any, Any], Tensor]) -> None:
        """See a product of attention on a unit: of ``Heads`` a and b y, which ``run(a, b, unit)`` returns again."""


class CallObserver(Watcher):
    """Call a function with each operand's name, original and quantised values, quantiser and dimension."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def operand(self, seen: Seen) -> None:
        """Call the function."""
        x, q, dim = seen.rounded()
        self._observer(seen.name, x, q, seen.quantized.quantizer, dim)


Watchers = tuple[Watcher, ...]
WATCHING: ContextVar[Watchers] = ContextVar("watching", default=())


@contextmanager
def watching(watcher: Watcher | None) -> Iterator[None]:
    """Add a watcher of everything that this thread runs eagerly; None removes all watchers meanwhile."""
    token = WATCHING.set(() if watcher is None else (*WATCHING.get(), watcher))
    try:
        yield
    finally:
        WATCHING.reset(token)


def watchers_with(observer: Observer | Watcher | None) -> Watchers:
    """Return the watchers of this thread, and a layer's observer beside them."""
    if observer is None:
        return WATCHING.get()
    return *WATCHING.get(), observer if isinstance(observer, Watcher) else CallObserver(observer)
