# SPDX-License-Identifier: Apache-2.0
"""``fmtsim memory``: what training or serving a model needs of memory on each device."""

import argparse
import re
from typing import Any

from fmtsim.lab.cli.options import parse_number
from fmtsim.lab.cli.output import answer
from fmtsim.lab.memory.serving import serving_memory
from fmtsim.lab.memory.training import training_memory
from fmtsim.recipes.registry import get_recipe
from fmtsim.recipes.spec import Recipe
from fmtsim.support.errors import ArgumentError, FmtsimError

TRAINING = (
    "recipe", "optimizer", "master", "gradients", "activations", "loss_format", "batch", "tokens", "checkpointing",
    "attention", "dropout", "quantize_early", "zero", "tensor_parallel", "sequence_parallel", "lora", "lora_layers",
)  # fmt: skip
SERVING = ("kv_format", "context", "requests")
BOTH = ("weights", "devices")


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate."""
    if (arguments.model is None) == (arguments.params is None):
        raise ArgumentError("fmtsim memory needs a model; pass either --model llama-8b, a config.json, or --params 7e9")
    model = arguments.model if arguments.params is None else parse_number(arguments.params)
    verb, allowed, refused = (
        (serving_memory, SERVING, TRAINING) if arguments.serve else (training_memory, TRAINING, SERVING)
    )
    wrong = next(iter(_given(arguments, (*refused, "level") if arguments.serve else refused)), None)
    if wrong is not None:
        why = "training; leave it or --serve out" if arguments.serve else "serving; add --serve, or leave it out"
        raise ArgumentError(f"--{wrong.replace('_', '-')} is about {why}")
    given = _given(arguments, (*BOTH, *allowed))
    if given.get("master") == "none":
        given["master"] = None
    try:
        if arguments.level is not None:
            given["recipe"] = _at_level(given.get("recipe"), arguments.level)
        found = verb(model, **given)
    except FmtsimError as error:
        raise type(error)(_in_options(str(error), arguments.model is None)) from error
    answer(arguments, found.to_dict(), lambda: f"{found}\n\n{found.formulas()}" if arguments.formulas else str(found))
    return 0


def _at_level(recipe: str | None, level: str) -> Recipe:
    if recipe is None:
        raise ArgumentError(f"--level {level} is a recipe's; pass --recipe fp8lm as well")
    return get_recipe(recipe).at_level(level)


def _in_options(message: str, by_number: bool) -> str:
    """Return what the verbs say with options in the place of their keywords: ``--lora 16`` for ``lora=16``."""

    def spelled(found: re.Match[str]) -> str:
        name = "params" if found[1] == "model" and by_number else found[1].replace("_", "-")
        return f"--{name} {found[2]}"

    names = "|".join(("model", *TRAINING, *SERVING, *BOTH))
    return re.sub(rf"\b({names})=('[^']*'|[^\s;,]+)", spelled, message)


def _given(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the options among these that the command line has."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}
