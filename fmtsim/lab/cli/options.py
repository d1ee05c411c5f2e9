# SPDX-License-Identifier: Apache-2.0
"""What subcommands share of their arguments: declaring them, reading their text, refusing what cannot be done."""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.formats.element import OVERFLOWS
from fmtsim.gemm.model_layers import DTYPES
from fmtsim.lab.cli import names
from fmtsim.lab.cli.names import Names
from fmtsim.lab.cli.output import origin
from fmtsim.rounding.modes import ALIASES, MODES
from fmtsim.support.errors import ArgumentError, first_line
from fmtsim.support.files import check_file
from fmtsim.support.records import parse_record

if TYPE_CHECKING:
    from fmtsim.lab.training.loading import Loaded


EXECUTOR = "run the tasks on this cluster: dask://HOST:PORT or ray://HOST:PORT"
MOST_THREADS = 1024  # beyond, torch's thread library may bring the process down instead of saying no

Parser = argparse._ActionsContainer
"""A parser, or a group of its options."""


def option(
    parser: Parser, name: str, text: str, default: Any = None, metavar: Any = "", names: Names = tuple, **more: Any
) -> None:  # fmt: skip
    """Declare an argument with a value: numbers have the type of their default, which the help text ends with.

    ``names`` are offered by completion, and their ``check``, if any, refuses other words; ``type=one_of(names)``
    refuses all others. Without ``metavar`` help has that of the names, else N.
    """
    if isinstance(default, int | float):
        more.setdefault("type", type(default))
    if default not in (None, []):
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        text = f"{text} (default {shown})"
    metavar = None if "choices" in more else getattr(names, "metavar", "N") if metavar == "" else metavar
    action = parser.add_argument(name, default=default, metavar=metavar, help=text, **more)
    action.names = names  # type: ignore[attr-defined]


def count(parser: Parser, name: str, text: str) -> None:
    """Declare an option whose value is an integer, None where it is left out."""
    option(parser, name, text, type=int)


