"""What a comparison leaves behind: pictures, a JSON record and a table, all of it or nothing."""

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fmtsim
from fmtsim.analysis.observe import Observation
from fmtsim.analysis.plots import plot_exponents, plot_loss
from fmtsim.analysis.stats import OperandStats
from fmtsim.files import Content, check_folder, write_folder
from fmtsim.plotting import new_figure, png
from fmtsim.training.config import TrainConfig
from fmtsim.training.corpus import Corpus
from fmtsim.training.loop import Run
from fmtsim.training.models import TITLES, source_digest

LOSS, EXPONENTS, RECORD, LAYERS = "loss.png", "exponents.png", "record.json", "layers.txt"
CHECKPOINT = "checkpoint.safetensors"  # of an unfinished comparison


def check_output(out: Path) -> None:
    """Say before the training what would fail after it: a file in the way, a read-only folder, no matplotlib."""
    check_folder(out)
    new_figure(1, 1)


def write_artifacts(out: Path, record: Mapping[str, Any], baseline: Run, simulated: Run) -> list[Path]:
    """Write pictures, record and table of a comparison to a folder, and remove its checkpoint; return their paths."""
    return write_folder(out, {**_contents(record, baseline, simulated), CHECKPOINT: None})


def about(config: TrainConfig, corpus: Corpus, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every record begins with: versions, machine, options and text."""
    own = source_digest(config.architecture)
    settings = asdict(config) | {name: getattr(config, name).to_dict() for name in ("simulated", "baseline")}
    return {
        "fmtsim": fmtsim.__version__,
        "torch": torch.__version__,
        "machine": {"processor": platform.processor() or platform.machine(), **machine},
        "config": settings | ({} if own is None else {"architecture_sha256": own}),
        "corpus": {name: getattr(corpus, name) for name in ("name", "bytes", "files", "truncated", "sha256")},
    }


def settings(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """Return what a comparison's record begins with, which decides its bits."""
    return about(config, corpus, {"threads": torch.get_num_threads()})


def make_record(config: TrainConfig, corpus: Corpus, baseline: Run, simulated: Run) -> dict[str, Any]:
    """Return everything about a comparison as JSON types; numbers that are not finite are None."""
    gaps = {name: getattr(simulated, name) - getattr(baseline, name) for name in ("final_loss", "validation")}
    return {
        **settings(config, corpus),
        "baseline": _run_record(baseline),
        "simulated": _run_record(simulated),
        "gap": {name: _finite(gap) for name, gap in gaps.items()},
    }


def by_operand(stats: Observation) -> dict[str, OperandStats]:
    """Add up the statistics of all layers for each operand."""
    total: dict[str, OperandStats] = {}
    for operands in stats.layers.values():
        for name, s in operands.items():
            total.setdefault(name, OperandStats()).merge(s)
    return total


def operand_in_words(operand: str) -> str:
    """Return an operand's tensor and product in words."""
    if "_" not in operand:
        attention = {"q": "queries", "k": "keys", "v": "values", "p": "softmax weights"}
        return f"{attention[operand]}, attention" if operand in attention else f"attention's {operand[:2]}"
    tensors = {"x": "activations", "w": "weights", "g": "gradients"}
    products = {"f": "forward", "d": "input gradient", "w": "weight gradient"}
    return f"{tensors[operand[0]]}, {products[operand[2]]}"


def _contents(record: Mapping[str, Any], baseline: Run, simulated: Run) -> dict[str, Content | None]:
    """Return the files by name, the record last; None where a run leaves no such file."""
    architecture = record["config"]["architecture"]
    title = f"{TITLES.get(architecture, architecture)} on {record['corpus']['name']}"
    curves = {f"baseline: {baseline.label}": baseline.losses, f"simulated: {simulated.label}": simulated.losses}
    parts = [f"{title}: {simulated.label} against {baseline.label}"]
    for run in (baseline, simulated):
        if run.stats is None:
            continue
        parts.append(f"{run.label}: operands in step {run.observed}\n\n{run.stats}\n\n{run.report}")
    return {
        LOSS: png(plot_loss(curves, title=title)),
        EXPONENTS: _exponents(simulated),
        LAYERS: "\n\n".join(parts) + "\n",
        RECORD: json.dumps(record, indent=1, allow_nan=False) + "\n",
    }


def _exponents(run: Run) -> bytes | None:
    if run.stats is None or not run.stats.layers:
        return None
    order = ("x_f", "w_f", "g_d", "x_w", "w_d", "g_w")
    totals = by_operand(run.stats)
    names = [*(name for name in order if name in totals), *(name for name in totals if name not in order)]
    shown = {f"{name}, {operand_in_words(name)}": totals[name] for name in names}
    return png(plot_exponents(shown, title=f"{run.label}: all layers, step {run.observed}"))


def _run_record(run: Run) -> dict[str, Any]:
    names = ("label", "stopped", "nonfinite", "skipped", "loss_scale", "guesses")
    system = ("optimizer", "state_bytes", "ranks", "reduction", "gathered")
    return {name: getattr(run, name) for name in (*names, *system)} | {
        "losses": [_finite(loss) for loss in run.losses],
        "final_loss": _finite(run.final_loss),
        "validation": _finite(run.validation),
        "seconds": round(run.seconds, 3),
        "observed_step": run.observed or None,
        "layers": None if run.stats is None else run.stats.to_dict()["layers"],
        "report": None if run.report is None else [asdict(row) for row in run.report.rows],
        "summary": None if run.report is None else run.report.summary,
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
