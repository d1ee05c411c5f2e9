# SPDX-License-Identifier: Apache-2.0
"""Runs of ``fmtsim train``, ``report``, ``sweep`` and ``memory``."""

import argparse
import contextlib
import dataclasses
import inspect
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.config import PRODUCTS
from fmtsim.gemm.model_layers import list_models
from fmtsim.gemm.targets.target import Target, find_target
from fmtsim.lab.analysis.losses import badness
from fmtsim.lab.analysis.stats import OperandStats, in_order, operand_in_words
from fmtsim.lab.cli.arguments.models import EVERY, SHARE_LAYERS, TRAIN_DEFAULTS
from fmtsim.lab.cli.options import check_device, check_threads, parse_number, read_target, simulated, workers_of
from fmtsim.lab.cli.output import MISMATCH, answer, format_table, json_text, origin, print_text
from fmtsim.lab.memory import Lora, Parallel, StoredFormats, serving_memory, training_memory
from fmtsim.lab.training import artifacts, sweep
from fmtsim.lab.training.corpus import Corpus, load_corpus, task_corpus
from fmtsim.lab.training.decoders import GPTConfig
from fmtsim.lab.training.lockstep import check_native
from fmtsim.lab.training.run import Checkpoint, Run, bounded_threads, compare_schemes
from fmtsim.lab.training.schemes import ADAMW, HIGH_PRECISION, Scheme, TrainConfig
from fmtsim.lab.training.sweep import SweepConfig, points_of, speed_of
from fmtsim.lab.training.sweep_result import Choice, ScalingLaw, SweepResult, byte_entropy, fit_law
from fmtsim.lab.training.training_models import source_digest
from fmtsim.recipes import OptimizerConfig, get_recipe, list_recipes
from fmtsim.recipes.serialization import load_rules
from fmtsim.support.errors import ArgumentError, FmtsimError, did_you_mean
from fmtsim.support.files import check_file, check_folder, write_file
from fmtsim.support.progress import Progress, make_progress
from fmtsim.support.records import read_value

T = TypeVar("T")
HEATMAP, LAW, OVER = "heatmap.png", "law.png", "over.png"
MOST_RUNS = 100_000


def run_sweep(arguments: argparse.Namespace) -> int:
    """Train what the folder lacks, draw the heatmap and print the table; Ctrl-C leaves the runs that are done."""
    words, target = _list(arguments.schemes, "--schemes", str), read_target(arguments)["target"]
    changes = _changes(arguments.over, target)
    schemes = [f"{word}@{change}" if change else word for word in words for change in changes]
    rates = _list(arguments.lr, "--lr", parse_number)
    widths, steps, seeds = (_integers(getattr(arguments, name), f"--{name}") for name in ("widths", "steps", "seeds"))
    total = len(schemes) * len(rates) * len(widths) * len(steps) * len(seeds)
    if total > MOST_RUNS:
        raise ArgumentError(
            f"the lists make {total:,} runs; choose at most {MOST_RUNS:,}, in several sweeps if need be"
        )
    points = points_of(schemes, rates, widths, steps, seeds)
    fields = ("layers", "heads", "context", "batch_size", "final_rate", "device")
    config = SweepConfig(
        architecture=arguments.model, clip=arguments.clip or None, target=target,
        **{name: getattr(arguments, name) for name in fields},
    )  # fmt: skip
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
            runs = sweep.run_sweep(config, points, corpus, out, progress, workers, arguments.executor)
    except KeyboardInterrupt:
        done = len({run.point for run in sweep.read_runs(out)} & set(points))
        raise KeyboardInterrupt(f"{done} of {len(points)} runs are in {out}; the same command goes on") from None
    result = SweepResult(runs=tuple(runs), entropy=byte_entropy(corpus.train), limit=arguments.failed)
    law = None if arguments.law is None else fit_law(result.trained(), arguments.law)
    # Draw what there is where matplotlib is installed; return the files of the sweep.
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no heatmap: matplotlib is not installed (pip install 'fmtsim[viz]')", file=sys.stderr)
    else:
        result.plot(out / HEATMAP)
        if arguments.over:
            result.plot_over(out / OVER)
        if law is not None:
            law.plot(_choices(law), out / LAW)
    files = sorted(str(path) for path in out.iterdir() if path.suffix in (".json", ".jsonl", ".png"))
    record = {**origin(), "runs": len(runs), "corpus": corpus.name, **result.to_dict(), "files": files}
    if law is not None:
        record["law"] = {name: getattr(law, name) for name in ("constants", "base", "eff_n", "eff_d")}
    tables = "\n\n".join(str(part) for part in (result, law) if part is not None)
    answer(arguments, record, lambda: f"text: {corpus.name}\n{tables}\n\nwritten: {', '.join(files)}")
    return 0


