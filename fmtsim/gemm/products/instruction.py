# SPDX-License-Identifier: Apache-2.0
"""The verb of one matrix instruction: mma."""

import math
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.arguments import check_together, random_keys
from fmtsim.casts.ops import define_operator, quantize
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.products.operands import check_tensor, operand_format, read_operand
from fmtsim.gemm.products.operator import run_gemm
from fmtsim.gemm.products.resolver import ACCUMULATE_DTYPES, accumulate_name, resolve_call, target_or_unit
from fmtsim.gemm.products.scales import unit_scale_format, unit_scales
from fmtsim.gemm.units.unit import unit_takes
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.call import SCALE_KINDS, UNIT_SCALES, OperandFormat, ScaleKind
from fmtsim.spec.cast import CastSpec
from fmtsim.spec.datapath import Arithmetic, Datapath, IntegerDatapath, LogDatapath, sum_dtype
from fmtsim.spec.gemm_spec import GemmSpec, gemm_spec_from_json
from fmtsim.support.dispatch import is_readable
from fmtsim.support.errors import ArgumentError, DtypeError, shown


def mma(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    unit: Any,
    a_format: Any = None,
    b_format: Any = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    accumulate: str | None = None,
    generator: Any = None,
) -> Tensor:
    """Compute ``a b^T + c`` as one matrix instruction of a unit does, for any number of matrices.

    Args:
        a: [..., M, K]: floats, torch float8 or float4 tensors, int8, or codes with ``a_format``. K may be any length:
            a longer one is a chain of blocks, as when instructions follow each other. Of float32 words a unit that
            takes TF32 ignores the low 13 bits.
        b: [..., N, K], likewise; leading dimensions broadcast.
        c: [..., M, N], the addend, in the accumulator's dtype (float32, float16, float64 or int32); None is +0.
        unit: Name or record of a unit, or the record of an arithmetic (``Datapath``, ...).
        a_format, b_format: Formats of the operands, where their dtypes do not say them.
        scale_a: [..., M, ceil(K / g)] scales inside the unit, one for g products: torch float8 tensors, uint8 codes, or
            floats on the unit's scale format. None is 1. Their signs are ignored, NaN makes NaN.
        scale_b: [..., N, ceil(K / g)].
        accumulate: ``"fp32"``, ``"fp16"``, ``"fp64"`` or ``"int32"``; None takes c's dtype, or the unit's usual one.
        generator: Random words of a datapath that rounds stochastically, as in ``mm``; matrices draw in order.

    Returns:
        [..., M, N] in the accumulator's dtype. It has no gradient.

    NaN is 0x7FFFFFFF, 0x7FFF in float16. Every bit is defined in docs/matmul.md, sections 2 and 3.

    Raises:
        ArgumentError: Shapes, devices, formats or scales that the unit does not take.
        DtypeError: A dtype that says no format, or a c that is not of the accumulator's.
        FormatError: An unknown format.

    >>> a = torch.tensor([[2.0**12, 1.0, -(2.0**12)]]).to(torch.float8_e5m2)
    >>> one = torch.ones(1, 3).to(torch.float8_e5m2)
    >>> mma(a, one, unit="hopper.wgmma"), mma(16 * a.float(), one.float(), unit="exact")
    (tensor([[1.]]), tensor([[16.]]))
    """
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x, "2+")
    for name, extra in (("c", c), ("scale_a", scale_a), ("scale_b", scale_b)):
        if extra is not None:
            check_tensor(name, extra, "2+")
    check_together(a=a, b=b, c=c, scale_a=scale_a, scale_b=scale_b)
    _refuse_gradient(a=a, b=b, c=c)
    target_or_unit("mma", None, unit, None, accumulate=accumulate)
    accumulate = None if isinstance(unit, Arithmetic) else _accumulate(c, accumulate)
    formats, truncated = _formats(a, b, unit, a_format, b_format)
    left = read_operand(a, formats[0], tf32="truncate" if truncated[0] else "")
    right = read_operand(b, formats[1], tf32="truncate" if truncated[1] else "")
    if left.shape[-1] != right.shape[-1]:
        raise ArgumentError(
            f"mma: a of shape {tuple(left.shape)} and b of shape {tuple(right.shape)} differ in K; a is [..., M, K], "
            "b is [..., N, K]"
        )
    given = unit_scale_format(scale_a, scale_b)
    kind: ScaleKind = next((kind for kind in UNIT_SCALES if SCALE_KINDS[kind].unit_scale == given), "none")
    spec = resolve_call("mm", *formats, (0, 0, 0), torch.float32, unit=unit, accumulate=accumulate, scaling=kind)
    dtype = ACCUMULATE_DTYPES[spec.accumulate]
    batch = _batch(left, right, c, scale_a, scale_b)
    if c is not None and c.dtype != dtype:
        raise DtypeError(f"c has dtype {c.dtype}, but the unit sums in {dtype}; pass c.to({dtype})")
    addend = c if c is None else (_addend if is_readable(c) else torch.ops.fmtsim.addend)(c, spec.text)
    scales = unit_scales(scale_a, scale_b, left, right, spec.text)
    validated = left is not a and right is not b  # made of codes, or truncated
    return _run(left, right, addend, scales, spec, dtype, batch, generator, validated)


