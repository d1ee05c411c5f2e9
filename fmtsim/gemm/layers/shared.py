# SPDX-License-Identifier: Apache-2.0
"""Operands that layers share: the projections of attention, or a gate beside its product, read one activation.

What the last layer made of its input is kept until another layer has another one, or a backward pass begins, so that
the next layer with the same input and quantiser takes it. The backward pass of each then needs the same elements.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from fmtsim.gemm.layers.keys import Layer
from fmtsim.gemm.layers.operand import is_untouched
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.replay.gpu import current_stream

_NAME = "x_f"


class _Made(NamedTuple):
    x: "weakref.ref[Tensor]"
    version: int
    stream: int
    dtype: torch.dtype
    quantizer: Quantizer
    folded: bool
    operand: Operand


_last: _Made | None = None


def is_shared(x: Tensor, layer: Layer) -> bool:
    """Say whether what a layer makes of its input hangs on nothing but the input, which autograd watches over.

    Nothing is drawn or remembered, and x is part of a graph: only there torch counts all changes.
    """
    if x.grad_fn is None or _NAME in layer.random or _NAME in layer.state:
        return False
    return not is_untouched(layer.quantizers[_NAME])


def shared(x: Tensor, dtype: torch.dtype, layer: Layer) -> Operand | None:
    """Return what the last layer made of the same input, cast to a dtype; None where it had another."""
    made = _last
    if made is None or made.x() is not x or made.version != x._version or made.dtype != dtype:
        return None
    same = made.quantizer is layer.quantizers[_NAME] and made.folded == (_NAME in layer.folded)
    same = same and made.stream == _stream(x)  # another stream would not wait for the elements
    return made.operand if same else None


def share(x: Tensor, dtype: torch.dtype, layer: Layer, operand: Operand) -> None:
    """Keep what a layer made of its input, cast to a dtype."""
    global _last
    quantizer, folded = layer.quantizers[_NAME], _NAME in layer.folded
    _last = _Made(weakref.ref(x), x._version, _stream(x), dtype, quantizer, folded, operand)


def _stream(x: Tensor) -> int:
    """Return the stream on which kernels of a GPU that read a tensor are started."""
    return current_stream(x.get_device()) if x.is_cuda else 0


def forget() -> None:
    """Keep nothing."""
    global _last
    _last = None
