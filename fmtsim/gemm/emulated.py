"""EmulatedGEMM: a linear layer whose three matrix products see quantised operands."""

from typing import Any

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError, DtypeError
from fmtsim.gemm.bfloat16 import Held, hold, hold_both, holds, multiply
from fmtsim.gemm.call import Operation
from fmtsim.gemm.choice import draw_keys
from fmtsim.gemm.coding import Coded, code
from fmtsim.gemm.config import Gemm, LinearConfig
from fmtsim.gemm.machine import multiply_coded, round_output
from fmtsim.gemm.once import OnceOnly
from fmtsim.gemm.passes import OPERANDS, Kept, Observer, Pass, State, kept_of
from fmtsim.gemm.streams import Generator, Stream, stream_of
from fmtsim.ops import RandomKey
from fmtsim.quantize import quantize
from fmtsim.scaling.quantizer import Quantizer

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ONCE = (
    "EmulatedGEMM cannot be differentiated twice: the gradient of a quantised gradient is not defined; "
    "compute second derivatives on the unconverted model (fmtsim.revert)"
)


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
    inputs); on a GPU the card's bfloat16 units run them where bfloat16 holds both operands, as it does those of most
    block formats (values below 2**-133 round to its grid): products are exact, sums are the unit's float32, and the
    scale of a tensor multiplies the sum. Results are rounded to ``Gemm.out``, or to the dtype of their tensor; what a
    target's library does not write (a bias, or another dtype) is added to and rounded from its float32 result. The
    bias gradient, the sum of g over T, is never quantised. Under autocast x, w and bias are first cast to the
    autocast dtype, as ``torch.nn.functional.linear`` does.

    Args:
        x: ``[..., K]``, float16, bfloat16, float32 or float64; the leading dimensions together are T.
        w: ``[N, K]`` of x's dtype.
        bias: ``[N]`` of x's dtype, or None.
        config: The six quantisers, and who multiplies.
        generator: Where stochastic rounding gets its words: None draws a key for each operand from torch's default
            generator (so ``torch.manual_seed`` reproduces a run, and activation checkpointing repeats its draws), a
            torch.Generator is drawn from in the same way, an int fixes the draws of this call. The two uses of
            g, units that round stochastically and outputs all draw independently. Nothing is ever reseeded.
        observer: Called as ``observer(operand, original, quantised, quantizer, dim)`` for each operand.
        state: What delayed scaling remembers, by operand (``"x_f"``, ...); needed where a scale has a history.

    NaN and infinities follow the formats (docs/semantics.md); an operand left in high precision passes them on.
    Differentiating twice raises FmtsimError: the gradient of a rounded gradient is not defined here.

    Raises:
        ArgumentError: shapes that do not fit each other or the machine's library, or a config that is none.
        DtypeError: dtypes that are not floating point, that differ, or that the library does not take.
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
        return _Products.apply(x, w, bias, config, generator, observer, state)[0]  # type: ignore[no-any-return]


def layer_forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    config: LinearConfig,
    generator: Generator,
    observer: Observer | None,
    state: State | None,
) -> tuple[Tensor | None, ...]:
    """Return y, and what the backward pass keeps of x and of w where operands are more than casts."""
    _check(x, w, bias, config)
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1])
        if config.plain:
            y = _product(0, rows, w, -1, -1, bias, config.fprop, x.dtype, generator, observer)
            return (y.reshape(*x.shape[:-1], w.shape[0]),)
        run = Pass(config, generator, observer, state or {}, backward=False)
        left, right = run.operand("x_f", rows, -1), run.operand("w_f", w, -1)
        y = run.product("fprop", left, right, bias, x.dtype)
        kept = (*kept_of(left, config.wgrad.b), *kept_of(right, config.dgrad.b))
        return (y.reshape(*x.shape[:-1], w.shape[0]), *kept)


