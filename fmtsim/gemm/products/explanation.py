# SPDX-License-Identifier: Apache-2.0
"""One product in words: what is called, the unit, the accumulation order, and what stands behind it."""

from dataclasses import dataclass

import torch

from fmtsim.formats.interop import dtype_name
from fmtsim.gemm.products.native import emulation_reason, unsupported_reason
from fmtsim.gemm.products.resolver import call_name
from fmtsim.gemm.targets.doubts import bug_in_words, products_left_out
from fmtsim.gemm.targets.target import get_target
from fmtsim.gemm.units.unit import STRENGTHS, describe, get_unit, is_unit
from fmtsim.spec.call import LARGE_BLOCKS, GemmCall
from fmtsim.spec.datapath import Datapath, IntegerDatapath
from fmtsim.spec.gemm_spec import BASES, GemmSpec
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.table import Facts, Result

_STEPS = {
    "scale": "times the product of both scales",
    "row_column": "times the scale of the row, then of the column",
    "column_row": "times the scale of the column, then of the row",
}

_REDUCTIONS = {
    "serial": "one after another",
    "pairwise": "in pairs",
    "neighbours": "neighbours first, down to one sum",
    "folded": "as 128 threads fold them",
}
_LANES = {
    "serial": "lanes are added one after another",
    "tree": "lanes are added as a tree, the halves onto each other",
    "pair_tree": "neighbouring lanes are added, then these sums as a tree, the halves onto each other",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MmExplanation(Result):
    """Explain one product: what is called, by which unit it is computed, and in which order it is summed.

    ``str()`` gives a text, a notebook shows a table.

    Args:
        call: The call as a library sees it; None for a product of a layer that no machine multiplies.
        machine: The target that was asked; empty without one.
        unit: Name of the unit, None for a datapath without one.
        plan: Accumulation order and epilogue, None without a machine.
        basis: The evidence for the plan: ``"recorded"`` bits of this very call, the choice that the library
            ``"reported"``, a ``"rule"``, or a ``"guess"``; ``"none"`` where there is no order to speak of.
        rows: What is shown: a heading and a text each.
    """

    call: GemmCall | None
    machine: str
    unit: str | None
    plan: GemmPlan | None
    basis: str
    rows: tuple[tuple[str, str], ...]

    @property
    def order(self) -> str:
        """The accumulation order in words."""
        return dict(self.rows)["order"]

    @property
    def verified(self) -> bool:
        """Whether recorded bits of this very call stand behind the plan."""
        return self.basis == "recorded"

    def _content(self) -> tuple[Facts]:
        return (Facts(self.rows),)


def explained(call: GemmCall, spec: GemmSpec, to_tf32: bool = False) -> MmExplanation:
    """Return a resolved call in words; ``to_tf32``: float32 operands were rounded to TF32 first."""
    plan, path, target = spec.plan, spec.datapath, None if is_unit(call.target) else call.target
    machine = str(getattr(target, "name", target)) if target is not None else spec.unit or "datapath"
    batch = f"{call.batch} of " if call.operation == "bmm" else ""
    out = dtype_name(call.out)
    # 1. what was asked, and of what
    rows = [("call", f"{call.operation}: {batch}{factors(call.m, call.n, call.k, call.a, call.b)} -> {out}")]
    if target is not None:
        layouts = f"a {call.a_layout}-major, b {call.b_layout}-major along K"
        rows.append(("target", f"{machine}, {layouts}"))
    # 2. how float32 operands became TF32, and the unit
    if call.a == "fp32" and spec.a.name == "tf32":
        rows.append(("operands", "float32, whose low 13 bits the unit ignores"))
    elif to_tf32:
        rounded = "rounded to TF32, to nearest even" if spec.a.name == "tf32" else "not rounded to TF32"
        rows.append(("operands", f"float32 {rounded}"))
    rows.append(("unit", f"{spec.unit or 'own datapath'}: {describe(path)}"))
    if spec.unit is not None:
        # the unit's mode whose arithmetic is used, None where a target changes it
        names = call_name(spec.a), call_name(spec.b)
        modes = get_unit(spec.unit).modes
        mode = next((mode for mode in modes if mode.datapath == path and mode.takes(*names)), None)
        rows += [("evidence", f"{STRENGTHS[mode.strength]}: {mode.evidence}")] if mode is not None else []
    # 3. the order of sums, what a library bug leaves out, and what follows the sums
    rows.append(("order", _order(call.k, spec)))
    if target is not None and call.plan is None and products_left_out(call.k, plan):
        left_out = bug_in_words(get_target(target), call.facts(), plan, guess=spec.basis == "guess")
        rows.append(("left out", left_out))
    rows.append(("epilogue", _epilogue(call, plan, out)))
    rows.append(("source", _source(call, spec)))
    return MmExplanation(call=call, machine=machine, unit=spec.unit, plan=plan, basis=spec.basis, rows=tuple(rows))


def factors(m: int, n: int, k: int, a: str, b: str) -> str:
    """Return sizes and formats of two operands in words."""
    return f"[{m}, {k}] {a} x [{k}, {n}] {b}"


def _order(k: int, spec: GemmSpec) -> str:
    plan, path = spec.plan, spec.datapath
    if isinstance(path, IntegerDatapath) and not path.saturate:
        return f"of no consequence: sums are exact modulo 2^{path.accumulator_bits}"
    # a chain, promoted every so many products, in instructions, in lanes of a tile
    promote = plan.promote_every or (path.promote_every if isinstance(path, Datapath) else None)
    chain = "one chain from +0, k in order"
    if promote is not None and promote < k:
        chain = f"a fresh chain every {promote} products, each added to an outer sum {_promotion(plan)}"
    if plan.instruction_k is not None:
        chain += f", blocks of at most {plan.instruction_k}"
    if plan.lanes > 1 and plan.k_tile is not None:
        lane_products = -(-plan.k_tile // plan.lanes)
        chain = (
            f"{plan.lanes} lanes of {lane_products} products of every tile, each {chain}; {_LANES[plan.lane_reduce]}"
        )
    end = f"products from {plan.k_end} on are left out; " if plan.k_end is not None and plan.k_end < k else ""
    return end + _parts(min(k, plan.k_end or k), chain, plan)


def _parts(k: int, chain: str, plan: GemmPlan) -> str:
    """Return in words how K is cut into tiles and parts, and how parts are added."""
    if plan.k_tile is None or k == 0:
        return chain
    # tiles of K, dealt to parts that are summed apart
    tiles = -(-k // plan.k_tile)
    residue = f", the incomplete one of {k % plan.k_tile} first" if plan.residue_first and k % plan.k_tile else ""
    text = f"{tiles} tiles of {plan.k_tile}{residue}"
    if plan.split == 1:
        return f"{text}; {chain}"
    share = -(-tiles // plan.split)
    parts = -(-tiles // share) if plan.owner == "contiguous" else min(plan.split, tiles)
    # which tiles a part gets: a run of them, or every n-th
    ordinal = {1: "st", 2: "nd", 3: "rd"}.get(plan.split % 10 if plan.split // 10 % 10 != 1 else 0, "th")
    runs = {"contiguous": f"runs of {share} tiles", "even": f"runs of {tiles // parts} tiles"}
    runs["even"] += f", the last {tiles % parts} one longer" if tiles % parts else ""
    dealt = runs.get(plan.owner, f"every {plan.split}{ordinal} tile")
    text += f" in {parts} parts ({dealt})"
    if plan.part_k is not None:
        first = ", the incomplete one first" if plan.residue_first else ""
        text = f"{-(-k // plan.part_k)} parts of {plan.part_k} products, each cut into tiles of {plan.k_tile}{first}"
    # how the parts become one sum
    if plan.reduce == "in_place":
        rounded = "" if plan.partial is None else f", rounded to {plan.partial.name} after every addition"
        return f"{text}, each {chain}; parts are added to the output in place{rounded}"
    partials = "" if plan.partial is None else f" rounded to {plan.partial.name} and"
    trip = " with a round trip" if plan.round_trip else ""
    return f"{text}, each {chain}; parts are{partials} added {_REDUCTIONS[plan.reduce]}{trip}"


def _promotion(plan: GemmPlan) -> str:
    if not plan.scaled_promotion:
        return "rounded to nearest"
    if plan.successive_scales:
        return "by a's scale, rounded, and by b's in one fused multiply-add"
    return "with its scales, in one fused multiply-add"


def _epilogue(call: GemmCall, plan: GemmPlan, out: str) -> str:
    steps = [] if call.scaling in ("none", *LARGE_BLOCKS) else [_STEPS[plan.epilogue]]
    steps += [f"rounded to {out}"] if call.bias and plan.bias_after_rounding and call.out.itemsize == 2 else []
    # scales, rounding before the bias, the bias, rounding to the output
    begins = call.bias and plan.reduce == "in_place"
    steps += ["the bias is what parts are added to" if begins else "plus the bias"] if call.bias else []
    if call.out in (torch.float32, torch.float64, torch.int32):
        return ", ".join([*steps, f"{out}"])
    saturating = ", saturating" if call.out.itemsize == 1 else ""
    return ", ".join([*steps, f"rounded to {out}, to nearest even{saturating}"])


def _source(call: GemmCall, spec: GemmSpec) -> str:
    if call.plan is not None:
        return "the caller's plan"
    source = spec.plan.source or "not said"
    return source if is_unit(call.target) else f"{BASES[spec.basis]}: {source}"


def runs(
    call: GemmCall, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device, native: bool | None, *,
    converted: bool,
) -> str:  # fmt: skip
    """Return whether a target's product of operands in these dtypes runs natively on a device, and why not."""
    # the same questions as a native product asks, in the same order
    unsupported = unsupported_reason(call, dtypes, call.out, converted=converted)
    reason = "native=False" if native is False else emulation_reason(call.target, call.plan, device, unsupported)
    if reason is None:
        function = {"scaled_mm": "_scaled_mm", "int_mm": "_int_mm"}.get(call.operation, call.operation)
        return f"natively, by torch.{function} on this GPU"
    return f"{'not at all (native=True)' if native else 'emulated'}: {reason}"
