"""``fmtsim train``: train a small model in a baseline precision and under simulated precision, side by side."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fmtsim.bench.timing import bounded_threads
from fmtsim.cli.options import (
    add_device,
    add_json,
    add_target,
    check_device,
    check_threads,
    count,
    flag,
    option,
    read_target,
    target_given,
)
from fmtsim.cli.output import MISMATCH, answer, format_table, json_text
from fmtsim.cli.train_summary import summary
from fmtsim.errors import ArgumentError, FmtsimError
from fmtsim.files import check_folder
from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.config import SCALINGS
from fmtsim.progress import Progress, make_progress
from fmtsim.recipes import OptimizerConfig, get_recipe, list_recipes
from fmtsim.recipes.system import OPTIMIZERS
from fmtsim.training.artifacts import CHECKPOINT, make_record, settings, write_artifacts, write_unfinished
from fmtsim.training.checkpoint import Checkpoint
from fmtsim.training.config import TrainConfig
from fmtsim.training.corpus import Corpus, load_corpus
from fmtsim.training.evidence import check_text, make_check_record, write_check
from fmtsim.training.gpt import GPTConfig
from fmtsim.training.lockstep import check_native
from fmtsim.training.loop import compare_schemes
from fmtsim.training.models import source_digest
from fmtsim.training.schemes import ADAMW, HIGH_PRECISION, Scheme

SIZES = {
    "steps": "optimizer steps of each run",
    "batch_size": "windows of text a step",
    "context": "bytes the model sees at once",
    "width": "features",
    "layers": "transformer blocks",
    "heads": "attention heads a block",
}
EVERY = 100
DEFAULTS = {"steps": 600, "batch_size": 16, "context": 64, "width": 128, "layers": 2, "heads": 4, "lr": 4e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _add_scheme(parser.add_argument_group("what is simulated"))
    _add_target(parser.add_argument_group("who multiplies (float32 sums in no particular order, or one of these)"))
    _add_system(parser.add_argument_group("optimizer and ranks (the recipe's own, or instead of them)"))
    how = parser.add_argument_group("model and training")
    model = "gpt, llama, or FILE.py:function that returns a torch.nn.Module; docs/recipes.md says what of"
    option(how, "--model", model, "gpt", "NAME")
    for name, text in SIZES.items():
        option(how, f"--{name.replace('_', '-')}", text, DEFAULTS[name])
    option(how, "--lr", "peak learning rate", DEFAULTS["lr"], None)
    option(how, "--seed", "of weights, batches and stochastic rounding", 0)
    data = "a text file or a folder of them; by default Python's own sources"
    option(how, "--data", data, metavar="PATH")
    add_device(how)
    count(how, "--threads", "CPU threads (default: torch's choice)")
    output = parser.add_argument_group("output")
    option(
        output, "--out", "folder for the report in the browser (report.html), record and table", "fmtsim-train", "DIR"
    )
    every = f"write a checkpoint to DIR after every N steps; 0: none (default {EVERY})"
    count(output, "--checkpoint-every", every)
    flag(output, "--resume", "go on from the checkpoint in DIR with the same bits; without one, begin")
    flag(output, "--quiet", "show no progress")
    add_json(parser)


def _add_scheme(group: argparse._ArgumentGroup) -> None:
    recipe = (
        "a published scheme, such as te_nvfp4, or a JSON file, instead of formats, rounding and scaling; 'list' prints "
        "all names, and --target recipe is the machine that it was made for"
    )
    option(group, "--recipe", recipe, metavar="NAME")
    option(group, "--format", "format of activations and weights (default e4m3)", metavar="NAME")
    gradients = "of gradients; by default e5m2 beside element formats of 8 bits and fewer, else as --format"
    option(group, "--grad-format", gradients, metavar="NAME")
    option(group, "--rounding", "of activations and weights (default nearest_even)", metavar="MODE")
    option(group, "--grad-rounding", "of gradients, such as stochastic (default nearest_even)", metavar="MODE")
    option(group, "--baseline", "fp32 (nothing quantised), bf16, fp16 or any format", "fp32", "NAME")
    scaling = (
        "what shares a scale; by default tensor for element formats of 8 bits and fewer, none for wider ones; "
        "block formats have blocks of their own"
    )
    option(group, "--scaling", scaling, choices=SCALINGS)


def _add_system(group: argparse._ArgumentGroup) -> None:
    option(group, "--level", "of a recipe that has levels, such as O1, O2 or O3 of fp8lm", metavar="NAME")
    option(group, "--optimizer", "whose states are kept (default adamw)", choices=tuple(OPTIMIZERS))
    state = "how its states are kept, such as coat or bnb8 (docs/optim.md); fp32 switches a recipe's scheme off"
    option(group, "--state", state, metavar="NAME")
    reduction = "of the gradients of all ranks, such as msamp (docs/distributed.md); fp32 switches a recipe's off"
    option(group, "--reduction", reduction, metavar="NAME")
    ranks = "simulated ranks that share the windows of a step (default 2 with a reduction in few bits, else 1)"
    count(group, "--ranks", ranks)


def _add_target(group: argparse._ArgumentGroup) -> None:
    add_target(group)
    dtype = "dtype of all that is no product of a linear layer, under torch.autocast (default: the recipe's, else none)"
    option(group, "--autocast", dtype, choices=("bfloat16", "float16"))
    fast = "use_fast_accum=True of a target's forward products; gradients promote their accumulators"
    flag(group, "--fast-accum", fast)
    flag(group, "--fast-backward", "use_fast_accum=True for gradients as well")
    check = (
        "native: instead of the comparison with a baseline, train with the device's own products and with emulated "
        "ones in lockstep, and stop at the first bit of a loss, gradient or weight that differs; 1 is returned then"
    )
    option(group, "--check", check, choices=("native",))
    minutes = "with --check: begin no step after so many minutes, and write what was found"
    option(group, "--minutes", minutes, type=float)


def run(arguments: argparse.Namespace) -> int:
    """Train both models, write the artifacts and print a summary; Ctrl-C leaves a report and a checkpoint, or nothing.

    With ``--check native`` both models are the same, and 1 says that a bit differs.
    """
    if arguments.recipe == "list":
        return _list_recipes()
    config = _config(arguments)
    check_device(arguments.device)
    if arguments.threads is not None:
        check_threads(arguments.threads)
    out = Path(arguments.out).expanduser()
    check_folder(out)
    if arguments.minutes is not None and not (arguments.check and arguments.minutes > 0):
        raise ArgumentError(f"--minutes {arguments.minutes:g} limits --check native; pass both, and a number above 0")
    if arguments.check:
        if arguments.resume or arguments.checkpoint_every is not None:
            raise ArgumentError("--check native has no checkpoints; leave --resume and --checkpoint-every out")
        return _check(arguments, config, out)
    corpus = load_corpus(arguments.data, config.model.context)
    with _training(arguments, out) as progress:
        checkpoint = _checkpoint(arguments, config, corpus, out)
        with _reported(config, corpus, checkpoint, out):
            baseline, simulated = compare_schemes(config, corpus, progress, checkpoint)
        record = make_record(config, corpus, baseline, simulated)
        paths = write_artifacts(out, record, baseline, simulated)
    _answer(arguments, record, summary(record, baseline, simulated), paths)
    return 0


@contextlib.contextmanager
def _training(arguments: argparse.Namespace, out: Path) -> Iterator[Progress]:
    """Show progress and bound torch's threads; Ctrl-C ends with a line that says what there is to go on from."""
    try:
        with bounded_threads(arguments.threads), make_progress(not arguments.quiet) as progress:
            yield progress
    except KeyboardInterrupt as interrupt:
        left = f"a checkpoint is in {out}, go on with --resume" if (out / CHECKPOINT).exists() else ""
        words = "; ".join(filter(None, (str(interrupt), left)))
        raise KeyboardInterrupt(words or f"nothing was written to {out}") from None


