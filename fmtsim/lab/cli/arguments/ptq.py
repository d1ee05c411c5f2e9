# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim ptq``."""

import argparse

from fmtsim.lab.cli import names
from fmtsim.lab.cli.model_options import add_model, add_quiet
from fmtsim.lab.cli.options import add_json, add_target, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    scheme = "a scheme of post-training quantisation, such as int8_static, or a JSON file; 'list' prints all names"
    option(parser, "--scheme", scheme, metavar="NAME", known=names.schemes, required=True)
    add_model(parser, required=False)
    option(parser, "--batches", "batches for calibration, and as many others to measure the loss", 8)
    add_target(parser.add_argument_group("simulated arithmetic (default: float32 in no particular order)"))
    result = parser.add_argument_group("result")
    option(result, "--out", "folder for the quantised model (model.pt), its scheme and report", metavar="DIR")
    layouts = ("compressed-tensors", "torchao", "gguf")
    option(result, "--export", "also write it to --out for another library", choices=layouts)
    add_quiet(result)
    add_json(result)
