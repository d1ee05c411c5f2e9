# SPDX-License-Identifier: Apache-2.0
"""Runs of ``fmtsim sweep`` and ``memory``."""

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fmtsim.gemm.models import list_models
from fmtsim.lab.cli.options import check_device, parse_number, workers_of
from fmtsim.lab.cli.output import answer, origin
from fmtsim.lab.memory import Lora, Parallel, StoredFormats, serving_memory, training_memory
from fmtsim.lab.training import sweep_folder
from fmtsim.lab.training.corpus import Corpus, load_corpus, task_corpus
from fmtsim.lab.training.scaling_law import Choice, ScalingLaw, fit_law
from fmtsim.lab.training.sweep import Point, SweepConfig, points_of, speed_of
from fmtsim.lab.training.sweep_result import SweepResult, byte_entropy
from fmtsim.recipes.registry import get_recipe
from fmtsim.support.errors import ArgumentError, FmtsimError
from fmtsim.support.files import check_folder
from fmtsim.support.progress import make_progress

T = TypeVar("T")
HEATMAP, LAW = "heatmap.png", "law.png"
MOST_RUNS = 100_000


def run_sweep(arguments: argparse.Namespace) -> int:
    """Train what the folder lacks, draw the heatmap and print the table; Ctrl-C leaves the runs that are done."""
    points, config = _points(arguments), _config(arguments)
    for point in points:
        config.train_config(point)  # what does not fit fails here
    if arguments.law is not None and arguments.law not in {point.scheme for point in points}:
        raise ArgumentError(
            f"--law {arguments.law} is none of --schemes {arguments.schemes}; add it, or choose one of them"
        )
    check_device(arguments.device)
    workers = workers_of(arguments)
    out = Path(arguments.out).expanduser()
    check_folder(out)
    corpus = _corpus(arguments)
    try:
        with make_progress(not arguments.quiet) as progress:
            runs = sweep_folder.run_sweep(config, points, corpus, out, progress, workers, arguments.executor)
    except KeyboardInterrupt:
        done = len({run.point for run in sweep_folder.read_runs(out)} & set(points))
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
    items = [read(word.strip()) for word in text.split(",") if word.strip()]
    if not items:
        raise ArgumentError(f"{option} {text!r} is empty; write a list, such as a,b,c")
    return items


def _integers(text: str, option: str) -> list[int]:
    """Read numbers and ranges: ``1,2,8..11``."""
    numbers: list[int] = []
    for word in _list(text, option, str):
        first, dots, last = word.partition("..")
        if not (first.isdecimal() and (last.isdecimal() if dots else True)) or len(first + last) > 30:
            raise ArgumentError(
                f"{option} {word!r} is neither a number nor a range; write 3, or 0..3 for 0, 1, 2 and 3"
            )
        low, high = int(first), int(last or first)
        if not low <= high < low + MOST_RUNS:
            raise ArgumentError(f"{option} {word} has no numbers, or too many; write the smaller one first")
        numbers += range(low, high + 1)
    return numbers


# Records that training_memory takes, and the options of their fields where these have other names.
RECORDS: dict[str, tuple[Any, dict[str, str]]] = {
    "formats": (StoredFormats, {"loss": "loss_format"}), "parallel": (Parallel, {}),
    "lora": (Lora, {"rank": "lora", "layers": "lora_layers"}),
}  # fmt: skip
FIELDS = {
    keyword: {field.name: options.get(field.name, field.name) for field in dataclasses.fields(record)}
    for keyword, (record, options) in RECORDS.items()
}
# Options of the verbs, each a keyword or a record's field of that name; ``model`` comes first.
TRAINING, SERVING = (
    [option for name in [*inspect.signature(verb).parameters][1:] for option in FIELDS.get(name, {name: name}).values()]
    for verb in (training_memory, serving_memory)
)


def run_memory(arguments: argparse.Namespace) -> int:
    """Print the estimate."""
    if arguments.model == "list":
        print("\n".join(list_models()))
        return 0
    model = arguments.model if arguments.params is None else arguments.params
    verb, allowed, others = (
        (serving_memory, SERVING, [*TRAINING, "level"]) if arguments.serve else (training_memory, TRAINING, SERVING)
    )
    wrong = next(iter(_given(arguments, [name for name in others if name not in allowed])), None)
    if wrong is not None:
        why = "training; leave it or --serve out" if arguments.serve else "serving; add --serve, or leave it out"
        raise ArgumentError(f"--{wrong.replace('_', '-')} is about {why}")
    options = _given(arguments, allowed)
    if options.get("master") == "none":
        options["master"] = None
    try:
        for keyword, fields in {} if arguments.serve else FIELDS.items():
            values = {field: options.pop(option) for field, option in fields.items() if option in options}
            options |= {keyword: RECORDS[keyword][0](**values)} if values else {}
        if arguments.level is not None:
            if "recipe" not in options:
                raise ArgumentError(f"--level {arguments.level} is a recipe's; pass --recipe fp8lm as well")
            options["recipe"] = get_recipe(options["recipe"], kind="training").at_level(arguments.level)
        estimate = verb(model, **options)
    except FmtsimError as error:
        raise type(error)(_in_options(str(error), arguments.model is None)) from error
    formulas = f"\n\n{estimate.formulas()}" if arguments.formulas else ""
    answer(arguments, estimate.to_dict(), lambda: f"{estimate}{formulas}")
    return 0


def _in_options(message: str, by_number: bool) -> str:
    """Return what the verbs say with options in the place of their keywords: ``--lora 16`` for ``lora=16``."""

    fields = {field: option for names in FIELDS.values() for field, option in names.items()}

    def spelled(keyword: re.Match[str]) -> str:
        name = "params" if keyword[1] == "model" and by_number else fields.get(keyword[1], keyword[1])
        return f"--{name.replace('_', '-')} {keyword[2]}"

    names = "|".join(("model", *fields, *TRAINING, *SERVING))
    return re.sub(rf"\b({names})=('[^']*'|[^\s;,]+)", spelled, message)


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}
