# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim compare``."""

import argparse

from fmtsim.lab.cli.options import add_json, option

SUFFIXES = (".npy", ".npz", ".safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = f"{', '.join(SUFFIXES)}; FILE:NAME picks one tensor of a file"
    parser.add_argument("actual", metavar="ACTUAL", help=f"a file of tensors: {what}")
    parser.add_argument("expected", metavar="EXPECTED", help="the file to compare with")
    option(parser, "--plot", "draw the ulp histograms", metavar="PNG")
    add_json(parser)
