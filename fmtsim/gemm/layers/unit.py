"""Products on a matrix unit or a target: what operands they take, and one product of two of them."""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.errors import FormatError
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.spec import ElementFormat, FloatFormat
from fmtsim.gemm.products.native import run_coded, runs_natively, unsupported_coded
from fmtsim.gemm.products.operands import matrix_layout, operand_format, own_dtype
from fmtsim.gemm.products.operator import draw_keys, run_gemm
from fmtsim.gemm.products.resolver import resolve_call
from fmtsim.gemm.products.scaled import check_library
from fmtsim.spec.call import SCALE_KINDS, OperandFormat, Operation, ScaleKind, scale_kind
from fmtsim.spec.datapath import Arithmetic, Datapath
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer

if TYPE_CHECKING:
    from fmtsim.gemm.layers.config import Gemm

_HALVES = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def kind_of(quantizer: Quantizer) -> ScaleKind:
    """Return how libraries name the scales that a quantiser makes.

    Raises:
        FormatError: No unit multiplies its elements (integers, codebooks, LogFMT) or takes scales of that kind.
    """
    fmt, scaling = quantizer.format, quantizer.scaling
    if quantizer.then is not None or (scaling is not None and not isinstance(fmt, FloatFormat)):
        raise FormatError(f"no unit multiplies operands quantised as {quantizer}; leave unit= and target= out")
    if scaling is not None:
        kind = scale_kind(*scaling.block, scaling.scale.name)
        if kind is None:
            blocks = f"blocks of {scaling.block} with {scaling.scale.name} scales"
            raise FormatError(f"no unit multiplies {blocks}; leave unit= and target= out")
        return kind
    if fmt is None or isinstance(fmt, FloatFormat):
        return "none"
    if not isinstance(fmt, BlockFormat) or not isinstance(fmt.element, FloatFormat):
        raise FormatError(
            f"no unit multiplies {fmt.name}; choose a floating-point format, or leave unit= and target= out"
        )
    kind = scale_kind(*fmt.block, fmt.scale.name)
    if kind is None:
        raise FormatError(
            f"no unit multiplies {fmt.name}, whose blocks of {fmt.block} have {fmt.scale.name} scales; units and "
            "libraries take one scale a tensor or row, E8M0 for 1x32 (MX), E4M3 for 1x16 or 16x16 (NVFP4) and float32 "
            "for 1x128 or 128x128"
        )
    return kind


def element_of(fmt: Format | None) -> ElementFormat | LogTileFormat | None:
    """Return the format of the elements of a format."""
    return fmt.element if isinstance(fmt, BlockFormat) else fmt


def product_kind(a: ScaleKind, b: ScaleKind) -> ScaleKind:
    """Return the kind of scales of a product; raise FormatError where no unit takes the two together."""
    if a == b or {a, b} <= {"none", "tensor", "row"}:
        return a if a == b else "row" if "row" in (a, b) else "tensor"
    names = ("no scales" if kind == "none" else f"{kind} scales" for kind in (a, b))
    raise FormatError(f"no unit multiplies an operand with {' by one with '.join(names)}; give both the same")


def check_unit_scales(path: Arithmetic, kind: ScaleKind) -> None:
    """Raise FormatError where operands have block scales that the unit does not multiply with."""
    extent = SCALE_KINDS.get(kind)
    if extent is None or extent.unit_scale is None:
        return
    name, every = extent.unit_scale, extent.block
    scale, block = (path.scale, path.scale_block) if isinstance(path, Datapath) else (None, 0)
    if scale is not None and (scale.name, block) == (name, every):
        return
    own = "has no scales of its own" if scale is None else f"has {scale.name} scales every {block}"
    raise FormatError(
        f"the operands have {name} scales every {every} products, the unit {own}; choose another unit "
        "(fmtsim.list_units()), or Datapath(scale=, scale_block=)"
    )


