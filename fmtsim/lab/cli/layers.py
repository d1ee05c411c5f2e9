# SPDX-License-Identifier: Apache-2.0
"""What subcommands share that ask about a model's linear layers: which layers, and of which model."""

import argparse
from typing import Any

from fmtsim.gemm.models import Shape, layer_shapes, read_shapes
from fmtsim.lab.training.models import module_of
from fmtsim.lab.training.own_code import is_function
from fmtsim.support.errors import ArgumentError


def chosen_shapes(arguments: argparse.Namespace) -> list[Shape]:
    """Return the layers that the arguments mean: those of gpt2 where they mean none."""
    shapes = layer_shapes(arguments.models or ([] if arguments.shapes else ["gpt2"]))
    return shapes + (read_shapes(arguments.shapes) if arguments.shapes else [])


def chosen_dtypes(arguments: argparse.Namespace) -> list[str]:
    """Return the names that ``--dtypes`` lists."""
    return [word.strip() for word in arguments.dtypes.split(",") if word.strip()]


def chosen_model(arguments: argparse.Namespace) -> Any:
    """Return the layers of the arguments as ``fmtsim.lab.analysis`` takes them, a module where a file has one."""
    files = [name for name in arguments.models if is_function(name)]
    if files and (len(arguments.models) > 1 or arguments.shapes):
        raise ArgumentError(f"--model {files[0]} is asked about alone; leave other models and --shapes out")
    if not files and arguments.target is None:
        raise ArgumentError("--target is missing: name a GPU with its library, such as h200, or a plan file")
    return module_of(files[0]) if files else chosen_shapes(arguments)
