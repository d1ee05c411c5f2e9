# SPDX-License-Identifier: Apache-2.0
"""Ask a GPU about many calls: find a plan for each that explains what it shows and has its bits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fmtsim.gemm.products.matmul import int_mm, linear, mm
from fmtsim.gemm.products.scaled_mm import scaled_mm
from fmtsim.gemm.units.unit import get_unit
from fmtsim.lab.analysis.compare import compare
from fmtsim.lab.explain.candidates import is_scalar, variants
from fmtsim.lab.explain.samples import Data, Extras, make_data, question
from fmtsim.spec.call import LARGE_BLOCKS, GemmCall
from fmtsim.spec.datapath import Arithmetic, Datapath, IntegerDatapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import DeviceError
from tools.calibrate.gpu import GPU
from tools.calibrate.order import Sighting, explains, fits, look


class Checked(NamedTuple):
    """How a plan compares: results, how many differ, and the first difference."""

    outputs: int
    mismatches: int
    first: str


@lru_cache(maxsize=256)
def emulate(question: GemmCall, seed: int, arithmetic: Arithmetic, plan: GemmPlan) -> Tensor:
    """Return the results that a unit and a plan give for ``make_data``."""
    return multiply(question, make_data(question, seed), arithmetic, plan)


def multiply(call: GemmCall, data: Data, arithmetic: Arithmetic, plan: GemmPlan) -> Tensor:
    """Return some rows and columns of a call, as a unit and a plan give them."""
    a, b, extras = data
    if call.operation == "scaled_mm":
        one = torch.ones(1)
        row, column = one if extras.row is None else extras.row, one if extras.column is None else extras.column
        recipes: dict[str, Any] = {}
        if call.scaling == "row":
            row, column = row[:, None], column[None, :]
        elif call.scaling in LARGE_BLOCKS:
            wide = call.scaling == "block_128"
            row = row.expand(call.m, -1)
            column = column.expand(-(-call.n // 128) if wide else call.n, -1)
            recipes = {
                "scale_recipes": ("BlockWise1x128", "BlockWise128x128" if wide else "BlockWise1x128"),
            }
        return scaled_mm(
            a, b.t(), row, column, bias=extras.bias, out_dtype=call.out, target=arithmetic, plan=plan, **recipes
        )
    if isinstance(arithmetic, IntegerDatapath):
        return int_mm(a, b.t(), target=arithmetic)
    tf32 = call.a == "tf32" and not is_scalar(arithmetic)
    options = {"target": arithmetic, "plan": plan, "out_dtype": call.out, "allow": "tf32" if tf32 else None}
    return linear(a, b, extras.bias, **options) if call.bias else mm(a, b.t(), **options)  # type: ignore[arg-type]


def verify(call: GemmCall, answer: Tensor, seed: int, arithmetic: Arithmetic, plan: GemmPlan) -> Checked:
    """Compare the bits that a GPU gave for ``make_data(question(call), seed)`` with those of a plan."""
    comparison = compare(emulate(question(call), seed, arithmetic, plan), answer)
    return Checked(comparison.count, comparison.mismatches, "" if comparison.equal else str(comparison.first))


Status = Literal["verified", "not found", "skipped"]
Units = Callable[[GemmCall], Arithmetic]
Guess = Callable[[GemmCall], GemmPlan | None]
Advance = Callable[[int, str], None]

SEEDS = (20261121, 7)
TRIED = 32  # plans that explain a call and whose bits are compared, at each stage
SCALAR = "fp32_fma"  # what runs where a library has no use for its matrix unit: one row, one column, few products
PAIRS = 2  # rows and columns that are repeated over a whole result
ENOUGH = 4  # plans with the GPU's bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found about one call."""

    call: GemmCall
    # ``"verified"``: the bits of ``plans`` are those of the GPU; ``"not found"``: no plan has them; ``"skipped"``: the
    # GPU could not be asked
    status: Status
    plans: tuple[GemmPlan, ...] = ()  # plans with the GPU's bits, any of which will do; likely ones first
    outputs: int = 0  # results compared bit for bit
    note: str = ""  # what the best plan misses, or why the call was skipped
    # name of the unit, where it is not the one that multiplies such operands elsewhere: ``SCALAR``
    unit: str | None = None


def calibrate(
    gpu: GPU, calls: Sequence[GemmCall], units: Units, *, guess: Guess | None = None, seeds: Sequence[int] = SEEDS,
    advance: Advance | None = None,
) -> list[Finding]:  # fmt: skip
    """Find the accumulation order of every call.

    Args:
        calls: The calls; those with equal K together share work.
        units: The arithmetic of a call's unit.
        guess: A plan to try first, from a rule or an earlier calibration; it must explain what the GPU shows and have
            its bits, like any other.
        seeds: Data to compare, one set for each.
        advance: Told how many calls are done, and about the current one.
    """
    findings = []
    for done, call in enumerate(calls):
        if advance is not None:
            advance(done, f"{call.a} M={call.m} N={call.n} K={call.k}")
        try:
            findings.append(find_plan(gpu, call, units(call), guess=guess, seeds=seeds))
        except DeviceError as error:
            findings.append(Finding(call=call, status="skipped", note=str(error)))
    return findings


