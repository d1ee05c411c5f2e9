# SPDX-License-Identifier: Apache-2.0
"""The torch operator of matrix products: one definition as JSON, the data, the choice of engine, and the epilogue."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts import ops
from fmtsim.casts.lanes import define_operator, key_tensor, random_key, with_keys
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.interop import dtype_name, torch_dtype
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.operands import FP4, gemm_converting_slices, inner_length, rounded_to_tf32
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.call import OperandFormat, Operands
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.engine import Engine
from fmtsim.spec.gemm_spec import GemmSpec, gemm_spec_from_json
from fmtsim.spec.plan import Epilogue, GemmPlan
from fmtsim.support.dispatch import constant_in_graphs
from fmtsim.support.errors import ArgumentError, DtypeError
from fmtsim.support.float64 import check_float64
from fmtsim.support.replay.gpu import captures

OUT_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
# Sums that are kept at once where they are rounded to a narrower output afterwards: 24 MB of float32 on a CPU. A GPU
# has room for more, would prepare operands once a piece, and waits for launches.
_SUMS = 6 << 20
_VALUES = 1 << 17  # numbers that are checked at once: they stay in a cache
_PIECE = 1 << 20  # sums that the epilogue takes at once: they and its temporaries are some 20 MB
_ON_GPUS = 1 << 26  # of all three
_ONE_CHAIN = GemmPlan()
_TENSORS = len(Operands._fields) - 1  # without rows_per_scale: each row has a scale of its own here
_CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def run_gemm(
    operands: Operands, spec: GemmSpec, dtype: torch.dtype | None = None, *, random: RandomKey | Tensor | None = None,
    validated: bool = False, to_tf32: bool = False, bare: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``a b^T`` as a GemmSpec defines it: the one way from verbs and layers to the operator.

    Args:
        operands: a [M, K] or [B, M, K] and b [N, K] or [B, N, K] of any strides: float8, 16-bit, float32 or float64
            values of the spec's formats, int8 for an IntegerDatapath; a matrix that ``stays_packed`` as it is. Block
            scales, one for each row, [M, ceil(K / g)] and [N, ceil(K / g)], or stacks of them, as is c.
        spec: Datapath, accumulation order and formats.
        dtype: Of the result; None leaves the reduced sums as they are, before the epilogue.
        random: A key, or int64 [2] or [B, 2] with seed and offset, where the unit rounds stochastically.
        validated: Both operands are known to hold values of their formats alone, which saves a check.
        to_tf32: Round float32 operands to TF32 first, to nearest even: a CPU rounds pieces of a matrix as it needs
            them.
        bare: All tensors are known to be ``fmtsim.support.dispatch.is_bare``, which need no dispatcher.

    Returns:
        [M, N] or [B, M, N]: ``dtype``, or float32, float64 where the accumulator needs it, int32 or int64
        for an IntegerDatapath. NaN is 0x7FFFFFFF (float64 0x7FFFFFFFFFFFFFFF).

    Raises:
        ArgumentError: An operand holds a number that its format lacks.
    """
    if bare and random is None:
        return _gemm(operands, spec, dtype, None, validated, to_tf32)  # type: ignore[no-any-return]
    key = key_tensor(random)
    operator = with_keys(torch.ops.fmtsim.gemm, key)
    return operator(list(operands[:_TENSORS]), spec.text, dtype, key, validated, to_tf32)  # type: ignore[no-any-return]


def gemm_engine(spec: GemmSpec, a: Tensor, b: Tensor) -> Engine:
    """Return the engine of a product: kernels for the device where they cover it, else torch operations."""
    engine = ops.load_engine("cpu") if a.is_cpu else ops.fused_engine(a)
    if FP4 in (a.dtype, b.dtype):
        a, b = _unpacked(a), _unpacked(b)
    return engine if engine is not None and engine.supports_gemm(spec, a, b) else ops.load_engine("torch_engine")


def _unpacked(x: Tensor) -> Tensor:
    """Return an E4M3 tensor of an FP4 matrix's unpacked shape, without memory; other tensors as they are."""
    return torch.empty(1, 1, dtype=torch.float8_e4m3fn).expand(x.shape[0], inner_length(x)) if x.dtype == FP4 else x


