"""Why a product has the bits it has: the unit, the accumulation order, and what stands behind both."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmtsim.arguments import check_together
from fmtsim.errors import ArgumentError
from fmtsim.gemm.products.matmul import Options, checked_options
from fmtsim.gemm.products.native import emulation_reason, unsupported_reason
from fmtsim.gemm.products.operands import asked_product, check_tensor, inner_length, matrix_layout
from fmtsim.gemm.products.resolver import call_name, resolve
from fmtsim.gemm.units.unit import STRENGTHS, describe, get_unit
from fmtsim.spec.call import LARGE_BLOCKS, GemmCall, Operation
from fmtsim.spec.datapath import Datapath, IntegerDatapath
from fmtsim.spec.gemm_spec import BASES, GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.table import facts_html

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
        plan: Accumulation order and epilogue.
        basis: What stands behind the plan: ``"recorded"`` bits of this very call, the choice that the library
            ``"reported"``, a ``"rule"``, or a ``"guess"``.
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
        return facts_html(self.rows)


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
            GPU multiplies or is emulated, and why.

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
    check_together(a=a, b=b)
    if a.dim() != b.dim() or a.dim() > 3:
        raise ArgumentError(f"a has {a.dim()} dimensions, b {b.dim()}; pass two matrices, or two stacks of them")
    given: Options = {
        "out_dtype": out_dtype, "target": target, "unit": unit, "datapath": datapath, "plan": plan,
        "accumulate": accumulate, "allow_tf32": allow_tf32, "allow_fp16_accumulation": allow_fp16_accumulation,
        "a_format": a_format, "b_format": b_format, "native": native,
    }  # fmt: skip
    options = checked_options("explain_mm", given)
    operation = _operation(a, b, target is not None)
    if operation == "int_mm":
        options |= {"out_dtype": torch.int32, "accumulate": "int32"}
    formats, tf32, dtype, sums = asked_product(operation, a, b.mT, options)
    call = GemmCall(
        operation=operation, m=a.shape[-2], n=b.shape[-1], k=inner_length(a), a=call_name(formats[0]),
        b=call_name(formats[1]), out=dtype or a.dtype, accumulate=sums or "", fast_accum=use_fast_accum,
        scaling="tensor" if operation == "scaled_mm" else "none", a_layout=matrix_layout(a),
        b_layout=matrix_layout(b, transposed=True), batch=a.shape[0] if a.dim() == 3 else 1, formats=formats,
        target=target, unit=options["unit"], plan=plan,
    )  # fmt: skip
    with warnings.catch_warnings():  # a guess is said in words here
        warnings.simplefilter("ignore")
        found = resolve(call)
    shown = _explanation(call, found, tf32)
    if target is None or (native is None and a.device.type != "cuda"):
        return shown
    return replace(shown, rows=(*shown.rows, ("runs", _runs(call, a, b, native, tf32))))


def _operation(a: Tensor, b: Tensor, library: bool) -> Operation:
    if a.dtype == b.dtype == torch.int8:
        return "int_mm"
    if library and all(t.dtype.is_floating_point and t.dtype.itemsize == 1 for t in (a, b)):
        return "scaled_mm"
    return "bmm" if a.dim() == 3 else "mm"


def _runs(call: GemmCall, a: Tensor, b: Tensor, native: bool | None, tf32: str) -> str:
    assert call.formats is not None
    found = unsupported_reason(
        call.operation, (a, b), call.formats, call.out, call.scaling, call.accumulate, converted=bool(tf32)
    )
    reason = "native=False" if native is False else emulation_reason(call.target, call.plan, a.device, found)
    if reason is None:
        function = {"scaled_mm": "_scaled_mm", "int_mm": "_int_mm"}.get(call.operation, call.operation)
        return f"natively, by torch.{function} on this GPU"
    return f"{'not at all (native=True)' if native else 'emulated'}: {reason}"


def _explanation(call: GemmCall, found: GemmSpec, tf32: str) -> MmExplanation:
    plan, path, target = found.plan, found.datapath, call.target
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
        rounded = "rounded to TF32, to nearest even" if found.a.name == "tf32" else "not rounded to TF32"
        rows.append(("operands", f"float32 {rounded}"))
    rows.append(("unit", f"{found.unit or 'own datapath'}: {describe(path)}"))
    if found.unit is not None:
        mode = _mode(found, path)
        rows += [("evidence", f"{STRENGTHS[mode.strength]}: {mode.evidence}")] if mode is not None else []
    rows.append(("order", _order(call.k, found)))
    rows.append(("epilogue", _epilogue(call, plan, out)))
    rows.append(("source", _source(call, found)))
    return MmExplanation(call=call, machine=machine, unit=found.unit, plan=plan, basis=found.basis, rows=tuple(rows))


def _mode(found: GemmSpec, path: Any) -> Any:
    """Return the unit's mode whose arithmetic is used, None where a target changes it."""
    assert found.unit is not None
    names = call_name(found.a), call_name(found.b)
    modes = get_unit(found.unit).modes
    return next((mode for mode in modes if mode.datapath == path and mode.takes(*names)), None)


def _order(k: int, found: GemmSpec) -> str:
    plan, path = found.plan, found.datapath
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


def _source(call: GemmCall, found: GemmSpec) -> str:
    if call.plan is not None:
        return "the caller's plan"
    source = found.plan.source or "not said"
    return source if call.target is None else f"{BASES[found.basis]}: {source}"
