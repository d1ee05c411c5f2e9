# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim bench``."""

import argparse
from pathlib import Path

from fmtsim.cli.options import add_json, flag, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    choices = "casts relative to a copy, matrix products relative to torch's float32 product, or the CUDA engine"
    parser.add_argument("what", nargs="?", choices=("casts", "gemm", "gpu"), default="casts", help=choices)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="measure the cases that match, such as 'e4m3*'")
    option(parser, "--side", "N: casts take float32 [N, N], and the memory of a product is measured for N", 4096)
    option(parser, "--shape", "of products: [M, K] times [K, N]", [512, 512, 2048], ("M", "N", "K"), type=int, nargs=3)
    option(parser, "--threads", "thread counts", [1, 2], type=int, nargs="+")
    option(parser, "--repeats", "timed runs of each case", 9)
    option(parser, "--record", "gpu: also write the measurements to a JSON file", metavar="FILE", type=Path)
    flag(parser, "--kernels-only", "leave out import time, first calls and memory")
    add_json(parser)
