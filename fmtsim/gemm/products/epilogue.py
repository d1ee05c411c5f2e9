"""What a library makes of a reduced sum: scales, bias and the output dtype (docs/matmul.md, section 4, step 7)."""

import torch
from torch import Tensor

from fmtsim import ops
from fmtsim.errors import DtypeError
from fmtsim.formats.interop import torch_dtype
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec
from fmtsim.spec.plan import Epilogue

OUT_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)

# A piece of this many sums and its temporaries are some 20 MB, however large the matrix is; a GPU has room for more,
# and waits for launches.
_PIECE = 1 << 20
_PIECE_ON_GPUS = 1 << 26
_CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def finish(
    sums: Tensor,
    dtype: torch.dtype,
    *,
    rule: Epilogue = "scale",
    row: Tensor | None = None,
    column: Tensor | None = None,
    bias: Tensor | None = None,
    bias_after_rounding: bool = False,
    result_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Scale reduced sums, add a bias and round to an output dtype, one rounding a step.

    Args:
        sums: [M, N], contiguous, float32 or float64, whose arithmetic the steps follow; it may be overwritten.
        dtype: One of ``OUT_DTYPES``.
        rule: In which order the scales multiply (``GemmPlan.epilogue``).
        row: Scale of a: one element, or M of them. None together with ``column`` multiplies nothing.
        column: Scale of b: one element, or N of them.
        bias: [N].
        bias_after_rounding: Round to a ``dtype`` of 16 bits before the bias is added, too.
        result_scale: One element that multiplies FP8 outputs; other dtypes ignore it.
        out: [M, N] of ``dtype`` to write to.

    Returns:
        ``out``, or [M, N] of ``dtype``, which is ``sums`` itself where that has the dtype.

    A product that is zero is +0. Inf stays Inf in float16 and wider, and saturates in FP8. NaN is 0x7FFFFFFF,
    0x7FFF, 0x7F or 0x7FFFFFFFFFFFFFFF (0x80 in the fnuz formats). Beside its operands and its result this needs
    less than 64 MB of a CPU's memory, whatever M and N are.
    """
    target = sums if out is None and dtype == sums.dtype else out
    target = torch.empty_like(sums, dtype=dtype) if target is None else target
    m, n = sums.shape
    step = max(1, (_PIECE_ON_GPUS if sums.is_cuda else _PIECE) // max(n, 1))
    touched = row is not None or bias is not None
    for start in range(0, m, step):
        piece = sums[start : start + step]
        if row is not None and column is not None:
            _multiply(piece, rule, row if row.numel() == 1 else row.reshape(-1, 1)[start : start + step], column)
        if bias is not None:
            if bias_after_rounding and dtype.itemsize == 2:
                piece = _rounded(piece, output_format(dtype))
            piece.add_(bias.reshape(1, -1).to(sums.dtype))
        if result_scale is not None and dtype.itemsize == 1:
            piece.mul_(result_scale.reshape(()).to(sums.dtype)).add_(0.0)
        if touched or target is not sums:
            _store(piece, target[start : start + step])
    return target


def _multiply(y: Tensor, rule: Epilogue, row: Tensor, column: Tensor) -> None:
    """Multiply in place by the scales of rows and columns, each product rounded, zeros made +0."""
    row = row.reshape(()) if row.numel() == 1 else row
    column = column.reshape(()) if column.numel() == 1 else column.reshape(1, -1)
    wide = row.to(y.dtype), column.to(y.dtype)
    factors = {"scale": (wide[0] * wide[1],), "row_column": wide, "column_row": wide[::-1]}[rule]
    for factor in factors:
        y.mul_(factor)
    y.add_(0.0)  # -0 + 0 is +0, and nothing else changes


def _store(y: Tensor, out: Tensor) -> None:
    """Write values rounded to out's dtype, NaN in the bits that units and libraries write."""
    fmt = output_format(out.dtype)
    nan = _nan_of(y)
    if out.data_ptr() != y.data_ptr():
        narrow = out.dtype not in (y.dtype, torch.float64)
        out.copy_(_rounded(y, fmt) if narrow else y)  # exact
    if nan is not None:
        code = fmt.sign_mask if fmt.nan == "negative_zero" else fmt.magnitude_mask
        out.view(_CODES[out.element_size()]).masked_fill_(nan, code)


def _nan_of(y: Tensor) -> Tensor | None:
    """Return where NaN is, None where a sum shows that there is none: asking a GPU for it would stop the stream."""
    return None if y.device.type == "cpu" and not y.sum().isnan() else y.isnan()


def _rounded(y: Tensor, fmt: FloatFormat) -> Tensor:
    """Round to nearest even, in y's dtype; torch's own casts differ between versions and devices."""
    spec = CastSpec(format=fmt, rounding=Rounding(), overflow="saturate" if fmt.bits == 8 else "ieee")
    rounded = torch.empty_like(y)  # in place kernels would not run on vectors
    ops.engine_for("quantize", spec, y, rounded).quantize(y, spec, None, rounded)
    return rounded


def output_format(dtype: torch.dtype) -> FloatFormat:
    """Return the format of an output dtype."""
    fmt = get_format(dtype) if dtype in OUT_DTYPES else None
    if not isinstance(fmt, FloatFormat) or torch_dtype(fmt) != dtype:
        names = ", ".join(str(allowed).removeprefix("torch.") for allowed in OUT_DTYPES)
        raise DtypeError(f"out_dtype={dtype} is not the dtype of a product; choose one of {names}")
    return fmt


# A constant to torch.compile, which cannot see through the caches in there.
output_format._dynamo_marked_constant = True  # type: ignore[attr-defined]
