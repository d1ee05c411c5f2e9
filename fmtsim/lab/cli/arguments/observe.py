# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim observe``."""

import argparse

from fmtsim.lab.cli.model_options import add_formats, add_model, add_quiet
from fmtsim.lab.cli.options import add_json, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    add_formats(parser.add_argument_group("the formats to cast the operands to (the model itself is unchanged)"))
    option(parser, "--steps", "batches, each run forward and backward", 8)
    option(parser, "--every", "observe the first of every N steps", 1)
    option(parser, "--lr", "also train with AdamW at this learning rate (default: weights do not change)", type=float)
    result = parser.add_argument_group("result")
    option(result, "--worst", "show this many operands, those that lose most", 10)
    option(result, "--by", "the measure of loss", "underflow", choices=("underflow", "saturation", "sqnr"))
    option(result, "--report", "write an HTML report (.html)", metavar="FILE")
    add_quiet(result)
    add_json(result)