def _changes(over: str | None, target: Any) -> list[str]:
    """Return ``FIELD=VALUE`` for each value of ``--over``, or one empty word; a range counts from end to end."""
    if over is None:
        return [""]
    name, equals, values = over.partition("=")
    fields = [field.name for field in dataclasses.fields(target)] if dataclasses.is_dataclass(target) else []
    if not equals or name not in fields:
        step = f"FIELD is one of {', '.join(fields)}" if fields else "and pass --target block=32,... whose field it is"
        raise ArgumentError(f"--over {over!r} is not possible; write FIELD=LIST, {step}{did_you_mean(name, fields)}")
    words = [str(n) for word in _list(values, "--over", str)
             for n in (_integers(word, "--over") if re.fullmatch(r"\d+\.\.\d+", word) else [word])]  # fmt: skip
    for word in words:  # a value that the datapath refuses fails here
        dataclasses.replace(target, **{name: read_value(word)})
    return [f"{name}={word}" for word in words]


def _choices(law: ScalingLaw) -> list[Choice]:
    """Return every forward with every backward precision, as many times faster as operands have fewer bits than 16."""
    return [
        Choice(first, second, speed_of(first, backward=False), speed_of(second, backward=True))
        for first in law.eff_n for second in law.eff_d
    ]  # fmt: skip


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
        # What the verbs say with options in the place of their keywords: ``--lora 16`` for ``lora=16``.
        message = str(error)
        by_number = arguments.model is None
        fields = {field: option for names in FIELDS.values() for field, option in names.items()}

        def spelled(keyword: re.Match[str]) -> str:
            name = "params" if keyword[1] == "model" and by_number else fields.get(keyword[1], keyword[1])
            return f"--{name.replace('_', '-')} {keyword[2]}"

        names = "|".join(("model", *fields, *TRAINING, *SERVING))
        raise type(error)(re.sub(rf"\b({names})=('[^']*'|[^\s;,]+)", spelled, message)) from error
    formulas = f"\n\n{estimate.formulas()}" if arguments.formulas else ""
    answer(arguments, estimate.to_dict(), lambda: f"{estimate}{formulas}")
    return 0


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


UNTOLD = artifacts.SEEDS  # of the verdict, which the summary leaves to the report


