# SPDX-License-Identifier: Apache-2.0
"""A linear layer with quantised operands: its forward pass, and dgrad and wgrad of its backward pass.

``forward`` and ``backward`` are the mathematics; ``_Linear`` and ``_PlainLinear`` hang them into autograd. Each of the
three products is ``quantize_operand`` twice, then ``layer_product``: functions in eager code, one operator each while a
compiler traces (fmtsim/gemm/layers/compile.py).
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.casts.arguments import check_dense, check_saved, check_together, takes
from fmtsim.casts.ops import Key, OnceOnly, define_operator, fused_engine
from fmtsim.gemm.layers.compile import OperandRequest, traced_both, traced_draws, traced_operand
from fmtsim.gemm.layers.config import OPERANDS, LinearConfig, size_fault
from fmtsim.gemm.layers.keys import SCALES, SIGNS, Generator, Layer, State, counts_passes, find_layer, lasting_layer
from fmtsim.gemm.layers.multiply import finish_sums, layer_product, unrotated
from fmtsim.gemm.layers.quantize_operand import (
    NO_KEYS,
    has_both,
    is_on_gpu,
    quantize_both,
    quantize_operand,
    values_of,
    wide_dtype,
)
from fmtsim.gemm.layers.watch import WATCHING, Observer, Seen, Watcher, Watchers, watchers_with
from fmtsim.gemm.products.operands import FLOATS
from fmtsim.scaling.blocks import block_sizes
from fmtsim.spec.operand import Keys, Operand, block_of, last_cast
from fmtsim.spec.quantizer import Hadamard, Quantizer, Transform
from fmtsim.support.dispatch import (
    PLAIN_TYPES,
    autocast_dtype,
    autocasts,
    constant_in_graphs,
    is_bare,
    without_autocast,
    without_own_modes,
)
from fmtsim.support.errors import ArgumentError, DtypeError, shown
from fmtsim.support.records import checked
from fmtsim.support.replay.gpu import current_stream

_ONCE = (
    "EmulatedGEMM cannot be differentiated twice: the gradient of a quantised gradient is not defined; "
    "compute second derivatives on the unconverted model (fmtsim.revert)"
)
_COMPILED = (
    "EmulatedGEMM.apply takes no observer and no state in compiled code; "
    "convert a model, which keeps its state, and observe it before it is compiled"
)

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype | None]  # of x, w and bias, those under autocast
Saved = tuple[Tensor | None, ...]  # elements, scale, tensor_scale and slope of an operand of the forward pass


class EmulatedGEMM:
    """Compute ``y = x w^T + bias`` with each operand of forward and backward in its own format.

    ``EmulatedGEMM.apply(x, w, bias, config, generator=None, observer=None, state=None)``.

    The three products, each operand quantised along the contraction axis, from the high-precision original unless its
    quantiser says otherwise:

    ====== ============== ========= =========================
    fprop  ``y = x w^T``  along K   ``config.fprop.a``, ``.b``
    dgrad  ``dx = g w``   along N   ``config.dgrad.a``, ``.b``
    wgrad  ``dw = g^T x`` along T   ``config.wgrad.a``, ``.b``
    ====== ============== ========= =========================

    A product whose ``Gemm`` names a target or a unit has the bits of ``fmtsim.linear``, ``mm`` or ``scaled_mm`` there,
    on the values and scales of ``fmtsim.encode``. Otherwise products and sums are float32 (float64 for float64
    inputs); on a GPU its bfloat16 units run them where bfloat16 holds both operands, as it does those of most
    block formats (values below 2**-133 round to its grid): products are exact, sums are the unit's float32, and the
    scale of a tensor multiplies the sum. Where it holds the elements of both but not their products with the scales of
    groups (``deepseek_v3``), a kernel for compute capability 9.0 multiplies the sum of each group by its two scales,
    and adds these sums in order. Results are rounded to ``Gemm.out``, or to the dtype of their tensor, which under
    autocast is that of its cast: gradients of float32 tensors are bfloat16 numbers then, as torch's own are; what a
    target's library does not write (a bias, or another dtype) is added to and rounded from its float32 result. The
    bias gradient, the sum of g over T, is never quantised. Under autocast x, w and bias are first cast to the
    autocast dtype, as ``torch.nn.functional.linear`` does; w only where ``config.casts_weight``.

    Args:
        x: ``[..., K]``, float16, bfloat16, float32 or float64; the leading dimensions together are T.
        w: ``[N, K]`` of x's dtype.
        bias: ``[N]`` of x's dtype, or None.
        config: The six quantisers, and the machine of each product.
        generator: Where stochastic rounding gets its words: None draws a key for each operand from torch's default
            generator (so ``torch.manual_seed`` reproduces a run, and activation checkpointing repeats its draws), a
            torch.Generator is drawn from in the same way, an int fixes the draws of this call. The two uses of
            g, units that round stochastically and outputs all draw independently. Nothing is ever reseeded.
        observer: Called as ``observer(operand, original, quantised, quantizer, dim)`` for each operand.
        state: What delayed scaling remembers, by operand (``"x_f"``, ...); needed where a scale has a history.

    In compiled code config and generator are constants; the tracer of torch 2.11 takes no config, and compiles models
    that ``fmtsim.convert`` made. NaN and infinities follow the formats (docs/semantics.md); an operand left in high
    precision passes them on. Differentiating twice raises FmtsimError: the gradient of a rounded gradient is not
    defined here.

    Raises:
        ArgumentError: shapes that do not fit each other or the machine's library, or not a LinearConfig.
        DtypeError: dtypes that are not floating point, that differ, or that the library does not take.

    ``LinearConfig.on`` puts a recipe's layer onto a target:

    >>> from fmtsim.recipes import get_recipe
    >>> config = get_recipe("te_current").linear.on(target="h200")
    >>> x, w = (torch.ones(rows, 64, dtype=torch.bfloat16, requires_grad=True) for rows in (32, 16))
    >>> y = EmulatedGEMM.apply(x, w, None, config)
    >>> y.sum().backward()
    >>> y[0, 0].item(), x.grad[0, 0].item(), w.grad[0, 0].item()
    (64.0, 16.0, 32.0)
    """

    @staticmethod
    def apply(
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        config: LinearConfig,
        generator: Generator = None,
        observer: Observer | None = None,
        state: State | None = None,
    ) -> Tensor:
        """Return ``[..., N]`` in x's dtype, or in the autocast dtype."""
        if not isinstance(config, LinearConfig):
            raise ArgumentError(
                f"EmulatedGEMM takes a LinearConfig, not {shown(config)}; build one with linear_config(x=, w=, g=)"
            )
        if torch.compiler.is_dynamo_compiling():
            # the operator takes the name of a layer that lives as long as the compiled code
            if observer is not None or state:
                raise ArgumentError(_COMPILED)
            return torch.ops.fmtsim.layer(x, w, bias, _compiled_layer(config, generator))  # type: ignore[no-any-return]
        if observer is not None and not takes(observer, *range(5)):
            raise ArgumentError(f"observer={shown(observer)} does not take five arguments; pass a function that does")
        checked("state", state, Mapping | None)
        return run_layer(x, w, bias, Layer(config, generator, state), observer)


