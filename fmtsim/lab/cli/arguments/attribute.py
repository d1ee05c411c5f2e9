# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim attribute``."""

import argparse

from fmtsim.lab.cli.model_options import add_formats, add_model, add_quiet
from fmtsim.lab.cli.options import add_json, flag, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    add_formats(parser.add_argument_group("the formats to which the model's operands are rounded"))
    flag(parser, "--exact", "round operands one at a time, a pass for each, instead of an estimate from 8 passes")
    result = parser.add_argument_group("result")
    option(result, "--by", "the cost by which layers are named", "loss", choices=("loss", "kl", "gradient"))
    option(result, "--share", "name the most costly layers, which together have this share of the cost", 0.5)
    option(result, "--out", "write rules that leave these layers in high precision (.json)", metavar="FILE")
    option(result, "--report", "write an HTML report (.html)", metavar="FILE")
    add_quiet(result)
    add_json(result)
