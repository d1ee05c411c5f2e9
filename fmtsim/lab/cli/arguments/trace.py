# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim trace``."""

import argparse

from fmtsim.lab.cli.model_options import add_formats, add_model
from fmtsim.lab.cli.options import add_json, add_target, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    option(parser, "--out", "the trace, a safetensors file", metavar="FILE")
    option(parser, "--level", "modules, or aten: every operator of torch", "modules", choices=("modules", "aten"))
    option(parser, "--tensors", "also save the outputs of these operations: indices and layers, or all", metavar="LIST")
    group = parser.add_argument_group("conversion of the model (default: none)")
    add_formats(group)
    add_target(group)
    add_json(parser)
