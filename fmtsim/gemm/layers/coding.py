"""One operand of a quantised layer as machines take it: values of a plain format, and the scales beside them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.dispatch import is_bare
from fmtsim.errors import FormatError
from fmtsim.formats.block import FP32, BlockFormat, Format, with_block
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.products.operands import operand_format, own_dtype
from fmtsim.ops import engine_for
from fmtsim.quantize import encode_parts, quantize
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.call import OperandFormat, ScaleKind
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.quantizer import Quantizer

# Kinds of scales that a unit itself multiplies with: their format, and products that share one.
INNER_SCALES: dict[str, tuple[str, int]] = {"mx": ("e8m0", 32), "nvfp4": ("ue4m3", 16)}
_HALVES = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLT_MAX = torch.finfo(torch.float32).max


class Coded(NamedTuple):
    """A quantised operand.

    values: [rows, K] of ``format``, in a dtype that engines take.
    format: A plain number format.
    kind: What shares a scale, as in GemmCall.
    scales: float32, one for the tensor or [row blocks, blocks along K]; None where ``kind`` is ``"none"``.
    whole: The second scale, of the tensor, of a two-level format.
    tall: Rows that share the scales of a block.
    """

    values: Tensor
    format: OperandFormat
    kind: ScaleKind
    scales: Tensor | None = None
    whole: Tensor | None = None
    tall: int = 1


def kind_of(fmt: Format) -> ScaleKind:
    """Return how libraries name the scales of a format.

    Raises:
        FormatError: No unit multiplies the format: integers, codebooks, LogFMT, scales of another kind.
    """
    if isinstance(fmt, FloatFormat):
        return "none"
    if not isinstance(fmt, BlockFormat) or not isinstance(fmt.element, FloatFormat):
        raise FormatError(
            f"no unit multiplies {fmt.name}; choose a floating-point format, or leave unit= and target= out"
        )
    outer, inner = fmt.block
    if inner is None and outer in (1, None):
        return "tensor" if outer is None else "row"
    if (outer, inner, fmt.scale.name) == (1, 32, "e8m0"):
        return "mx"
    if outer in (1, 16) and inner == 16 and fmt.scale.name in ("e4m3", "ue4m3"):
        return "nvfp4"
    if outer in (1, 128) and inner == 128 and fmt.scale.name in ("fp32", "e8m0"):  # powers of two are float32 as well
        return "block_128"
    raise FormatError(
        f"no unit multiplies {fmt.name}, whose blocks of {fmt.block} have {fmt.scale.name} scales; units and libraries "
        "take one scale a tensor or row, E8M0 for 1x32 (MX), E4M3 for 1x16 or 16x16 (NVFP4) and float32 for 1x128 or "
        "128x128"
    )


def product_kind(a: ScaleKind, b: ScaleKind) -> ScaleKind:
    """Return the kind of scales of a product; raise FormatError where no unit takes the two together."""
    if a == b or {a, b} <= {"none", "tensor", "row"}:
        return a if a == b else "row" if "row" in (a, b) else "tensor"
    names = ("no scales" if kind == "none" else f"{kind} scales" for kind in (a, b))
    raise FormatError(f"no unit multiplies an operand with {' by one with '.join(names)}; give both the same")


def check_unit_scales(path: Arithmetic, kind: ScaleKind) -> None:
    """Raise FormatError where operands have block scales that the unit does not multiply with."""
    if kind not in INNER_SCALES:
        return
    name, every = INNER_SCALES[kind]
    scale, block = (path.scale, path.scale_block) if isinstance(path, Datapath) else (None, 0)
    if scale is not None and (scale.name, block) == (name, every):
        return
    own = "has no scales of its own" if scale is None else f"has {scale.name} scales every {block}"
    raise FormatError(
        f"the operands have {name} scales every {every} products, the unit {own}; choose another unit "
        "(fmtsim.list_units()), or Datapath(scale=, scale_block=)"
    )


def code(t: Tensor, quantizer: Quantizer, dim: int, generator: Any, *, check: bool = True) -> Coded:
    """Quantise a matrix along its contraction axis ``dim``, 0 or -1, keeping values and scales apart.

    Values and scales are those of ``fmtsim.encode``; with a seed, or a generator in the same state, so are the draws.
    Without ``check`` the scales may be of a kind that no unit takes; they are then said to be of ``"none"``.

    Raises:
        FormatError: A format that no unit multiplies.
    """
    fmt = quantizer.format
    if fmt is None:
        return Coded(t if dim == -1 else t.mT, operand_format("operand", t), "none")
    kind = kind_of(fmt) if check else "none"
    options: Any = {"rounding": quantizer.rounding, "overflow": quantizer.overflow, "generator": generator}
    if isinstance(fmt, FloatFormat):
        values, element = _element_values(t, fmt, options), fmt
        return Coded(values if dim == -1 else values.mT, element, kind)
    assert isinstance(fmt, BlockFormat) and isinstance(fmt.element, FloatFormat)  # kind_of refused the rest
    # A GPU's kernels encode blocks in two launches and wait for nothing.
    found = None if not is_bare(t) or _by_kernels(t, fmt) else _fast_parts(t, fmt, dim, options)
    values, scales, whole = found or _encoded_parts(t, fmt, dim, options)
    return Coded(values if dim == -1 else values.mT, fmt.element, kind, scales, whole, fmt.block[0] or 1)


def _by_kernels(t: Tensor, fmt: BlockFormat) -> bool:
    """Say whether a GPU's own kernels encode a tensor."""
    if not t.is_cuda:
        return False
    spec = CastSpec(format=fmt, rounding=Rounding(), overflow=fmt.default_overflow)
    return engine_for("encode", spec, t).__name__ == "fmtsim.cuda"


