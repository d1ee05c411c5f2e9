# SPDX-License-Identifier: Apache-2.0
"""``fmtsim search``: a format for each layer of a trained model, or of one in training, within a budget."""

import argparse
import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fmtsim.lab.analysis.attribute import attribute
from fmtsim.lab.cli.model_options import file_given, load_model, machine_given
from fmtsim.lab.cli.options import check_positive
from fmtsim.lab.cli.output import answer
from fmtsim.lab.search import Policy, SearchResult, search, search_while_training
from fmtsim.lab.search.in_training import LEARNING
from fmtsim.lab.search.verb import DEFAULT
from fmtsim.ptq import get_ptq_recipe, save_ptq_recipe
from fmtsim.ptq.calibrate import call
from fmtsim.support.errors import ArgumentError

if TYPE_CHECKING:
    from fmtsim.lab.training.loading import Loaded


def run(arguments: argparse.Namespace) -> int:
    """Search, print the choice and write it."""
    check_positive(arguments, "batches", "samples")
    _check_training(arguments)
    if (arguments.bits is None) == (arguments.budget is None):
        raise ArgumentError("pass exactly one of --bits (of both operands) and --budget (bit operations of a batch)")
    machine = machine_given(arguments)
    out, plot = file_given(arguments, "out", ".json"), file_given(arguments, "plot", ".png")
    weights = file_given(arguments, "weights", ".pt")
    more = machine | {"bits": arguments.bits, "progress": not arguments.quiet}
    if arguments.schemes is not None:
        more["formats"] = [word.strip() for word in arguments.schemes.split(",") if word.strip()]
    loaded = load_model(arguments, count=arguments.batches)
    found = (_afterwards if arguments.while_training is None else _in_training)(arguments, loaded, more)
    if out is not None:
        save_ptq_recipe(found.recipe(), out)
    if plot is not None:
        found.plot(plot)
    if weights is not None:
        torch.save(loaded.model.state_dict(), weights)
    files = [str(path) for path in (out, plot, weights) if path is not None]
    wrote = [f"wrote {' and '.join(files)}"] if files else []
    record = {"model": loaded.name, "data": loaded.data, **_figures(found), "files": files}
    answer(arguments, record, lambda: "\n".join([str(found), loaded.data, *wrote]))
    return 0


def _afterwards(arguments: argparse.Namespace, loaded: "Loaded", more: dict[str, Any]) -> SearchResult:
    if arguments.samples is not None:
        more["policy"] = Policy(steps=arguments.samples, seed=arguments.seed)
    if arguments.sensitivity:
        sample, recipes = loaded.samples[0], [get_ptq_recipe(name) for name in more.get("formats", DEFAULT)]
        loss = partial(loaded.loss, sample)
        more["sensitivity"] = {
            recipe.name: attribute(loaded.model, sample.batch, loss, recipe.linear, generator=arguments.seed,
                                   progress=more["progress"])
            for recipe in recipes
        }  # fmt: skip
    return search(loaded.model, [sample.batch for sample in loaded.samples], arguments.budget, **more)


def _in_training(arguments: argparse.Namespace, loaded: "Loaded", more: dict[str, Any]) -> SearchResult:
    """Train on the batches in turn; a quarter of the steps is warm-up."""
    warmup = arguments.while_training // 4
    policy = dataclasses.replace(LEARNING, steps=arguments.while_training - warmup, seed=arguments.seed)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=arguments.lr)

    def loss_of(step: int) -> torch.Tensor:
        sample = loaded.samples[step % len(loaded.samples)]
        return loaded.loss(sample, call(loaded.model, sample.batch, step, kind="batch"))

    return search_while_training(
        loaded.model, loss_of, optimizer, arguments.budget, policy=policy, warmup=warmup, **more
    )


def _check_training(arguments: argparse.Namespace) -> None:
    check_positive(arguments, "while_training")
    if arguments.while_training is None:
        if arguments.weights is not None:
            raise ArgumentError("--weights are those of a search while training; pass --while-training STEPS as well")
        return
    for name in ("samples", "sensitivity"):
        if getattr(arguments, name):
            raise ArgumentError(f"--{name} is of a search without training; leave it or --while-training out")
    if not arguments.lr > 0:
        raise ArgumentError(f"--lr {arguments.lr} is not a learning rate; choose a number above 0")


def _figures(found: SearchResult) -> dict[str, Any]:
    names = ("formats", "cost", "budget", "loss", "losses", "costs", "left_out", "tried", "chances", "reference")
    return {name: getattr(found, name) for name in names}
