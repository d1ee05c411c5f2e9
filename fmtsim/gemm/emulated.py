"""EmulatedGEMM: a linear layer whose three matrix products see quantised operands."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtsim.errors import ArgumentError, DtypeError, FmtsimError
from fmtsim.gemm.config import LinearConfig, Quantizer
from fmtsim.quantize import quantize

Generator = int | torch.Generator | None
Observer = Callable[[str, Tensor, Tensor, Quantizer, int], None]

OPERANDS = tuple(LinearConfig().operands)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MASK64 = (1 << 64) - 1


class EmulatedGEMM(torch.autograd.Function):
    """Compute ``y = x w^T + bias`` with each operand of forward and backward in its own format.

    ``EmulatedGEMM.apply(x, w, bias, config, generator=None, observer=None)``, with positional arguments.

    The three products, each operand quantised from the high-precision original along the contraction axis:

    ====== ============== ========= =========================
    fprop  ``y = x w^T``  along K   ``config.fprop.a``, ``.b``
    dgrad  ``dx = g w``   along N   ``config.dgrad.a``, ``.b``
    wgrad  ``dw = g^T x`` along T   ``config.wgrad.a``, ``.b``
    ====== ============== ========= =========================

    Products and sums are float32 (float64 for float64 inputs); results are rounded once to the dtype of their
    tensor. The bias and its gradient, the sum of g over T, are never quantised. Under autocast x, w and bias are
    first cast to the autocast dtype, as ``torch.nn.functional.linear`` does.

    Args:
        x: ``[..., K]``, float16, bfloat16, float32 or float64; the leading dimensions together are T.
        w: ``[N, K]`` of x's dtype.
        bias: ``[N]`` of x's dtype, or None.
        config: The six quantisers.
        generator: Where stochastic rounding gets its words: None draws a key for each operand from torch's default
            generator (so ``torch.manual_seed`` reproduces a run, and activation checkpointing repeats its draws), a
            torch.Generator is drawn from in the same way, an int fixes the draws of this call. The two uses of
            g always draw independently. Nothing is ever reseeded.
        observer: Called as ``observer(operand, original, quantised, quantizer, dim)`` for each operand.

    NaN and infinities follow the formats (docs/semantics.md); an operand left in high precision passes them on.
    Differentiating twice raises FmtsimError: the gradient of a rounded gradient is not defined here.

    Raises:
        ArgumentError: shapes that do not fit, or a config that is none.
        DtypeError: dtypes that are not floating point or that differ.
    """

    @staticmethod
    def forward(
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        config: LinearConfig,
        generator: Generator = None,
        observer: Observer | None = None,
    ) -> Tensor:
        """Return ``[..., N]`` in x's dtype, or in the autocast dtype."""
        x, w, bias = _autocast(x, x), _autocast(w, x), None if bias is None else _autocast(bias, x)
        _check(x, w, bias, config)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            a = _operand(0, x.reshape(-1, x.shape[-1]), config.fprop.a, -1, dtype, generator, observer)
            b = _operand(1, w, config.fprop.b, -1, dtype, generator, observer)
            y = F.linear(a, b, None if bias is None else bias.to(dtype))
            return y.to(x.dtype).reshape(*x.shape[:-1], w.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the originals that the two backward products need."""
        x, w, bias, ctx.config, ctx.generator, ctx.observer = (*inputs, None, None)[:6]
        needs_x, needs_w, _ = ctx.needs_input_grad[:3]
        ctx.save_for_backward(x if needs_w else None, w if needs_x else None)
        ctx.dtypes = (x.dtype, w.dtype, None if bias is None else bias.dtype)
        ctx.x_shape, ctx.given = x.shape, len(inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of x, w and bias, each in its tensor's dtype."""
        x, w = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            grads = _gradients(ctx, g, x, w)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: only then on
            grads = [None if d is None else _OnceOnly.apply(d, g, x, w) for d in grads]
        return (*grads, *(None,) * (ctx.given - 3))


def _gradients(ctx: Any, g: Tensor, x: Tensor | None, w: Tensor | None) -> list[Tensor | None]:
    config, stream, see = ctx.config, ctx.generator, ctx.observer
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
    rows = g.reshape(-1, g.shape[-1])
    dx = dw = dbias = None
    if w is not None:
        a = _operand(2, rows, config.dgrad.a, -1, dtype, stream, see)
        b = _operand(3, w.to(g.dtype), config.dgrad.b, 0, dtype, stream, see)
        dx = torch.mm(a, b).to(x_dtype).reshape(ctx.x_shape)
    if x is not None:
        a = _operand(4, rows, config.wgrad.a, 0, dtype, stream, see)
        b = _operand(5, x.reshape(-1, x.shape[-1]).to(g.dtype), config.wgrad.b, 0, dtype, stream, see)
        dw = torch.mm(a.t(), b).to(w_dtype)
    if bias_dtype is not None and ctx.needs_input_grad[2]:
        dbias = rows.sum(0, dtype=dtype).to(bias_dtype)
    return [dx, dw, dbias]


class _OnceOnly(torch.autograd.Function):
    """Pass a gradient through, and say so clearly when someone differentiates it again."""

    @staticmethod
    def forward(grad: Tensor, *sources: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise FmtsimError(
            "EmulatedGEMM cannot be differentiated twice: the gradient of a quantised gradient is not defined; "
            "compute second derivatives on the unconverted model (fmtsim.revert)"
        )


def _operand(
    index: int,
    t: Tensor,
    quantizer: Quantizer,
    dim: int,
    dtype: torch.dtype,
    generator: Generator,
    see: Observer | None,
) -> Tensor:
    if quantizer.format is None:
        q = t.to(dtype)
    else:
        stochastic = quantizer.rounding.mode == "stochastic"
        q = quantize(
            t,
            quantizer.format,
            rounding=quantizer.rounding,
            overflow=quantizer.overflow,
            dim=dim,
            generator=_stream(generator, index) if stochastic else None,
            pad=True,
            out_dtype=dtype,
        )
    if see is not None:
        see(OPERANDS[index], t, q, quantizer, dim)
    return q


def _stream(generator: Generator, index: int) -> Generator:
    """Return the generator itself, or a seed of its own for each operand of a call with an int seed."""
    if not isinstance(generator, int):
        return generator
    z = (generator + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64  # splitmix64: near seeds give unrelated keys
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1


def _autocast(t: Tensor, like: Tensor) -> Tensor:
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