def _gemm(operands, spec, dtype=None, key=None, validated=False, to_tf32=False):  # type: ignore[no-untyped-def]
    definition = gemm_spec_from_json(spec) if isinstance(spec, str) else spec
    operands = Operands(operands[0].detach(), operands[1].detach(), *operands[2:_TENSORS])
    a, b = operands.a, operands.b
    # 1. operands that lie in their formats
    if to_tf32 and (a.dim() == 3 or not a.is_cpu or key is not None):
        a, b, to_tf32 = rounded_to_tf32(a), rounded_to_tf32(b), False
        operands = operands._replace(a=a, b=b)
    elif not validated and not to_tf32:
        _require_values(("a", a, definition.a), ("b", b, definition.b))
    dtype = dtype or definition.sum_dtype
    for what, wide in (("the result", dtype), ("the sum", definition.sum_dtype)):
        if wide == torch.float64:
            check_float64(a.device, what, "choose a unit and an output in float32, or move the operands to the CPU")
    # 2. one product
    if a.dim() == 2:
        out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
        _product(operands, definition, key, out, to_tf32)
        return out
    # 3. a batch: small products together, the others one after another
    out = torch.empty(a.shape[0], a.shape[1], b.shape[1], dtype=dtype, device=a.device)
    batched = (operands.c, operands.scale_a, operands.scale_b, key)
    for i in _small_products(operands, definition, key, out):
        c_i, scale_a_i, scale_b_i, key_i = (None if t is None else t[i] for t in batched)
        one = operands._replace(a=a[i], b=b[i], c=c_i, scale_a=scale_a_i, scale_b=scale_b_i)
        _product(one, definition, key_i, out[i])
    return out