def find_plan(
    gpu: GPU, call: GemmCall, arithmetic: Arithmetic, *, guess: Guess | None = None, seeds: Sequence[int] = SEEDS
) -> Finding:
    """Find the accumulation order of one call; arguments are those of ``calibrate``.

    Where no order on the call's unit has the GPU's bits, chains of float32 multiply-adds are tried, whose operands are
    not rounded to TF32.
    """
    seen = look(gpu, call)
    asked = question(call)
    answers = [(seed, gpu.ask(call, *make_data(asked, seed))) for seed in seeds]
    finding = _explained(gpu, call, arithmetic, seen, answers, guess)
    if finding.status == "verified" or not isinstance(arithmetic, Datapath) or call.accumulate != "fp32":
        return finding
    if call.operation == "scaled_mm" or is_scalar(arithmetic):
        return finding
    scalar = _explained(gpu, call, scalar_unit(call), seen, answers, None)
    return replace(scalar, unit=SCALAR) if scalar.status == "verified" else finding


def scalar_unit(call: GemmCall) -> Arithmetic:
    """Return the arithmetic of calls for which a library has no use for its matrix unit."""
    return get_unit(SCALAR).mode("fp32", "fp32")


def _explained(
    gpu: GPU, call: GemmCall, arithmetic: Arithmetic, seen: Sighting | None, answers: list[tuple[int, Tensor]],
    guess: Guess | None,
) -> Finding:  # fmt: skip
    """Look for plans that explain what was seen, and have the bits of the answers."""
    outputs = sum(answer.numel() for _, answer in answers)
    right: list[GemmPlan] = []
    best: Checked | None = None
    for stage in _stages(call, arithmetic, seen, guess):
        for plan in islice(stage, TRIED):
            checked = _compare(call, answers, arithmetic, plan)
            if not checked.mismatches:
                right.append(plan)
            elif best is None or checked.mismatches < best.mismatches:
                best = checked
            if len(right) == ENOUGH:
                break
        if right:
            break
    if right:
        finding = Finding(call=call, status="verified", plans=tuple(right), outputs=outputs)
        return _everywhere(gpu, finding, answers[0][0])
    if best is not None:
        note = f"of {outputs} results {best.mismatches} differ from the nearest plan; {best.first}"
    else:
        note = f"no plan explains what was seen: {profile(seen)}"
    return Finding(call=call, status="not found", outputs=outputs, note=note)


def _everywhere(gpu: GPU, found: Finding, seed: int) -> Finding:
    """Ask whether the whole result is summed in one order: equal rows and columns then give equal bits everywhere."""
    call = found.call
    data = make_data(question(call), seed)
    for number in range(PAIRS):
        row, column = min(2 * number + 1, len(data.a) - 1), min(number, len(data.b) - 1)
        extras = Extras(*(None if x is None else x[:1] for x in data.extras))
        wrong = gpu.differing(call, data.a[row : row + 1], data.b[column : column + 1], extras)
        if wrong:
            note = f"{wrong} of {call.m * call.n} results are summed in another order than the first"
            return replace(found, status="not found", note=note)
    return found


def _stages(
    call: GemmCall, arithmetic: Arithmetic, seen: Sighting | None, guess: Guess | None
) -> Iterator[Iterable[GemmPlan]]:
    """Yield plans that explain what was seen, with all that a sighting cannot show."""
    guessed = None if guess is None else guess(call)
    if guessed is not None and explains(call.k, arithmetic, guessed, seen):
        yield [replace(guessed, source="", verified=False)]
    for stage in fits(call, arithmetic, seen):
        yield (variant for plan in stage for variant in variants(call, plan))


def _compare(call: GemmCall, answers: list[tuple[int, Tensor]], arithmetic: Arithmetic, plan: GemmPlan) -> Checked:
    outputs = mismatches = 0
    first = ""
    for seed, answer in answers:
        checked = verify(call, answer, seed, arithmetic, plan)
        outputs, mismatches = outputs + checked.outputs, mismatches + checked.mismatches
        first = first or checked.first
        if mismatches:
            break
    return Checked(outputs, mismatches, first)


def profile(seen: Sighting | None) -> str:
    """Return the steps of a sighting, so that a person can read the order off: place and units lost from there on."""
    if seen is None:
        return "K is too small to see anything"
    steps = [i for i in range(len(seen.lost)) if not i or seen.lost[i] != seen.lost[i - 1]]
    shown = ", ".join(f"{seen.ends[i]}:{seen.lost[i]}" for i in steps[:12])
    return f"{shown}{', ...' if len(steps) > 12 else ''} of {len(seen.units)} units in {len(steps)} steps"
