# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim bisect``."""

import argparse

from fmtsim.lab.cli.model_options import MODEL, add_data
from fmtsim.lab.cli.options import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("a", metavar="A", help=f"a trace (.safetensors); or {MODEL}")
    parser.add_argument("b", metavar="B", help="the run to compare with, in the same forms")
    add_data(parser)
    add_json(parser)