def run_layer(
    x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer, observer: Observer | Watcher | None = None
) -> Tensor:
    """Return ``x w^T + bias`` under a layer's definition; torch.compile sees one operator.

    Below its own tracer that operator is what ``EmulatedGEMM`` does: matrix products and opaque operands.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.fmtsim.layer(x, w, bias, layer.name)  # type: ignore[no-any-return]
    layer.runs += 1
    plain = is_bare(x, w) if bias is None else is_bare(x, w, bias)
    watchers = WATCHING.get() if observer is None else watchers_with(observer)
    if not plain:
        check_dense("x", x)
        check_dense("w", w)
        if bias is not None:
            check_dense("bias", bias)
    if (x.is_inference() or w.is_inference()) and torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        check_saved("EmulatedGEMM", x, w)
    # the common case: eager code, plain tensors, nobody looks on
    if plain and not watchers:
        return _apply_plain(x, w, bias, layer, ())  # type: ignore[no-any-return]

    def run(x: Tensor, w: Tensor) -> Tensor:
        if is_bare(x, w) if bias is None else is_bare(x, w, bias):
            return _apply_plain(x, w, bias, layer, watchers)  # type: ignore[no-any-return]
        return _Linear.apply(x, w, bias, layer, watchers)[0]  # type: ignore[no-any-return]

    # a watcher may run the layer several times, or on other tensors; modes that look for products do not see these
    with without_own_modes() if torch._C._len_torch_function_stack() else nullcontext():
        for watcher in watchers:
            run = partial(watcher.layer, run, layer)
        return run(x, w)


def run_sized(
    x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer, observer: Observer | Watcher | None = None
) -> Tensor:
    """Return ``run_layer``'s result; rows of x are padded with zeros to whole groups where operands have groups.

    Raises:
        ArgumentError: Sizes that do not fit a product of the backward pass, before half a step is done.
    """
    learns = torch.is_grad_enabled() and w.requires_grad
    if not (layer.sized and learns and x.dim() and x.dtype in FLOATS):  # run_layer refuses others
        return run_layer(x, w, bias, layer, observer)
    rows = x.numel() // max(x.shape[-1], 1)
    fault = size_fault(layer.config, rows + -rows % layer.rows, *w.shape)
    if fault is not None:
        raise ArgumentError(
            f"{fault} (x is {tuple(x.shape)}, w {tuple(w.shape)}); choose another batch size or context, pass "
            "drop_last=True to the DataLoader where the last batch is smaller, or leave the layer out with filter_fn= "
            "or a Rule(name=...)"
        )
    if not rows % layer.rows:
        return run_layer(x, w, bias, layer, observer)
    padded = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, -rows % layer.rows))
    return run_layer(padded, w, bias, layer, observer)[:rows].reshape(*x.shape[:-1], w.shape[0])


@constant_in_graphs
def _compiled_layer(config: LinearConfig, generator: Generator) -> str:
    """Return the name of a layer that lives as long as the code that is compiled for it."""
    return lasting_layer(config, generator).name


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
    dtype, w_dtype, bias_dtype = dtypes
    config, traced = layer.config, lane.traced
    # 1. dtypes, those under autocast, and shapes fit
    for name, t_dtype in (("x", dtype), ("w", w_dtype), ("bias", bias_dtype)):
        if t_dtype is not None and t_dtype not in FLOATS:
            raise DtypeError(f"EmulatedGEMM: {name} has dtype {t_dtype}; pass float16, bfloat16, float32 or float64")
    plain = not traced and w.device == x.device  # x and w
    if not plain or (bias is not None and not (type(bias) in PLAIN_TYPES and bias.device == x.device)):
        check_together(x=x, w=w, bias=bias)
    other = w_dtype if w_dtype != dtype else bias_dtype
    if other is not None and other != dtype:
        raise DtypeError(
            f"EmulatedGEMM: x has dtype {dtype}, w or bias {other}; cast them to one dtype, or use torch.autocast"
        )
    if x.dim() < 1 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        raise ArgumentError(
            f"EmulatedGEMM: x of shape {tuple(x.shape)} does not fit w of shape {tuple(w.shape)}; "
            "x is [..., K], w is [N, K]"
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise ArgumentError(
            f"EmulatedGEMM: bias of shape {tuple(bias.shape)} does not fit w of shape {tuple(w.shape)}; bias is [N]"
        )
    # 2. operands in the dtype of the pass; w is cast once for both passes if the backward pass quantises it again
    run = _Pass(layer, lane, w, dtype, (math.prod(x.shape[:-1]), *w.shape))
    later = config.wgrad.b, config.dgrad.b  # quantisers of x and of w in the backward pass
    w_again = later[1].source == "original" and not layer.uncast
    w_hp = run.cast(w, ("w_f", -1), ("w_d", 0)) if w_again else run.cast(w, ("w_f", -1))
    bias = None if bias is None else bias.to(bias_dtype)
    # 3. both quantised along K; x [..., K] is one matrix [T, K]
    if x_shared is None:
        x_hp = run.cast(as_matrix(x), ("x_f", -1))
        if run.counted:
            run.draw(OperandRequest("x_f", x_hp, -1), OperandRequest("w_f", w_hp, -1))
        x_q = run.operand("x_f", x_hp, -1)
    else:
        x_q = x_shared
        for watcher in run.watchers:  # another layer quantised it from the same tensor
            watcher.operand(Seen("x_f", as_matrix(x.to(dtype)), x_q, NO_KEYS, -1, None))
    w_q = run.operand("w_f", w_hp, -1)
    # 4. fprop: y = x w^T + bias, sums over K of x_q [T, K] and w_q [N, K]; the scales of both run along K
    follows = bias is not None and config.bias_after_rounding
    y = run.product("fprop", x_q, w_q, None if follows else bias, dtype)
    if follows:  # a bias that follows the rounding rounds again, in an operator, where no compiler fuses the two
        y = finish_sums(y, None, None, None, bias, dtype, traced)
    if x.dim() != 2 or y._is_view():  # a model may not write into a view
        y = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], w.shape[0]))
    # 5. what the backward products take of the forward pass: elements and scales, unless they quantise the original
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
    run = _Pass(layer, lane, g_hp, g.dtype, (*g_hp.shape, ctx.x_shape[-1]), backward=True)
    x_hp = None if x is None else run.cast(as_matrix(x), ("x_w", 0))
    w_hp = None if w is None else run.cast(w, ("w_d", 0))
    # 1. one node of the graph, or one read of g, for all operands that it gives
    if run.counted:
        requests: list[OperandRequest | Operand] = []
        if needs_x or g_is_shared:
            requests.append(OperandRequest("g_d", g_hp, -1))
        if needs_x:
            requests.append(run.second("w_d", w_hp, w_saved))
        if needs_w:
            requests += [OperandRequest("g_w", g_hp, 0), run.second("x_w", x_hp, x_saved)]
        run.draw(*(request for request in requests if isinstance(request, OperandRequest)))
    both = run.both_gradients(g_hp) if needs_x and needs_w else None
    g_dgrad = both[0] if both is not None else None
    if g_dgrad is None and (needs_x or g_is_shared):
        g_dgrad = run.operand("g_d", g_hp, -1)
    dx = dw = dbias = None
    # 2. dgrad: dx = g w, sums over N of g_dgrad [T, N] and w_dgrad [K, N], w transposed; the scales of both run along N
    if needs_x:
        assert g_dgrad is not None
        w_dgrad = run.quantized(run.second("w_d", w_hp, w_saved))
        dx = run.gradient("dgrad", g_dgrad, w_dgrad, x_saved).reshape(ctx.x_shape)
    # 3. wgrad: dw = g^T x, sums over T of g_wgrad [N, T] and x_wgrad [K, T], both transposed; scales run along T
    if needs_w:
        if both is not None:
            g_wgrad = both[1]
        elif g_dgrad is not None and g_is_shared:
            g_wgrad = g_dgrad.transposed()
        else:
            g_wgrad = run.operand("g_w", g_hp, 0)
        x_wgrad = run.quantized(run.second("x_w", x_hp, x_saved))
        dw = run.gradient("wgrad", g_wgrad, x_wgrad, w_saved)
    # 4. the gradient of the bias is never quantised
    if needs_bias:
        dbias = g_hp.sum(0, dtype=wide_dtype(g.dtype)).to(g.dtype)
    return [dx, dw, dbias]


class _Pass:
    """The operands and products of one pass, forward or backward.

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
        self.watchers = () if lane.traced else lane.watchers
        self.counted = lane.traced and counts_passes(layer, t, sizes)
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
            if name in layer.random:
                # the keys of elements, scales and signs; those of a rotation's signs are drawn first
                signs = self._sign_key(quantizer.transforms, t)
                rounds = "stochastic" in (quantizer.rounding.mode, last_cast(quantizer).rounding.mode)
                scales = quantizer.scaling is not None and quantizer.scaling.scale_rounding == "stochastic"
                use = OPERANDS.index(name)
                elements = layer.key(use, t, traced=self._traced) if rounds else None
                scale_key = layer.key(SCALES + use, t, traced=self._traced) if scales else None
                keys = Keys(elements, scale_key, signs)  # type: ignore[arg-type]
            if self._traced:
                source = (layer.name, name) if name in layer.state else ("", "")
                return traced_operand(t, quantizer, keys[:3], source, dim=dim, folded=folded, factor=factor)
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
        uses = OPERANDS.index("g_d"), OPERANDS.index("g_w")
        keys = [self._layer.key(use, g, traced=self._traced) if quantizer.is_stochastic else None for use in uses]
        both = (traced_both if self._traced else quantize_both)(g, quantizer, *keys)
        for watcher in self.watchers:
            for name, operand, key, dim in zip(("g_d", "g_w"), both, keys, (-1, 0), strict=True):
                watcher.operand(Seen(name, g, operand, Keys(key), dim))  # type: ignore[arg-type]
        return both

    def second(self, name: str, original: Tensor | None, saved: Saved) -> Operand | OperandRequest:
        """Return the second operand of a backward product, or the request to quantise it; sums run over its rows."""
        quantizer = self._layer.quantizers[name]
        if quantizer.source == "original":
            assert original is not None
            return OperandRequest(name, original, 0)
        # the operand of the forward pass: its transpose, or its values, quantised once more
        before = self._config.fprop.b if name == "w_d" else self._config.fprop.a
        elements, scale, tensor_scale, _ = saved
        assert elements is not None
        forward = Operand(elements, before, scale, tensor_scale, block_sizes(block_of(before), elements.shape))
        if quantizer.source == "forward":
            return forward.transposed()
        # values are quantised once more: elements times a factor in kernels, else in float32
        factor = tensor_scale if scale is None else scale
        blocks = scale is not None and tensor_scale is None and quantizer.scaling is not None
        whole = blocks and not any(n % size for n, size in zip(elements.shape, forward.block, strict=True))
        if elements.dtype == torch.bfloat16 and (scale is None or whole):
            return OperandRequest(name, elements, 0, factor)
        return OperandRequest(name, values_of(forward, torch.float32), 0)

    def product(self, name: str, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return ``a b^T + bias`` of a product of the layer, rounded as it says."""
        how = self._layer, name, a, b, bias, dtype, self._dtype
        if not self.watchers:
            return layer_product(*how, traced=self._traced)
        run = partial(layer_product, *how)
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
        signs = self._sign_key(outer, y)
        before = fprop.a if name == "dgrad" else fprop.b
        return unrotated(
            y, gemm.a, before, slope, signs, dtype, was_rotated=was_rotated, traced=self._traced, scales=scales
        )

    def _sign_key(self, transforms: Iterable[Transform], t: Tensor) -> Key:
        """Return the key of this pass's random signs, the same for all operands; None where no transform has any."""
        if not any(isinstance(transform, Hadamard) and transform.signs == "random" for transform in transforms):
            return None
        if self._signs is None:
            self._signs = self._layer.key(SIGNS + self._backward, t, traced=self._traced)
        return self._signs


def as_matrix(t: Tensor) -> Tensor:
    """Return a tensor as a matrix of its last dimension, which may be empty."""
    if t.dim() == 2:
        return t
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


class _Linear(torch.autograd.Function):
    """The three products, with the tensors saved for the backward pass as outputs beside the result.

    torch.func, compilers and modes need them as outputs. ``_PlainLinear`` is for calls that none of them sees.
    """

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer, watchers: Watchers
    ) -> tuple[Tensor | None, ...]:
        """Return y and the saved tensors of x and of w."""
        bare = is_bare(x, w) if bias is None else is_bare(x, w, bias)
        return _run_forward(x, w, bias, layer, Lane(watchers, traced=not bare))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep what ``_keep`` does; none of it has a gradient."""
        ctx.mark_non_differentiable(*(t for t in output[1:] if t is not None))
        _keep(ctx, inputs, output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of x, w and bias, in the dtype of g; autograd widens them to their tensors'."""
        return _run_backward(ctx, g, plain=False)


