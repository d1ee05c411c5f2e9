# SPDX-License-Identifier: Apache-2.0
"""Products of sizes drawn at random, on a GPU: the bits of its library against those that fmtsim says they have.

A call that differs although its order is said to be known is an error in silence.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fmtsim.gemm.targets.target import Target, get_target
from fmtsim.lab.analysis.compare import Comparison, compare
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.support.errors import FmtsimError, first_line
from tools.calibrate.recheck import DATA, compared, shown

LARGEST = 1 << 36  # products of a call
WHOLE = 1 << 29  # of a call that is emulated whole; of larger ones, every 16th row and column, which meets each tile
FORMS: dict[str, dict[str, Any]] = {
    "tf32": {"a": "tf32", "b": "tf32", "out": torch.float32},
    "float16 sums": {"a": "fp16", "b": "fp16", "out": torch.float16, "accumulate": "fp16"},
    "float16": {"a": "fp16", "b": "fp16", "out": torch.float16},
    "bfloat16": {"a": "bf16", "b": "bf16", "out": torch.bfloat16},
    "bfloat16 to float32": {"a": "bf16", "b": "bf16", "out": torch.float32},
    "linear": {"a": "bf16", "b": "bf16", "out": torch.bfloat16, "operation": "linear", "bias": True},
    "tf32 linear": {"a": "tf32", "b": "tf32", "out": torch.float32, "operation": "linear", "bias": True},
    "float8": {"a": "e4m3", "b": "e4m3", "out": torch.bfloat16, "operation": "scaled_mm", "scaling": "tensor"},
    "float8 rows": {"a": "e4m3", "b": "e4m3", "out": torch.bfloat16, "operation": "scaled_mm", "scaling": "row"},
}
"""Kinds of calls. Those of which most were wrong, TF32 and float16 sums, are drawn as often as all others."""


def draw(r: random.Random, forms: Sequence[str]) -> tuple[str, GemmCall, str]:
    """Return the name of a kind of calls, a call of it, and a kind of data."""
    often = [name for name in forms if name in ("tf32", "float16 sums")]
    name = r.choice(often) if often and r.random() < 0.5 else r.choice(forms)
    form = {"operation": "mm", "fast_accum": True, **FORMS[name]}
    scaled, linear = form["operation"] == "scaled_mm", form["operation"] == "linear"
    while True:
        # widths of models are multiples of 64, batches are anything, and CUTLASS's kernels need less than 8
        unit = 64 if r.random() < 0.5 else 16 if scaled else 8
        n, k = (_width(r, unit) for _ in range(2))
        m = r.choice((r.randint(1, 512), 64 * r.randint(1, 64), _width(r, unit)))
        if not scaled and r.random() < 0.15:
            m, n, k = (max(1, size - r.randint(0, 63)) for size in (m, n, k))
        if m * n * k <= LARGEST:
            break
    layouts = [("row", "row"), ("row", "column"), ("column", "column"), ("column", "row")]
    a_layout, b_layout = layouts[0] if scaled or linear else r.choice(layouts)
    return name, GemmCall(m=m, n=n, k=k, a_layout=a_layout, b_layout=b_layout, **form), r.choice(DATA)  # type: ignore[arg-type]


def _width(r: random.Random, unit: int) -> int:
    """Return a multiple of a unit up to 16384; small ones are as frequent as large ones."""
    return max(1, round(2 ** r.uniform(4, 14) / unit)) * unit


@dataclass
class Report:
    """What came of the calls: numbers of calls by kind and outcome, and each that differs although it is known."""

    target: Target
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = ("equal, known", "different, known", "equal, a guess", "different, a guess", "refused")
        lines = [f"{'':22}" + "".join(f"{name:>20}" for name in names)]
        for form in [*(form for form in FORMS if any(form == kind for kind, _ in self.ends)), "all"]:
            counts = [
                sum(n for (kind, e), n in self.ends.items() if e == end and form in (kind, "all")) for end in names
            ]
            lines.append(f"{form:22}" + "".join(f"{count:>20,}" for count in counts))
        return "\n".join([*lines, *self.different])


Multiply = Callable[..., Tensor]


def natively(verb: Multiply, *operands: Tensor, **options: Any) -> Tensor:
    """Run a product on the GPU itself."""
    return verb(*operands, native=True, **options)


def whole(verb: Multiply, *operands: Tensor, multiply: Multiply, **options: Any) -> Comparison:
    """Compare all results of a product with emulated ones."""
    return compare(multiply(verb, *operands, **options), verb(*operands, native=False, **options))


def sampled(target: Target, call: GemmCall, spec: GemmSpec, first: tuple[int, int]) -> Callable[..., Comparison]:
    """Return what compares every 16th row and column of a product with emulated ones, which have the call's plan."""
    # 1. rows and columns, of these a multiple of 16: rows of memory that are not aligned run on other units
    rows, columns = torch.arange(first[0], call.m, 16), torch.arange(first[1], call.n, 16)
    columns = columns[: len(columns) // 16 * 16] if len(columns) >= 16 else torch.arange(call.n)
    # 2. where so few run on another unit after all, everything is compared
    if target.resolve(replace(call, m=len(rows), n=len(columns))).unit != spec.unit:
        return whole
    linear = call.operation == "linear"

    def compare_sample(
        verb: Multiply, a: Tensor, b: Tensor, *extras: Tensor, multiply: Multiply, **options: Any
    ) -> Comparison:
        result = multiply(verb, a, b, *extras, **options)[rows][:, columns]
        # 3. rows of both operands in the layout that the call has
        b_rows = b if linear else b.mT
        a_some = a[rows] if call.a_layout == "row" else a.mT[:, rows].clone().mT
        b_some = b_rows[columns] if call.b_layout == "row" else b_rows.mT[:, columns].clone().mT
        if linear:
            extras = (extras[0][columns],)
        elif call.scaling == "row":
            extras = extras[0][rows], extras[1][:, columns]
        b_some = b_some if linear else b_some.mT
        return compare(result, verb(a_some, b_some, *extras, native=False, plan=spec.plan, **options))

    return compare_sample


def run(
    name: str, calls: int, minutes: float, seed: int, *, forms: Sequence[str] = tuple(FORMS), device: str = "cuda",
    multiply: Multiply = natively,
) -> Report:  # fmt: skip
    """Run calls on the GPU that a target describes, natively and emulated, until there are enough or time is over.

    Args:
        name: Of the target.
        calls: How many.
        minutes: How long.
        seed: Of the calls and their data.
        forms: Names of ``FORMS`` to draw from.
        device: Of the operands.
        multiply: What stands in for the GPU.
    """
    report, r, end = Report(get_target(name)), random.Random(seed), time.monotonic() + 60 * minutes
    for number in range(calls):
        if time.monotonic() > end:
            break
        form, call, data = draw(r, forms)
        first = r.randrange(min(16, call.m)), r.randrange(min(16, call.n))
        try:
            spec = report.target.resolve(call)
            way = sampled(report.target, call, spec, first) if call.m * call.n * call.k > WHOLE else whole
            result = compared(
                partial(way, multiply=multiply), report.target, call, data, torch.device(device), seed + number
            )
        except (FmtsimError, RuntimeError) as error:
            report.ends[form, "refused"] += 1
            report.different.append(f"refused: {shown(call)}: {first_line(error)}")
            continue
        known = spec.basis != "guess"
        report.ends[form, f"{'equal' if result.equal else 'different'}, {'known' if known else 'a guess'}"] += 1
        if known and not result.equal:
            report.different.append(
                f"{shown(call)}, {data} data, seed {seed + number}: {result.mismatches:,} of {result.count:,}, first "
                f"{result.first}; {spec.basis}: {spec.plan.source}"
            )
    return report
