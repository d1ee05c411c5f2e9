# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim explain``."""

import argparse

from fmtsim.formats.scaling import SCALE_RULES
from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_json, add_rounding, count, option

DTYPES = ("float64", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "numbers",
        nargs="+",
        metavar="NUMBER",
        help="one number, or the consecutive numbers of a block; - reads them from standard input",
    )
    option(parser, "--format", "any format; blocks are consecutive numbers", metavar=None, known=names.formats,
           required=True)  # fmt: skip
    option(parser, "--dtype", "dtype in which the numbers are stored before the cast", "float64", choices=DTYPES)
    count(parser, "--block-size", "numbers that share a scale")
    option(parser, "--scale-rule", f"one of {', '.join(SCALE_RULES)}", metavar="RULE", known=names.scale_rules)
    add_rounding(parser)
    add_json(parser)