class _PlainLinear(torch.autograd.Function):
    """Do what ``_Linear`` does for plain tensors, in a fraction of the host's time: y is the only output.

    ``_apply_plain`` applies it; what torch's own ``apply`` does before, for torch.func, plain tensors do not need.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Return y."""
        x, w, bias, layer, watchers = inputs
        shares_x = layer.shares_x and x.grad_fn is not None
        y, *saved = _run_forward(x, w, bias, layer, Lane(watchers, shares_x=shares_x))
        _keep(ctx, inputs, tuple(saved))
        return y  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of x, w and bias, in the dtype of g; autograd widens them to their tensors'."""
        return _run_backward(ctx, g, plain=True)


_apply_plain: Callable[..., Tensor] = super(torch.autograd.Function, _PlainLinear).apply  # type: ignore[misc]


def _run_forward(x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer, lane: Lane) -> tuple[Tensor | None, ...]:
    """Return y and the saved tensors of ``forward``: under autocast in its dtype, on a GPU from a recording."""
    # 1. the dtypes of the pass
    kind, dtypes = x.device.type, (x.dtype, w.dtype, None if bias is None else bias.dtype)
    autocast = autocast_dtype(kind)
    if autocast is not None:
        dtypes = tuple([d if d in (None, torch.float64) else autocast for d in dtypes])  # type: ignore[assignment]
    # 2. the quantised x of the layer before, if its x, dtype and quantiser were the same
    x_shared = None
    if lane.shares_x and (last := _last) is not None and last.x() is x and last.version == x._version:
        same = last.dtype == dtypes[0] and last.quantizer is layer.quantizers["x_f"]
        same = same and last.folded == ("x_f" in layer.folded)
        if same and last.stream == _stream(x):  # another stream would not wait for the elements
            x_shared = last.operand
    # 3. the pass, or the replay of its recording on a GPU, without autocast
    run = partial(forward, x, w, bias, layer, dtypes, x_shared, lane)
    if not (lane.traced or lane.watchers) and is_on_gpu(x):
        parts = () if x_shared is None else (part for part in x_shared if isinstance(part, Tensor))
        run = partial(layer.repeat, dtypes, (x, w, bias, *parts), run)
    if autocast is None:
        y, x_q, saved = run()
    else:  # as without_autocast, in less of the host's time
        torch.set_autocast_enabled(kind, False)
        try:
            y, x_q, saved = run()
        finally:
            torch.set_autocast_enabled(kind, True)
    if x_q is not None:
        share(x, dtypes[0], layer, x_q)
    return y, *saved


