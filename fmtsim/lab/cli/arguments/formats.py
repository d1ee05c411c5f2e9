# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim formats``."""

import argparse

from fmtsim.lab.cli.options import add_json, option

KINDS = ("float", "int", "codebook", "log", "block", "log_tile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "pattern", nargs="?", default="*", help="names or aliases to list, such as 'mx*' (default: all)"
    )
    option(parser, "--kind", "list one kind of format", choices=KINDS)
    add_json(parser)