def flag(parser: Parser, name: str, text: str) -> None:
    """Declare an option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def repeated(
    parser: Parser, name: str, text: str, metavar: Any = "NAME", names: Names = tuple, **more: Any
) -> None:  # fmt: skip
    """Declare an option that may be given several times; ``names`` as in ``option``."""
    default = more.pop("default", [])
    option(parser, name, f"{text}; may be repeated", default, metavar, names, action="append", **more)


def offered(action: argparse.Action) -> tuple[str, ...]:
    """Return the words that complete an argument: its choices, or the names that its declaration knows."""
    return tuple(map(str, getattr(action, "names", tuple)() if action.choices is None else action.choices))


def one_of(names: Names) -> Callable[[str], str]:
    """Return an option's ``type`` that takes some names, for names that are not known without torch.

    ``choices`` of argparse are read while the option is declared, these where the option is given.
    """

    def check(text: str) -> str:
        if text not in (choices := list(names())):
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(choices)})")
        return text

    return check


def add_json(parser: Parser) -> None:
    """Add ``--json``: one JSON document on standard output instead of text."""
    flag(parser, "--json", "print one JSON document instead of text")


def add_rounding(parser: Parser) -> None:
    """Add ``--rounding``, ``--overflow``, ``--random-bits`` and ``--seed``."""
    option(parser, "--rounding", f"one of {', '.join(MODES)}, or short: {', '.join(ALIASES)}", "nearest_even", "MODE",
           names.roundings)  # fmt: skip
    option(parser, "--overflow", f"{' or '.join(OVERFLOWS)}; by default the format's own rule", names=names.overflows)
    count(parser, "--random-bits", "random bits of stochastic rounding, 1 to 32")
    option(parser, "--seed", "seed of stochastic rounding", 0)


def check_rounding(arguments: argparse.Namespace) -> None:
    """Refuse random bits that nothing draws, or that are more than a word has."""
    count, rounding = arguments.random_bits, arguments.rounding
    if count is not None and rounding not in ("stochastic", "all") and ALIASES.get(rounding) != "stochastic":
        raise ArgumentError(
            f"--random-bits {count} belongs to --rounding stochastic, not to {rounding}; leave it out, or pass that "
            "rounding"
        )
    if count is not None and not 1 <= count <= 32:
        raise ArgumentError(f"--random-bits {count} is not allowed; choose 1 to 32, or leave it out for all")


def add_device(parser: Parser, default: str = "cpu") -> None:
    """Add ``--device``."""
    devices = "cpu, cuda or cuda:1" if default == "cpu" else "cuda or cuda:1"
    option(parser, "--device", devices, default, "DEVICE")


def add_target(parser: Parser, *, plan: bool = True) -> None:
    """Add ``--target`` and ``--plan``: what multiplies, and the accumulation order."""
    kinds = (
        "a GPU with its library, such as h200, or a plan file; an MMA unit alone, such as hopper.wgmma or exact; or a "
        "datapath: a JSON file, or fields such as block=32,fraction_bits=10, integers,accumulator_bits=24 or "
        "logarithms,entries=4"
    )
    option(parser, "--target", kinds, names=names.targets_and_units)
    if plan:
        option(parser, "--plan", "an accumulation order, such as promote_every=128", metavar="FIELD=VALUE,...")


def add_layers(parser: Parser, dtypes: str, models: str = "gpt2, llama-8b, ..., or FILE.py:function") -> None:
    """Add ``--model``, ``--shapes`` and ``--dtypes``."""
    repeated(parser, "--model", f"linear layers of this model: {models}", names=names.models, dest="models")
    option(parser, "--shapes", "layers of your own: a line 'outputs inputs [bias]' for each", names=names.shapes)
    option(parser, "--dtypes", f"of {', '.join(DTYPES)}", dtypes, "LIST")


def add_tokens(parser: Parser) -> None:
    """Add ``--tokens``, which ``parse_tokens`` reads, and ``--no-gradients``."""
    tokens = "rows of the layers' input: a list (1,77,512), or the powers of two in a range (1..8192)"
    option(parser, "--tokens", tokens, "1..8192", "LIST")
    flag(parser, "--no-gradients", "forward products only")


def read_target(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return ``--target`` and ``--plan`` as ``target=`` and ``plan=`` of verbs: fields become records."""
    from fmtsim.spec.gemm_spec import datapath_from_text
    from fmtsim.spec.plan import GemmPlan

    target, plan = arguments.target, getattr(arguments, "plan", None)
    target = target and (datapath_from_text(target, "--target") or target)
    return {"target": target, "plan": None if plan is None else parse_record(plan, GemmPlan, "--plan")}


SUFFIXES = (".npy", ".npz", ".pt", ".safetensors")
ALIAS_SUFFIXES = {".st": ".safetensors", ".pth": ".pt", ".bin": ".pt"}


def tensor_file(text: str) -> tuple[Path, str]:
    """Return the file of tensors that a word means, and the tensor that ``FILE:NAME`` picks, else an empty name.

    Raises:
        ArgumentError: There is no such file, or its suffix is not known.
    """
    path, name = Path(text), ""
    if not path.exists() and ":" in text:
        before, _, name = text.rpartition(":")
        path = Path(before)
    if not path.is_file():
        raise ArgumentError(
            f"{text}: no such file{names.close_files(path)}; pass a {', '.join(SUFFIXES)} file, or FILE:NAME for one "
            "tensor"
        )
    if path.suffix not in (*SUFFIXES, *ALIAS_SUFFIXES):
        raise ArgumentError(f"{path} is of no known kind; pass a {', '.join(SUFFIXES)} file")
    return path, name


