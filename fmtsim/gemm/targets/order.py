# SPDX-License-Identifier: Apache-2.0
"""What cuBLASLt's families of kernels share: the record of an order, slices of K, and how parts are added."""

from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.targets.question import Choice, question_of
from fmtsim.spec.call import GemmCall
from fmtsim.spec.plan import GemmPlan

Architecture = Literal["sm_90", "sm_100", "sm_103"]


class Order(NamedTuple):
    """The accumulation order of a choice.

    plan: The accumulation order.
    unit: Unit that runs, where it is not the target's for such operands.
    operands: Format in which that unit takes them, where it is not the call's: float32 that is not rounded to TF32.
    certain: False where results of zeros or subnormal products had other signs on the GPU.
    """

    plan: GemmPlan
    unit: str | None = None
    operands: str | None = None
    certain: bool = True


def plan_order(**fields: Any) -> Order:
    """Return the order of a plan's fields; a call with one part has no fields of a reduction."""
    if fields.get("split", 1) == 1:
        gone = ("split", "part_k", "partial", "round_trip", "reduce") + (
            () if "residue_first" in fields else ("k_tile",)
        )
        fields = {name: value for name, value in fields.items() if name not in gone}
    return Order(cached_plan(tuple(fields.items())))


@lru_cache(maxsize=4096)
def cached_plan(fields: tuple[tuple[str, Any], ...]) -> GemmPlan:
    """Return a plan of fields, cached: making one checks them all."""
    return GemmPlan(**dict(fields))


def sourced(plan: GemmPlan, source: str, verified: bool = False) -> GemmPlan:
    """Return a copy of a plan with another source; ``replace`` would check all fields again, which takes longer."""
    copy = object.__new__(GemmPlan)
    for name in GemmPlan.__dataclass_fields__:
        object.__setattr__(copy, name, getattr(plan, name))
    object.__setattr__(copy, "source", source)
    object.__setattr__(copy, "verified", verified)
    return copy


def reduction_of(choice: Choice, call: GemmCall) -> dict[str, Any] | None:
    """Return how partial sums are added: REDUCTION_SCHEME 0 and 1 in the output, 2 as they are, 4 rounded to it."""
    out = get_format(call.out)
    assert isinstance(out, FloatFormat)
    rounded = None if out.name == "fp32" else out
    if choice.algorithm == 21 and choice.reduction == 1 and call.bias and rounded and call.accumulate == "fp32":
        return None  # neither of two such products on an H200 had the order below
    # In place: r = RN(p_0), r = RN(r + p_i), a bias in the first part: 0 of 256 results differ in each of 10 calls of
    # heads (H200, 2026-11-21).
    if choice.reduction in (0, 1):  # without a rounding and a bias this is the sum of the parts as they are
        return {"partial": rounded, "reduce": "in_place"} if rounded is not None or call.bias else {}
    # FP16 accumulation: parts in binary16, rounded after every addition: 122 of 125 shapes (H200, 2026-11-21).
    if call.accumulate == "fp16":
        return {"partial": out, "round_trip": True} if choice.reduction == 2 else None
    # OUTPUT_TYPE (4): parts are rounded to the result's 16 bits, added in float32 and rounded once: 954 of 954 calls of
    # CUTLASS's 16-bit kernels in all layouts (H200, 2026-11-21).
    if choice.reduction not in (2, 4):
        return None
    return {"partial": rounded if choice.reduction == 4 else None, "bias_after_rounding": call.bias}


def slice_of(call: GemmCall, split: int) -> int:
    """Return the products of a slice, whose starts are aligned to whole lines where K lies along rows."""
    # H200, 2026-11-21: TF32 64x64x64, 24 parts logged: slices of 32, so 2; 160x128x680: 10 slices of 68.
    align, line = (4, 32) if call.a in ("tf32", "fp32") else (8, 64)
    question = question_of(call)
    along_rows = question is not None and (question.layout != 2 or 1 in (call.m, call.n))
    step = line if along_rows and call.k % line == 0 else align
    return ceil_div(ceil_div(call.k, split), step) * step


def ceil_div(number: int, divisor: int) -> int:
    """Return a quotient of whole numbers, rounded up."""
    return -(-number // divisor)
