"""Why a product has the bits it has: the unit, the order of its sums, and what stands behind both."""

import warnings
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import torch
from torch import Tensor

from fmtsim.errors import ArgumentError
from fmtsim.gemm.products.choice import Choice, Resolved, call_name, choose, resolve
from fmtsim.gemm.products.native import check_native, plain_obstacle, scaled_obstacle, why_not
from fmtsim.gemm.products.operands import OperandFormat, check_devices, check_tensor, matrix_layout
from fmtsim.gemm.products.product import Request, accumulation, operand_formats, output_dtype, request_formats
from fmtsim.gemm.products.scales import Scales
from fmtsim.gemm.units.unit import STRENGTHS, describe, get_unit
from fmtsim.spec.call import LARGE_BLOCKS, GemmCall, Operation, Scaling
from fmtsim.spec.datapath import Datapath, IntegerDatapath
from fmtsim.spec.plan import GemmPlan

_BASES = {
    "recorded": "recorded bits of this call",
    "logged": "the library's own choice for this call",
    "rule": "a rule",
    "guess": "a guess",
}
_STEPS = {
    "scale": "times the product of both scales",
    "row_column": "times the scale of the row, then of the column",
    "column_row": "times the scale of the column, then of the row",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MmExplanation:
    """Explain one product: what is called, by which unit it is computed, and in which order it is summed.

    ``str()`` gives a text, a notebook shows a table.

    Args:
        call: The call as a library sees it.
        machine: The target, unit or datapath that was asked.
        unit: Name of the unit, None for a datapath without one.
        plan: Order of sums and epilogue.
        basis: What stands behind the plan: ``"recorded"`` bits of this very call, the library's ``"logged"`` choice, a
            ``"rule"``, or a ``"guess"``.
        rows: What is shown: a heading and a text each.
    """

    call: GemmCall
    machine: str
    unit: str | None
    plan: GemmPlan
    basis: str
    rows: tuple[tuple[str, str], ...]

    @property
    def verified(self) -> bool:
        """Whether recorded bits of this very call stand behind the plan."""
        return self.basis == "recorded"

    def __str__(self) -> str:
        width = max(len(heading) for heading, _ in self.rows)
        return "\n".join(f"{heading:<{width}}  {text}" for heading, text in self.rows)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        left = "text-align:left"
        cells = "".join(
            f"<tr><th style='{left}'>{escape(heading)}</th><td style='{left}'>{escape(text)}</td></tr>"
            for heading, text in self.rows
        )
        return f"<table>{cells}</table>"


def explain_mm(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    target: Any = None,
    unit: Any = None,
    datapath: Any = None,
    plan: GemmPlan | None = None,
    accumulate: str | None = None,
    allow_tf32: bool = False,
    allow_fp16_accumulation: bool = False,
    use_fast_accum: bool = False,
    a_format: Any = None,
    b_format: Any = None,
    native: bool | None = None,
) -> MmExplanation:
    """Explain what ``mm`` would compute; nothing is multiplied.

    Args:
        a: [M, K], or [B, M, K] for ``bmm``. On a target, FP8 operands stand for ``scaled_mm`` with a scale for each
            tensor, and int8 operands for ``int_mm``.
        b: [K, N], or [B, K, N].
        use_fast_accum: As in ``scaled_mm``.
        out_dtype, target, unit, datapath, plan, accumulate, allow_tf32, allow_fp16_accumulation, a_format, b_format,
            native: As in ``mm``. Where the operands are on a GPU, or native is given, a row ``runs`` says whether the
            card multiplies or is emulated, and why.

    Raises:
        ArgumentError, DtypeError, FormatError: As the verb.

    >>> a = torch.zeros(64, 4096, dtype=torch.bfloat16)
    >>> print(explain_mm(a, a.mT, unit="hopper.wgmma"))
    call       mm: [64, 4096] bf16 x [4096, 64] bf16 -> bfloat16
    unit       hopper.wgmma: blocks of 16, F=25, E>=-133, toward_zero to fp32
    evidence   equal to recorded hardware bits: H200: torch.mm; probes on H200 give the lower bound of E
    order      one chain from +0, k in order
    epilogue   rounded to bfloat16, to nearest even
    source     one chain, k in order: a unit alone names no library
    """
    check_tensor("a", a, "2+")
    check_tensor("b", b, "2+")
    check_devices(a=a, b=b)
    if a.dim() != b.dim() or a.dim() > 3:
        raise ArgumentError(f"a has {a.dim()} dimensions, b {b.dim()}; pass two matrices, or two stacks of them")
    choice = choose("explain_mm", target, unit, datapath, plan, accumulate)
    operation, scaling = _operation(a, b, choice)
    request = Request(
        operation=operation,
        choice=choice,
        out_dtype=out_dtype,
        allow_tf32=allow_tf32,
        allow_fp16_accumulation=allow_fp16_accumulation,
        a_format=a_format,
        b_format=b_format,
    )
    if operation == "scaled_mm":
        formats, tf32 = request_formats(a, b.mT, request), ""
    else:
        formats, tf32 = operand_formats(a, b.mT, request)
    call = _call(a, b, formats, request, scaling, use_fast_accum)
    with warnings.catch_warnings():  # a guess is said in words here
        warnings.simplefilter("ignore")
        found = resolve(call, choice, *formats)
    shown = _explanation(call, found, choice, tf32)
    check_native(native)
    if choice.target is None or (native is None and a.device.type != "cuda"):
        return shown
    obstacle = _obstacle(a, b, call, formats, request)
    return replace(shown, rows=(*shown.rows, ("runs", _runs(call, choice, a.device, native, obstacle))))


def _operation(a: Tensor, b: Tensor, choice: Choice) -> tuple[Operation, Scaling]:
    if a.dtype == b.dtype == torch.int8:
        return "int_mm", "none"
    narrow = all(t.dtype.is_floating_point and t.dtype.itemsize == 1 for t in (a, b))
    if narrow and choice.target is not None:
        return "scaled_mm", "tensor"
    return ("bmm" if a.dim() == 3 else "mm"), "none"


def _call(
    a: Tensor, b: Tensor, formats: tuple[OperandFormat, OperandFormat], request: Request, scaling: Scaling, fast: bool
) -> GemmCall:
    if request.operation == "int_mm":
        dtype, sums = torch.int32, "int32"
    elif request.operation == "scaled_mm":
        dtype, sums = request.out_dtype or a.dtype, "fp32"
    else:
        dtype = output_dtype(a, b, request) or a.dtype
        sums = accumulation(a, output_dtype(a, b, request), request)
    return GemmCall(
        operation=request.operation, m=a.shape[-2], n=b.shape[-1],
        k=a.shape[-1] * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1),
        a=call_name(formats[0]), b=call_name(formats[1]), out=dtype, accumulate=sums, fast_accum=fast, scaling=scaling,
        a_layout=matrix_layout(a, transposed=False), b_layout=matrix_layout(b, transposed=True),
        batch=a.shape[0] if a.dim() == 3 else 1,
    )  # fmt: skip


