# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim invariance``."""

import argparse

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_json, add_layers, flag, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = parser.add_argument_group("which products (default: the layers of gpt2)")
    add_layers(what, "bf16")
    option(what, "--sizes", "rows of the layers' input: a list (1,77,512) or a range (1..512)", "1..512", "LIST")
    flag(what, "--no-gradients", "forward products only")
    named = "a GPU with its library, such as h200, or a plan file; leave it out for a converted model"
    option(parser, "--target", named, metavar="NAME", known=names.targets)
    option(parser, "--plot", "save a picture of the sizes with equal results as PNG", metavar="FILE")
    add_json(parser)