class UnitOperand(NamedTuple):
    """An operand as units and libraries take it.

    values: [rows, K] of ``format``, in a dtype that engines take.
    format: A plain number format.
    kind: What shares a scale, as in GemmCall.
    scales: float32, one for the tensor or [row blocks, blocks along K]; None where ``kind`` is ``"none"``.
    tensor_scale: The second scale, of the tensor, of a two-level format.
    rows_per_scale: Rows that share the scales of a block.
    """

    values: Tensor
    format: OperandFormat
    kind: ScaleKind
    scales: Tensor | None = None
    tensor_scale: Tensor | None = None
    rows_per_scale: int = 1


def unit_operand(x: Operand) -> UnitOperand:
    """Return an operand as units take it.

    Raises:
        FormatError: No unit multiplies elements or blocks of that kind.
    """
    element, kind = element_of(x.quantizer.format), kind_of(x.quantizer)
    if element is None:
        return UnitOperand(x.elements, operand_format("operand", x.elements), "none")
    assert isinstance(element, FloatFormat)  # kind_of refused the rest
    if x.scale is None:
        return UnitOperand(x.elements, element, "none")
    return UnitOperand(x.elements, element, kind, x.scale, x.tensor_scale, x.block[0] if kind != "tensor" else 1)


def multiply_on_unit(
    operation: Operation, a: UnitOperand, b: UnitOperand, bias: Tensor | None, gemm: "Gemm", dtype: torch.dtype,
    generator: int | torch.Generator | None,
) -> Tensor:  # fmt: skip
    """Return ``a b^T + bias`` as a target or a unit computes it: the bits of fmtsim.mm, linear or scaled_mm.

    Args:
        operation: ``"mm"`` or ``"linear"``: which function of torch this is where the operands have no scales.
        a: [M, K].
        b: [N, K].
        bias: [N], or None. Where the library adds none in such a call, it is added to its float32 result.
        gemm: The target or unit, its plan and the rounding of the output.
        dtype: Of the tensor that the product becomes.
        generator: Random words of a unit that rounds stochastically.

    Returns:
        [M, N]: the output format's own dtype where the unit writes that, else ``dtype``, or float32 where the library
        has no such output; ``round_output`` does the rest.

    Raises:
        ArgumentError, DtypeError, FormatError: These operands are not multiplied together there.
    """
    kind = product_kind(a.kind, b.kind)
    kind = "row_block_128" if kind == "block_128" and a.rows_per_scale == b.rows_per_scale == 1 else kind
    scaled = kind != "none" or min(a.format.bits, b.format.bits) <= 8
    operation, asked, adds = _asked("scaled_mm" if scaled else operation, a, bias, gemm, dtype)
    sizes = a.values.shape[0], b.values.shape[0], a.values.shape[1]
    if gemm.target is not None and scaled:
        _check_scaled(a, b, asked, sizes, gemm.fast_accum)
    sums = gemm.accumulate or ("fp64" if a.values.dtype == torch.float64 else "fp32")
    unsupported = partial(unsupported_coded, a, b, kind, asked, sums, gemm.fast_accum)
    if runs_natively(gemm.native, gemm.target, gemm.plan, a.values.device, unsupported):
        left, right = (_in_own_dtype(x) for x in (a, b))
        rules: dict[str, Any] = {"adds": adds, "sums": sums, "fast_accum": gemm.fast_accum}
        return run_coded(operation, left, right, bias, kind, asked, **rules)
    layouts = matrix_layout(a.values), matrix_layout(b.values.mT, transposed=True)
    spec = resolve_call(
        operation, a.format, b.format, sizes, asked, target=gemm.target, unit=gemm.unit, plan=gemm.plan,
        accumulate=gemm.accumulate if gemm.target is None else sums, fast_accum=gemm.fast_accum,
        scaling="tensor" if scaled and kind == "none" else kind, bias=adds,
        layouts=("row", "row") if scaled else layouts,
    )  # fmt: skip
    check_unit_scales(spec.datapath, kind)
    key = draw_keys(spec.stochastic, generator if spec.stochastic else None, None, a.values.device)
    row, column, scale_a, scale_b = _scales(a, b, kind)
    return run_gemm(
        a.values, b.values, spec, dtype=asked, scale_a=scale_a, scale_b=scale_b, row=row, column=column, bias=bias,
        random=key, validated=(a.format, b.format) == (spec.a, spec.b),
    )  # fmt: skip


