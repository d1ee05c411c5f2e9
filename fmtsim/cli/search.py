# SPDX-License-Identifier: Apache-2.0
"""``fmtsim search``: a format for each layer of a trained model, within a budget of bit operations."""

import argparse
from typing import Any

from fmtsim.cli.model_options import file_given, load_model, machine_given
from fmtsim.cli.options import check_positive
from fmtsim.cli.output import answer
from fmtsim.errors import ArgumentError
from fmtsim.ptq import save_ptq_recipe
from fmtsim.search import Policy, SearchResult, search


def run(arguments: argparse.Namespace) -> int:
    """Search, print the choice and write it."""
    check_positive(arguments, "batches", "samples")
    if (arguments.bits is None) == (arguments.budget is None):
        raise ArgumentError("pass exactly one of --bits (of both operands) and --budget (bit operations of a batch)")
    machine = machine_given(arguments)
    out, plot = file_given(arguments, "out", ".json"), file_given(arguments, "plot", ".png")
    more: dict[str, Any] = {}
    if arguments.schemes is not None:
        more["formats"] = [word.strip() for word in arguments.schemes.split(",") if word.strip()]
    if arguments.samples is not None:
        more["policy"] = Policy(steps=arguments.samples, seed=arguments.seed)
    loaded = load_model(arguments, count=arguments.batches)
    found = search(
        loaded.model, [sample.batch for sample in loaded.samples], arguments.budget, bits=arguments.bits,
        progress=not arguments.quiet, **machine, **more,
    )  # fmt: skip
    if out is not None:
        save_ptq_recipe(found.recipe(), out)
    if plot is not None:
        found.plot(plot)
    files = [str(path) for path in (out, plot) if path is not None]
    wrote = [f"wrote {' and '.join(files)}"] if files else []
    record = {"model": loaded.name, "data": loaded.data, **_figures(found), "files": files}
    answer(arguments, record, lambda: "\n".join([str(found), loaded.data, *wrote]))
    return 0


def _figures(found: SearchResult) -> dict[str, Any]:
    names = ("formats", "cost", "budget", "loss", "losses", "costs", "left_out", "tried")
    return {name: getattr(found, name) for name in names}
