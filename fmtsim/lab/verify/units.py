# SPDX-License-Identifier: Apache-2.0
"""Every unit of the catalogue on a device, against the engine of the CPU: operands, plans and numbers of each kind."""

import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.formats.element import FloatFormat, IntFormat
from fmtsim.formats.interop import torch_dtype
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.operator import run_gemm
from fmtsim.gemm.units.unit import Mode, get_unit, list_units
from fmtsim.lab.analysis.compare import compare
from fmtsim.lab.verify.outcome import Advance, Task, moved, task_of
from fmtsim.lab.verify.probe_operands import spread, sprinkled
from fmtsim.spec.call import Operands
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.datapath import Datapath, IntegerDatapath, sum_dtype
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Say what replaying one set of recordings gave.

    Args:
        set: Name of the file, and for library calls the kind of call.
        machine: The GPU with its unit, or the target.
        cases: Instructions' rows or library calls that were replayed; ``skipped`` were left out by a limit.
        outputs: Results compared.
        mismatches: Results whose bits differ; at least 1 where replaying raised an error.
        in_guesses: Those of the mismatches that are in calls whose accumulation order is a guess.
        plans: The evidence for the accumulation orders, with the number of calls of each: ``recorded`` for this very
            shape, ``reported``, ``rule``, or ``guess``.
        first: The first difference in hex, or the error.
    """

    set: str
    machine: str
    cases: int
    outputs: int
    mismatches: int
    in_guesses: int = 0
    skipped: int = 0
    plans: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    first: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return dataclasses.asdict(self) | {"plans": dict(self.plans)}


def merged(replays: Iterable[Replay]) -> list[Replay]:
    """Return replays with those of one set, which follow each other, as one."""
    results: list[Replay] = []
    for replay in replays:
        before = results[-1] if results and results[-1].set == replay.set else None
        if before is None:
            results.append(replay)
            continue
        summed = ("cases", "outputs", "mismatches", "in_guesses", "skipped", "seconds")
        numbers: dict[str, Any] = {name: getattr(before, name) + getattr(replay, name) for name in summed}
        plans = Counter(dict(before.plans)) + Counter(dict(replay.plans))
        results[-1] = dataclasses.replace(
            before, machine=before.machine or replay.machine, plans=tuple(plans.most_common()),
            first=before.first or replay.first, **numbers,
        )  # fmt: skip
    return results


def replay_task(name: str, replay: Callable[[Advance], Replay]) -> Task:
    """Return the task of replaying one set."""
    failed = partial(Replay, set=name, machine="", cases=0, outputs=0, mismatches=1)
    return task_of(name, replay, lambda error: failed(first=f"replaying {error}"))


Product = Callable[..., Tensor]
Arguments = tuple[Mode, str, str, GemmPlan, str, int]

SHAPE = (130, 200)  # more than a tile either way
DEPTH = 5  # blocks of a sum, and a short one
KINDS = ("normal", "wide", "special")
PLANS = (GemmPlan(), GemmPlan(k_tile=64, split=2, partial=get_format("bf16"), reduce="pairwise"))  # type: ignore[arg-type]
THREADS = GemmPlan(k_tile=4, lanes=4, lane_reduce="pair_tree", split=2, owner="interleaved", reduce="folded")
PROMOTION = GemmPlan(promote_every=64, scaled_promotion=True)
SPECIALS = (torch.inf, -torch.inf, torch.nan, 0.0, -0.0)


class Case(NamedTuple):
    """One product: the arguments of ``run_gemm``."""

    operands: Operands
    spec: GemmSpec
    random: RandomKey | None
    label: str


def unit_tasks(device: torch.device, product: Product = run_gemm, most: int | None = None) -> list[Task]:
    """Return a task for each unit of the catalogue: its products on a device are compared with those of the CPU.

    Args:
        device: The device under test.
        product: What computes there; it takes the arguments of ``run_gemm``.
        most: Products of one task; a unit with more of them has several tasks, all of its name. None sets no limit.
    """

    def task(name: str, chosen: Sequence[Arguments]) -> Task:
        return replay_task(name, lambda advance: _check_unit(name, chosen, device, product, advance))

    tasks = []
    for name in list_units():
        every = list(_arguments(name))
        size = most or len(every)
        tasks += [task(name, every[first : first + size]) for first in range(0, len(every), size)]
    return tasks


def planted(*arguments: Any, **rest: Any) -> Tensor:
    """Return what ``run_gemm`` does with one bit of the last output flipped: the checks must see it."""
    result = run_gemm(*arguments, **rest)
    result.view(torch.uint8)[-1, 0] ^= 1
    return result


def _check_unit(
    name: str, chosen: Sequence[Arguments], device: torch.device, product: Product, advance: Advance
) -> Replay:
    outputs = mismatches = 0
    first = ""
    for done, arguments in enumerate(chosen):
        case = _case(*arguments)
        tensors: dict[str, Any] = case.operands._asdict()
        there = {name: moved(x, device) for name, x in tensors.items() if isinstance(x, Tensor)}
        operands = case.operands._replace(**there)  # type: ignore[arg-type]
        got = product(operands, case.spec, random=case.random).cpu()
        comparison = compare(got, run_gemm(case.operands, case.spec, random=case.random))
        outputs += comparison.count
        mismatches += comparison.mismatches
        first = first or ("" if comparison.equal else f"{case.label}, {comparison.first}")
        advance((done + 1) / len(chosen))
    return Replay(set=name, machine=str(device), cases=len(chosen), outputs=outputs, mismatches=mismatches, first=first)


def _arguments(name: str) -> Iterator[Arguments]:
    """Yield what the products of a unit are: each format in turn as either operand, with numbers of every kind."""
    for mode in get_unit(name).modes:
        formats = mode.inputs or ("fp32", "bf16", "fp16", "e4m3")
        for i, a in enumerate(formats):
            b = formats[(i + 1) % len(formats)] if i % 2 else a
            for kind in KINDS:
                yield mode, a, b, PLANS[0], kind, i
        for plan in _plans(mode):
            yield mode, formats[0], formats[-1], plan, "normal", 7


def _plans(mode: Mode) -> tuple[GemmPlan, ...]:
    unit = mode.datapath
    if isinstance(unit, IntegerDatapath):
        return (GemmPlan(k_tile=64, split=2),)
    promotes = isinstance(unit, Datapath) and (unit.promote_every is not None or unit.scale is not None)
    plans = (*PLANS[1:], THREADS) if unit.block == 1 else PLANS[1:]
    return plans if promotes or sum_dtype(unit) == torch.float64 else (*plans, PROMOTION)


def _case(mode: Mode, a: str, b: str, plan: GemmPlan, kind: str, seed: int) -> Case:
    formats = _element(a), _element(b)
    spec = GemmSpec(datapath=mode.datapath, plan=plan, a=formats[0], b=formats[1])
    k = DEPTH * (mode.datapath.block or 32) + 3
    generator = torch.Generator().manual_seed(zlib.crc32(f"{mode} {a} {b} {kind} {seed}".encode()))
    lhs, rhs = (_operand(fmt, rows, k, kind, generator) for fmt, rows in zip(formats, SHAPE, strict=True))
    operands = Operands(lhs, rhs)
    every = plan.promote_every if plan.scaled_promotion else 0
    if isinstance(spec.datapath, Datapath) and spec.datapath.scale is not None:
        every = spec.datapath.scale_block
    if every:
        scale_a, scale_b = (
            torch.exp2(torch.randint(-3, 4, (rows, -(-k // every)), generator=generator).float()) for rows in SHAPE
        )
        operands = operands._replace(scale_a=scale_a, scale_b=scale_b)
    if kind == "wide" and not plan.scaled_promotion:
        dtype = sum_dtype(spec.datapath)
        steps = torch.randint(-64, 64, SHAPE, generator=generator)
        operands = operands._replace(c=steps.to(dtype) if dtype == torch.int32 else steps.to(dtype) / 16)
    random = RandomKey(seed, 5) if spec.stochastic else None
    return Case(operands, spec, random, f"{a} x {b} -> {mode.accumulate}, {kind} numbers, split {plan.split}")


def _element(name: str) -> FloatFormat | IntFormat:
    fmt = get_format(name)
    assert isinstance(fmt, FloatFormat | IntFormat)
    return fmt


def _operand(fmt: FloatFormat | IntFormat, rows: int, k: int, kind: str, generator: torch.Generator) -> Tensor:
    """Return values of a format in its own dtype where torch has it, else in float32."""
    if isinstance(fmt, IntFormat):
        return torch.randint(-127, 128, (rows, k), generator=generator).to(torch.int8)
    if kind == "wide":
        low, high = max(fmt.min_exponent - 2, -60), min(fmt.max_exponent, 60)
        x = spread((rows, k), (low, high + 1), generator)
    else:
        x = torch.randn(rows, k, generator=generator, dtype=torch.float64)
    if kind == "special" and fmt.has_nan:
        x = sprinkled(x, SPECIALS, 400, generator)
    wide = torch.float64 if fmt.mantissa_bits > 23 else torch.float32
    values = quantize(x, fmt, overflow="ieee" if fmt.infinities else "saturate", out_dtype=wide)
    dtype = torch_dtype(fmt)
    return values.to(dtype) if dtype is not None and fmt.bits >= 8 else values
