# SPDX-License-Identifier: Apache-2.0
"""Replay recorded matrix products through the public verbs and compare every bit."""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.matmul import int_mm, linear, mm
from fmtsim.gemm.products.operands import matrix_layout
from fmtsim.gemm.products.scaled_mm import mma, scaled_mm
from fmtsim.gemm.targets.target import get_target
from fmtsim.lab.analysis.compare import compare
from fmtsim.lab.verify.outcome import Advance, Task, moved
from fmtsim.lab.verify.units import Replay, replay_task
from fmtsim.spec.call import GemmCall, ScaleKind
from fmtsim.support.errors import ArgumentError, PlanUnknownWarning
from tools.calibrate.recordings import Call, Dots, Recording, find_recordings, read_calls, read_dots

Record = TypeVar("Record", Call, Dots)
ROWS = 1024  # dot products between two looks at the progress bar
SQUARE = 32


def gemm_tasks(
    folders: Sequence[str | Path], limit: int | None = None, device: torch.device | None = None
) -> list[Task]:
    """Return a task for each set of recordings in some folders.

    Args:
        folders: Folders with files that ``tools.calibrate.recordings`` describes.
        limit: Compare about so many results of each set: the first dot products, the cheapest calls (at least one).
        device: Where the products are computed; None is the CPU.

    Raises:
        ArgumentError: the limit is not positive.
        DataError: a folder holds no recording, or a file cannot be read.
    """
    if limit is not None and limit < 1:
        raise ArgumentError(f"limit={limit} is not possible; choose 1 or more, or leave it out")
    tasks = []
    for recording in (file for folder in folders for file in find_recordings(folder)):
        if recording.kind != "calls":
            tasks.append(replay_task(recording.name, partial(_replay_dots, recording, limit, device)))
            continue
        groups: dict[str, list[Call]] = {}
        for call in read_calls(recording):
            groups.setdefault(call.group, []).append(call)
        for group, calls in groups.items():
            name = f"{recording.name}: {group}"
            tasks.append(replay_task(name, partial(_replay_calls, recording, name, calls, limit, device)))
    return tasks


def _replay_dots(recording: Recording, limit: int | None, device: torch.device | None, advance: Advance) -> Replay:
    dots = _moved(read_dots(recording), device)
    count = dots.a.shape[0]
    rows = count if limit is None else min(limit, count)
    results = []
    for start in range(0, rows, ROWS):
        results.append(_dot_products(dots, start, min(start + ROWS, rows)))
        advance(min(start + ROWS, rows) / rows)
    comparison = compare(torch.cat(results).cpu(), dots.d[:rows].cpu())
    machine = f"{dots.machine}, {dots.unit}"
    return Replay(set=recording.name, machine=machine, cases=rows, outputs=rows, mismatches=comparison.mismatches,
                  skipped=count - rows, first="" if comparison.equal else str(comparison.first))  # fmt: skip


def _moved(record: Record, device: torch.device | None) -> Record:
    """Return a recording with its tensors on a device, with the strides that they have."""
    if device is None:
        return record
    fields: dict[str, Any] = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    there: dict[str, Any] = {name: moved(x, device) for name, x in fields.items() if isinstance(x, Tensor)}
    return dataclasses.replace(record, **there)


def _dot_products(dots: Dots, start: int, stop: int) -> Tensor:
    """Return the dot product of each row of a with the same row of b.

    Rows are multiplied in squares, of which the diagonal is kept: more products, but far fewer calls of an engine.
    """
    whole = start + (stop - start) // SQUARE * SQUARE
    results = []
    for first, last, side in ((start, whole, SQUARE), (whole, stop, stop - whole)):
        if last == first:
            continue
        a, b = (x[first:last].unflatten(0, (-1, side)) for x in (dots.a, dots.b))
        c = None if dots.c is None else dots.c[first:last].reshape(-1, side, 1).expand(-1, side, side)
        d = mma(a, b, c, target=dots.unit, formats=dots.format, accumulate=dots.accumulate)
        results.append(d.diagonal(dim1=-2, dim2=-1).reshape(-1))
    return torch.cat(results)


def _replay_calls(
    recording: Recording, name: str, calls: list[Call], limit: int | None, device: torch.device | None, advance: Advance
) -> Replay:
    target = recording.name.rpartition("_")[0].lower()
    chosen = _cheapest(calls, limit)
    outputs = mismatches = in_guesses = 0
    plans: Counter[str] = Counter()
    first = ""
    for done, call in enumerate(chosen):
        comparison = compare(replay_call(_moved(call, device), target).cpu(), call.out)
        outputs += comparison.count
        mismatches += comparison.mismatches
        basis = plan_basis(call, target)
        plans[basis] += 1
        in_guesses += comparison.mismatches if basis == "guess" else 0
        first = first or ("" if comparison.equal else f"{call.label}, {comparison.first}")
        advance((done + 1) / len(chosen))
    return Replay(set=name, machine=target, cases=len(chosen), outputs=outputs, mismatches=mismatches,
                  in_guesses=in_guesses, skipped=len(calls) - len(chosen), plans=tuple(plans.most_common()),
                  first=first)  # fmt: skip


def _cheapest(calls: list[Call], limit: int | None) -> list[Call]:
    """Return the calls with the fewest products until they have ``limit`` outputs together, in recorded order."""
    if limit is None:
        return calls
    room, chosen = limit, set()
    for call in sorted(calls, key=lambda call: call.out.numel() * call.a.shape[1]):
        if room <= 0:
            break
        chosen.add(id(call))
        room -= call.out.numel()
    return [call for call in calls if id(call) in chosen]


def replay_call(call: Call, target: str) -> Tensor:
    """Return what a public verb gives for a recorded call; a plan that is a guess is no reason for a warning here."""
    a, b = call.a, call.b.t()
    flags = call.options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanUnknownWarning)
        match call.function:
            case "mm":
                return mm(
                    a, b, out_dtype=call.out.dtype, target=target,
                    allow=tuple(name for name in ("tf32", "fp16_accumulation") if flags.get(name, False)),
                )  # fmt: skip
            case "linear":
                return linear(a, call.b, call.bias, target=target)
            case "scaled_mm":
                assert call.scale_a is not None and call.scale_b is not None
                return scaled_mm(
                    a, b, call.scale_a, call.scale_b, bias=call.bias, out_dtype=call.out.dtype,
                    use_fast_accum=flags.get("use_fast_accum", False), target=target,
                )  # fmt: skip
            case _:
                return int_mm(a, b, target=target)


def plan_basis(call: Call, target: str) -> str:
    """Return what stands behind the target's accumulation order for a call: recorded, reported, rule or guess."""
    half, tf32 = call.options.get("fp16_accumulation", False), call.options.get("tf32", False)
    scaling: ScaleKind = "none"
    if call.scale_a is not None:
        scaling = "tensor" if call.scale_a.numel() == 1 else "row"
    names = ["tf32" if tf32 else get_format(x.dtype).name for x in (call.a, call.b)]
    integer = call.function == "int_mm"
    asked = GemmCall(
        operation=call.function,  # type: ignore[arg-type]  # _call knows it
        m=call.a.shape[0], n=call.b.shape[0], k=call.a.shape[1], a=names[0], b=names[1],
        out=call.out.dtype, accumulate="int32" if integer else "fp16" if half else "fp32", scaling=scaling,
        fast_accum=call.options.get("use_fast_accum", True), bias=call.bias is not None,
        a_layout=matrix_layout(call.a, transposed=False), b_layout=matrix_layout(call.b.t(), transposed=True),
    )  # fmt: skip
    return get_target(target).find(asked).basis
