# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim bench``."""

import argparse
from pathlib import Path

from fmtsim.lab.cli.names import converters, targets
from fmtsim.lab.cli.options import add_json, count, flag, option

SIZES = {
    "width": "of the models; by default what fits the device",
    "layers": "blocks of a model",
    "batch_size": "sequences of a step",
    "context": "tokens of a sequence",
}
DEFAULTS = {"side": 4096, "shape": [512, 512, 2048], "threads": [1, 2]}
KERNELS = ("side", "threads", "kernels_only")
MEANT = {
    "casts": KERNELS,
    "gemm": (*KERNELS, "shape"),
    "gpu": (),
    "layers": ("recipes", "device", *SIZES, "target", "emulate"),
}
"""Which options belong to what is measured, beside those that all have."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    choices = (
        "casts relative to a copy, matrix products relative to torch's float32 product, the CUDA engine, or training "
        "steps under recipes relative to plain ones"
    )
    parser.add_argument("what", nargs="?", choices=tuple(MEANT), default="casts", help=choices)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="measure the cases that match, such as 'e4m3*'")
    option(parser, "--repeats", "timed runs of each case", 9)
    option(parser, "--record", "also write the measurements to a JSON file", metavar="FILE", type=Path)
    option(parser, "--against", "say what became slower by more than 5 %% since this record", metavar="FILE", type=Path)
    add_json(parser)
    _add_kernels(parser.add_argument_group("casts and gemm"))
    _add_layers(parser.add_argument_group("layers"))


def _add_kernels(group: argparse._ArgumentGroup) -> None:
    side = "N: casts take float32 [N, N], and the memory of a product is measured for N"
    option(group, "--side", side, DEFAULTS["side"])
    shape = "of products: [M, K] times [K, N]"
    option(group, "--shape", shape, DEFAULTS["shape"], ("M", "N", "K"), type=int, nargs=3)
    option(group, "--threads", "thread counts", DEFAULTS["threads"], type=int, nargs="+")
    flag(group, "--kernels-only", "leave out import time, first calls and memory")


def _add_layers(group: argparse._ArgumentGroup) -> None:
    text = "recipes, torchao_float8 or microxcaling_mxfp4; by default some recipes, and what is installed"
    option(group, "--recipes", text, metavar="NAME", nargs="+", known=converters)
    option(group, "--device", "cpu, cuda or cuda:1 (default cuda where there is one)", metavar="DEVICE")
    for name, text in SIZES.items():
        count(group, f"--{name.replace('_', '-')}", text)
    option(group, "--target", "what multiplies under the recipes, such as h200", metavar="NAME", known=targets)
    flag(group, "--emulate", "emulate the target, also on a GPU that is one")