class _Products(torch.autograd.Function):
    """The three products; what the backward pass keeps of the forward one are outputs beside the result."""

    @staticmethod
    def forward(
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        config: LinearConfig,
        generator: Generator,
        observer: Observer | None,
        state: State | None,
    ) -> tuple[Tensor | None, ...]:
        """Return y, and what is kept of x and of w."""
        x, w, bias = autocast_to(x, x), autocast_to(w, x), None if bias is None else autocast_to(bias, x)
        return layer_forward(x, w, bias, config, generator, observer, state)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep the originals, or what became of them, that the two backward products need."""
        x, w, bias, ctx.config, ctx.generator, ctx.observer, ctx.state = inputs
        needs_x, needs_w, _ = ctx.needs_input_grad[:3]
        whole = ctx.config.plain
        originals = [
            x if needs_w and (whole or ctx.config.wgrad.b.source == "original") else None,
            w if needs_x and (whole or ctx.config.dgrad.b.source == "original") else None,
        ]
        kept = output[1:]
        ctx.mark_non_differentiable(*(t for t in kept if t is not None))
        ctx.save_for_backward(*originals, *kept)
        ctx.dtypes = (x.dtype, w.dtype, None if bias is None else bias.dtype)
        ctx.x_shape, ctx.w_shape = x.shape, w.shape

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of x, w and bias, each in its tensor's dtype."""
        x, w, *kept = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            grads = _gradients(ctx, g, x, w) if ctx.config.plain else layer_gradients(ctx, g, x, w, kept)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: only then on
            grads = [None if d is None else OnceOnly.apply(d, _ONCE, g, x, w) for d in grads]
        return (*grads, None, None, None, None)


def layer_gradients(
    ctx: Any, g: Tensor, x: Tensor | None, w: Tensor | None, kept: list[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients where operands are more than casts of the originals."""
    config: LinearConfig = ctx.config
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    run = Pass(config, ctx.generator, ctx.observer, ctx.state or {}, backward=True)
    rows = g.reshape(-1, g.shape[-1])
    of_x, of_w = Kept(*kept[: len(kept) // 2]), Kept(*kept[len(kept) // 2 :])
    wide = torch.float64 if g.dtype == torch.float64 else torch.float32
    first = None
    dx = dw = dbias = None
    if needs_x:
        first = run.operand("g_d", rows, -1)
        right = run.second("w_d", None if w is None else w.to(g.dtype), of_w, config.fprop.b)
        dx = run.finish(run.product("dgrad", first, right, None, wide), config.dgrad.a, config.fprop.a, of_x, x_dtype)
        dx = dx.reshape(ctx.x_shape)
    if needs_w:
        if config.wgrad.a.source == "forward":
            first = run.operand("g_d", rows, -1) if first is None else first
            left = first.turned()
        else:
            left = run.operand("g_w", rows, 0)
        source = None if x is None else x.reshape(-1, x.shape[-1]).to(g.dtype)
        right = run.second("x_w", source, of_x, config.fprop.a)
        dw = run.finish(run.product("wgrad", left, right, None, wide), config.wgrad.a, config.fprop.b, of_w, w_dtype)
    if bias_dtype is not None and needs_bias:
        dbias = rows.sum(0, dtype=wide).to(bias_dtype)
    return [dx, dw, dbias]


def _gradients(ctx: Any, g: Tensor, x: Tensor | None, w: Tensor | None) -> list[Tensor | None]:
    config, stream, see = ctx.config, ctx.generator, ctx.observer
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
    rows = g.reshape(-1, g.shape[-1])
    dx = dw = dbias = None
    w = None if w is None else w.to(g.dtype)
    x = None if x is None else x.reshape(-1, x.shape[-1]).to(g.dtype)
    across, down = _held_gradients(config, rows, w, x, stream)
    if w is not None:
        dx = _product(1, rows, w, -1, 0, None, config.dgrad, x_dtype, stream, see, across).reshape(ctx.x_shape)
    if x is not None:
        dw = _product(2, rows, x, 0, 0, None, config.wgrad, w_dtype, stream, see, down)
    if bias_dtype is not None and ctx.needs_input_grad[2]:
        dbias = rows.sum(0, dtype=dtype).to(bias_dtype)
    return [dx, dw, dbias]


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
            keys = draw_keys(True, stream, None, t.device)
            stream = None if keys is None else RandomKey(*keys.tolist())
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


def autocast_to(t: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the dtype that autocast gives products of ``like``."""
    device = like.device.type
    if t.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return t
    return t.to(torch.get_autocast_dtype(device))


def _check(x: Tensor, w: Tensor, bias: Tensor | None, config: LinearConfig) -> None:
    if not isinstance(config, LinearConfig):
        raise ArgumentError(
            f"EmulatedGEMM takes a LinearConfig, not {config!r}; build one with linear_config(x=, w=, g=)"
        )
    for name, t in (("x", x), ("w", w), ("bias", bias)):
        if t is not None and t.dtype not in _FLOATS:
            raise DtypeError(f"EmulatedGEMM: {name} has dtype {t.dtype}; pass float16, bfloat16, float32 or float64")
    others = [t for t in (w, bias) if t is not None and t.dtype != x.dtype]
    if others:
        raise DtypeError(
            f"EmulatedGEMM: x has dtype {x.dtype}, w or bias {others[0].dtype}; "
            "cast them to one dtype, or use torch.autocast"
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
