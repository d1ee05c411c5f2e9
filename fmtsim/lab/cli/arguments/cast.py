# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim cast``."""

import argparse

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_json, add_rounding, repeated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "numbers", nargs="+", metavar="NUMBER", help="0.1, -3e-5, 0x1.8p-3, inf or nan; - reads standard input"
    )
    repeated(parser, "--to", "the element format", "FORMAT", names.formats, required=True, dest="formats",
             default=None)  # fmt: skip
    add_rounding(parser)
    add_json(parser)
