# SPDX-License-Identifier: Apache-2.0
"""Arguments of the commands that compare and check results, and of those about this machine."""

import argparse
import re
from pathlib import Path

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import (
    EXECUTOR,
    MODEL,
    SUFFIXES,
    add_data,
    add_formats,
    add_json,
    add_layers,
    add_model,
    add_simulate,
    add_target,
    add_tokens,
    count,
    flag,
    option,
    repeated,
    tensor_file,
)
from fmtsim.support.errors import ArgumentError


def declare_info(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


PLACES = {
    "bash": "~/.local/share/bash-completion/completions/fmtsim",
    "zsh": "a file that ~/.zshrc sources behind compinit",
    "fish": "~/.config/fish/completions/fmtsim.fish",
}


def declare_completion(parser: argparse.ArgumentParser) -> None:
    places = "; ".join(f"{place} ({shell})" for shell, place in PLACES.items())
    parser.add_argument("shell", choices=PLACES, help=f"print the script for this shell; save it as {places}")


def declare_doctor(parser: argparse.ArgumentParser) -> None:
    dropped = "look for terms that the target's library omits, and for accumulation orders that are guesses"
    flag(parser, "--gemm", dropped)
    what = parser.add_argument_group("with --gemm: which products (default: the layers of gpt2)")
    add_layers(what, "bf16")
    add_tokens(what)
    named = "a GPU with its library, such as h200, or a plan file; leave it out for a converted model"
    option(what, "--target", named, names=names.targets)
    add_json(parser)


def declare_warmup(parser: argparse.ArgumentParser) -> None:
    device = "cpu, cuda or cuda:1 (default: the CPU, and the current GPU where kernels run on it)"
    option(parser, "--device", device, metavar="DEVICE")
    flag(parser, "--quiet", "show no progress")
    add_json(parser)


def declare_trace(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    option(parser, "--out", "the trace, a safetensors file", metavar="FILE")
    option(parser, "--level", "modules, or aten: every operator of torch", "modules", choices=("modules", "aten"))
    option(parser, "--tensors", "also save the outputs of these operations: indices and layers, or all", metavar="LIST")
    group = parser.add_argument_group("conversion of the model (default: none)")
    add_formats(group)
    add_target(group)
    add_simulate(parser)
    add_json(parser)


def declare_bisect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help=f"a trace (.safetensors); or {MODEL}")
    parser.add_argument("b", metavar="B", help="the run to compare with, in the same forms")
    add_data(parser)
    add_simulate(parser)
    add_json(parser)


FILES = (".st", ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npy", ".npz", ".json", ".gguf")  # never models
RUN_FORMS = "pass a file that fmtsim trace --out wrote, or a model as FILE.py:function; fmtsim compare takes tensors"


def check_bisect(arguments: argparse.Namespace) -> None:
    """Refuse the name of a file that is not there, and a file that is no trace."""
    for text in (arguments.a, arguments.b):
        suffix = Path(text).suffix
        if not Path(text).exists() and (suffix in FILES or ("/" not in text and re.fullmatch(r"\.[a-z_]+", suffix))):
            raise ArgumentError(f"{text} is not there{names.close_files(Path(text))}; {RUN_FORMS}")
        if Path(text).is_file() and not _is_trace(Path(text)):
            raise ArgumentError(f"{text} is not a trace; {RUN_FORMS}")
        names.functions.check("", text)


def _is_trace(path: Path) -> bool:
    """Return True if the header of a safetensors file names a trace."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return length < path.stat().st_size and b'"fmtsim_trace"' in file.read(length)


def declare_audit(parser: argparse.ArgumentParser) -> None:
    option(parser, "trace", "a file of fmtsim trace --level aten --tensors all", names=names.traces)
    option(parser, "--target", "hold it to this GPU, h200 or h100 (default: the trace's own)", names=names.simulated)
    option(parser, "--rows", "rows of each matrix product that are recomputed", 32)
    option(parser, "--seed", "which rows", 0)
    option(parser, "--executor", EXECUTOR, metavar="URL")
    add_json(parser)


def check_audit(arguments: argparse.Namespace) -> None:
    """Refuse a file that is no trace."""
    if not _is_trace(Path(arguments.trace)):
        raise ArgumentError(f"{arguments.trace} is not a trace; {names.traces.hint}")


def declare_compare(parser: argparse.ArgumentParser) -> None:
    what = f"{', '.join(SUFFIXES)}; FILE:NAME picks one tensor of a file"
    parser.add_argument("actual", metavar="ACTUAL", help=f"a file of tensors: {what}")
    parser.add_argument("expected", metavar="EXPECTED", help="the file to compare with")
    option(parser, "--plot", "draw the ulp histograms", metavar="PNG")
    add_json(parser)


def check_compare(arguments: argparse.Namespace) -> None:
    """Refuse files that are not there or of no known kind."""
    for text in (arguments.actual, arguments.expected):
        tensor_file(text)


def declare_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=("casts", "gemm"),
                        help="casts (default), or matrix products; both where --device is given")  # fmt: skip
    device = (
        "check this device, cuda or cuda:1: its casts against the oracle and the CPU engines, its products of "
        "every unit against the CPU's"
    )
    option(parser, "--device", device, metavar="NAME")
    repeated(parser, "--format", "check only this format (default: all listed formats)", names=names.formats,
             dest="formats", default=None)  # fmt: skip
    flag(parser, "--exhaustive", "all 2**32 float32 inputs of e4m3, e5m2, bf16, fp16, e2m1: minutes for each")
    workers = (
        "processes that share the checks (default 1; with --device as many as cores and the device's memory "
        "allow, 16 at most)"
    )
    count(parser, "--workers", workers)
    option(parser, "--record", "also write the findings to a JSON file", metavar="FILE", type=Path)
    flag(parser, "--plant-error", argparse.SUPPRESS)
    add_json(parser)
