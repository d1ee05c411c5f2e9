# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim search``."""

import argparse

from fmtsim.lab.cli.model_options import add_model, add_quiet
from fmtsim.lab.cli.options import add_json, add_target, count, flag, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    option(parser, "--batches", "batches for calibration and measurement", 8)
    what = parser.add_argument_group("formats and budget (--bits or --budget)")
    option(what, "--bits", "the bit operations of this many bits in both operands of every layer", type=float)
    option(what, "--budget", "bit operations of a batch", type=float)
    schemes = "schemes of fmtsim ptq to choose from, JSON files too (default w4a4,minifloat_e3m2,e4m3_static)"
    option(what, "--schemes", schemes, metavar="LIST")
    count(what, "--samples", "also try this many assignments, sampled from a policy that is trained on their results")
    flag(
        what,
        "--sensitivity",
        "estimate what layers lose by fmtsim attribute, on the first batch and the model's own loss",
    )
    train = parser.add_argument_group("search while training (instead of the search of a trained model)")
    steps = "train the model for this many steps on its batches (--batches) in turn, and search in the same steps"
    count(train, "--while-training", steps)
    option(train, "--lr", "learning rate, of AdamW", 1e-3)
    weights = "write the trained weights (.pt), for --checkpoint"
    option(train, "--weights", weights, metavar="FILE")
    add_target(parser.add_argument_group("simulated arithmetic (default: float32 in no particular order)"))
    result = parser.add_argument_group("result")
    out = "write the chosen formats (.json), for ptq --scheme, --rules and convert(rules=)"
    option(result, "--out", out, metavar="FILE")
    option(result, "--plot", "draw losses and costs (.png)", metavar="FILE")
    add_quiet(result)
    add_json(result)
