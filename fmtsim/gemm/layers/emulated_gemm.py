# SPDX-License-Identifier: Apache-2.0
"""EmulatedGEMM: a linear layer whose three products see quantised operands, in autograd, autocast and compiled code.

fmtsim/gemm/layers/layer.py has the mathematics: the forward pass, dgrad and wgrad.
"""

import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.casts.arguments import check_dense, check_saved, check_together, takes
from fmtsim.casts.lanes import OnceOnly, define_operator
from fmtsim.gemm.layers.config import LinearConfig, size_fault
from fmtsim.gemm.layers.keys import Generator, Layer, State, find_layer, lasting_layer
from fmtsim.gemm.layers.layer import Dtypes, Lane, Saved, backward, forward
from fmtsim.gemm.layers.quantize_operand import is_on_gpu
from fmtsim.gemm.layers.watch import WATCHING, Observer, Watcher, Watchers, watchers_with
from fmtsim.gemm.products.operands import FLOATS
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer
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
_PLAIN, _SHARING = Lane(), Lane(shares_x=True)


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
    # the common case: eager code, plain tensors, no watcher
    if plain and not watchers:
        return _apply_plain(x, w, bias, layer, ())  # type: ignore[no-any-return]
    # a watcher may run the layer several times, or on other tensors; modes that look for products do not see these
    with without_own_modes() if torch._C._len_torch_function_stack() else nullcontext():
        run = partial(_apply, bias, layer, watchers)
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
    if not layer.sized or not (torch.is_grad_enabled() and w.requires_grad):
        return run_layer(x, w, bias, layer, observer)
    if not x.dim() or x.dtype not in FLOATS:  # which run_layer refuses
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


def _apply(bias: Tensor | None, layer: Layer, watchers: Watchers, x: Tensor, w: Tensor) -> Tensor:
    """Run the Function that autograd, its modes and transforms need for these tensors."""
    if is_bare(x, w) if bias is None else is_bare(x, w, bias):
        return _apply_plain(x, w, bias, layer, watchers)  # type: ignore[no-any-return]
    return _Linear.apply(x, w, bias, layer, watchers)[0]  # type: ignore[no-any-return]


@constant_in_graphs
def _compiled_layer(config: LinearConfig, generator: Generator) -> str:
    """Return the name of a layer that lives as long as the code that is compiled for it."""
    return lasting_layer(config, generator).name


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
        y, saved, _ = _run_forward(x, w, bias, layer, Lane(watchers, traced=not bare))
        return y, *saved

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
        lane = _SHARING if layer.shares_x and x.grad_fn is not None else _PLAIN
        y, saved, made_by = _run_forward(x, w, bias, layer, lane._replace(watchers=watchers) if watchers else lane)
        _keep(ctx, inputs, saved)
        # hooks on saved tensors may give the backward pass tensors with other strides
        ctx.saved_by = None if torch._C._autograd._top_saved_tensors_default_hooks(False) else made_by
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of x, w and bias, in the dtype of g; autograd widens them to their tensors'."""
        return _run_backward(ctx, g, plain=True)


_apply_plain: Callable[..., Tensor] = super(torch.autograd.Function, _PlainLinear).apply  # type: ignore[misc]


def _run_forward(x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer, lane: Lane) -> tuple[Tensor, Saved, Hashable]:
    """Return y and the saved tensors of ``forward``, under autocast in its dtype, and the recording that made them."""
    # 1. the dtypes of the pass
    dtypes = x.dtype, w.dtype, None if bias is None else bias.dtype
    kind = "cuda" if x.is_cuda else x.device.type
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
    run = partial(_checked_forward, x, w, bias, layer, dtypes, x_shared, lane)
    repeats = not (lane.traced or lane.watchers) and is_on_gpu(x)
    tensors: list[Tensor | None] = [x, w, bias]
    if x_shared is not None:
        tensors += [part for part in x_shared if isinstance(part, Tensor)]
    if autocast is not None:  # as without_autocast, in less of the host's time
        torch.set_autocast_enabled(kind, False)
    try:
        (y, x_q, saved), made_by = layer.repeat(dtypes, tensors, run) if repeats else (run(), None)
    finally:
        if autocast is not None:
            torch.set_autocast_enabled(kind, True)
    if x_q is not None:
        share(x, dtypes[0], layer, x_q)
    return y, saved, made_by


def _checked_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, layer: Layer, dtypes: Dtypes, x_shared: Operand | None, lane: Lane
) -> tuple[Tensor, Operand | None, Saved]:
    """Return the result of ``forward`` for tensors that fit each other; a replay was checked before."""
    # 1. one device; dtypes of floats, one for all under autocast or without
    dtype, w_dtype, bias_dtype = dtypes
    for name, t_dtype in (("x", dtype), ("w", w_dtype), ("bias", bias_dtype)):
        if t_dtype is not None and t_dtype not in FLOATS:
            raise DtypeError(f"EmulatedGEMM: {name} has dtype {t_dtype}; pass float16, bfloat16, float32 or float64")
    plain = not lane.traced and w.device == x.device  # x and w
    if not plain or (bias is not None and not (type(bias) in PLAIN_TYPES and bias.device == x.device)):
        check_together(x=x, w=w, bias=bias)
    other = w_dtype if w_dtype != dtype else bias_dtype
    if other is not None and other != dtype:
        raise DtypeError(
            f"EmulatedGEMM: x has dtype {dtype}, w or bias {other}; cast them to one dtype, or use torch.autocast"
        )
    # 2. shapes
    if x.dim() < 1 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        raise ArgumentError(
            f"EmulatedGEMM: x of shape {tuple(x.shape)} does not fit w of shape {tuple(w.shape)}; "
            "x is [..., K], w is [N, K]"
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise ArgumentError(
            f"EmulatedGEMM: bias of shape {tuple(bias.shape)} does not fit w of shape {tuple(w.shape)}; bias is [N]"
        )
    return forward(x, w, bias, layer, dtypes, x_shared, lane)


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
    lane = _PLAIN if bare and not ctx.watchers else Lane(ctx.watchers, traced=not bare)
    once = partial(backward, ctx, g, tensors[1], w, (tensors[3:7], tensors[7:11]), lane)
    repeats = plain and bare and is_on_gpu(g) and not ctx.watchers
    # what a recording saved is alike in all its calls; g, x and w are not
    alike = 0 if not repeats or ctx.saved_by is None else len(tensors) - 3

    def run() -> list[Tensor | None]:
        if not repeats:
            return once()
        return ctx.layer.repeat((ctx.needs_input_grad, ctx.x_shape, ctx.saved_by), tensors, once, alike)[0]

    # gradients of gradients are refused by a node that raises when it is differentiated
    again = torch.is_grad_enabled()  # with create_graph=True alone
    if again or autocasts("cuda" if g.is_cuda else g.device.type):
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


define_operator(
    "layer(Tensor x, Tensor w, Tensor? bias, str layer) -> Tensor",
    lambda x, w, bias, layer: run_layer(x, w, bias, find_layer(layer)),
    None,
    "CompositeImplicitAutograd",
)