def _element_values(t: Tensor, fmt: FloatFormat, options: Any) -> Tensor:
    """Return a tensor rounded to a plain format, in the dtype that engines take it in."""
    dtype = holder(fmt)
    values = quantize(t, fmt, out_dtype=torch.float32 if dtype in _FP8 else dtype, **options)
    return values.to(dtype)  # on the dtype's grid: nothing is rounded


def holder(fmt: FloatFormat) -> torch.dtype:
    """Return the smallest dtype of engines that holds a format's values."""
    own = own_dtype(fmt)
    if own in (*_HALVES, *_FP8, torch.float64):
        return own
    wide = get_format("e4m3")
    assert isinstance(wide, FloatFormat)
    small = fmt.mantissa_bits <= wide.mantissa_bits and fmt.max <= wide.max and fmt.min_subnormal >= wide.min_subnormal
    return torch.float8_e4m3fn if small and not fmt.infinities else torch.float32


def _encoded_parts(t: Tensor, fmt: BlockFormat, dim: int, options: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return values, scales and tensor scale by the engine's encode."""
    parts = encode_parts(t, fmt, dim=dim, pad=True, **options)
    element = fmt.element
    assert isinstance(element, FloatFormat)
    if own_dtype(element) in _FP8:
        return parts.codes.view(own_dtype(element)), parts.scales, parts.tensor_scale  # type: ignore[arg-type]
    nothing = [torch.empty(0, device=t.device) for _ in range(3)]
    values = torch.ops.fmtsim.decode(parts.codes, *nothing, _element_text(element), torch.float32)
    return values.to(holder(element)), parts.scales, parts.tensor_scale


def _element_text(element: FloatFormat) -> str:
    return CastSpec(format=element, rounding=Rounding(), overflow=element.default_overflow).to_json()


def _fast_parts(
    t: Tensor, fmt: BlockFormat, dim: int, options: Any
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Return what ``_encoded_parts`` does by the kernel of plain formats, a dozen times as fast; None where it cannot.

    A scale depends on nothing but the largest magnitude of its block (docs/semantics.md, sections 5 and 6), so that
    encoding one number a block gives all scales. Elements are then the rounding of RN(x r), or of the real x / s
    where s is a power of two, which has to be exact here.
    """
    axes = (fmt.block[1], fmt.block[0]) if dim == 0 else fmt.block
    block = [size or extent for size, extent in zip(axes, t.shape, strict=True)]
    ragged = not t.numel() or any(extent % size for size, extent in zip(block, t.shape, strict=True))
    if ragged or t.dtype == torch.float64 or (fmt.arithmetic == "divide" and not fmt.power_of_two):
        return None
    x = t.detach().float().reshape(t.shape[0] // block[0], block[0], t.shape[1] // block[1], block[1])
    amax = _amax(x)
    if not bool(amax.isfinite().all()):
        return None
    parts = _scales_of(amax if dim == -1 else amax.mT, fmt)
    assert parts.scales is not None  # a block format
    scales = parts.scales if dim == -1 else parts.scales.mT
    y = x * _spread(_multiplier(fmt, amax, scales, parts.tensor_scale))
    if fmt.power_of_two and bool((scales > 1).any()) and not torch.equal(y * _spread(scales), x):
        return None  # a quotient fell below float32's smallest; products with 1 / s >= 1 are exact
    values = _element_values(y.view(t.shape), fmt.element, options)  # type: ignore[arg-type]
    return values, parts.scales, parts.tensor_scale


def _amax(x: Tensor) -> Tensor:
    """Return the largest magnitudes [n, m] of blocks [n, ., m, .], NaN and Inf included."""
    if x.shape[0] == x.shape[2] == 1:
        low, high = (extreme.reshape(1, 1) for extreme in torch.aminmax(x))
    else:
        low, high = x.amin((1, 3)), x.amax((1, 3))
    return torch.maximum(low.abs(), high.abs())


def _scales_of(amax: Tensor, fmt: BlockFormat) -> EncodedParts:
    """Return the scales [row blocks, blocks along K] of blocks with these largest magnitudes."""
    alone = with_block(fmt, (1, 1))
    return encode_parts(amax, alone, rounding=Rounding(), overflow=None, dim=-1, generator=None, pad=True)


def _multiplier(fmt: BlockFormat, amax: Tensor, scales: Tensor, whole: Tensor | None) -> Tensor:
    """Return r of docs/semantics.md, sections 5 and 6: what a block's elements are multiplied by before rounding."""
    if fmt.power_of_two:
        return torch.div(torch.ones_like(amax), scales)
    if fmt.arithmetic == "encode" and fmt.scale == FP32 and whole is None:
        top = torch.full_like(amax, float(fmt.element.max))  # type: ignore[union-attr]
        return torch.div(top, amax).clamp(max=_FLT_MAX)
    divisor = scales if whole is None else scales * whole
    return torch.div(torch.ones_like(amax), divisor).clamp(max=_FLT_MAX)


def _spread(t: Tensor) -> Tensor:
    """Give a number of each block the four dimensions of the blocked matrix."""
    return t[:, None, :, None]
