# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim search``."""

import argparse

from fmtsim.cli.model_options import add_model, add_quiet
from fmtsim.cli.options import add_json, add_target, count, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    option(parser, "--batches", "so many to calibrate and measure on", 8)
    what = parser.add_argument_group("what is chosen, and within which budget (one of the two)")
    option(what, "--bits", "as many bit operations as so many bits in both operands of every layer take", type=float)
    option(what, "--budget", "bit operations of a batch", type=float)
    schemes = "schemes of fmtsim ptq to choose from, JSON files too (default w4a4,minifloat_e3m2,e4m3_static)"
    option(what, "--schemes", schemes, metavar="LIST")
    count(what, "--samples", "also try so many assignments, drawn from a policy that learns which are good")
    add_target(parser.add_argument_group("who multiplies (float32 sums in no particular order, or one of these)"))
    result = parser.add_argument_group("result")
    out = "write the choice (.json), which ptq --scheme takes, and --rules and convert(rules=) likewise"
    option(result, "--out", out, metavar="FILE")
    option(result, "--plot", "draw losses and costs (.png)", metavar="FILE")
    add_quiet(result)
    add_json(result)
