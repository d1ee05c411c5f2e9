# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim observe``."""

import argparse

from fmtsim.cli.model_options import add_formats, add_model, add_quiet
from fmtsim.cli.options import add_json, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    add_formats(parser.add_argument_group("what the operands of its products are cast to, beside it"))
    option(parser, "--steps", "batches, each run forward and backward", 8)
    option(parser, "--every", "observe the first of so many steps", 1)
    option(parser, "--lr", "also train, by AdamW with this rate (default: the weights stay as they are)", type=float)
    result = parser.add_argument_group("result")
    option(result, "--worst", "so many operands, those that lose most", 10)
    option(result, "--by", "what they lose", "underflow", choices=("underflow", "saturation", "sqnr"))
    option(result, "--report", "write a page for the browser (.html)", metavar="FILE")
    add_quiet(result)
    add_json(result)