def _obstacle(
    a: Tensor, b: Tensor, call: GemmCall, formats: tuple[OperandFormat, OperandFormat], request: Request
) -> str | None:
    if call.operation == "scaled_mm":
        return scaled_obstacle((a, b), formats, Scales("tensor"), call.out, accumulate=request.choice.accumulate)
    given = request.a_format, request.b_format
    return plain_obstacle((a, b), formats, given, call.out, call.accumulate, None)


def _runs(call: GemmCall, choice: Choice, device: torch.device, native: bool | None, obstacle: str | None) -> str:
    reason = "native=False" if native is False else why_not(choice, device, obstacle)
    if reason is None:
        function = {"scaled_mm": "_scaled_mm", "int_mm": "_int_mm"}.get(call.operation, call.operation)
        return f"natively, by torch.{function} on this card"
    return f"{'not at all (native=True)' if native else 'emulated'}: {reason}"


def _explanation(call: GemmCall, found: Resolved, choice: Choice, tf32: str) -> MmExplanation:
    plan, path = found.spec.plan, found.spec.datapath
    target = choice.target
    machine = str(getattr(target, "name", target)) if target is not None else found.unit or "datapath"
    batch = f"{call.batch} of " if call.operation == "bmm" else ""
    out = str(call.out).removeprefix("torch.")
    rows = [
        ("call", f"{call.operation}: {batch}[{call.m}, {call.k}] {call.a} x [{call.k}, {call.n}] {call.b} -> {out}")
    ]
    if target is not None:
        layouts = f"a {call.a_layout}-major, b {call.b_layout}-major along K"
        rows.append(("target", f"{machine}, {layouts}"))
    if tf32:
        rounded = "rounded to TF32, to nearest even" if found.spec.a.name == "tf32" else "not rounded to TF32"
        rows.append(("operands", f"float32 {rounded}"))
    rows.append(("unit", f"{found.unit or 'own datapath'}: {describe(path)}"))
    if found.unit is not None:
        mode = _mode(found, path)
        rows += [("evidence", f"{STRENGTHS[mode.strength]}: {mode.evidence}")] if mode is not None else []
    rows.append(("order", _order(call.k, found)))
    rows.append(("epilogue", _epilogue(call, plan, out)))
    rows.append(("source", _source(found, choice)))
    return MmExplanation(call=call, machine=machine, unit=found.unit, plan=plan, basis=found.basis, rows=tuple(rows))


