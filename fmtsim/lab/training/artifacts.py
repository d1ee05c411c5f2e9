# SPDX-License-Identifier: Apache-2.0
"""What a comparison leaves behind: a report in the browser, a JSON record and a table, all of it or nothing."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fmtsim
from fmtsim.lab.analysis.page import write_page
from fmtsim.lab.training.checkpoint import Checkpoint
from fmtsim.lab.training.config import TrainConfig
from fmtsim.lab.training.corpus import Corpus
from fmtsim.lab.training.models import TITLES, source_digest
from fmtsim.lab.training.run import Run
from fmtsim.support.files import Content, write_folder

REPORT, RECORD, LAYERS = "report.html", "record.json", "layers.txt"
CHECKPOINT = "checkpoint.safetensors"  # of an unfinished comparison


def write_artifacts(out: Path, record: Mapping[str, Any], baseline: Run, simulated: Run) -> list[Path]:
    """Write report, record and table of a comparison to a folder, and remove its checkpoint; return their paths."""
    return write_folder(out, {**_contents(record, baseline, simulated), CHECKPOINT: None})


def write_unfinished(out: Path, config: TrainConfig, corpus: Corpus, checkpoint: Checkpoint) -> str | None:
    """Write the report of what there is of a comparison that was interrupted; return in words where it is, if any."""
    runs = checkpoint.begun
    if not any(run.losses for run in runs):
        return None
    runs[-1].guesses = list(dict.fromkeys(checkpoint.guesses))
    which = ("baseline", "simulated")[len(runs) - 1]
    at = f"after step {len(runs[-1].losses)} of {config.steps} of the {which} run"
    page = _page(settings(config, corpus), runs, [f"Interrupted {at}: this is what there is, without held-out losses."])
    write_folder(out, {REPORT: page})
    return f"{out / REPORT} shows what there is, {at}"


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


def _contents(record: Mapping[str, Any], baseline: Run, simulated: Run) -> dict[str, Content | None]:
    """Return the files by name, the record last."""
    parts = [f"{_title(record)}: {simulated.label} against {baseline.label}"]
    for run in (baseline, simulated):
        if run.stats is not None:
            steps = ", ".join(map(str, run.stats.history))
            parts.append(f"{run.label}: operands in steps {steps}\n\n{run.stats}\n\n{run.report}")
    about = {key: value for key, value in record.items() if key not in ("baseline", "simulated", "gap")}
    held_out = {f"held-out loss, {run.label}": run.validation for run in (baseline, simulated)}
    return {
        REPORT: _page({**about, **held_out}, (baseline, simulated)),
        LAYERS: "\n\n".join(parts) + "\n",
        RECORD: json.dumps(record, indent=1, allow_nan=False) + "\n",
    }


def _page(about: Mapping[str, Any], runs: Sequence[Run], notes: Sequence[str] = ()) -> str:
    """Return the report of the runs that there are, the baseline first; the last one's operands are shown."""
    names = [f"{name}: {run.label}" for name, run in zip(("baseline", "simulated"), runs, strict=False)]
    last = runs[-1]
    told = [*notes, *(f"{run.label}: stopped, {run.stopped}" for run in runs if run.stopped)]
    if last.nonfinite:
        told.append(f"Steps with gradients that were not finite: {last.nonfinite}, skipped: {last.skipped}")
    if any(run.stats is not None for run in runs[:-1]):
        told.append(f"Heatmaps and exponents are of {last.label}; those of the baseline are in {LAYERS} and {RECORD}")
    told += last.report.notes if last.report is not None else ()
    if last.guesses:
        told.append(f"Products whose accumulation order was guessed: {len(last.guesses)}. The first: {last.guesses[0]}")
    return write_page(
        None,
        title=f"{_title(about)}: {' against '.join(run.label for run in reversed(runs))}",
        curves=dict(zip(names, (run.losses for run in runs), strict=True)),
        loss_unit="nats per byte",
        observation=last.stats,
        coverage=None if last.report is None else last.report.coverage,
        configuration=about,
        notes=told,
    )


def _title(about: Mapping[str, Any]) -> str:
    architecture = about["config"]["architecture"]
    return f"{TITLES.get(architecture, architecture)} on {about['corpus']['name']}"


def _run_record(run: Run) -> dict[str, Any]:
    names = ("label", "stopped", "nonfinite", "skipped", "loss_scale", "guesses")
    observed = None if run.stats is None else run.stats.to_dict()
    system = ("optimizer", "state_bytes", "ranks", "reduction", "gathered")
    return {name: getattr(run, name) for name in (*names, *system)} | {
        "losses": [_finite(loss) for loss in run.losses],
        "final_loss": _finite(run.final_loss),
        "validation": _finite(run.validation),
        "seconds": round(run.seconds, 3),
        "layers": None if observed is None else observed["layers"],
        "history": None if observed is None else observed["history"],
        "report": None if run.report is None else [asdict(row) for row in run.report.rows],
        "summary": None if run.report is None else run.report.summary,
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
