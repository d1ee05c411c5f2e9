"""One product of a quantised layer on a machine: codes and scales go in, a rounded output comes out."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError, DtypeError, FormatError
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.call import Operation, Scaling
from fmtsim.gemm.choice import Choice, definition, draw_keys
from fmtsim.gemm.config import Gemm, Quantizer
from fmtsim.gemm.operands import OperandFormat, operand_format, own_dtype
from fmtsim.quantize import decode, encode_parts, quantize

_OUTPUTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
_MX, _NV, _LARGE = 32, 16, 128  # products that share a scale


class Coded(NamedTuple):
    """A quantised operand: values [rows, K] of a format, and its scales.

    ``kind`` as in GemmCall; ``scales`` float32 [rows or 1, groups]; ``whole`` the second scale of a two-level format.
    """

    values: Tensor
    format: OperandFormat
    kind: Scaling
    scales: Tensor | None = None
    scale_format: str | None = None
    whole: Tensor | None = None


def code(t: Tensor, quantizer: Quantizer, dim: int, generator: Any) -> Coded:
    """Quantise a matrix along its contraction axis ``dim``, 0 or -1, keeping codes and scales apart.

    Raises:
        FormatError: A format that no unit multiplies: integers, codebooks, blocks of other sizes.
    """
    fmt = quantizer.format
    if fmt is None:
        return Coded(t if dim == -1 else t.mT, operand_format("operand", t), "none")
    options: Any = {"rounding": quantizer.rounding, "overflow": quantizer.overflow, "generator": generator}
    if isinstance(fmt, FloatFormat):
        dtype = own_dtype(fmt)
        held = dtype if dtype in (torch.bfloat16, torch.float16) else None
        values = quantize(t, fmt, out_dtype=held or torch.float32, **options)
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            values = values.to(dtype)  # on the format's grid: nothing is rounded
        return Coded(values if dim == -1 else values.mT, fmt, "none")
    if not isinstance(fmt, BlockFormat) or not isinstance(fmt.element, FloatFormat):
        raise FormatError(
            f"no unit multiplies {fmt.name}; choose a floating-point format, or leave unit= and target= out"
        )
    parts = encode_parts(t, fmt, dim=dim, pad=True, **options)
    dtype = own_dtype(fmt.element)
    direct = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    values = parts.codes.view(dtype) if direct else decode(parts.codes, fmt.element)
    kind, scale_format = _kind(fmt)
    return Coded(values if dim == -1 else values.mT, fmt.element, kind, parts.scales, scale_format, parts.tensor_scale)


def _kind(fmt: BlockFormat) -> tuple[Scaling, str | None]:
    """Return how a library names the scales of a format, and their format where a unit applies them."""
    outer, inner = fmt.block
    scale = fmt.scale.name
    if (outer, inner) == (None, None):
        return "tensor", None
    if (outer, inner) == (1, None):
        return "row", None
    if (outer, inner) == (1, _MX) and scale == "e8m0":
        return "mx", "e8m0"
    if (outer, inner) == (1, _NV) and scale in ("e4m3", "ue4m3"):
        return "nvfp4", "ue4m3"
    if outer in (1, _LARGE) and inner == _LARGE and scale == "fp32":
        return "block_128", None
    raise FormatError(
        f"no unit multiplies {fmt.name}, whose blocks of {fmt.block} have {scale} scales; units and libraries take one "
        "scale a tensor or row, E8M0 for 32 (MX), E4M3 for 16 (NVFP4) and float32 for 1x128 or 128x128"
    )


def multiply_coded(
    a: Coded, b: Coded, bias: Tensor | None, gemm: Gemm, dtype: torch.dtype, layouts: tuple[str, str], generator: Any
) -> Tensor:
    """Return ``a b^T + bias`` as a machine computes it.

    Args:
        a: [M, K].
        b: [N, K].
        bias: [N], or None.
        gemm: The machine, its plan and the rounding of the output.
        dtype: Of the result.
        layouts: How a and b lie in memory, for libraries whose choice depends on it.
        generator: Random words of a unit, or of the output's rounding, that is stochastic.

    Returns:
        [M, N] of ``dtype``, or of the dtype that holds ``gemm.out``'s format.

    Raises:
        ArgumentError, DtypeError: The machine does not take these operands together.
    """
    kind, row, column, inner = _scales(a, b)
    asked = _library_dtype(gemm.out, dtype)
    scaled = kind != "none" or a.values.element_size() == 1
    operation: Operation = "scaled_mm" if scaled else "linear" if bias is not None else "mm"
    if gemm.target is not None and scaled:
        _check_library(a, b)
    fields = (
        operation, a.values.shape[0], b.values.shape[0], a.values.shape[1], asked,
        gemm.accumulate or ("fp64" if a.values.dtype == torch.float64 else "fp32"), gemm.fast_accum,
        "tensor" if scaled and kind == "none" else kind, bias is not None,
        *(("row", "row") if scaled else layouts), 1,
    )  # fmt: skip
    choice = Choice(target=gemm.target, unit=gemm.unit, plan=gemm.plan, accumulate=gemm.accumulate)
    text, stochastic, _ = definition(fields, choice, a.format, b.format, a.scale_format or b.scale_format)
    key = draw_keys(stochastic, generator if stochastic else None, None, a.values.device)
    y = torch.ops.fmtsim.gemm(a.values, b.values, text, asked, None, *inner, row, column, bias, None, key)
    return round_output(y, gemm.out, dtype, generator)


def round_output(y: Tensor, out: Quantizer, dtype: torch.dtype, generator: Any) -> Tensor:
    """Round a product to its output format, then to the dtype of the tensor that it becomes."""
    if out.format is not None and _library_dtype(out, dtype) != own_dtype_of(out):
        random = generator if out.rounding.mode == "stochastic" else None
        y = quantize(
            y, out.format, rounding=out.rounding, overflow=out.overflow, generator=random, pad=True, out_dtype=y.dtype
        )
    if y.dtype == dtype:
        return y
    return quantize(y if y.element_size() > 1 else y.float(), dtype, overflow="ieee", out_dtype=dtype)


def own_dtype_of(out: Quantizer) -> torch.dtype | None:
    """Return the torch dtype of an output format, where it has one."""
    return own_dtype(out.format) if isinstance(out.format, FloatFormat) else None


def _library_dtype(out: Quantizer, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the machine gives its result: the output format's own where it rounds to nearest."""
    if out.format is None:
        return dtype
    own = own_dtype_of(out)
    plain = out.rounding.mode == "nearest_even" and out.overflow is None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return own if own in _OUTPUTS and plain else wide


