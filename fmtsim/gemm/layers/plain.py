"""The products of a layer whose operands are casts of the originals and no more."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.gemm.layers.bfloat16 import Held, hold, hold_both, holds, multiply
from fmtsim.gemm.layers.coding import Coded, code
from fmtsim.gemm.layers.config import OPERANDS, Gemm, LinearConfig
from fmtsim.gemm.layers.layer import Layer
from fmtsim.gemm.layers.machine import multiply_coded, round_output
from fmtsim.gemm.layers.passes import Observer
from fmtsim.gemm.layers.streams import Generator, Stream, stream_of
from fmtsim.gemm.products.operator import drawn_key
from fmtsim.quantize import quantize
from fmtsim.spec.call import Operation
from fmtsim.spec.quantizer import Quantizer


def plain_forward(x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer, see: Observer | None) -> Tensor:
    """Return ``x w^T + bias`` of [T, K] and [N, K] in x's dtype."""
    return _product(0, x, w, -1, -1, bias, layer.config.fprop, x.dtype, layer.generator, see)


def plain_gradients(
    ctx: Any, g: Tensor, x: Tensor | None, w: Tensor | None, kept: list[Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and w, each where the other is there; nothing else is kept of the forward pass."""
    config, stream, see = ctx.layer.config, ctx.layer.generator, ctx.observer
    across, down = _held_gradients(config, g, w, x, stream)
    dx = dw = None
    if w is not None:
        dx = _product(1, g, w, -1, 0, None, config.dgrad, ctx.dtypes[0], stream, see, across)
    if x is not None:
        dw = _product(2, g, x, 0, 0, None, config.wgrad, ctx.dtypes[1], stream, see, down)
    return dx, dw


def _held_gradients(
    config: LinearConfig, g: Tensor, w: Tensor | None, x: Tensor | None, stream: Generator
) -> tuple[Held | None, Held | None]:
    """Return the gradient quantised for both its products from one read, where they take the same of it."""
    dgrad, wgrad = config.dgrad, config.wgrad
    if w is None or x is None or dgrad.a != wgrad.a or dgrad.emulated or wgrad.emulated or not holds(g, dgrad.a):
        return None, None
    if not holds(w, dgrad.b) or not holds(x, wgrad.b) or "stochastic" in (dgrad.b.rounding.mode, wgrad.b.rounding.mode):
        return None, None  # the operands draw in their order
    return hold_both(g, dgrad.a, (_own_stream(dgrad.a, stream, 2), _own_stream(wgrad.a, stream, 4))) or (None, None)


def _product(
    index: int,
    a: Tensor,
    b: Tensor,
    dim_a: int,
    dim_b: int,
    bias: Tensor | None,
    gemm: Gemm,
    dtype: torch.dtype,
    generator: Generator,
    see: Observer | None,
    held: Held | None = None,
) -> Tensor:
    """Return product ``index`` (0 fprop, 1 dgrad, 2 wgrad) of two matrices that contract over dim_a and dim_b.

    ``held`` is a, quantised already.
    """
    words = stream_of(generator, 9 + index)
    if gemm.emulated:
        left = _coded(2 * index, a, gemm.a, dim_a, generator, see)
        right = _coded(2 * index + 1, b, gemm.b, dim_b, generator, see)
        operation: Operation = "mm" if index else "linear"
        y = multiply_coded(operation, left, right, bias, gemm, dtype, stream_of(generator, 6 + index))
        return round_output(y, gemm.out, dtype, words)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    if holds(a, gemm.a) and holds(b, gemm.b):
        left_held = _held(2 * index, a, gemm.a, dim_a, generator, see, held)
        right_held = _held(2 * index + 1, b, gemm.b, dim_b, generator, see)
        plain = gemm.out.format is None
        y = multiply(left_held, right_held, (dim_a, dim_b), bias, dtype if plain else wide)
        return y if plain else round_output(y, gemm.out, dtype, words)
    first = _operand(2 * index, a, gemm.a, dim_a, wide, generator, see)
    second = _operand(2 * index + 1, b, gemm.b, dim_b, wide, generator, see)
    first, second = first if dim_a == -1 else first.t(), second.t() if dim_b == -1 else second
    y = torch.mm(first, second) if bias is None else torch.addmm(bias.to(wide), first, second)
    return round_output(y, gemm.out, dtype, words) if gemm.out.format is not None else y.to(dtype)


def _coded(index: int, t: Tensor, quantizer: Quantizer, dim: int, generator: Generator, see: Observer | None) -> Coded:
    stream: Stream = _own_stream(quantizer, generator, index)
    if see is not None:  # statistics look at the values, which have to be rounded by the same draws
        if quantizer.rounding.mode == "stochastic":
            stream = drawn_key(stream, t.device)
        wide = torch.float64 if t.dtype == torch.float64 else torch.float32
        see(OPERANDS[index], t, _values(t, quantizer, dim, wide, stream), quantizer, dim)
    return code(t, quantizer, dim, stream)


def _held(
    index: int,
    t: Tensor,
    quantizer: Quantizer,
    dim: int,
    generator: Generator,
    see: Observer | None,
    held: Held | None = None,
) -> Held:
    held = hold(t, quantizer, dim, _own_stream(quantizer, generator, index)) if held is None else held
    if see is not None:
        see(OPERANDS[index], t, held.quantised, quantizer, dim)
    return held


def _own_stream(quantizer: Quantizer, generator: Generator, index: int) -> Generator:
    return stream_of(generator, index) if quantizer.rounding.mode == "stochastic" else None


def _operand(
    index: int,
    t: Tensor,
    quantizer: Quantizer,
    dim: int,
    dtype: torch.dtype,
    generator: Generator,
    see: Observer | None,
) -> Tensor:
    q = _values(t, quantizer, dim, dtype, _own_stream(quantizer, generator, index))
    if see is not None:
        see(OPERANDS[index], t, q, quantizer, dim)
    return q


def _values(t: Tensor, quantizer: Quantizer, dim: int, dtype: torch.dtype, stream: Stream) -> Tensor:
    if quantizer.format is None:
        return t.to(dtype)
    return quantize(
        t,
        quantizer.format,
        rounding=quantizer.rounding,
        overflow=quantizer.overflow,
        dim=dim,
        generator=stream,
        pad=True,
        out_dtype=dtype,
    )