def _mode(found: Resolved, path: Any) -> Any:
    """Return the unit's mode whose arithmetic is used, None where a target changes it."""
    assert found.unit is not None
    names = call_name(found.spec.a), call_name(found.spec.b)
    modes = get_unit(found.unit).modes
    return next((mode for mode in modes if mode.datapath == path and mode.takes(*names)), None)


def _order(k: int, found: Resolved) -> str:
    plan, path = found.spec.plan, found.spec.datapath
    if isinstance(path, IntegerDatapath) and not path.saturate:
        return "of no consequence: sums are exact modulo 2^32"
    promote = plan.promote_every or (path.promote_every if isinstance(path, Datapath) else None)
    chain = "one chain from +0, k in order"
    if promote is not None and promote < k:
        chain = f"a fresh chain every {promote} products, each added to an outer sum {_promotion(plan)}"
    if plan.instruction_k is not None:
        chain += f", blocks of at most {plan.instruction_k}"
    if plan.k_tile is None or k == 0:
        return chain
    tiles = -(-k // plan.k_tile)
    residue = f", the incomplete one of {k % plan.k_tile} first" if plan.residue_first and k % plan.k_tile else ""
    text = f"{tiles} tiles of {plan.k_tile}{residue}"
    if plan.split == 1:
        return f"{text}; {chain}"
    share = -(-tiles // plan.split)
    parts = -(-tiles // share) if plan.owner == "contiguous" else min(plan.split, tiles)
    dealt = f"runs of {share} tiles" if plan.owner == "contiguous" else f"every {plan.split}th tile"
    if plan.reduce == "in_place":
        rounded = "" if plan.partial is None else f", rounded to {plan.partial.name} after every addition"
        return f"{text} in {parts} parts ({dealt}), each {chain}; parts are added to the output in place{rounded}"
    kept = "" if plan.partial is None else f" rounded to {plan.partial.name} and"
    trip = " with a round trip" if plan.round_trip else ""
    return f"{text} in {parts} parts ({dealt}), each {chain}; parts are{kept} added {plan.reduce}ly{trip}".replace(
        "pairwisely", "in pairs"
    ).replace("serially", "one after another")


def _promotion(plan: GemmPlan) -> str:
    if not plan.scaled_promotion:
        return "rounded to nearest"
    if plan.successive_scales:
        return "by a's scale, rounded, and by b's in one fused multiply-add"
    return "with its scales, in one fused multiply-add"


def _epilogue(call: GemmCall, plan: GemmPlan, out: str) -> str:
    steps = [] if call.scaling in ("none", *LARGE_BLOCKS) else [_STEPS[plan.epilogue]]
    steps += [f"rounded to {out}"] if call.bias and plan.bias_after_rounding and call.out.itemsize == 2 else []
    begins = call.bias and plan.reduce == "in_place"
    steps += ["the bias is what parts are added to" if begins else "plus the bias"] if call.bias else []
    if call.out in (torch.float32, torch.float64, torch.int32):
        return ", ".join([*steps, f"{out}"])
    saturating = ", saturating" if call.out.itemsize == 1 else ""
    return ", ".join([*steps, f"rounded to {out}, to nearest even{saturating}"])


def _source(found: Resolved, choice: Choice) -> str:
    if choice.plan is not None:
        return "the caller's plan"
    source = found.spec.plan.source or "not said"
    return source if choice.target is None else f"{_BASES.get(found.basis, found.basis)}: {source}"