def parse_number(text: str) -> float:
    """Read a decimal or hexadecimal float, inf or nan.

    Raises:
        ArgumentError: The text is not a number, or lies beyond float64.
    """
    word = text.strip().lower().replace("_", "")
    try:
        value = float.fromhex(word) if "0x" in word else float(word)
    except (ValueError, OverflowError):
        raise ArgumentError(
            f"{text.strip()!r} is not a number of float64; write 0.1, -3e-5, 0x1.8p-3, inf or nan"
        ) from None
    if math.isinf(value) and "inf" not in word:
        raise ArgumentError(f"{text.strip()} is beyond float64 (1.797e308); write inf if infinity is meant")
    return value


def parse_numbers(words: Sequence[str]) -> list[float]:
    """Read numbers; a word ``-`` stands for those on standard input, between spaces or lines.

    Raises:
        ArgumentError: A word is not a number, or standard input has none.
    """
    numbers: list[float] = []
    for word in words:
        tokens = sys.stdin.read().split() if word.strip() == "-" else [word]
        if not tokens:
            raise ArgumentError("standard input, which - stands for, has no numbers; pipe some, such as 0.1 -3e-5")
        numbers += map(parse_number, tokens)
    return numbers


def parse_int(text: str) -> int:
    """Read a decimal, hexadecimal (0x) or binary (0b) integer."""
    try:
        return int(text.strip(), 0)
    except ValueError:
        raise ArgumentError(f"{text.strip()!r} is not an integer; write 17, 0x11 or 0b10001") from None


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Refuse numbers, or lists of them, that are below 1; None passes."""
    for name in names:
        number = getattr(arguments, name)
        for value in number if isinstance(number, list) else [number]:
            if value is not None and value < 1:
                raise ArgumentError(f"--{name.replace('_', '-')} {value} is not possible; choose 1 or more")


def check_device(name: str) -> None:
    """Refuse a device that is not there, or that holds no numbers (meta)."""
    import torch

    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ArgumentError(
            f"--device {name} is not there: {first_line(error)}; choose cpu, or look at fmtsim info"
        ) from None


def workers_of(arguments: argparse.Namespace) -> int:
    """Return how many processes of this machine share the tasks, by default as many as it has cores."""
    if arguments.executor is not None and arguments.workers is not None:
        raise ArgumentError(f"--workers {arguments.workers} are of this machine; leave it or --executor out")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = cores if arguments.workers is None else arguments.workers
    check_threads(workers, "--workers")
    return int(workers)


def check_threads(number: int, option: str = "--threads") -> None:
    """Refuse a number of CPU threads, or of processes, that no machine has."""
    if not 1 <= number <= MOST_THREADS:
        allowed = "1 or more" if number < 1 else f"1 to {MOST_THREADS}"
        raise ArgumentError(f"{option} {number} is not allowed; choose {allowed}")


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
    option(parser, "--checkpoint", weights, names=names.checkpoints)
    option(parser, "--dtype", "of the weights (default: the model's own)", choices=("float32", "bfloat16", "float16"))
    add_device(parser)
    option(parser, "--seed", "of what functions and models draw, and of stochastic rounding", 0)
    group = parser.add_argument_group("text for a language model that comes without batches")
    option(group, "--data", "a text file or a folder of them", names=names.texts)
    tokenizer = "a folder or name of Hugging Face, or bytes (default: the model's own; bytes for functions)"
    option(group, "--tokenizer", tokenizer, metavar="NAME")
    option(group, "--batch-size", "windows of text a batch", 8)
    option(group, "--context", "tokens of a window", 128)


def add_formats(parser: Parser) -> None:
    """Add ``--recipe``, ``--format`` and ``--rules``."""
    option(parser, "--recipe", "a published scheme, such as te_current, or a JSON file", names=names.recipes)
    option(parser, "--format", "one format of all operands", names=names.formats)
    rules = "exceptions for layers, ahead of the recipe's: JSON, as attribute --out and search --out write it"
    option(parser, "--rules", rules, names=names.rules)


def add_simulate(parser: Parser) -> None:
    """Add ``--simulate``."""
    option(parser, "--simulate", "compute operators with the bits of this GPU: h200 or h100", names=names.simulated)


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
