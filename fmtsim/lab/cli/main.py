# SPDX-License-Identifier: Apache-2.0
"""The entry of the command line: find the subcommand, run it, and turn errors into one line."""

import argparse
import contextlib
import importlib
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NoReturn

from fmtsim.lab.cli import names
from fmtsim.lab.cli.output import version_of
from fmtsim.support.errors import ArgumentError, FmtsimError, did_you_mean, shown
from fmtsim.support.interrupts import raised

GROUPS: dict[str, dict[str, str]] = {
    "Numbers and formats": {
        "formats": "list number formats with their width and range, or every code of one",
        "cast": "round numbers to a format, with codes, errors and neighbours",
        "explain": "explain how a number, or a block of numbers, got its bits",
        "identify-cast": "name every cast that gives the bits of a result: format, scale rule, rounding, library",
        "convert-checkpoint": "write the quantised weights of a checkpoint in another format, or say what is lost",
        "vectors": "write inputs on which kernels go wrong, for any format, and compare what a kernel gave for them",
    },
    "Matrix products": {
        "mm": "run one matrix product on a target or unit and explain its bits",
        "identify": "name every accumulation that gives the bits of a product: unit, order of K, roundings, library",
        "invariance": "list the batch sizes at which a row's bits change, layer by layer",
    },
    "Models": {
        "observe": "measure underflow, saturation and SQNR of a model's operands, and write a report",
        "attribute": "attribute loss to operands, and recommend layers to leave in high precision",
        "mismatch": "say which products a trainer and a rollout engine add in different orders, and what follows",
        "ptq": "quantise a trained model from a few batches, and print the loss before and after",
        "search": "find a format for each layer of a trained model within a budget of bit operations",
        "train": "train a small GPT in full precision and under simulated precision, side by side",
        "report": "lay runs of train over each other in one HTML report, with a verdict over seeds",
        "sweep": "train a small model over schemes, learning rates, widths and seeds, and count failed runs",
        "memory": "estimate the memory that training or serving a model needs on each device",
    },
    "Results": {
        "trace": "record every operation of a step of a model, with hashes of all bits, in a file",
        "bisect": "name the first operation whose bits differ between two traces or models",
        "audit": "recompute operators of a trace that a GPU left, and say per layer whether the bits are the GPU's",
        "compare": "compare two files of tensors bit for bit, with distances in units of the last place",
        "verify": "check the engines against the oracle and against each other",
    },
    "This machine": {
        "info": "show versions, devices, engines and threads",
        "completion": "print a script by which bash, zsh or fish completes commands, options and names",
        "doctor": "report what is missing on this machine; with --gemm, products of which a library drops terms",
        "warmup": "compile kernels now, so that no later call waits for the compiler",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
# A command NAME is run by run_NAME of a module here; declare_NAME of a module of arguments/ declares its arguments,
# and check_NAME there, if any, refuses what is wrong with them before torch is imported.
RUNS = {
    "checkpoints": ("convert-checkpoint",),
    "number_commands": ("formats", "cast", "explain", "identify-cast", "vectors"),
    "products": ("mm", "identify", "invariance"),
    "model_commands": ("observe", "attribute", "mismatch", "ptq", "search"),
    "training_commands": ("train", "report", "sweep", "memory"),
    "result_commands": ("trace", "bisect", "audit", "compare", "verify"),
    "machine": ("info", "completion", "doctor", "warmup"),
}  # fmt: skip
ARGUMENTS = {
    "numbers": (*GROUPS["Numbers and formats"], *GROUPS["Matrix products"]),
    "models": (*GROUPS["Models"],), "results": (*GROUPS["Results"], *GROUPS["This machine"]),
}  # fmt: skip
# Commands that left, and what does their work.
MOVED = {
    "reproduce": "python -m studies.claims, in a checkout",
    "bench": "python -m benchmarks.suite, in a checkout",
    "calibrate": "python -m tools.calibrate, in a checkout",
    "table": "fmtsim formats NAME --codes",
    "check-vectors": "fmtsim vectors --check DIR",
    "check-recode": "fmtsim convert-checkpoint A --to B, without --out",
}
BAD_INPUT = 2
BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it

ParserOf = Callable[[list[str]], "_Parser"]
Call = Callable[[Literal["check", "run"], argparse.Namespace], Any]

# Numbers that argparse would take for options: -1e-5, -inf, -0x1p-3.
_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan|0x).*", re.IGNORECASE)

# Functions that errors name, and what does the same here.
_LISTED = {
    "fmtsim.list_formats()": "fmtsim formats",
    "fmtsim.gemm.model_layers.list_models()": "fmtsim memory --model list",
    "list the values: fmtsim.formats.element.CodebookFormat(...)": "in Python, formats.element.CodebookFormat has any",
}

# What torch says for want of memory, on a CPU, on a GPU, and of sizes whose product is not a number of bytes.
_NO_MEMORY = re.compile(
    r"tried to allocate [\d.]+ \w+|out of memory|Storage size calculation overflowed", re.IGNORECASE
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 is success, 1 a check that found a mismatch, 2 bad input with one line on stderr, 130 and 143 Ctrl-C and SIGTERM.
    """

    def parser_of(words: list[str]) -> _Parser:
        command = next((word for word in words if not word.startswith("-")), None)
        if command in MOVED:
            raise ArgumentError(f"fmtsim {command} is now {MOVED[command]}")
        if command is not None and command not in COMMANDS:
            hint = did_you_mean(command, COMMANDS)
            raise ArgumentError(f"unknown command {shown(command)}{hint}; fmtsim --help shows what there is")
        return build_parser(command)

    return _run(argv, parser_of, lambda what, arguments: _call(what, arguments.command, arguments))


def run_program(
    prog: str, summary: str, declare: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int | None], check: Callable[[argparse.Namespace], None] | None = None, *,
    argv: Sequence[str] | None = None,
) -> int:  # fmt: skip
    """Run a program that is not a subcommand as a subcommand is run: the same errors, interrupts and exit codes.

    Args:
        prog: How it is called, for its help.
        summary: What it does, for its help.
        declare: Declares its arguments.
        run: Runs it and returns its exit code.
        check: Refuses arguments that do not go together, before it runs.
        argv: Its arguments; None takes those of the process.
    """

    def parser_of(words: list[str]) -> _Parser:
        parser = _Parser(prog=prog, description=summary)
        declare(parser)
        parser.actions = parser._actions
        return parser

    return _run(argv, parser_of, lambda what, arguments: {"check": check or bool, "run": run}[what](arguments))


def _run(argv: Sequence[str] | None, parser_of: ParserOf, call: Call) -> int:
    """Parse the words, check and run; an interrupt becomes a line and an exit code, as an error does."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the parent process, as daemons do
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    # A leading space makes a word positional for argparse and means nothing to those that read numbers.
    words = [f" {word}" if _NEGATIVE.fullmatch(word) else word for word in words]

    with raised() as interruption, _short_warnings():
        try:
            return _answer(words, parser_of, call)
        except KeyboardInterrupt as interrupt:
            word, status = interruption()
            detail = f"; {interrupt}" if str(interrupt) else ""
            print(f"\nfmtsim: {word}{detail}", file=sys.stderr)
            return status


def _answer(words: list[str], parser_of: ParserOf, call: Call) -> int:
    """Parse, check and run; of an error that is the user's to mend, print a line."""
    actions: Sequence[argparse.Action] = ()
    try:
        parser = parser_of(words)
        actions = parser.actions
        if not words and not actions:  # no command
            parser.print_help()
            return 0
        arguments = parser.parse_args(words)
        names.check_names(actions, arguments)
        call("check", arguments)
        arguments.words = [word.removeprefix(" ") for word in words]
        status = call("run", arguments) or 0
        sys.stdout.flush()  # a closed pipe shows here, not at interpreter exit
        return int(status)
    except FmtsimError as error:
        return _fail(_in_options(str(error), actions))
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.strerror is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # a full disk below standard output
            _drop_output()
        return _fail(error.strerror if error.filename is None else f"{error.filename}: {error.strerror}")
    except (MemoryError, RuntimeError) as error:
        said = _NO_MEMORY.search(str(error))
        if said is None and not isinstance(error, MemoryError):
            raise
        detail = f" ({said[0]})" if said else ""
        return _fail(f"there is not enough memory for this{detail}; choose smaller sizes")


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Show each warning of fmtsim once, as a line without the place in the code that gave it."""
    with warnings.catch_warnings():
        show, shown = warnings.showwarning, set[str]()

        def shorter(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
            if not category.__module__.startswith("fmtsim."):
                show(message, category, *rest, **named)
            elif str(message) not in shown:
                shown.add(str(message))
                print(f"fmtsim: warning: {message}", file=sys.stderr)

        warnings.showwarning = shorter
        yield


def build_parser(command: str | None = None) -> "_Parser":
    """Return the parser of all subcommands; only ``command``'s own arguments are declared, to be quick."""
    parser = _Parser(
        prog="fmtsim",
        usage="fmtsim [-h] [-V] COMMAND ...",
        description=f"Bit-exact number formats, rounding and low-precision training for PyTorch.\n\n{_listed()}",
        epilog="fmtsim COMMAND --help shows the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"fmtsim {version_of('fmtsim')}")
    commands = parser.add_subparsers(
        dest="command", prog="fmtsim", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == command:
            _call("declare", name, subparser)
            parser.actions = subparser._actions
    return parser


def _listed() -> str:
    """Return the commands by task, within the width of the terminal."""
    width = max(map(len, COMMANDS)) + 4
    columns = max(40, shutil.get_terminal_size().columns - 2)
    lines = []
    for title, group in GROUPS.items():
        lines.append(f"{title}:")
        for name, summary in group.items():
            lines += textwrap.wrap(f"  {name:<{width - 2}}{summary}", columns, subsequent_indent=" " * width)
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong, as every other error does."""

    actions: Sequence[argparse.Action] = ()  # of the command's own parser

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse what is left over here, where options that are close are known."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            unknown = next((word for word in rest if word.startswith("--")), "")
            hint = did_you_mean(unknown.partition("=")[0], self._option_string_actions) if unknown else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below a usage of many lines."""
        raise ArgumentError(f"{message}; {self.prog} --help shows what is allowed")


def _call(what: Literal["run", "declare", "check"], command: str, argument: Any) -> Any:
    """Run a command, declare its arguments, or check them without torch, where there is something to check."""
    modules, folder = (RUNS, "") if what == "run" else (ARGUMENTS, "arguments.")
    module = next(module for module, commands in modules.items() if command in commands)
    functions = vars(importlib.import_module(f"fmtsim.lab.cli.{folder}{module}"))
    name = f"{what}_{command.replace('-', '_')}"
    return functions[name](argument) if what != "check" or name in functions else None


def _in_options(message: str, actions: Iterable[argparse.Action]) -> str:
    """Return what verbs say of their keywords with the command's options: ``--lora 16`` for ``lora=16``."""
    for name, command in _LISTED.items():
        message = message.replace(name, command)
    message = re.sub(r"\bor None\b", "or leave it out", message)
    options = {option[2:].replace("-", "_"): action for action in actions for option in action.option_strings[-1:]}

    def spelled(keyword: re.Match[str]) -> str:
        action, value = options[keyword[1]], keyword[2].strip("'")
        if value.endswith("(...)"):  # a record
            value = {"TARGET": "block=32,fraction_bits=10"}.get(str(action.metavar), str(action.metavar))
        return " ".join(filter(None, (action.option_strings[-1], "" if action.nargs == 0 else value)))

    return re.sub(rf"(?<![\w.-])({'|'.join(options) or '(?!)'})=('[^']*'|[\w.+-]+(?:\(\.\.\.\))?|)", spelled, message)


def _drop_output() -> None:
    """Send what standard output still holds to nowhere; the interpreter would fail on it as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    print(f"fmtsim: error: {' '.join(message.splitlines())}", file=sys.stderr)
    return BAD_INPUT
