# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim info``."""

import argparse

from fmtsim.lab.cli.options import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_json(parser)
