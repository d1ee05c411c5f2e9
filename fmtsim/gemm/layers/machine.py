"""One product of a quantised layer on a machine: coded operands go in, a rounded output comes out."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fmtsim.errors import FormatError
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.layers.coding import Coded, check_unit_scales, product_kind
from fmtsim.gemm.layers.config import Gemm
from fmtsim.gemm.products.native import run_coded, runs_natively, unsupported_coded
from fmtsim.gemm.products.operands import matrix_layout, own_dtype
from fmtsim.gemm.products.operator import draw_keys, run_gemm
from fmtsim.gemm.products.resolver import resolve_call
from fmtsim.gemm.products.scaled import check_library
from fmtsim.quantize import quantize
from fmtsim.spec.call import Operation, ScaleKind
from fmtsim.spec.quantizer import Quantizer

_HALVES = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def multiply_coded(
    operation: Operation, a: Coded, b: Coded, bias: Tensor | None, gemm: Gemm, dtype: torch.dtype, generator: Any
) -> Tensor:
    """Return ``a b^T + bias`` as a machine computes it: the bits of fmtsim.mm, linear or scaled_mm.

    Args:
        operation: ``"mm"`` or ``"linear"``: which function of torch this is where the operands have no scales.
        a: [M, K].
        b: [N, K].
        bias: [N], or None. Where the library adds none in such a call, it is added to its float32 result.
        gemm: The machine, its plan and the rounding of the output.
        dtype: Of the tensor that the product becomes.
        generator: Random words of a unit that rounds stochastically.

    Returns:
        [M, N]: the output format's own dtype where the machine writes that, else ``dtype``, or float32 where the
        library has no such output; ``round_output`` does the rest.

    Raises:
        ArgumentError, DtypeError, FormatError: The machine does not take these operands together.
    """
    kind = product_kind(a.kind, b.kind)
    kind = "row_block_128" if kind == "block_128" and a.tall == b.tall == 1 else kind
    scaled = kind != "none" or min(a.format.bits, b.format.bits) <= 8
    operation, asked, adds = _asked("scaled_mm" if scaled else operation, a, bias, gemm, dtype)
    m, n, k = a.values.shape[0], b.values.shape[0], a.values.shape[1]
    if gemm.target is not None and scaled:
        _check_scaled(a, b, asked, (m, n, k), gemm.fast_accum)
    sums = gemm.accumulate or ("fp64" if a.values.dtype == torch.float64 else "fp32")
    unsupported = partial(unsupported_coded, a, b, kind, asked, sums, gemm.fast_accum)
    if runs_natively(gemm.native, gemm.target, gemm.plan, a.values.device, unsupported):
        rules: dict[str, Any] = {"adds": adds, "sums": sums, "fast_accum": gemm.fast_accum}
        return run_coded(operation, a, b, bias, kind, asked, **rules)
    layouts = matrix_layout(a.values), matrix_layout(b.values.mT, transposed=True)
    spec = resolve_call(
        operation, a.format, b.format, (m, n, k), asked, target=gemm.target, unit=gemm.unit, plan=gemm.plan,
        accumulate=gemm.accumulate if gemm.target is None else sums, fast_accum=gemm.fast_accum,
        scaling="tensor" if scaled and kind == "none" else kind, bias=adds,
        layouts=("row", "row") if scaled else layouts,
    )  # fmt: skip
    check_unit_scales(spec.datapath, kind)
    key = draw_keys(spec.stochastic, generator if spec.stochastic else None, None, a.values.device)
    row, column, scale_a, scale_b = _scales(a, b, kind)
    return run_gemm(
        a.values, b.values, spec, dtype=asked, scale_a=scale_a, scale_b=scale_b, row=row, column=column, bias=bias,
        random=key,
    )  # fmt: skip


def round_output(y: Tensor, out: Quantizer, dtype: torch.dtype, generator: Any) -> Tensor:
    """Round a product to its output format, unless it lies there already, then to the dtype that it becomes."""
    if out.format is not None and (_machine_dtype(out) is None or _machine_dtype(out) != y.dtype):
        random = generator if out.rounding.mode == "stochastic" else None
        y = quantize(
            y, out.format, rounding=out.rounding, overflow=out.overflow, generator=random, pad=True, out_dtype=y.dtype
        )
    if y.dtype == dtype:
        return y
    return quantize(y if y.element_size() > 1 else y.float(), dtype, overflow="ieee", out_dtype=dtype)


def _machine_dtype(out: Quantizer) -> torch.dtype | None:
    """Return the dtype of an output format that machines round to themselves, to nearest, FP8 saturating."""
    if not isinstance(out.format, FloatFormat) or out.rounding.mode != "nearest_even" or out.overflow is not None:
        return None
    dtype = own_dtype(out.format)
    return dtype if dtype in (torch.float32, torch.float64, *_HALVES, *_FP8) else None


def _asked(
    operation: Operation, a: Coded, bias: Tensor | None, gemm: Gemm, dtype: torch.dtype
) -> tuple[Operation, torch.dtype, bool]:
    """Return the function of a library, the dtype of its result, and whether it adds the bias.

    A unit alone gives every dtype and adds every bias.
    """
    wide = torch.float64 if torch.float64 in (a.values.dtype, dtype) else torch.float32
    asked = dtype if gemm.out.format is None else _machine_dtype(gemm.out) or wide
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


def _check_scaled(a: Coded, b: Coded, asked: torch.dtype, sizes: tuple[int, int, int], fast: bool) -> None:
    """Refuse what torch._scaled_mm refuses."""
    check_library((a.format, b.format), asked, sizes, fast)
    if a.kind == "block_128" and a.tall == b.tall == 128:
        raise FormatError("torch._scaled_mm has no 128x128 by 128x128 scales; give one operand 1x128, or pass unit=")


def _scales(a: Coded, b: Coded, kind: ScaleKind) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the scales of rows and of columns, and those along K of both operands."""
    if kind == "none":
        return None, None, None, None
    if kind not in ("tensor", "row"):
        return a.whole, b.whole, _along_k(a), _along_k(b)
    one = torch.ones((), device=a.values.device)
    rows = [one if x.scales is None else x.scales for x in (a, b)]
    if kind == "row":
        rows = [s.reshape(-1).expand(x.values.shape[0]) for s, x in zip(rows, (a, b), strict=True)]
    return rows[0], rows[1], None, None


def _along_k(x: Coded) -> Tensor:
    """Return one scale for every row, where blocks hold several rows."""
    assert x.scales is not None
    return x.scales if x.tall == 1 else x.scales.repeat_interleave(x.tall, dim=0)[: x.values.shape[0]]
