# SPDX-License-Identifier: Apache-2.0
"""Arguments of the commands that compare and check results."""

import argparse
from pathlib import Path

from fmtsim.lab.cli import names
from fmtsim.lab.cli.model_options import MODEL, add_data, add_formats, add_model, add_simulate
from fmtsim.lab.cli.options import add_json, add_target, count, flag, option, repeated
from fmtsim.support.errors import ArgumentError


def declare_trace(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
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
    """Declare the arguments."""
    parser.add_argument("a", metavar="A", help=f"a trace (.safetensors); or {MODEL}")
    parser.add_argument("b", metavar="B", help="the run to compare with, in the same forms")
    add_data(parser)
    add_simulate(parser)
    add_json(parser)


FILES = (".st", ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npy", ".npz", ".json", ".gguf")  # never models
RUN_FORMS = "pass a file that fmtsim trace --out wrote, or a model as FILE.py:function; fmtsim compare takes tensors"


def check_bisect(arguments: argparse.Namespace) -> None:
    """Refuse the name of a file that is not there."""
    for text in (arguments.a, arguments.b):
        if Path(text).suffix in FILES and not Path(text).is_file():
            raise ArgumentError(f"{text} is not there; {RUN_FORMS}")


def declare_audit(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("trace", metavar="TRACE", help="a file of fmtsim trace --level aten --tensors all")
    option(parser, "--target", "hold it to this GPU, h200 or h100 (default: the trace's own)", metavar="GPU",
           known=names.simulated)  # fmt: skip
    option(parser, "--rows", "rows of each matrix product that are recomputed", 32)
    option(parser, "--seed", "which rows", 0)
    add_json(parser)


SUFFIXES = (".npy", ".npz", ".pt", ".safetensors")


def declare_compare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = f"{', '.join(SUFFIXES)}; FILE:NAME picks one tensor of a file"
    parser.add_argument("actual", metavar="ACTUAL", help=f"a file of tensors: {what}")
    parser.add_argument("expected", metavar="EXPECTED", help="the file to compare with")
    option(parser, "--plot", "draw the ulp histograms", metavar="PNG")
    add_json(parser)


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
        raise ArgumentError(f"{text}: no such file; pass a {', '.join(SUFFIXES)} file, or FILE:NAME for one tensor")
    if path.suffix not in SUFFIXES:
        raise ArgumentError(f"{path} is of no known kind; pass a {', '.join(SUFFIXES)} file")
    return path, name


def check_compare(arguments: argparse.Namespace) -> None:
    """Refuse files that are not there or of no known kind."""
    for text in (arguments.actual, arguments.expected):
        tensor_file(text)


def declare_verify(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("what", nargs="?", choices=("casts", "gemm"),
                        help="casts (default), or matrix products; both where --device is given")  # fmt: skip
    device = (
        "check this device, cuda or cuda:1: its casts against the oracle and the CPU engines, its products of "
        "every unit against the CPU's"
    )
    option(parser, "--device", device, metavar="NAME")
    vectors = "gemm: a folder of mtc_*.npz, probe_*.npz or recorded calls"
    repeated(parser, "--vectors", vectors, "DIR")
    count(parser, "--limit", "gemm: compare about N outputs of each set")
    repeated(parser, "--format", "check only this format (default: all listed formats)", known=names.formats,
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