def _keep(ctx: Any, inputs: tuple[Any, ...], saved: Saved) -> None:
    """Save the original or quantised tensors that the two backward products need."""
    x, w, _, ctx.layer, ctx.watchers = inputs
    needs_x, needs_w, _ = ctx.needs_input_grad[:3]
    config = ctx.layer.config
    source = x if needs_w and config.wgrad.b.source == "original" else None
    weight = w if needs_x and config.dgrad.b.source == "original" else None
    ctx.save_for_backward(source, weight, *saved)
    ctx.x_shape = x.shape


def _run_backward(ctx: Any, g: Tensor, *, plain: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs of a layer's Function."""
    forget()
    tensors = g, *ctx.saved_tensors
    bare = is_bare(g)
    w = tensors[2] if tensors[11] is None else tensors[11]
    lane = Lane(ctx.watchers, traced=not bare)
    run = partial(backward, ctx, g, tensors[1], w, (tensors[3:7], tensors[7:11]), lane)
    if plain and bare and is_on_gpu(g) and not ctx.watchers:
        run = partial(ctx.layer.repeat, (ctx.needs_input_grad, ctx.x_shape), tensors, run)
    # gradients of gradients are refused by a node that raises when it is differentiated
    again = torch.is_grad_enabled()  # with create_graph=True alone
    if again or autocasts(g.device.type):
        with torch.no_grad(), without_autocast(g.device):
            grads = run()
    else:
        grads = run()
    if again and is_bare(g.detach()):
        grads = [None if d is None else OnceOnly.apply(d, _ONCE, *tensors[:3]) for d in grads]
    return (*grads, None, None)


class _SharedInput(NamedTuple):
    """The quantised input of the last layer, cached for the next layer until a backward pass begins.

    The projections of attention, or a gate beside its product, read one activation. The backward pass of each needs the
    same elements.
    """

    x: "weakref.ref[Tensor]"
    version: int
    stream: int
    dtype: torch.dtype
    quantizer: Quantizer
    folded: bool
    operand: Operand


_last: _SharedInput | None = None


def share(x: Tensor, dtype: torch.dtype, layer: Layer, operand: Operand) -> None:
    """Keep a layer's quantised input for layers that follow."""
    global _last
    quantizer, folded = layer.quantizers["x_f"], "x_f" in layer.folded
    _last = _SharedInput(weakref.ref(x), x._version, _stream(x), dtype, quantizer, folded, operand)


def _stream(x: Tensor) -> int:
    """Return the stream on which kernels of a GPU that read a tensor are started."""
    return current_stream(x.get_device()) if x.is_cuda else 0


def forget() -> None:
    """Release the operand that ``share`` keeps."""
    global _last
    _last = None


def autocast_to(t: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the dtype that autocast gives products of ``like``."""
    dtype = autocast_dtype(like.device.type)
    return t if dtype is None or t.dtype == torch.float64 else t.to(dtype)


define_operator(
    "layer(Tensor x, Tensor w, Tensor? bias, str layer) -> Tensor",
    lambda x, w, bias, layer: run_layer(x, w, bias, find_layer(layer)),
    None,
    "CompositeImplicitAutograd",
)
