# SPDX-License-Identifier: Apache-2.0
"""A linear layer with quantised operands: its forward pass, and dgrad and wgrad of its backward pass.

With x [T, K], w [N, K] and the gradient g [T, N] of y, the three products are

    fprop  y = x w^T + bias    sums over K of x and w
    dgrad  dx = g w            sums over N of g and w^T
    wgrad  dw = g^T x          sums over T of g^T and x^T

Each is ``quantize_operand`` twice, with scales along the axis of the sum, then ``layer_product``: functions in eager
code, one operator each while a compiler traces (compile.py). emulated_gemm.py hangs both passes into autograd.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.lanes import Key, random_key
from fmtsim.casts.ops import fused_engine
from fmtsim.gemm.layers.compile import OperandRequest, traced_both, traced_draws, traced_operand
from fmtsim.gemm.layers.keys import SIGNS, USES, Layer, counts_passes
from fmtsim.gemm.layers.multiply import finish_sums, layer_product, unrotated
from fmtsim.gemm.layers.quantize_operand import (
    NO_KEYS,
    dequantize,
    has_both,
    quantize_both,
    quantize_operand,
    saved_operand,
    wide_dtype,
)
from fmtsim.gemm.layers.watch import Seen, Watchers
from fmtsim.spec.operand import Keys, Operand
from fmtsim.support.dispatch import is_readable

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype | None]  # of x, w and bias, those under autocast
Saved = tuple[Tensor | None, ...]  # elements, scale, tensor_scale and slope of an operand of the forward pass


class Lane(NamedTuple):
    """How a pass runs.

    Attributes:
        watchers: Who sees its operands and products.
        traced: The tensors are a compiler's, without values: call operators.
        shares_x: Layers that follow may reuse the quantised x.
    """

    watchers: Watchers = ()
    traced: bool = False
    shares_x: bool = False


def forward(
    x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer, dtypes: Dtypes, x_shared: Operand | None, lane: Lane
) -> tuple[Tensor, Operand | None, tuple[Tensor | None, ...]]:
    """Return y, the quantised x if layers share it, and the tensors that the backward pass needs.

    The last of these is w in the dtype of autocast, where the backward pass quantises that again and no kernel rounds w
    as it reads.

    Args:
        x: [..., K].
        w: [N, K].
        bias: [N], or None.
        layer: The quantisers, and the machine of each product.
        dtypes: Of x, w and bias in this pass.
        x_shared: The quantised x of a layer before, or None.
        lane: How the pass runs.
    """
    (dtype, _, bias_dtype), config, traced = dtypes, layer.config, lane.traced
    # 1. operands in the dtype of the pass; w is cast once for both passes if the backward pass quantises it again
    this_pass = _Pass(layer, lane, w, dtype, (math.prod(x.shape[:-1]), *w.shape))
    later = config.wgrad.b, config.dgrad.b  # quantisers of x and of w in the backward pass
    w_again = later[1].source == "original" and not layer.uncast
    w_hp = this_pass.cast(w, ("w_f", -1), ("w_d", 0)) if w_again else this_pass.cast(w, ("w_f", -1))
    bias = None if bias is None else bias.to(bias_dtype)
    # 2. both quantised along K; x [..., K] is one matrix [T, K]
    if x_shared is None:
        x_hp = this_pass.cast(as_matrix(x), ("x_f", -1))
        if this_pass.counted:
            this_pass.draw(OperandRequest("x_f", x_hp, -1), OperandRequest("w_f", w_hp, -1))
        x_q = this_pass.operand("x_f", x_hp, -1)
    else:
        x_q = x_shared
        for watcher in this_pass.watchers:  # another layer quantised it from the same tensor
            watcher.operand(Seen("x_f", as_matrix(x.to(dtype)), x_q, NO_KEYS, -1, None))
    w_q = this_pass.operand("w_f", w_hp, -1)
    # 3. fprop: y = x w^T + bias, sums over K of x_q [T, K] and w_q [N, K]; the scales of both run along K
    follows = bias is not None and config.bias_after_rounding
    y = this_pass.product("fprop", x_q, w_q, None if follows else bias, dtype)
    if follows:  # a bias that follows the rounding rounds again, in an operator, where no compiler fuses the two
        y = finish_sums(y, None, None, None, bias, dtype, traced)
    if x.dim() != 2 or y._is_view():  # a model may not write into a view
        y = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], w.shape[0]))
    # 4. what the backward products take of the forward pass: elements and scales, unless they quantise the original
    saved: list[Tensor | None] = []
    for operand, quantizer in zip((x_q, w_q), later, strict=True):
        original = quantizer.source == "original"
        saved += [None] * 3 if original else [operand.elements, operand.scale, operand.tensor_scale]
        saved.append(operand.slope)
    saved.append(w_hp if w_again and w_hp is not w and not traced else None)
    return y, x_q if lane.shares_x else None, tuple(saved)


def backward(
    ctx: Any, g: Tensor, x: Tensor | None, w: Tensor | None, saved: tuple[Saved, Saved], lane: Lane
) -> list[Tensor | None]:
    """Return the gradients of x, w and the bias.

    Args:
        ctx: Of the Function: ``layer``, ``x_shape``, ``needs_input_grad``.
        g: [..., N], the gradient of y.
        x, w: The originals [..., K] and [N, K], where a quantiser takes them, else None.
        saved: What the forward pass saved of x and of w.
        lane: How the pass runs.
    """
    layer, (x_saved, w_saved), (needs_x, needs_w, needs_bias) = ctx.layer, saved, ctx.needs_input_grad[:3]
    g_is_shared = layer.config.wgrad.a.source == "forward"  # wgrad takes the transpose of dgrad's g
    g_hp = as_matrix(g)
    this_pass = _Pass(layer, lane, g_hp, g.dtype, (*g_hp.shape, ctx.x_shape[-1]), backward=True)
    x_hp = None if x is None else this_pass.cast(as_matrix(x), ("x_w", 0))
    w_hp = None if w is None else this_pass.cast(w, ("w_d", 0))
    # 1. one node of the graph, or one read of g, for all operands that it gives
    if this_pass.counted:
        requests: list[OperandRequest | Operand] = []
        if needs_x or g_is_shared:
            requests.append(OperandRequest("g_d", g_hp, -1))
        if needs_x:
            requests.append(this_pass.second("w_d", w_hp, w_saved))
        if needs_w:
            requests += [OperandRequest("g_w", g_hp, 0), this_pass.second("x_w", x_hp, x_saved)]
        this_pass.draw(*(request for request in requests if isinstance(request, OperandRequest)))
    both = this_pass.both_gradients(g_hp) if needs_x and needs_w else None
    g_dgrad = both[0] if both is not None else None
    if g_dgrad is None and (needs_x or g_is_shared):
        g_dgrad = this_pass.operand("g_d", g_hp, -1)
    dx = dw = dbias = None
    # 2. dgrad: dx = g w, sums over N of g_dgrad [T, N] and w_dgrad [K, N], w transposed; the scales of both run along N
    if needs_x:
        assert g_dgrad is not None
        w_dgrad = this_pass.quantized(this_pass.second("w_d", w_hp, w_saved))
        dx = this_pass.gradient("dgrad", g_dgrad, w_dgrad, x_saved).reshape(ctx.x_shape)
    # 3. wgrad: dw = g^T x, sums over T of g_wgrad [N, T] and x_wgrad [K, T], both transposed; scales run along T
    if needs_w:
        if both is not None:
            g_wgrad = both[1]
        elif g_dgrad is not None and g_is_shared:
            g_wgrad = g_dgrad.transposed()
        else:
            g_wgrad = this_pass.operand("g_w", g_hp, 0)
        x_wgrad = this_pass.quantized(this_pass.second("x_w", x_hp, x_saved))
        dw = this_pass.gradient("wgrad", g_wgrad, x_wgrad, w_saved)
    # 4. the gradient of the bias is never quantised
    if needs_bias:
        dbias = g_hp.sum(0, dtype=wide_dtype(g.dtype)).to(g.dtype)
    return [dx, dw, dbias]


class _Pass:
    """Quantise the operands of one pass, forward or backward, and run its products.

    Args:
        layer: Its definition, random keys and states.
        lane: How it runs.
        t: A tensor of the pass.
        dtype: Of its operands before they are quantised.
        sizes: M, N and K of its products.
        backward: Which pass.
    """

    def __init__(
        self, layer: Layer, lane: Lane, t: Tensor, dtype: torch.dtype, sizes: tuple[int, ...], *,
        backward: bool = False,
    ) -> None:  # fmt: skip
        self._layer, self._config, self._backward, self._dtype = layer, layer.config, backward, dtype
        self._traced = lane.traced
        # a compiler's tensors have nothing to see; those under a mode, such as a simulated GPU, have
        self.watchers = lane.watchers if not lane.traced or is_readable(t) else ()
        self.counted = lane.traced and not self.watchers and counts_passes(layer, t, sizes)
        self._signs: Key = None  # of this pass's random rotations
        self._drawn: dict[str, Operand] = {}
        self._narrow: set[str] = set()  # operands whose tensors are float32 in place of bfloat16

    def cast(self, t: Tensor, *uses: tuple[str, int]) -> Tensor:
        """Return a matrix in the dtype of the pass; as it is where kernels round it as they read, or nothing casts it.

        Args:
            t: [M, N].
            uses: Names of the operands that it becomes, and the dimensions that their products sum over.
        """
        if t.dtype == self._dtype or all(name in self._layer.uncast for name, _ in uses):
            return t
        # kernels of a GPU read float32 and round to bfloat16 first, which saves the cast's pass over memory
        watched, dtypes, layer = self._traced or self.watchers, (t.dtype, self._dtype), self._layer
        engine = None if watched or dtypes != (torch.float32, torch.bfloat16) else fused_engine(t)
        if engine is None or not all(
            name not in layer.untouched and engine.narrows(t, layer.quantizers[name], dim, name in layer.folded)
            for name, dim in uses
        ):
            return t.to(self._dtype)
        self._narrow.update(name for name, _ in uses)
        return t

    def operand(self, name: str, t: Tensor, dim: int, factor: Tensor | None = None) -> Operand:
        """Quantise a tensor, times a factor (float32, 0-d) where there is one, whose products sum over ``dim``."""
        layer = self._layer
        quantizer, folded = layer.quantizers[name], name in layer.folded
        keys = NO_KEYS
        if name in layer.untouched and factor is None:
            operand = Operand(t if dim == -1 else t.mT, quantizer)
        elif name in self._drawn:
            return self._drawn[name]
        else:
            if name in layer.random:  # the key of a rotation's signs is the pass's own, and drawn first
                signs = self._sign_key(t) if quantizer.has_random_signs else None
                keys = layer.draw_keys(name, t, signs, traced=self._traced)
            if self._traced:
                source = (layer.name, name) if name in layer.state else ("", "")
                operand = traced_operand(t, quantizer, keys[:3], source, dim=dim, folded=folded, factor=factor)
                if self.watchers:
                    keys = Keys(*map(random_key, keys[:3]))  # type: ignore[arg-type]
            else:
                operand = quantize_operand(
                    t, quantizer, keys, layer.state.get(name), dim=dim, folded=folded, factor=factor,
                    narrow=name in self._narrow,
                )  # fmt: skip
        for watcher in self.watchers:
            watcher.operand(Seen(name, t, operand, keys, dim, factor))
        return operand

    def quantized(self, x: OperandRequest | Operand) -> Operand:
        """Return an operand, quantised if it is a request to do so."""
        return self.operand(*x) if isinstance(x, OperandRequest) else x

    def draw(self, *requests: OperandRequest) -> None:
        """Quantise the operands with counted keys as one node of the graph, for ``operand`` to return."""
        drawn = [request for request in requests if request.name in self._layer.random]
        if drawn:
            self._drawn = dict(zip([request.name for request in drawn], traced_draws(self._layer, drawn), strict=True))

    def both_gradients(self, g: Tensor) -> tuple[Operand, Operand] | None:
        """Return the gradient quantised for both its products from one read; None where that has no kernel."""
        dgrad, wgrad = self._config.dgrad, self._config.wgrad
        quantizer = dgrad.a
        if quantizer != wgrad.a or dgrad.emulated or wgrad.emulated or not has_both(g, quantizer):
            return None
        if dgrad.b.is_stochastic or wgrad.b.is_stochastic or (self.counted and quantizer.is_stochastic):
            return None  # the operands draw in their order
        # both draw, each from the stream of its operand
        keys = [
            self._layer.key(USES[name], g, traced=self._traced) if quantizer.is_stochastic else None
            for name in ("g_d", "g_w")
        ]
        both = (traced_both if self._traced else quantize_both)(g, quantizer, *keys)
        for watcher in self.watchers:
            for name, operand, key, dim in zip(("g_d", "g_w"), both, keys, (-1, 0), strict=True):
                watcher.operand(Seen(name, g, operand, Keys(random_key(key)), dim))
        return both

    def second(self, name: str, original: Tensor | None, saved: Saved) -> Operand | OperandRequest:
        """Return the second operand of a backward product, or the request to quantise it; sums run over its rows."""
        quantizer = self._layer.quantizers[name]
        if quantizer.source == "original":
            assert original is not None
            return OperandRequest(name, original, 0)
        # the operand of the forward pass: its transpose, or its values, quantised once more
        before = self._config.fprop.b if name == "w_d" else self._config.fprop.a
        fprop_q = saved_operand(saved, before)
        if quantizer.source == "forward":
            return fprop_q.transposed()
        # values are quantised once more: elements times a factor in kernels, else in float32
        elements, scale, tensor_scale = fprop_q.elements, fprop_q.scale, fprop_q.tensor_scale
        factor = tensor_scale if scale is None else scale
        blocks = scale is not None and tensor_scale is None and quantizer.scaling is not None
        whole = blocks and not any(n % size for n, size in zip(elements.shape, fprop_q.block, strict=True))
        if elements.dtype == torch.bfloat16 and (scale is None or whole):
            return OperandRequest(name, elements, 0, factor)
        return OperandRequest(name, dequantize(fprop_q, torch.float32), 0)

    def product(self, name: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return ``a b^T + bias`` of a product of the layer, rounded as it says."""
        how = self._layer, name, a, b, bias, dtype, self._dtype
        run = partial(layer_product, *how, traced=self._traced)
        for watcher in self.watchers:
            run = partial(watcher.product, name, a, b, bias, run)  # type: ignore[assignment]
        return run()

    def gradient(self, name: str, grad: Operand, other: Operand, saved: Saved) -> Tensor:
        """Return a backward product: the gradient of a tensor that was rotated and rounded in the forward pass.

        Args:
            name: Of the product, ``"dgrad"`` or ``"wgrad"``.
            grad: The incoming gradient, quantised.
            other: The second operand.
            saved: What the forward pass saved of the tensor.
        """
        gemm, fprop, dtype = getattr(self._config, name), self._config.fprop, self._dtype
        was_rotated, slope = saved[0] is not None, saved[3]
        outer, inner = self._layer.rotations[name]
        inner = inner if was_rotated else []
        if not outer and not inner and slope is None:
            return self.product(name, grad, other, None, dtype)
        # the product is that of rotated tensors: rotate it back, and multiply it by the slope of the rounding
        scales: tuple[Tensor | None, Tensor | None] = None, None
        bare = grad.scale is other.scale is grad.rest is gemm.out.format is None
        if inner and bare and not (self.watchers or gemm.emulated):
            scales = other.row_scales(), grad.row_scales()  # part of the step that follows
            grad, other = (operand._replace(tensor_scale=None) for operand in (grad, other))
        y = self.product(name, grad, other, None, wide_dtype(dtype))
        signs = self._sign_key(y) if any(transform.signs == "random" for transform in outer) else None
        before = fprop.a if name == "dgrad" else fprop.b
        return unrotated(
            y, gemm.a, before, slope, signs, dtype, was_rotated=was_rotated, traced=self._traced, scales=scales
        )

    def _sign_key(self, t: Tensor) -> Key:
        """Return the key of this pass's random signs, the same for all operands."""
        if self._signs is None:
            self._signs = self._layer.key(SIGNS + self._backward, t, traced=self._traced)
        return self._signs


def as_matrix(t: Tensor) -> Tensor:
    """Return a tensor as a matrix of its last dimension, which may be empty."""
    if t.dim() == 2:
        return t
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])
