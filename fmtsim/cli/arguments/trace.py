"""The arguments of ``fmtsim trace``."""

import argparse

from fmtsim.cli.options import add_device, add_json, add_target, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    model = "FILE.py:function that returns (model, batch) or (model, batch, loss), or a model that fmtsim train takes"
    option(parser, "--model", model, metavar="NAME", required=True)
    option(parser, "--out", "the trace, a safetensors file", metavar="FILE")
    option(parser, "--level", "modules, or aten: every operator of torch", "modules", choices=("modules", "aten"))
    option(parser, "--tensors", "keep the outputs of these operations, too: indices and layers, or all", metavar="LIST")
    option(parser, "--seed", "of what the function and the model draw", 0)
    add_device(parser)
    group = parser.add_argument_group("what to convert the model to (default: nothing)")
    option(group, "--recipe", "a published scheme, such as te_current", metavar="NAME")
    option(group, "--format", "one format of all operands", metavar="NAME")
    add_target(group)
    add_json(parser)
