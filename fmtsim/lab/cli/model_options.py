# SPDX-License-Identifier: Apache-2.0
"""What subcommands share that run a model: which model, on which data, in which formats."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import Parser, add_device, check_device, check_positive, flag, option, read_target
from fmtsim.lab.cli.output import origin
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import check_file

if TYPE_CHECKING:
    from fmtsim.lab.training.loading import Loaded

MODEL = (
    "FILE.py:function or package.module:function that returns (model, batches), (model, batches, loss) or a language "
    "model; or a causal language model of Hugging Face: a folder, or a name in its cache"
)
_MOST = {"seed": 1 << 48, **dict.fromkeys(("batch_size", "context", "steps", "batches"), 1 << 31)}


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add ``--model``, and what ``add_data`` adds."""
    option(parser, "--model", MODEL, metavar="NAME", required=required, names=names.functions)
    add_data(parser)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add ``--checkpoint``, ``--dtype``, ``--device`` and ``--seed``, and which text a language model reads."""
    weights = "load these weights (.safetensors, or a state_dict in .pt) instead of those that the model comes with"
    option(parser, "--checkpoint", weights, metavar="FILE", names=names.checkpoints)
    option(parser, "--dtype", "of the weights (default: the model's own)", choices=("float32", "bfloat16", "float16"))
    add_device(parser)
    option(parser, "--seed", "of what functions and models draw, and of stochastic rounding", 0)
    group = parser.add_argument_group("text for a language model that comes without batches")
    option(group, "--data", "a text file or a folder of them", metavar="PATH", names=names.texts)
    tokenizer = "a folder or name of Hugging Face, or bytes (default: the model's own; bytes for functions)"
    option(group, "--tokenizer", tokenizer, metavar="NAME")
    option(group, "--batch-size", "windows of text a batch", 8)
    option(group, "--context", "tokens of a window", 128)


def add_formats(parser: Parser) -> None:
    """Add ``--recipe``, ``--format`` and ``--rules``."""
    option(parser, "--recipe", "a published scheme, such as te_current, or a JSON file", metavar="NAME",
           names=names.recipes)  # fmt: skip
    option(parser, "--format", "one format of all operands", metavar="NAME", names=names.formats)
    rules = "exceptions for layers, ahead of the recipe's: JSON, as attribute --out and search --out write it"
    option(parser, "--rules", rules, metavar="FILE", names=names.rules)


def add_simulate(parser: Parser) -> None:
    """Add ``--simulate``."""
    option(parser, "--simulate", "compute operators with the bits of this GPU: h200 or h100", metavar="GPU",
           names=names.simulated)  # fmt: skip


def simulated(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Return ``fmtsim.simulate`` of ``--simulate``, or a context without effect."""
    from fmtsim.machine.simulate import simulate

    return contextlib.nullcontext() if arguments.simulate is None else simulate(target=arguments.simulate)


def add_quiet(parser: Parser) -> None:
    """Add ``--quiet``."""
    flag(parser, "--quiet", "show no progress")


def formats_given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return ``--recipe``, ``--format`` and ``--rules`` as keywords of ``convert``, those that are given."""
    options = {name: getattr(arguments, name) for name in ("recipe", "format", "rules")}
    options = {name: value for name, value in options.items() if value is not None}
    if "recipe" in options and "format" in options:
        raise ArgumentError("--recipe and --format are both given; a recipe says everything about formats: pass one")
    if list(options) == ["rules"]:
        raise ArgumentError("--rules are exceptions of --recipe or --format; pass one of these as well")
    return options


def machine_given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return target and plan as keywords, those that are given."""
    return {name: value for name, value in read_target(arguments).items() if value is not None}


def file_given(arguments: argparse.Namespace, name: str, suffix: str) -> Path | None:
    """Return the file that an option names, which can be written; None where it is not given."""
    text = getattr(arguments, name)
    if text is None:
        return None
    path = Path(text).expanduser()
    if path.suffix != suffix:
        raise ArgumentError(f"--{name} {path} does not end in {suffix}; choose another name")
    check_file(f"--{name}", path)
    return path


def configuration(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the command, the time, and the options with a value, for a report."""
    return {**{name: value for name, value in vars(arguments).items() if value not in (None, False)}, **origin()}


def load_plain(arguments: argparse.Namespace, formats: dict[str, Any], **more: Any) -> "Loaded":
    """Return what ``load_model`` does; a model that is not converted needs formats, and one that is takes none."""
    from fmtsim.nn.state import is_converted

    loaded = load_model(arguments, **more)
    if not formats and not is_converted(loaded.model):
        raise ArgumentError("--recipe or --format is missing; pass one, such as --recipe te_current or --format e4m3")
    return loaded


def load_model(arguments: argparse.Namespace, **more: Any) -> "Loaded":
    """Return the model that the arguments mean, with its batches; ``more`` are fields of ``Asked``."""
    from fmtsim.lab.training.loading import Asked, load

    check_positive(arguments, "batch_size", "context")
    for name, most in _MOST.items():
        if not 0 <= (number := getattr(arguments, name, 0)) <= most:
            raise ArgumentError(f"--{name.replace('_', '-')} {number} is not possible; choose 0 to {most}")
    check_device(arguments.device)
    fields = {name: getattr(arguments, name) for name in ("checkpoint", "data", "tokenizer", "dtype", "seed", "device")}
    sizes = {"rows": arguments.batch_size, "context": arguments.context}
    return load(Asked(**{"model": getattr(arguments, "model", ""), **fields, **sizes, **more}))
