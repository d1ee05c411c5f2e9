# SPDX-License-Identifier: Apache-2.0
"""Arguments of the commands about this machine."""

import argparse
from pathlib import Path

from fmtsim.gemm.models import DTYPES, list_models
from fmtsim.lab.cli import names
from fmtsim.lab.cli.names import converters, targets
from fmtsim.lab.cli.options import EXECUTOR, add_device, add_json, add_layers, add_tokens, count, flag, option
from fmtsim.support.errors import ArgumentError


def declare_info(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)


PLACES = {
    "bash": "~/.local/share/bash-completion/completions/fmtsim",
    "zsh": "a file that ~/.zshrc sources behind compinit",
    "fish": "~/.config/fish/completions/fmtsim.fish",
}


def declare_completion(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    places = "; ".join(f"{place} ({shell})" for shell, place in PLACES.items())
    parser.add_argument("shell", choices=PLACES, help=f"print the script for this shell; save it as {places}")


def declare_doctor(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    dropped = "look for terms that the target's library omits, and for accumulation orders that are guesses"
    flag(parser, "--gemm", dropped)
    what = parser.add_argument_group("with --gemm: which products (default: the layers of gpt2)")
    add_layers(what, "bf16")
    add_tokens(what)
    named = "a GPU with its library, such as h200, or a plan file; leave it out for a converted model"
    option(what, "--target", named, metavar="NAME", names=names.targets)
    add_json(parser)


def declare_warmup(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    device = "cpu, cuda or cuda:1 (default: the CPU, and the current GPU where kernels run on it)"
    option(parser, "--device", device, metavar="DEVICE")
    flag(parser, "--quiet", "show no progress")
    add_json(parser)


PLAN, EVIDENCE, BOOK, LEARNED = "fmtsim-plan.json", "fmtsim-evidence.json", "fmtsim.book", "fmtsim.trees"
QUICK = 64  # calls that --quick measures


def declare_calibrate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = parser.add_argument_group("which products (default: the layers of gpt2)")
    add_layers(what, ",".join(DTYPES), "gpt2, llama-8b, ...")
    add_tokens(what)
    flag(what, "--quick", f"at most {QUICK} of these calls, evenly chosen, and one set of data each")
    base = "try this target's plans first, and append its rules to the new ones; with --book, write the difference"
    option(parser, "--base", base, metavar="TARGET", names=names.targets)
    option(parser, "--out", f"file to write, {PLAN} or {EVIDENCE} unless given", metavar="FILE")
    check = parser.add_argument_group("comparing a GPU with its emulation, instead of measuring it")
    run_both = (
        "run calls of every rule of this target, or every kind of call that reaches this unit, and write evidence"
    )
    option(check, "--check", f"{run_both} (h200, hopper.wgmma)", metavar="TARGET", names=names.targets_and_units)
    option(check, "--calls", "calls of every rule", 3)
    book = parser.add_argument_group("querying the cuBLASLt heuristic, which runs no kernel")
    every = "write or continue a plan book and its target: the kernel for every number of rows of the layers of"
    models = f"--model and --shapes, by default of all {len(list_models())} known models ({BOOK} unless named)"
    option(book, "--book", f"{every} {models}", metavar="FILE", nargs="?", const=BOOK)
    kinds = "kinds of calls, such as bf16,fp8_rows (default: all; an unknown kind prints all names)"
    option(book, "--kinds", kinds, metavar="LIST")
    option(book, "--lattice", "add layers with up to N sizes of outputs and of inputs, from 64 to 32768", 0)
    trees = "write a file of decision trees, trained on this library's results for random sizes"
    option(book, "--learn", f"{trees} ({LEARNED} unless named)", metavar="FILE", nargs="?", const=LEARNED)
    option(book, "--questions", "queries for each group of kinds; some groups take more or fewer", 3_000_000)
    option(book, "--workers", "processes that query (default: one per core)", type=int)
    option(check, "--evidence", "check such a file on any machine: emulate its calls again and compare", metavar="FILE",
           names=names.files)  # fmt: skip
    add_device(parser, "cuda")
    option(parser, "--executor", EXECUTOR, metavar="URL")
    add_json(parser)


BENCH_SIZES = {
    "width": "of the models; by default what fits the device", "layers": "blocks of a model",
    "batch_size": "sequences of a step", "context": "tokens of a sequence",
}  # fmt: skip
BENCH_DEFAULTS = {"side": 4096, "shape": [512, 512, 2048], "threads": [1, 2]}
KERNELS = ("side", "threads", "kernels_only")
BENCH_OPTIONS = {
    "casts": KERNELS, "gemm": (*KERNELS, "shape"), "gpu": (), "simulate": (),
    "layers": ("recipes", "device", *BENCH_SIZES, "target", "emulate"),
}  # fmt: skip
"""Which options belong to what is measured, beside those that all have."""


def declare_bench(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    choices = (
        "casts relative to a copy, matrix products relative to torch's float32 product, the CUDA engine, models "
        "under simulate, or training steps under recipes, both relative to plain ones"
    )
    parser.add_argument("what", nargs="?", choices=tuple(BENCH_OPTIONS), default="casts", help=choices)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="measure the cases that match, such as 'e4m3*'")
    option(parser, "--repeats", "timed runs of each case", 9)
    option(parser, "--record", "also write the measurements to a JSON file", metavar="FILE", type=Path)
    option(parser, "--against", "say what became slower by more than 5 %% since this record", metavar="FILE", type=Path,
           names=names.records)  # fmt: skip
    add_json(parser)
    _add_kernels(parser.add_argument_group("casts and gemm"))
    _add_layers(parser.add_argument_group("layers"))


def check_bench(arguments: argparse.Namespace) -> None:
    """Refuse an option of another job than the one that is asked for."""
    for name in dict.fromkeys(name for options in BENCH_OPTIONS.values() for name in options):
        is_set = getattr(arguments, name) not in (BENCH_DEFAULTS.get(name), False)
        if is_set and name not in BENCH_OPTIONS[arguments.what]:
            jobs = " and ".join(what for what, options in BENCH_OPTIONS.items() if name in options)
            raise ArgumentError(
                f"--{name.replace('_', '-')} belongs to fmtsim bench {jobs}, not to {arguments.what}; leave it out"
            )


def _add_kernels(group: argparse._ArgumentGroup) -> None:
    side = "N: casts take float32 [N, N], and the memory of a product is measured for N"
    option(group, "--side", side, BENCH_DEFAULTS["side"])
    shape = "of products: [M, K] times [K, N]"
    option(group, "--shape", shape, BENCH_DEFAULTS["shape"], ("M", "N", "K"), type=int, nargs=3)
    option(group, "--threads", "thread counts", BENCH_DEFAULTS["threads"], type=int, nargs="+")
    flag(group, "--kernels-only", "leave out import time, first calls and memory")


def _add_layers(group: argparse._ArgumentGroup) -> None:
    text = "recipes, torchao_float8 or microxcaling_mxfp4; by default some recipes, and what is installed"
    option(group, "--recipes", text, metavar="NAME", nargs="+", names=converters)
    option(group, "--device", "cpu, cuda or cuda:1 (default cuda where there is one)", metavar="DEVICE")
    for name, text in BENCH_SIZES.items():
        count(group, f"--{name.replace('_', '-')}", text)
    option(group, "--target", "what multiplies under the recipes, such as h200", metavar="NAME", names=targets)
    flag(group, "--emulate", "emulate the target, also on a GPU that is one")