def run_train(arguments: argparse.Namespace) -> int:
    """Train both models, write the artifacts and print a summary; Ctrl-C leaves a report and a checkpoint, or nothing.

    With ``--check native`` both models are the same, and 1 says that a bit differs.
    """
    if arguments.recipe == "list":
        rows = [(name, get_recipe(name).source) for name in list_recipes(kind="training")]
        print_text(lambda: format_table(("recipe", "source"), rows, left=(0, 1)))
        return 0
    config = _config(arguments)
    check_device(arguments.device)
    if arguments.threads is not None:
        check_threads(arguments.threads)
    out = Path(arguments.out).expanduser()
    check_folder(out)
    if arguments.minutes is not None and not (arguments.check and arguments.minutes > 0):
        raise ArgumentError(f"--minutes {arguments.minutes:g} limits --check native; pass both, and a number above 0")
    if arguments.simulate is not None and (arguments.check or arguments.device != "cpu"):
        raise ArgumentError("--simulate computes on the CPU; leave --check and --device out")
    if arguments.check:
        if arguments.resume or arguments.checkpoint_every is not None:
            raise ArgumentError("--check native has no checkpoints; leave --resume and --checkpoint-every out")
        # Train natively and emulated in lockstep; 0 where all bits agree after all steps, else 1.
        corpus = load_corpus(arguments.data, config.model.context)
        with _training(arguments, out) as progress:
            result = check_native(config, corpus, progress, arguments.minutes)
        record = artifacts.make_check_record(config, corpus, result)
        text = artifacts.check_text(record)
        paths = artifacts.write_check(out, record, text, lambda found: json_text(found, indent=1))
        _answer(arguments, record, lambda: text, paths)
        return 0 if result.equal else MISMATCH
    corpus = load_corpus(arguments.data, config.model.context)
    started = {"command": shlex.join(["fmtsim", *arguments.words]), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    with _training(arguments, out) as progress:
        # where checkpoints go, read where the training goes on; refuse to begin where one waits
        every, path = arguments.checkpoint_every, out / artifacts.CHECKPOINT
        if path.exists() and not arguments.resume:
            raise ArgumentError(
                f"{path} is of a training that was cut short; pass --resume to go on, delete it, or choose another "
                "--out"
            )
        checkpoint = Checkpoint(path, artifacts.settings(config, corpus), EVERY if every is None else every)
        if arguments.resume:
            said = checkpoint.read() if path.exists() else f"no checkpoint in {out}, training begins"
            print(f"resume: {said}", file=sys.stderr)
        with _reported(config, corpus, checkpoint, out, started), simulated(arguments) as run:
            baseline, emulated = compare_schemes(config, corpus, progress, checkpoint)
        record = artifacts.make_record(config, corpus, baseline, emulated, started)
        paths = artifacts.write_artifacts(out, record, baseline, emulated)
    parts = [summary(record, baseline, emulated), *([] if run is None else [run.summary])]
    _answer(arguments, record, lambda: "\n\n".join(parts), paths)
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    """Write the report of several runs."""
    out = Path(arguments.out).expanduser()
    check_file("--out", out)
    page, told = artifacts.overlay([Path(folder).expanduser() for folder in arguments.folders])
    write_file(out, page)
    print(f"{told}\nwritten: {out}")
    return 0


@contextlib.contextmanager
def _training(arguments: argparse.Namespace, out: Path) -> Iterator[Progress]:
    """Show progress and bound torch's threads; Ctrl-C ends with a line that says what there is to go on from."""
    try:
        with bounded_threads(arguments.threads), make_progress(not arguments.quiet) as progress:
            yield progress
    except KeyboardInterrupt as interrupt:
        hint = f"a checkpoint is in {out}, go on with --resume" if (out / artifacts.CHECKPOINT).exists() else ""
        words = "; ".join(filter(None, (str(interrupt), hint)))
        raise KeyboardInterrupt(words or f"nothing was written to {out}") from None


@contextlib.contextmanager
def _reported(
    config: TrainConfig, corpus: Corpus, checkpoint: Checkpoint, out: Path, started: dict[str, str]
) -> Iterator[None]:
    """Write the report of a comparison that is interrupted, if it can be written."""
    try:
        yield
    except KeyboardInterrupt:
        written = None
        with contextlib.suppress(FmtsimError):
            written = artifacts.write_unfinished(out, config, corpus, checkpoint, started)
        raise KeyboardInterrupt(written or "") from None


def _answer(arguments: argparse.Namespace, record: dict[str, Any], text: Callable[[], str], paths: list[Path]) -> None:
    files = [str(path) for path in paths]
    answer(arguments, {**record, "files": files}, lambda: f"{text()}\n\nwritten: {', '.join(files)}")


def _config(arguments: argparse.Namespace) -> TrainConfig:
    for name in filter(None, (arguments.format, arguments.grad_format, arguments.baseline)):
        get_format(name)  # an unknown name fails here, with close matches
    sizes = {name: getattr(arguments, name) for name in ("context", "width", "heads")}
    rules = () if arguments.rules is None else load_rules(arguments.rules)
    machine = _machine(arguments) | {"reduction": arguments.reduction, "rules": rules}
    if arguments.level is not None and arguments.recipe is None:
        raise ArgumentError(f"--level {arguments.level} is a recipe's; pass --recipe {_with_levels()} as well")
    if arguments.recipe is not None:
        simulated = _recipe(arguments, machine)
    else:
        names = ("format", "grad_format", "scaling", "rounding", "grad_rounding", "fast_accum", "fast_backward")
        set_sizes = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
        simulated = Scheme(**{"format": "e4m3"} | set_sizes | machine, optimizer=_optimizer(arguments, None))
    # Of two blocks a recipe that leaves the last 15 % of them in high precision leaves one: it would hardly show.
    rules = () if simulated.recipe is None else simulated.recipe.rules
    by_share = any(isinstance(blocks, float) for rule in rules for blocks in (rule.first_blocks, rule.last_blocks))
    sizes["layers"] = arguments.layers or (SHARE_LAYERS if by_share else TRAIN_DEFAULTS["layers"])
    baseline = Scheme(format=arguments.baseline, grad_format=arguments.baseline)
    rest = {name: getattr(arguments, name) for name in ("steps", "batch_size", "ranks", "lr", "seed", "device")}
    model = {"model": GPTConfig(**sizes), "architecture": arguments.model}
    config = TrainConfig(simulated=simulated, baseline=baseline, **model, **rest)
    source_digest(config.architecture)  # an unknown model fails here
    return config


def _recipe(arguments: argparse.Namespace, machine: dict[str, Any]) -> Scheme:
    """Return the scheme of a recipe, beside which nothing else describes formats or sums."""
    others = ("format", "grad_format", "scaling", "rounding", "grad_rounding", "fast_accum", "fast_backward")
    conflicts = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name)]
    if conflicts:
        raise ArgumentError(
            f"--recipe says everything about formats and sums; leave {' and '.join(conflicts)} out, or put it into a "
            "recipe file of your own"
        )
    recipe = get_recipe(arguments.recipe, kind="training")
    if arguments.level is not None:
        if not recipe.levels:
            raise ArgumentError(
                f"--level {arguments.level}: recipe {recipe.name} has no levels; pass --recipe {_with_levels()}, or "
                "leave --level out"
            )
        recipe = recipe.at_level(arguments.level)
    if machine["target"] == "recipe":
        machine |= {"target": recipe.made_for}
    return Scheme(format=HIGH_PRECISION, recipe=recipe, optimizer=_optimizer(arguments, recipe.optimizer), **machine)


