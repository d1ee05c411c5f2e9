# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim table``."""

import argparse

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_json, count, flag, option, repeated

ALL_BITS = 16  # with --all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    option(parser, "format", "name of a format; a block format shows its element", metavar=None, known=names.formats)
    flag(parser, "--all", f"every code of a format of 9 to {ALL_BITS} bits, instead of its landmarks only")
    repeated(parser, "--code", "show only this code (17, 0x11 or 0b10001)", "N")
    count(parser, "--columns", "codes side by side (default 4, fewer in a narrow terminal)")
    add_json(parser)