def _in_own_dtype(x: UnitOperand) -> UnitOperand:
    """Return an operand in the dtype that torch's scaled products take."""
    own = own_dtype(x.format)
    return x._replace(values=x.values.to(own)) if own in _FP8 else x  # on its grid: nothing is rounded


def unit_dtype(out: Quantizer) -> torch.dtype | None:
    """Return the dtype of an output format that units round to themselves, to nearest, FP8 saturating."""
    if not isinstance(out.format, FloatFormat) or out.rounding.mode != "nearest_even" or out.overflow is not None:
        return None
    dtype = own_dtype(out.format)
    return dtype if dtype in (torch.float32, torch.float64, *_HALVES, *_FP8) else None


def _asked(
    operation: Operation, a: UnitOperand, bias: Tensor | None, gemm: "Gemm", dtype: torch.dtype
) -> tuple[Operation, torch.dtype, bool]:
    """Return the function of a library, the dtype of its result, and whether it adds the bias.

    A unit alone gives every dtype and adds every bias.
    """
    wide = torch.float64 if torch.float64 in (a.values.dtype, dtype) else torch.float32
    asked = dtype if gemm.out.format is None else unit_dtype(gemm.out) or wide
    if gemm.target is None:
        return operation, asked, bias is not None
    own = a.values.dtype
    wide = torch.float64 if own == torch.float64 else torch.float32
    given = (torch.float32, *_HALVES, *_FP8) if operation == "scaled_mm" else (own, wide)
    asked = asked if asked in given else wide
    if bias is None:
        return operation if operation == "scaled_mm" or asked == own else "mm", asked, False
    if operation == "scaled_mm":
        adds = bias.dtype in _HALVES and asked in (bias.dtype, *_FP8)
    else:
        adds = asked == bias.dtype == own
    if adds:
        return operation, asked, True
    return operation if operation == "scaled_mm" else "mm", wide, False


def _check_scaled(a: UnitOperand, b: UnitOperand, asked: torch.dtype, sizes: tuple[int, int, int], fast: bool) -> None:
    """Refuse what torch._scaled_mm refuses."""
    check_library((a.format, b.format), asked, sizes, fast)
    if a.kind == "block_128" and a.rows_per_scale == b.rows_per_scale == 128:
        raise FormatError("torch._scaled_mm has no 128x128 by 128x128 scales; give one operand 1x128, or pass unit=")


def _scales(
    a: UnitOperand, b: UnitOperand, kind: ScaleKind
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the scales of rows and of columns, and those along K of both operands."""
    if kind == "none":
        return None, None, None, None
    if kind not in ("tensor", "row"):
        return a.tensor_scale, b.tensor_scale, _along_k(a), _along_k(b)
    one = torch.ones((), device=a.values.device)
    rows = [one if x.scales is None else x.scales for x in (a, b)]
    if kind == "row":
        rows = [s.reshape(-1).expand(x.values.shape[0]) for s, x in zip(rows, (a, b), strict=True)]
    return rows[0], rows[1], None, None


def _along_k(x: UnitOperand) -> Tensor:
    """Return one scale for every row, where blocks hold several rows."""
    assert x.scales is not None
    tall = x.rows_per_scale
    return x.scales if tall == 1 else x.scales.repeat_interleave(tall, dim=0)[: x.values.shape[0]]