def _with_levels() -> str:
    return " or ".join(name for name in list_recipes(kind="training") if get_recipe(name).levels)


def _optimizer(arguments: argparse.Namespace, own: OptimizerConfig | None) -> OptimizerConfig:
    """Return the recipe's optimizer, or AdamW in float32, with what is asked for instead."""
    choices = {"rule": arguments.optimizer, "state": arguments.state}
    return dataclasses.replace(own or ADAMW, **{name: value for name, value in choices.items() if value is not None})


def _machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return target, plan and autocast as a Scheme takes them."""
    if arguments.plan is not None and arguments.target is None:
        raise ArgumentError("--plan is an accumulation order; pass --target as well")
    machine = read_target(arguments)
    target = machine["target"]
    has_library = target == "recipe" or (target is not None and isinstance(find_target(target), Target))
    if arguments.fast_accum and not has_library:
        raise ArgumentError("--fast-accum chooses between a library's kernels; pass a GPU as --target as well")
    if arguments.target == "recipe" and arguments.recipe is None:
        raise ArgumentError("--target recipe is the machine that a recipe was made for; pass --recipe as well")
    return {**machine, "autocast": arguments.autocast}


def summary(record: dict[str, Any], baseline: Run, simulated: Run) -> str:
    """Return what a reader wants to know first: both losses, their gap, and where bits were lost."""
    corpus = record["corpus"]
    cut = ", cut at the limit" if corpus["truncated"] else ""
    runs = (("baseline", baseline), ("simulated", simulated))
    rows = [(name, r.label, _loss(r.final_loss), _loss(r.validation), f"{r.seconds:.1f}") for name, r in runs]
    gap = (simulated.final_loss - baseline.final_loss, simulated.validation - baseline.validation)
    rows.append(("gap", "", _loss(gap[0], "+"), _loss(gap[1], "+"), ""))
    header = ("run", "precision", "train loss", "held-out loss", "seconds")
    size = f"{corpus['bytes'] / 1e6:.1f} MB" if corpus["bytes"] >= 1e5 else f"{corpus['bytes']:,} bytes"
    files = f"{corpus['files']} file{'' if corpus['files'] == 1 else 's'}"
    # Lines about optimizers, reductions and gathered weights, where these are not the baseline's.
    lines = []
    if simulated.optimizer != baseline.optimizer:
        states = [f"{run.optimizer}, {run.state_bytes:.2f} bytes a parameter" for run in (simulated, baseline)]
        lines.append(f"weights and optimizer states: {states[0]} (baseline: {states[1]})")
    if simulated.reduction or baseline.reduction:
        lines.append(f"gradients: {simulated.reduction} (baseline: {baseline.reduction.partition(' (')[0]})")
    if simulated.gathered:
        share = simulated.state_bytes / simulated.ranks + get_format(simulated.gathered).bits / 8
        lines.append(
            f"weights: ranks share them and the states out and gather weights in {simulated.gathered}, {share:.2f} "
            "bytes a parameter on each; the bits are those of whole ones"
        )
    parts = [
        f"text: {corpus['name']}, {size} in {files}{cut}",
        format_table(header, rows, left=(0, 1)),
        *(f"{run.label}: stopped, {run.stopped}" for run in (baseline, simulated) if run.stopped),
        "(losses in nats per byte; train loss is the mean of the last tenth of the steps)",
        *lines,
        "",
        *(f"{question.lower()}: {answer}" for question, answer in record.get("verdict", ()) if question != UNTOLD),
    ]
    if simulated.nonfinite:
        skipped = f", {simulated.skipped} of them skipped; the loss ended at a scale of {simulated.loss_scale:g}"
        parts.append(f"steps with gradients that were not finite: {simulated.nonfinite}" + (
            skipped if simulated.skipped else ", all of them taken"))  # fmt: skip
    if simulated.stats is not None and simulated.stats.layers:
        total: dict[str, OperandStats] = {}  # of each operand, all layers together
        for operands in simulated.stats.layers.values():
            for name, s in operands.items():
                total.setdefault(name, OperandStats()).merge(s)
        lost = [
            (operand, operand_in_words(operand), total[operand].format, f"{total[operand].underflow_percent:.2f}",
             f"{total[operand].saturation_percent:.3f}", f"{total[operand].sqnr_db:.1f}")
            for operand in in_order(total)
        ]  # fmt: skip
        columns = ("operand", "of", "format", "underflow %", "saturation %", "SQNR dB")
        looks, products = len(simulated.stats.history), not total.keys().isdisjoint(PRODUCTS)
        layer, operand, worst = max(
            ((layer, name, s) for layer, operands in simulated.stats.layers.items() for name, s in operands.items()),
            # what a product loses shows in its SQNR alone
            key=lambda item: (
                0.0 if products else badness(item[2], "underflow") + item[2].saturation_percent,
                badness(item[2], "sqnr"),
            ),
        )
        parts += [
            "",
            f"where bits were lost in {looks} observed step{'s' * (looks > 1)}, all layers together (each: "
            f"report.html)\n{format_table(columns, lost, left=(0, 1, 2))}\n"
            f"hardest hit: {operand} of {layer}, {worst.underflow_percent:.1f} % underflow, "
            f"{worst.saturation_percent:.2g} % saturation, SQNR {worst.sqnr_db:.1f} dB",
        ]
    if simulated.guesses:
        # What a reader should know about plans that are guesses: how many, one of them, and what to do.
        guesses = simulated.guesses
        first = guesses[0].partition(";")[0]
        many = len(guesses) > 1
        others = f" (and {len(guesses) - 1} other products, in record.json)" if many else ""
        parts += [
            "",
            f"{first}{others}: {'their' if many else 'its'} accumulation order was guessed.\n"
            "Record such calls on the machine and name the plan file as --target, give an order as --plan, or take "
            "a unit as --target for the arithmetic alone.",
        ]
    return "\n".join(parts)


def _loss(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if math.isfinite(value) else "-"