def _small_products(operands: Operands, spec: GemmSpec, key: Tensor | None, out: Tensor) -> Iterable[int]:
    """Compute the small products of a batch in one call of the CPU engine; return the indices of the others."""
    a, b, bias, row, c = operands.a, operands.b, operands.bias, operands.row, operands.c
    (count, m, n), plan = out.shape, spec.plan
    cpu = ops.load_engine("cpu") if a.is_cpu and out.numel() else None
    if cpu is None or gemm_engine(spec, a[0], b[0]) is not cpu:
        return range(count)
    scaled = not (operands.scale_a is operands.scale_b is None) or (row is not None and row.numel() > 1)
    if scaled or plan.k_end is not None or (bias is not None and plan.reduce == "in_place"):
        return range(count)
    remaining: list[int] = []
    step = max(1, _SUMS // (m * n))
    for start in range(0, count, step):
        few = slice(start, start + step)
        part, keys = out[few], None if key is None else key[few]
        sums = part if out.dtype == spec.sum_dtype else torch.empty(part.shape, dtype=spec.sum_dtype)
        rest = cpu.gemm_batch(a[few], b[few], spec, keys, sums, None if c is None else c[few])
        remaining += [start + i for i in rest]
        if len(rest) < len(part):
            finish(
                sums.view(-1, n), out.dtype, plan, row=row, column=operands.column, bias=bias,
                result_scale=operands.result_scale, out=part.view(-1, n),
            )  # fmt: skip
    return remaining


def _product(operands: Operands, spec: GemmSpec, key: Tensor | None, out: Tensor, to_tf32: bool = False) -> None:
    """Compute one product into out, by groups of rows if the sums have another dtype than out."""
    m, n = out.shape
    if not out.numel():
        return
    path, wide = spec.datapath, spec.sum_dtype
    a, b, scale_a, scale_b = operands.a, operands.b, operands.scale_a, operands.scale_b
    # 1. K ends where the plan says, and scales that are missing are ones
    if spec.plan.k_end is not None:  # the library drops the end of K
        every = path.scale_block if isinstance(path, Datapath) and path.scale is not None else spec.plan.promote_every
        groups = -(-spec.plan.k_end // (every or 1))
        scale_a, scale_b = (None if s is None else s[:, :groups] for s in (scale_a, scale_b))
        a, b, spec = a[:, : spec.plan.k_end], b[:, : spec.plan.k_end], _without_end(spec)
    if isinstance(path, Datapath) and path.scale is not None and (scale_a is None or scale_b is None):
        blocks = -(-inner_length(a) // path.scale_block)
        scale_a = torch.ones(m, blocks, device=a.device) if scale_a is None else scale_a
        scale_b = torch.ones(n, blocks, device=a.device) if scale_b is None else scale_b
    # 2. groups of rows; random words are drawn for the whole product
    random = None if key is None else random_key(key)
    step = m if out.dtype == wide or random is not None else min(m, max(64, _at_once(out, _SUMS) // n))
    engine = gemm_engine(spec, a, b)
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        part, c_rows, scale_rows, row, bias = out[rows], operands.c, scale_a, operands.row, operands.bias
        if step < m:
            c_rows, scale_rows = (None if t is None else t[rows] for t in (c_rows, scale_a))
            row = row if row is None or row.numel() == 1 else row.reshape(-1)[rows]
        # 3. sums, which begin with the bias where parts are added in place
        sums = part if out.dtype == wide else torch.empty(part.shape, dtype=wide, device=out.device)
        if bias is not None and spec.plan.reduce == "in_place":
            if c_rows is not None:
                raise ArgumentError(
                    "parts that are added in place begin with c or with a bias, and both are given; pass one"
                )
            c_rows, bias = bias.reshape(1, -1).to(sums.dtype).expand_as(sums), None  # the initial value of the output
        multiply = partial(gemm_converting_slices, engine) if to_tf32 or FP4 in (a.dtype, b.dtype) else engine.gemm
        multiply(a[rows], b, c_rows, scale_rows, scale_b, spec, random, sums)
        # 4. the epilogue
        if wide.is_floating_point:
            scales = {"row": row, "column": operands.column, "result_scale": operands.result_scale}
            finish(sums, out.dtype, spec.plan, bias=bias, out=part, **scales)


@lru_cache(maxsize=256)
def _without_end(spec: GemmSpec) -> GemmSpec:
    return replace(spec, plan=replace(spec.plan, k_end=None))


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _at_once(x: Tensor, few: int) -> int:
    """Return how many elements to process at a time: ``few`` on a CPU, many on a GPU."""
    return _ON_GPUS if _is_on_gpu(x) else few


def _require_values(*operands: tuple[str, Tensor, OperandFormat]) -> None:
    """Refuse operands with values outside their formats.

    Operands in the format's own dtype cannot hold such values, and 8-bit operands in other dtypes were decoded here
    from codes of a narrower format. On a GPU one synchronisation covers all operands; while a CUDA graph is captured,
    which allows none, nothing is checked.
    """
    unproven = [
        (name, x, fmt) for name, x, fmt in operands
        if x.dtype.is_floating_point and x.dtype.itemsize > 1 and _own_dtype(fmt) != x.dtype and x.numel()
    ]  # fmt: skip
    if not unproven:
        return
    if _is_on_gpu(unproven[0][1]):
        if captures():
            return
        equal = [(rounded == piece).all() for _, x, fmt in unproven for piece, rounded in _pieces(x, fmt)]
        if bool(torch.stack(equal).all()):
            return
    for name, x, fmt in unproven:
        _require_each(name, x, fmt)


_own_dtype = lru_cache(maxsize=256)(torch_dtype)


def _pieces(x: Tensor, fmt: OperandFormat) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an operand by groups of rows, each group with its values rounded to a format."""
    spec = CastSpec(format=fmt, rounding=Rounding(), overflow="ieee")
    rows = x.reshape(-1, x.shape[-1])
    step = min(max(1, _at_once(x, _VALUES) // rows.shape[1]), rows.shape[0])
    wide = torch.promote_types(x.dtype, torch.float32)  # in which kernels are fast
    buffer = torch.empty(step * rows.shape[1], dtype=wide, device=x.device)
    for start in range(0, rows.shape[0], step):
        piece = rows[start : start + step].to(wide)
        rounded = buffer[: piece.numel()].view(piece.shape)
        ops.engine_for("quantize", spec, piece, rounded).quantize(piece, spec, None, rounded)
        yield piece, rounded


def _require_each(name: str, x: Tensor, fmt: OperandFormat) -> None:
    for piece, rounded in _pieces(x, fmt):
        if torch.equal(rounded, piece):  # five times as fast as what follows; False where there is a NaN
            continue
        lost = (rounded != piece) & ~(rounded.isnan() & piece.isnan())
        if bool(lost.any()):
            value = piece[lost][0].item()
            raise ArgumentError(
                f"{name} holds {value:g}, which is not a value of {fmt.name}; round it first with "
                f"fmtsim.quantize({name}, {fmt.name!r}), or leave formats= out"
            )


def finish(
    sums: Tensor, dtype: torch.dtype, plan: GemmPlan = _ONE_CHAIN, *, row: Tensor | None = None,
    column: Tensor | None = None, bias: Tensor | None = None, result_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Scale reduced sums, add a bias and round to an output dtype, one rounding a step.

    Args:
        sums: [M, N], contiguous, float32 or float64, whose arithmetic the steps follow; it may be overwritten.
        dtype: One of ``OUT_DTYPES``.
        plan: In which order the scales multiply (``epilogue``), and whether sums are rounded to a ``dtype`` of 16 bits
            before the bias is added, too (``bias_after_rounding``).
        row: Scale of a: one element, or M of them. None together with ``column`` multiplies nothing.
        column: Scale of b: one element, or N of them.
        bias: [N].
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
    step = max(1, (_ON_GPUS if sums.is_cuda else _PIECE) // max(n, 1))
    touched = row is not None or bias is not None
    for start in range(0, m, step):
        piece = sums[start : start + step]
        if row is not None and column is not None:
            _multiply(
                piece, plan.epilogue, row if row.numel() == 1 else row.reshape(-1, 1)[start : start + step], column
            )
        if bias is not None:
            if plan.bias_after_rounding and dtype.itemsize == 2:
                piece = _rounded(piece, output_format(dtype))
            piece.add_(bias.reshape(1, -1).to(sums.dtype))
        if result_scale is not None and dtype.itemsize == 1:
            piece.mul_(result_scale.reshape(()).to(sums.dtype)).add_(0.0)
        if touched or target is not sums:
            # Values rounded to the output's dtype, NaN in the bits that units and libraries write.
            stored, fmt = target[start : start + step], output_format(dtype)
            # Where NaN is; None where a sum shows that there is none, which a GPU would stop the stream for.
            nan = None if piece.device.type == "cpu" and not piece.sum().isnan() else piece.isnan()
            if stored.data_ptr() != piece.data_ptr():
                narrow = stored.dtype not in (piece.dtype, torch.float64)
                stored.copy_(_rounded(piece, fmt) if narrow else piece)  # exact
            if nan is not None:
                code = fmt.sign_mask if fmt.nan == "negative_zero" else fmt.magnitude_mask
                stored.view(_CODES[stored.element_size()]).masked_fill_(nan, code)
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


def _rounded(y: Tensor, fmt: FloatFormat) -> Tensor:
    """Round to nearest even, in y's dtype; torch's own casts differ between versions and devices."""
    spec = _rounding_to(fmt)
    rounded = torch.empty_like(y)  # in place kernels would not run on vectors
    # The CPU's kernels round sums, float32 or float64, to every format.
    engine = ops.load_engine("cpu") if y.is_cpu else ops.engine_for("quantize", spec, y, rounded)
    engine.quantize(y, spec, None, rounded)
    return rounded


@lru_cache(maxsize=64)
def _rounding_to(fmt: FloatFormat) -> CastSpec:
    return CastSpec(format=fmt, rounding=Rounding(), overflow="saturate" if fmt.bits == 8 else "ieee")


@constant_in_graphs  # torch.compile cannot see through the cache
def output_format(dtype: torch.dtype) -> FloatFormat:
    """Return the format of an output dtype."""
    fmt = _OUTPUTS.get(dtype)
    if fmt is None:
        names = ", ".join(dtype_name(allowed) for allowed in OUT_DTYPES)
        raise DtypeError(f"out_dtype={dtype} is not the dtype of a product; choose one of {names}")
    return fmt


_OUTPUTS: dict[Any, FloatFormat] = {dtype: get_format(dtype) for dtype in OUT_DTYPES}  # type: ignore[misc]


def _gemm_shape(operands, spec, dtype=None, *_):  # type: ignore[no-untyped-def]
    a, b = operands[:2]
    dtype = dtype or gemm_spec_from_json(spec).sum_dtype
    return torch.empty((*a.shape[:-1], b.shape[-2]), dtype=dtype, device=a.device)


define_operator(
    "gemm(Tensor?[] operands, str spec, ScalarType? dtype=None, Tensor? key=None, bool validated=False, "
    "bool to_tf32=False) -> Tensor",
    _gemm,
    _gemm_shape,
    keyed=True,
)
