"""The arguments of ``fmtsim bisect``."""

import argparse

from fmtsim.cli.options import add_device, add_json, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = "a trace, or FILE.py:function that returns (model, batch) or (model, batch, loss)"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help="what to compare with, likewise")
    option(parser, "--seed", "of what functions and models draw", 0)
    add_device(parser)
    add_json(parser)