@contextlib.contextmanager
def _reported(config: TrainConfig, corpus: Corpus, checkpoint: Checkpoint, out: Path) -> Iterator[None]:
    """Write the report of a comparison that is interrupted, if it can be written."""
    try:
        yield
    except KeyboardInterrupt:
        written = None
        with contextlib.suppress(FmtsimError):
            written = write_unfinished(out, config, corpus, checkpoint)
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


def _answer(arguments: argparse.Namespace, record: dict[str, Any], text: str, paths: list[Path]) -> None:
    files = [str(path) for path in paths]
    answer(arguments, {**record, "files": files}, lambda: f"{text}\n\nwritten: {', '.join(files)}")


def _list_recipes() -> int:
    rows = [(name, get_recipe(name).source) for name in list_recipes()]
    print(format_table(("recipe", "source"), rows, left=(0, 1)))
    return 0


def _check(arguments: argparse.Namespace, config: TrainConfig, out: Path) -> int:
    """Train natively and emulated in lockstep; 0 where all bits agree after all steps, else 1."""
    corpus = load_corpus(arguments.data, config.model.context)
    with _training(arguments, out) as progress:
        result = check_native(config, corpus, progress, arguments.minutes)
    record = make_check_record(config, corpus, result)
    text = check_text(record)
    paths = write_check(out, record, text, lambda found: json_text(found, indent=1))
    _answer(arguments, record, text, paths)
    return 0 if result.equal else MISMATCH


