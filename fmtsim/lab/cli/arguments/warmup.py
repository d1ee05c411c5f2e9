# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim warmup``."""

import argparse

from fmtsim.lab.cli.options import add_json, flag, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    device = "cpu, cuda or cuda:1 (default: the CPU, and the current GPU where kernels run on it)"
    option(parser, "--device", device, metavar="DEVICE")
    flag(parser, "--quiet", "show no progress")
    add_json(parser)
