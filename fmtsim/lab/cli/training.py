# SPDX-License-Identifier: Apache-2.0
"""Run of ``fmtsim train``: a baseline and a simulated training side by side."""

import argparse
import contextlib
import dataclasses
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fmtsim.formats.registry import get_format
from fmtsim.gemm.targets.target import Target, find_target
from fmtsim.lab.analysis.losses import badness
from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.analysis.stats import OperandStats, in_order, operand_in_words
from fmtsim.lab.cli.arguments.models import EVERY, SHARE_LAYERS, TRAIN_DEFAULTS
from fmtsim.lab.cli.model_options import simulated
from fmtsim.lab.cli.options import check_device, check_threads, read_target
from fmtsim.lab.cli.output import MISMATCH, answer, format_table, json_text, print_text
from fmtsim.lab.training.artifacts import (
    CHECKPOINT,
    check_text,
    make_check_record,
    make_record,
    settings,
    write_artifacts,
    write_check,
    write_unfinished,
)
from fmtsim.lab.training.checkpoint import Checkpoint
from fmtsim.lab.training.corpus import Corpus, load_corpus
from fmtsim.lab.training.decoders import GPTConfig
from fmtsim.lab.training.lockstep import check_native
from fmtsim.lab.training.loop import bounded_threads, compare_schemes
from fmtsim.lab.training.models import source_digest
from fmtsim.lab.training.overlay import overlay
from fmtsim.lab.training.run import Run
from fmtsim.lab.training.schemes import ADAMW, HIGH_PRECISION, Scheme, TrainConfig
from fmtsim.recipes import OptimizerConfig, get_recipe, list_recipes
from fmtsim.support.errors import ArgumentError, FmtsimError
from fmtsim.support.files import check_file, check_folder, write_file
from fmtsim.support.progress import Progress, make_progress

