# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim bench``."""

import argparse
from pathlib import Path

from fmtsim.cli.options import add_json, flag, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    choices = "casts against a copy, matrix products against torch's float32 one, or the CUDA engine"
    parser.add_argument("what", nargs="?", choices=("casts", "gemm", "gpu"), default="casts", help=choices)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="measure the cases that match, such as 'e4m3*'")
    option(parser, "--side", "casts take float32 [N, N], the memory of a product is measured for this side", 4096)
    option(parser, "--shape", "of products: [M, K] times [K, N]", [512, 512, 2048], ("M", "N", "K"), type=int, nargs=3)
    option(parser, "--threads", "thread counts", [1, 2], type=int, nargs="+")
    option(parser, "--repeats", "timed runs of each case", 9)
    option(parser, "--record", "gpu: write what was measured to a JSON file as well", metavar="FILE", type=Path)
    flag(parser, "--kernels-only", "leave out import time, first calls and memory")
    add_json(parser)
