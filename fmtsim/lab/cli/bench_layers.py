# SPDX-License-Identifier: Apache-2.0
"""``fmtsim bench layers``: training steps under recipes, and beside other software, against plain steps of the run."""

import argparse
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from fmtsim.lab.bench import layers, peers
from fmtsim.lab.bench.layers import Result
from fmtsim.lab.bench.models import HEAD, Sizes
from fmtsim.lab.cli.arguments.bench import SIZES
from fmtsim.lab.cli.info import processor_name
from fmtsim.lab.cli.options import check_device, check_positive, chosen_cases
from fmtsim.lab.cli.output import each_shown, format_table, origin, versions_of
from fmtsim.support.errors import ArgumentError, FmtsimError

PACKAGES = ("fmtsim", "torch", "transformers", "triton", "torchao")


def measured(
    arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], Callable[[], str]]:
    """Return the record and how it reads; ``keep`` gets what there is after every case: a run may be cut short.

    A case that fails says why, and the others go on.
    """
    _check(arguments)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    machine = {"target": arguments.target, "native": False if arguments.emulate else None} if arguments.target else {}
    given = {name: getattr(arguments, name) for name in SIZES}
    sizes = {name: size.resized(**given) for name, size in layers.sizes_of(device).items()}
    cases = chosen_cases(layers.cases(arguments.recipes, device), arguments.only)
    absent = [] if arguments.recipes else [name for name in peers.PEERS if name not in peers.installed()]
    bench = layers.Bench(device, sizes, arguments.repeats, **machine)
    record: dict[str, Any] = {
        "machine": about(device), "sizes": {name: size.to_dict() for name, size in sizes.items()},
        "target": arguments.target, "emulated": arguments.emulate, "not_installed": absent,
    }  # fmt: skip
    results: list[Result] = []
    failed: dict[str, str] = {}
    for case in each_shown(cases):
        try:
            results.append(bench.measure(case))
        except Exception as error:  # of compilers and other software, whatever it is
            said = str(error) if isinstance(error, FmtsimError) else f"{type(error).__name__}: {error}"
            failed[case.name] = textwrap.shorten(said, 300)
        record.update(results=[result.to_dict() for result in results], failed=failed)
        keep(record)
    return record, lambda: _text(record, results, failed)


def _check(arguments: argparse.Namespace) -> None:
    check_positive(arguments, *SIZES)
    if arguments.emulate and arguments.target is None:
        raise ArgumentError("--emulate without --target emulates nothing; pass --target h200, too")
    if arguments.width is not None and arguments.width % HEAD:
        near = max(HEAD, arguments.width // HEAD * HEAD)
        raise ArgumentError(
            f"--width {arguments.width} is not a multiple of {HEAD}, the features of an attention head; choose {near}"
        )


def about(device: str) -> dict[str, Any]:
    """Return what a measurement depends on, and how to make it again."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else processor_name()
    return {"device": name, "threads": torch.get_num_threads(), **versions_of(PACKAGES), **origin()}


def _text(record: dict[str, Any], results: list[Result], failed: dict[str, str]) -> str:
    machine = record["machine"]
    parts = [", ".join([machine["device"], *(f"{name} {machine[name]}" for name in ("torch", "transformers", "date"))])]
    for name in dict.fromkeys(result.case.model for result in results):
        parts.append(f"{name}: {_size(Sizes(**record['sizes'][name]))}")
    parts += ["", table(results), "", summary(results), ""] if results else []
    absent = record["not_installed"]
    parts += [f"not measured, because not installed: {', '.join(absent)}"] if absent else []
    parts += [f"{name}: not measured, {reason}" for name, reason in failed.items()]
    return "\n".join(parts).rstrip()


def _size(size: Sizes) -> str:
    return f"{size.layers} layers of width {size.width}, {size.batch_size} x {size.context} tokens"


def table(results: list[Result]) -> str:
    """Return a line for each case: a step's time over the plain model's."""
    header = ("case", "ms", "plain, ms", "ratio", "first, s", "loss")
    return format_table(header, map(_line, results))


def _line(result: Result) -> tuple[str, ...]:
    loss = "-" if result.loss is None else f"{result.loss:.4f}"
    times = (f"{1e3 * seconds:.3f}" for seconds in (result.seconds, result.plain_seconds))
    return (result.case.name, *times, f"{result.ratio:.3f}", f"{result.first_seconds:.1f}", loss)


def summary(results: list[Result]) -> str:
    """Return the ratios: a line for each recipe, a column for each model and mode."""
    ratios = {(str(each.case.recipe), f"{each.case.model} {each.case.mode}"): f"{each.ratio:.2f}" for each in results}
    recipes, ways = dict.fromkeys(recipe for recipe, _ in ratios), dict.fromkeys(way for _, way in ratios)
    rows = [(recipe, *(ratios.get((recipe, way), "-") for way in ways)) for recipe in recipes]
    return format_table(("over plain", *ways), rows)
