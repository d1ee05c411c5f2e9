# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim reproduce``."""

import argparse
from pathlib import Path

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_json, count, flag, option, repeated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    flag(parser, "--list", "list the claims, and run none")
    repeated(parser, "--only", "run only this claim (default: all)", known=names.claims, dest="claims")
    flag(parser, "--quick", "leave out claims that take more than ten seconds")
    count(parser, "--seeds", "run experiments with so many seeds (default: as many as each claim asks for)")
    count(parser, "--workers", "processes that share slow claims, a CPU thread each (default: one a core)")
    flag(parser, "--markdown", "print the table in Markdown, with the sources")
    text = "write claims.md, claims.json and, where matplotlib is installed, a plot of each claim with a curve"
    option(parser, "--out", text, metavar="DIR", type=Path)
    flag(parser, "--quiet", "show no progress")
    add_json(parser)