TOLD = ("Gap", "Where to look first")  # of the verdict, in the summary


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
        return _check(arguments, config, out)
    corpus = load_corpus(arguments.data, config.model.context)
    started = {"command": shlex.join(["fmtsim", *arguments.words]), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    with _training(arguments, out) as progress:
        checkpoint = _checkpoint(arguments, config, corpus, out)
        with _reported(config, corpus, checkpoint, out, started), simulated(arguments) as run:
            baseline, emulated = compare_schemes(config, corpus, progress, checkpoint)
        record = make_record(config, corpus, baseline, emulated, started)
        paths = write_artifacts(out, record, baseline, emulated)
    parts = [summary(record, baseline, emulated), *([] if run is None else [run.summary])]
    _answer(arguments, record, lambda: "\n\n".join(parts), paths)
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    """Write the report of several runs."""
    out = Path(arguments.out).expanduser()
    check_file("--out", out)
    write_file(out, overlay([Path(folder).expanduser() for folder in arguments.folders]))
    print(f"written: {out}")
    return 0


@contextlib.contextmanager
def _training(arguments: argparse.Namespace, out: Path) -> Iterator[Progress]:
    """Show progress and bound torch's threads; Ctrl-C ends with a line that says what there is to go on from."""
    try:
        with bounded_threads(arguments.threads), make_progress(not arguments.quiet) as progress:
            yield progress
    except KeyboardInterrupt as interrupt:
        hint = f"a checkpoint is in {out}, go on with --resume" if (out / CHECKPOINT).exists() else ""
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
            written = write_unfinished(out, config, corpus, checkpoint, started)
        raise KeyboardInterrupt(written or "") from None


def _checkpoint(arguments: argparse.Namespace, config: TrainConfig, corpus: Corpus, out: Path) -> Checkpoint:
    """Return where checkpoints go, read where the training goes on; refuse to begin where one waits."""
    every, path = arguments.checkpoint_every, out / CHECKPOINT
    if path.exists() and not arguments.resume:
        raise ArgumentError(
            f"{path} is of a training that was cut short; pass --resume to go on, delete it, or choose another --out"
        )
    checkpoint = Checkpoint(path, settings(config, corpus), EVERY if every is None else every)
    if arguments.resume:
        said = checkpoint.read() if path.exists() else f"no checkpoint in {out}, training begins"
        print(f"resume: {said}", file=sys.stderr)
    return checkpoint


def _answer(arguments: argparse.Namespace, record: dict[str, Any], text: Callable[[], str], paths: list[Path]) -> None:
    files = [str(path) for path in paths]
    answer(arguments, {**record, "files": files}, lambda: f"{text()}\n\nwritten: {', '.join(files)}")


def _check(arguments: argparse.Namespace, config: TrainConfig, out: Path) -> int:
    """Train natively and emulated in lockstep; 0 where all bits agree after all steps, else 1."""
    corpus = load_corpus(arguments.data, config.model.context)
    with _training(arguments, out) as progress:
        result = check_native(config, corpus, progress, arguments.minutes)
    record = make_check_record(config, corpus, result)
    text = check_text(record)
    paths = write_check(out, record, text, lambda found: json_text(found, indent=1))
    _answer(arguments, record, lambda: text, paths)
    return 0 if result.equal else MISMATCH


def _config(arguments: argparse.Namespace) -> TrainConfig:
    for name in filter(None, (arguments.format, arguments.grad_format, arguments.baseline)):
        get_format(name)  # an unknown name fails here, with close matches
    sizes = {name: getattr(arguments, name) for name in ("context", "width", "heads")}
    machine = _machine(arguments) | {"reduction": arguments.reduction}
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
    parts = [
        f"text: {corpus['name']}, {size} in {files}{cut}",
        format_table(header, rows, left=(0, 1)),
        *(f"{run.label}: stopped, {run.stopped}" for run in (baseline, simulated) if run.stopped),
        "(losses in nats per byte; train loss is the mean of the last tenth of the steps)",
        *_system(baseline, simulated),
        "",
        *(f"{question.lower()}: {answer}" for question, answer in record.get("verdict", ()) if question in TOLD),
    ]
    if simulated.nonfinite:
        skipped = f", {simulated.skipped} of them skipped; the loss ended at a scale of {simulated.loss_scale:g}"
        parts.append(f"steps with gradients that were not finite: {simulated.nonfinite}" + (
            skipped if simulated.skipped else ", all of them taken"))  # fmt: skip
    if simulated.stats is not None and simulated.stats.layers:
        parts += ["", _lost_bits(simulated)]
    if simulated.guesses:
        parts += ["", _guessed(simulated.guesses)]
    return "\n".join(parts)


def _system(baseline: Run, simulated: Run) -> list[str]:
    """Return lines about optimizers, reductions and gathered weights, where these are not the baseline's."""
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
    return lines


def _guessed(guesses: list[str]) -> str:
    """Return what a reader should know about plans that are guesses: how many, one of them, and what to do."""
    first = guesses[0].partition(";")[0]
    many = len(guesses) > 1
    others = f" (and {len(guesses) - 1} other products, in record.json)" if many else ""
    return (
        f"{first}{others}: {'their' if many else 'its'} accumulation order was guessed.\n"
        "Record such calls on the machine and name the plan file as --target, give an order as --plan, or take "
        "a unit as --target for the arithmetic alone."
    )


def _loss(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if math.isfinite(value) else "-"


def _by_operand(stats: Observation) -> dict[str, OperandStats]:
    total: dict[str, OperandStats] = {}
    for operands in stats.layers.values():
        for name, s in operands.items():
            total.setdefault(name, OperandStats()).merge(s)
    return {name: total[name] for name in in_order(total)}


def _lost_bits(run: Run) -> str:
    rows = [
        (operand, operand_in_words(operand), s.format, f"{s.underflow_percent:.2f}", f"{s.saturation_percent:.3f}",
         f"{s.sqnr_db:.1f}")
        for operand, s in _by_operand(run.stats).items()  # type: ignore[arg-type]  # summary checked it
    ]  # fmt: skip
    header = ("operand", "of", "format", "underflow %", "saturation %", "SQNR dB")
    assert run.stats is not None
    looks = len(run.stats.history)
    layer, operand, worst = max(
        ((layer, name, s) for layer, operands in run.stats.layers.items() for name, s in operands.items()),
        key=lambda item: (badness(item[2], "underflow") + item[2].saturation_percent, -item[2].sqnr_db),
    )
    return (
        f"where bits were lost in {looks} observed step{'s' * (looks > 1)}, all layers together (each: report.html)\n"
        f"{format_table(header, rows, left=(0, 1, 2))}\n"
        f"hardest hit: {operand} of {layer}, {worst.underflow_percent:.1f} % underflow, "
        f"{worst.saturation_percent:.2g} % saturation, SQNR {worst.sqnr_db:.1f} dB"
    )