def _config(arguments: argparse.Namespace) -> TrainConfig:
    for name in filter(None, (arguments.format, arguments.grad_format, arguments.baseline)):
        get_format(name)  # an unknown name fails here, with close matches
    sizes = {name: getattr(arguments, name) for name in ("context", "width", "layers", "heads")}
    machine = _machine(arguments) | {"reduction": arguments.reduction}
    if arguments.level is not None and arguments.recipe is None:
        raise ArgumentError(f"--level {arguments.level} is a recipe's; pass --recipe {_with_levels()} as well")
    if arguments.recipe is not None:
        simulated = _recipe(arguments, machine)
    else:
        names = ("format", "grad_format", "scaling", "rounding", "grad_rounding", "fast_accum", "fast_backward")
        given = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
        simulated = Scheme(**{"format": "e4m3"} | given | machine, optimizer=_optimizer(arguments, None))
    baseline = Scheme(format=arguments.baseline, grad_format=arguments.baseline)
    rest = {name: getattr(arguments, name) for name in ("steps", "batch_size", "ranks", "lr", "seed", "device")}
    model = {"model": GPTConfig(**sizes), "architecture": arguments.model}
    config = TrainConfig(simulated=simulated, baseline=baseline, **model, **rest)
    source_digest(config.architecture)  # an unknown model fails here
    return config


def _recipe(arguments: argparse.Namespace, machine: dict[str, Any]) -> Scheme:
    """Return the scheme of a recipe, beside which nothing else describes formats or sums."""
    others = ("format", "grad_format", "scaling", "rounding", "grad_rounding", "fast_accum", "fast_backward")
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name)]
    if given:
        raise ArgumentError(
            f"--recipe says everything about formats and sums; leave {' and '.join(given)} out, or put it into a "
            "recipe file of your own"
        )
    recipe = get_recipe(arguments.recipe)
    if arguments.level is not None:
        if not recipe.levels:
            raise ArgumentError(
                f"--level {arguments.level}: recipe {recipe.name} has no levels; pass --recipe {_with_levels()}, or "
                "leave --level out"
            )
        recipe = recipe.at_level(arguments.level)
    if machine["target"] == "recipe":
        machine |= {"target": None, **recipe.made_for}
    return Scheme(format=HIGH_PRECISION, recipe=recipe, optimizer=_optimizer(arguments, recipe.optimizer), **machine)


def _with_levels() -> str:
    """Return the recipes that have levels, as words."""
    return " or ".join(name for name in list_recipes() if get_recipe(name).levels)


def _optimizer(arguments: argparse.Namespace, own: OptimizerConfig | None) -> OptimizerConfig:
    """Return the recipe's optimizer, or AdamW in float32, with what is asked for instead."""
    given = {"rule": arguments.optimizer, "state": arguments.state}
    return dataclasses.replace(own or ADAMW, **{name: value for name, value in given.items() if value is not None})


def _machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return target, unit, plan and autocast as a Scheme takes them."""
    given = target_given(arguments)
    if len(given) > 1:
        raise ArgumentError(
            f"fmtsim train takes one of --target, --unit and --datapath, not {' and '.join(f'--{n}' for n in given)}"
        )
    if arguments.plan is not None and not given:
        raise ArgumentError("--plan is an accumulation order; pass --target, --unit or --datapath as well")
    if arguments.fast_accum and arguments.target is None:
        raise ArgumentError("--fast-accum chooses between a library's kernels; pass --target as well")
    if arguments.target == "recipe" and arguments.recipe is None:
        raise ArgumentError("--target recipe is the machine that a recipe was made for; pass --recipe as well")
    options = read_target(arguments)
    own = options.pop("datapath")
    return {**options, "unit": arguments.unit if own is None else own, "autocast": arguments.autocast}