def _run(
    a: Tensor, b: Tensor, c: Tensor | None, scales: tuple[Tensor | None, Tensor | None], spec: GemmSpec,
    dtype: torch.dtype, batch: torch.Size, generator: Any, validated: bool,
) -> Tensor:  # fmt: skip
    """Multiply a stack of matrices; one that shares b is one product of all rows."""
    m, n = a.shape[-2], b.shape[-2]
    together = not spec.stochastic and b.dim() == 2 and (scales[1] is None or scales[1].dim() == 2)
    if together or not batch:
        shapes = (a, c, scales[0])
        rows = [None if t is None else t.expand(*batch, *t.shape[-2:]).flatten(0, -2) for t in shapes]
        operands: Any = (rows[0], b, rows[1], rows[2], scales[1])
    else:
        operands = [None if t is None else t.expand(*batch, *t.shape[-2:]).flatten(0, -3) for t in (a, b, c, *scales)]
    left, right, addend, scale_a, scale_b = operands
    key = random_keys(spec.stochastic, generator, math.prod(batch) if batch and not together else None, a.device)
    out = run_gemm(
        left, right, spec, dtype=dtype, c=addend, scale_a=scale_a, scale_b=scale_b, random=key, validated=validated
    )  # fmt: skip
    return out.reshape(*batch, m, n)


def _refuse_gradient(**tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"mma has no gradient, but {name} requires one; pass {name}.detach(), or call mm")


def _accumulate(c: Tensor | None, accumulate: str | None) -> str | None:
    if c is None:
        return accumulate
    own = accumulate_name(c.dtype)
    if accumulate not in (None, own):
        raise DtypeError(f"c has dtype {c.dtype}, but accumulate={shown(accumulate)}; leave one of them out")
    return own


def _formats(
    a: Tensor, b: Tensor, unit: Any, a_format: Any, b_format: Any
) -> tuple[tuple[OperandFormat, OperandFormat], tuple[bool, bool]]:
    """Return both formats, and which operands are float32 words whose low bits a TF32 unit ignores."""
    formats, truncated = [], []
    only_tf32 = not unit_takes(unit, "fp32") and unit_takes(unit, "tf32")
    for name, x, given in (("a", a, a_format), ("b", b, b_format)):
        word = x.dtype == torch.float32
        given = "tf32" if given is None and word and only_tf32 else given
        formats.append(operand_format(name, x, given))
        truncated.append(word and formats[-1].name == "tf32")
    return (formats[0], formats[1]), (truncated[0], truncated[1])


def _batch(a: Tensor, b: Tensor, c: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None) -> torch.Size:
    shapes = [t.shape[:-2] for t in (a, b, c, scale_a, scale_b) if t is not None]
    try:
        batch = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise ArgumentError(
            f"mma: leading dimensions {', '.join(str(tuple(shape)) for shape in shapes)} do not broadcast"
        ) from None
    m, n = a.shape[-2], b.shape[-2]
    if c is not None and c.shape[-2:] != (m, n):
        raise ArgumentError(f"mma: c has shape {tuple(c.shape)}; pass [..., {m}, {n}]")
    return batch


def _addend(c: Tensor, text: str) -> Tensor:
    """Return c as values of the accumulator of a product's definition, in the dtype of the sums."""
    path = gemm_spec_from_json(text).datapath
    if isinstance(path, IntegerDatapath):
        return c
    if isinstance(path, LogDatapath):
        raise ArgumentError("a LogDatapath starts its sums at zero; leave c out, and add it to the result")
    wide = c.to(sum_dtype(path))  # exact
    if not isinstance(path, Datapath) or is_exactly(path.accumulator, c.dtype):
        return wide
    # Registers are wider than the accumulator. Alignment drops the same low bits of c, whatever the exponent is.
    dropped = path.fraction_bits is not None and path.fraction_bits <= path.accumulator.mantissa_bits
    rounding = Rounding(mode="toward_zero") if dropped and path.term_rounding == "toward_zero" else Rounding()
    spec = CastSpec(format=path.accumulator, rounding=rounding, overflow="ieee")
    kept = quantize(wide, spec.to_json(), wide.dtype, None, None)
    if rounding.mode != "toward_zero" and bool(((kept != wide) & ~(kept.isnan() & wide.isnan())).any()):
        raise ArgumentError(
            f"c holds numbers that the accumulator {path.accumulator.name} lacks; round it first with fmtsim.quantize"
        )
    return kept


def is_exactly(fmt: FloatFormat, dtype: torch.dtype) -> bool:
    """Say whether every number of a dtype is a value of a format."""
    own = get_format(dtype)
    assert isinstance(own, FloatFormat)
    fits = own.max <= fmt.max and own.min_subnormal >= fmt.min_subnormal
    return fits and own.mantissa_bits <= fmt.mantissa_bits


def _addend_shape(c, text):  # type: ignore[no-untyped-def]
    return torch.empty_like(c, dtype=sum_dtype(gemm_spec_from_json(text).datapath))


define_operator("addend(Tensor c, str spec) -> Tensor", lambda c, spec: _addend(c.clone(), spec), _addend_shape)
