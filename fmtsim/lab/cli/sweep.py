# SPDX-License-Identifier: Apache-2.0
"""``fmtsim sweep``: train a small model under many schemes, learning rates and seeds, and count what fails."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fmtsim.lab.cli.options import check_device, check_threads, parse_number, usable_cores
from fmtsim.lab.cli.output import answer, origin
from fmtsim.lab.training.corpus import Corpus, load_corpus
from fmtsim.lab.training.scaling_law import Choice, ScalingLaw, fit_law
from fmtsim.lab.training.sweep import Point, SweepConfig, points_of, speed_of
from fmtsim.lab.training.sweep_folder import read_runs, run_sweep
from fmtsim.lab.training.sweep_result import SweepResult, byte_entropy
from fmtsim.lab.training.tasks import task_corpus
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import check_folder
from fmtsim.support.progress import make_progress

T = TypeVar("T")
HEATMAP, LAW = "heatmap.png", "law.png"
MOST_RUNS = 100_000


def run(arguments: argparse.Namespace) -> int:
    """Train what the folder lacks, draw the heatmap and print the table; Ctrl-C leaves the runs that are done."""
    points, config = _points(arguments), _config(arguments)
    for point in points:
        config.train_config(point)  # what does not fit fails here
    if arguments.law is not None and arguments.law not in {point.scheme for point in points}:
        raise ArgumentError(
            f"--law {arguments.law} is none of --schemes {arguments.schemes}; add it, or choose one of them"
        )
    check_device(arguments.device)
    workers = usable_cores() if arguments.workers is None else arguments.workers
    check_threads(workers, "--workers")
    out = Path(arguments.out).expanduser()
    check_folder(out)
    corpus = _corpus(arguments)
    try:
        with make_progress(not arguments.quiet) as progress:
            runs = run_sweep(config, points, corpus, out, progress, workers)
    except KeyboardInterrupt:
        done = len({run.point for run in read_runs(out)} & set(points))
        raise KeyboardInterrupt(f"{done} of {len(points)} runs are in {out}; the same command goes on") from None
    result = SweepResult(runs=tuple(runs), entropy=byte_entropy(corpus.train), limit=arguments.failed)
    law = None if arguments.law is None else fit_law(result.trained(), arguments.law)
    files = _draw(result, law, out)
    record = {**origin(), "runs": len(runs), "corpus": corpus.name, **result.to_dict(), "files": files}
    if law is not None:
        record["law"] = {name: getattr(law, name) for name in ("constants", "base", "eff_n", "eff_d")}
    tables = "\n\n".join(str(part) for part in (result, law) if part is not None)
    answer(arguments, record, lambda: f"text: {corpus.name}\n{tables}\n\nwritten: {', '.join(files)}")
    return 0


def _choices(law: ScalingLaw) -> list[Choice]:
    """Return every forward with every backward precision, as many times faster as operands have fewer bits than 16."""
    return [
        Choice(first, second, speed_of(first, backward=False), speed_of(second, backward=True))
        for first in law.eff_n for second in law.eff_d
    ]  # fmt: skip


def _draw(result: SweepResult, law: ScalingLaw | None, out: Path) -> list[str]:
    """Draw what there is where matplotlib is installed; return the files of the sweep."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no heatmap: matplotlib is not installed (pip install 'fmtsim[viz]')", file=sys.stderr)
    else:
        result.plot(out / HEATMAP)
        if law is not None:
            law.plot(_choices(law), out / LAW)
    return sorted(str(path) for path in out.iterdir() if path.suffix in (".json", ".jsonl", ".png"))


def _points(arguments: argparse.Namespace) -> list[Point]:
    schemes = _list(arguments.schemes, "--schemes", str)
    rates = _list(arguments.lr, "--lr", parse_number)
    widths, steps, seeds = (_integers(getattr(arguments, name), f"--{name}") for name in ("widths", "steps", "seeds"))
    total = len(schemes) * len(rates) * len(widths) * len(steps) * len(seeds)
    if total > MOST_RUNS:
        raise ArgumentError(
            f"the lists make {total:,} runs; choose at most {MOST_RUNS:,}, in several sweeps if need be"
        )
    return points_of(schemes, rates, widths, steps, seeds)


def _config(arguments: argparse.Namespace) -> SweepConfig:
    names = ("layers", "heads", "context", "batch_size", "final_rate", "device")
    clip = None if arguments.clip == 0 else arguments.clip
    return SweepConfig(architecture=arguments.model, clip=clip, **{name: getattr(arguments, name) for name in names})


def _corpus(arguments: argparse.Namespace) -> Corpus:
    if not arguments.tasks:
        return load_corpus(arguments.data, arguments.context)
    if arguments.data is not None:
        raise ArgumentError(f"--tasks is a text of its own; leave --data {arguments.data} or --tasks out")
    return task_corpus()


def _list(text: str, option: str, read: Callable[[str], T]) -> list[T]:
    found = [read(word.strip()) for word in text.split(",") if word.strip()]
    if not found:
        raise ArgumentError(f"{option} {text!r} is empty; write a list, such as a,b,c")
    return found


def _integers(text: str, option: str) -> list[int]:
    """Read numbers and ranges: ``1,2,8..11``."""
    found: list[int] = []
    for word in _list(text, option, str):
        first, dots, last = word.partition("..")
        if not (first.isdecimal() and (last.isdecimal() if dots else True)) or len(first + last) > 30:
            raise ArgumentError(
                f"{option} {word!r} is neither a number nor a range; write 3, or 0..3 for 0, 1, 2 and 3"
            )
        low, high = int(first), int(last or first)
        if not low <= high < low + MOST_RUNS:
            raise ArgumentError(f"{option} {word} has no numbers, or too many; write the smaller one first")
        found += range(low, high + 1)
    return found
