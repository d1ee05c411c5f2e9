# SPDX-License-Identifier: Apache-2.0
"""``fmtsim calibrate --book`` and ``--learn``: the library's own choices, asked of it without running anything."""

import argparse
import datetime
import os
from functools import partial
from pathlib import Path
from typing import cast, get_args

import torch

from fmtsim.gemm.models import find_models, list_models, read_shapes
from fmtsim.gemm.targets.ask import open_asker
from fmtsim.gemm.targets.cublaslt import Architecture
from fmtsim.gemm.targets.learned import Group
from fmtsim.lab.calibration.arithmetic import family_of
from fmtsim.lab.calibration.book import Made, book_target, choose_kinds, families_of, lattice, make_book, similar_kinds
from fmtsim.lab.calibration.gpu import TorchGPU, open_gpu
from fmtsim.lab.calibration.learn import check_learner, learn
from fmtsim.lab.calibration.planfile import write_plan
from fmtsim.lab.cli.options import check_positive
from fmtsim.lab.cli.output import MISMATCH, answer, format_table
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.files import check_file
from fmtsim.support.progress import make_progress

SHOWN = 10  # questions that are answered otherwise


def run_book(arguments: argparse.Namespace) -> int:
    """Ask the library for a plan book; 0 where it answers 999 of 1000 questions at random as the book does."""
    path, plan = Path(arguments.book).expanduser(), Path(arguments.book).expanduser().with_suffix(".json")
    if path == plan:
        raise ArgumentError(f"--book {path} is the name of the plan file, which is written beside it; choose another")
    check_file("--book", path)
    check_positive(arguments, "workers")
    kinds = choose_kinds(arguments.kinds)
    families = families_of(book_shapes(arguments), kinds)
    gpu, index = open_card(arguments)
    source = f"cublasLtMatmulAlgoGetHeuristic, {datetime.date.today()}"
    make = partial(
        make_book, path, families, partial(open_asker, index, cached=False), library=gpu.library, source=source
    )
    try:
        with make_progress(None, transient=True) as progress:
            made = make(similar=similar_kinds(kinds), workers=arguments.workers, progress=progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{path} has what was asked; the same command goes on") from None
    target = book_target(path, gpu.name, architecture_of(index), family_of(torch.cuda.get_device_capability(index)))
    if target is not None:
        write_plan(target, plan)
    record = {"library": gpu.library, "file": str(path), "bytes": made.size, "families": made.families,
              "asked": made.asked, "checked": made.checked, "different": list(map(str, made.different)),
              "target": None if target is None else str(plan)}  # fmt: skip
    answer(arguments, record, lambda: book_text(path, made, None if target is None else plan))
    return MISMATCH if len(made.different) * 1000 > made.checked else 0


def open_card(arguments: argparse.Namespace) -> tuple[TorchGPU, int]:
    """Return the GPU whose library is asked, and its number."""
    gpu = open_gpu(arguments.device)
    return gpu, torch.cuda.current_device() if gpu.device.index is None else gpu.device.index


def architecture_of(index: int) -> str:
    """Return the name of a GPU's architecture."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def run_learn(arguments: argparse.Namespace) -> int:
    """Grow trees from the library's answers, and show how often they are right about answers they never saw."""
    path = Path(arguments.learn).expanduser()
    check_file("--learn", path)
    check_positive(arguments, "workers", "questions")
    check_learner()
    gpu, index = open_card(arguments)
    workers = arguments.workers or len(os.sched_getaffinity(0))
    known = architecture_of(index) if architecture_of(index) in get_args(Architecture) else None
    with make_progress(None, transient=True) as progress:
        groups = learn(path, partial(open_asker, index, cached=False), count=arguments.questions, workers=workers,
                       architecture=cast(Architecture | None, known), progress=progress)  # fmt: skip
    rows = [
        (kind_name(group), f"{group.learned:,}", f"{group.held_out:,}", f"{group.right / group.held_out:.2%}",
         f"{group.certain / group.held_out:.1%}", f"{group.certain_right / max(group.certain, 1):.3%}")
        for group in groups
    ]  # fmt: skip
    head = ("kinds", "learned from", "held out", "right", "certain", "right of these")
    record = {"library": gpu.library, "file": str(path), "bytes": path.stat().st_size,
              "groups": [dict(zip(head, row, strict=True)) for row in rows]}  # fmt: skip
    answer(arguments, record, lambda: f"{format_table(head, rows, left=(0,))}\nwritten: {path}")
    return 0


def kind_name(group: Group) -> str:
    """Return a few words that name a group of kinds."""
    first = group.kinds[0]
    words = ["batches of", first.a] if group.batched else [first.a]
    words += [{"16f": "sums in fp16", "tf32": "", "32f": ""}[first.compute], "with bias" if first.bias else ""]
    words += [f"scaling {first.scaling}" if first.scaling != "none" else ""]
    others = len(group.kinds) - 1
    return " ".join(filter(None, words)) + (f", {others} more" if others else "")


def book_shapes(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """Return outputs and inputs of the layers of a book that the arguments mean."""
    if arguments.lattice < 0:
        raise ArgumentError(f"--lattice {arguments.lattice} is not possible; choose 0 or more sizes")
    own = [(n, k) for n, k, _ in read_shapes(arguments.shapes)] if arguments.shapes else []
    names = arguments.models or ([] if arguments.shapes else list_models())
    shapes = [pair for model in find_models(names) for pair in model.parallel_layers]
    return [*shapes, *own, *lattice(arguments.lattice)]


def book_text(path: Path, made: Made, plan: Path | None) -> str:
    """Tell what came of making a book."""
    lines = [f"{made.asked:,} families asked; {path} has {made.families:,} in {made.size:,} bytes"]
    if made.checked:
        wrong = len(made.different)
        lines.append(f"{made.checked:,} questions at random, {wrong:,} with another answer than the book")
        lines += [f"  {shown(question)}" for question in made.different[:SHOWN]]
    if plan is None:
        lines.append("no plan file: the orders behind cuBLASLt's choices are known on sm_90, sm_100 and sm_103 alone")
    else:
        lines.append(f"written: {plan}; use it: fmtsim.mm(a, b, target={str(plan)!r})")
    return "\n".join(lines)