def _scales(a: Coded, b: Coded) -> tuple[Scaling, Tensor | None, Tensor | None, tuple[Tensor | None, Tensor | None]]:
    """Return the kind of scales of a product, those of its rows and columns, and those along K."""
    kinds = {a.kind, b.kind}
    if kinds == {"none"}:
        return "none", None, None, (None, None)
    if kinds <= {"none", "tensor", "row"}:
        one = torch.ones((), device=a.values.device)
        rows = [one if x.scales is None else x.scales for x in (a, b)]
        kind: Scaling = "row" if "row" in kinds else "tensor"
        if kind == "row":
            rows = [s.reshape(-1).expand(x.values.shape[0]) for s, x in zip(rows, (a, b), strict=True)]
        return kind, rows[0], rows[1], (None, None)
    if len(kinds) > 1:
        raise FormatError(f"no unit multiplies an operand with {a.kind} scales by one with {b.kind} scales")
    inner = [_along_k(x) for x in (a, b)]
    return a.kind, a.whole, b.whole, (inner[0], inner[1])


def _along_k(x: Coded) -> Tensor:
    """Return one scale for every row, where blocks hold several rows."""
    assert x.scales is not None
    rows = x.values.shape[0]
    return x.scales if x.scales.shape[0] == rows else x.scales.repeat_interleave(_LARGE, dim=0)[:rows]


def _check_library(a: Coded, b: Coded) -> None:
    """Refuse what torch._scaled_mm refuses."""
    names, k, n = (a.format.name, b.format.name), a.values.shape[1], b.values.shape[0]
    if names == ("e5m2", "e5m2"):
        raise DtypeError("cuBLAS does not multiply e5m2 by e5m2; make one operand e4m3, or pass unit=")
    if k % 16 or n % 16:
        raise ArgumentError(f"torch._scaled_mm takes K and N that are multiples of 16, not K={k}, N={n}; pass unit=")
