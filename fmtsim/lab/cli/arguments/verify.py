# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim verify``."""

import argparse
from pathlib import Path

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_json, count, flag, option, repeated


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
