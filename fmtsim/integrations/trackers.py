# SPDX-License-Identifier: Apache-2.0
"""Values that callbacks send to a run's trackers: a few numbers of each observed step, and histograms of exponents."""

import importlib
import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from fmtsim.lab.analysis.losses import MEASURES, badness, losses_of, worst
from fmtsim.lab.analysis.measure import LOWEST_EXPONENT
from fmtsim.lab.analysis.observation import Observation
from fmtsim.support.errors import ArgumentError, shown

KINDS: Final = ("operand", "layer", None)


def check_histograms(histograms: str | None) -> None:
    """Raise ArgumentError where ``histograms`` is none of KINDS."""
    if histograms not in KINDS:
        raise ArgumentError(
            f"histograms={shown(histograms)} is not a choice; pass 'operand' for one of each operand over all layers, "
            "'layer' for one of each operand of each layer, or None"
        )


def figures(part: Observation) -> dict[str, float]:
    """Return a few numbers of a step, each of the operand that loses most by it, for a trainer's log.

    What is infinite or undefined (nothing lost, all zeros) is left out: not all loggers take it.
    """
    losses = losses_of(part.layers)
    if not losses:
        return {}
    numbers = {
        "fmtsim_worst_underflow_percent": worst(losses, 1, "underflow")[0].stats.underflow_percent,
        "fmtsim_worst_saturation_percent": worst(losses, 1, "saturation")[0].stats.saturation_percent,
        "fmtsim_worst_sqnr_db": worst(losses, 1, "sqnr")[0].stats.sqnr_db,
        "fmtsim_nonfinite": float(sum(loss.stats.nonfinite for loss in losses)),
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def worst_places(part: Observation) -> dict[str, str]:
    """Return the layer and operand of each of ``figures``, for logs that take text; those that lose nothing are out."""
    losses = losses_of(part.layers)
    firsts = {by: worst(losses, 1, by)[0] for by in MEASURES} if losses else {}
    places = {f"fmtsim_worst_{by}": f"{one.layer or '(model)'} {one.operand}" for by, one in firsts.items()}
    nothing = {
        f"fmtsim_worst_{by}" for by in ("underflow", "saturation") if losses and not badness(firsts[by].stats, by)
    }
    return {name: place for name, place in places.items() if name not in nothing}


def exponents(part: Observation, by: str | None) -> dict[str, Tensor]:
    """Return histograms of ``floor(log2|x / scale|)`` over the finite elements that are not zero, by their names.

    Args:
        part: Statistics of a step.
        by: ``"operand"``, ``"layer"`` or None, as callbacks take it.
    """
    totals: dict[str, Tensor] = {}
    for layer, operand, stats in losses_of(part.layers) if by is not None else ():
        parts = ("fmtsim_exponents", *([layer or "(model)"] if by == "layer" else []), operand)
        name = "/".join(parts)
        totals[name] = totals.get(name, 0) + stats.scaled_exponents
    return {name: counts for name, counts in totals.items() if counts.any()}


def send(histograms: dict[str, Tensor], trackers: Iterable[Any], step: int, axis: str | None = None) -> None:
    """Send histograms to those trackers that take some.

    Args:
        histograms: What ``exponents`` returned.
        trackers: Writers of TensorBoard, runs of W&B or its module; all else is passed over.
        step: The number under which the trainer logs the step.
        axis: The key by which a trainer tells W&B its step; None tells it as W&B's own.
    """
    for tracker in trackers if histograms else ():
        if hasattr(tracker, "add_histogram_raw"):
            for name, counts in histograms.items():
                tracker.add_histogram_raw(name, **_of_tensorboard(counts), global_step=step)
        elif _is_wandb(tracker):
            histogram = importlib.import_module("wandb").Histogram
            values = {name: histogram(np_histogram=_used(counts)) for name, counts in histograms.items()}
            tracker.log(values | {axis: step}) if axis else tracker.log(values, step=step)


def _is_wandb(tracker: Any) -> bool:
    name = getattr(tracker, "__name__", "") or type(tracker).__module__
    return name.partition(".")[0] == "wandb" and callable(getattr(tracker, "log", None))


def _used(counts: Tensor) -> tuple[list[int], list[int]]:
    """Return the bins from the first to the last that has elements, and their edges, one more."""
    used = counts.nonzero().flatten()
    first, last = int(used[0]), int(used[-1])
    return counts[first : last + 1].tolist(), list(range(first + LOWEST_EXPONENT, last + LOWEST_EXPONENT + 2))


def _of_tensorboard(counts: Tensor) -> dict[str, Any]:
    """Return what ``SummaryWriter.add_histogram_raw`` takes; sums count elements at the middles of their bins."""
    numbers, edges = _used(counts)
    many, middles = torch.tensor(numbers).double(), torch.tensor(edges[:-1]) + 0.5
    return {
        "min": edges[0], "max": edges[-1], "num": sum(numbers), "sum": float((many * middles).sum()),
        "sum_squares": float((many * middles * middles).sum()), "bucket_limits": edges[1:], "bucket_counts": numbers,
    }  # fmt: skip
