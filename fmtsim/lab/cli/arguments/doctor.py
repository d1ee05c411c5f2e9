# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim doctor``."""

import argparse

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_json, add_layers, add_tokens, flag, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    dropped = "look for terms that the target's library omits, and for accumulation orders that are guesses"
    flag(parser, "--gemm", dropped)
    what = parser.add_argument_group("with --gemm: which products (default: the layers of gpt2)")
    add_layers(what, "bf16")
    add_tokens(what)
    named = "a GPU with its library, such as h200, or a plan file; leave it out for a converted model"
    option(what, "--target", named, metavar="NAME", known=names.targets)
    add_json(parser)
