"""What a comparison leaves behind: pictures, a JSON record and a table, all of it or nothing."""

import json
import math
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fmtsim
from fmtsim.analysis.observe import Observation
from fmtsim.analysis.plots import plot_exponents, plot_loss
from fmtsim.analysis.stats import OperandStats
from fmtsim.errors import ArgumentError
from fmtsim.plotting import new_figure
from fmtsim.training.corpus import Corpus
from fmtsim.training.loop import Run, TrainConfig

LOSS, EXPONENTS, RECORD, LAYERS = "loss.png", "exponents.png", "record.json", "layers.txt"


def check_output(out: Path) -> None:
    """Say before the training what would fail after it: a file in the way, a read-only folder, no matplotlib."""
    check_folder(out)
    new_figure(1, 1)


def check_folder(out: Path) -> None:
    """Refuse a folder that is a file, or that cannot be written to or made, by making one for a moment."""
    if out.exists() and not out.is_dir():
        raise ArgumentError(f"--out {out} is a file; choose a folder, which may not exist yet")
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".fmtsim-", dir=existing)).rmdir()
    except OSError:  # permissions do not say it all: there are read-only disks and /proc
        raise ArgumentError(f"--out {out}: {existing} is not a folder one can write to; choose another") from None


def write_artifacts(out: Path, record: Mapping[str, Any], baseline: Run, simulated: Run) -> list[Path]:
    """Write pictures, record and table of a comparison to a folder; return their paths."""
    names = (LOSS, EXPONENTS, RECORD, LAYERS)
    return write_folder(out, names, lambda folder: _write(folder, record, baseline, simulated))


def write_folder(out: Path, names: Sequence[str], fill: Callable[[Path], None]) -> list[Path]:
    """Let ``fill`` write files to a temporary folder and move them to ``out``; return their paths.

    The temporary folder lies in ``out`` where that exists (its parent may be read-only), else beside it. Those of
    ``names`` are replaced, or removed where ``fill`` writes no such file; other files in ``out`` are left alone.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".fmtsim-", dir=out if out.exists() else out.parent))
    try:
        fill(folder)
        folder.chmod(0o755)  # mkdtemp's folders are private
        written = sorted(path.name for path in folder.iterdir())
        if not out.exists():
            folder.replace(out)
        else:
            for name in names:
                if name in written:
                    (folder / name).replace(out / name)
                else:
                    (out / name).unlink(missing_ok=True)  # of an earlier run
        return [out / name for name in written]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def about(config: TrainConfig, corpus: Corpus, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every record begins with: versions, machine, options and text."""
    schemes = {name: getattr(config, name).to_dict() for name in ("simulated", "baseline")}
    return {
        "fmtsim": fmtsim.__version__,
        "torch": torch.__version__,
        "machine": {"processor": platform.processor() or platform.machine(), **machine},
        "config": asdict(config) | schemes,
        "corpus": {name: getattr(corpus, name) for name in ("name", "bytes", "files", "truncated")},
    }


def make_record(config: TrainConfig, corpus: Corpus, baseline: Run, simulated: Run) -> dict[str, Any]:
    """Return everything about a comparison as JSON types; numbers that are not finite are None."""
    gaps = {name: getattr(simulated, name) - getattr(baseline, name) for name in ("final_loss", "validation")}
    return {
        **about(config, corpus, {"threads": torch.get_num_threads()}),
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


def _write(folder: Path, record: Mapping[str, Any], baseline: Run, simulated: Run) -> None:
    title = f"GPT on {record['corpus']['name']}: {simulated.label} against {baseline.label}"
    curves = {f"baseline: {baseline.label}": baseline.losses, f"simulated: {simulated.label}": simulated.losses}
    plot_loss(curves, folder / LOSS, title=title)
    (folder / RECORD).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    parts = [title]
    for run in (baseline, simulated):
        if run.stats is None:
            continue
        parts.append(f"{run.label}: operands in step {run.observed}\n\n{run.stats}\n\n{run.report}")
    (folder / LAYERS).write_text("\n\n".join(parts) + "\n")
    if simulated.stats is not None and simulated.stats.layers:
        order = ("x_f", "w_f", "g_d", "x_w", "w_d", "g_w")
        totals = by_operand(simulated.stats)
        names = [*(name for name in order if name in totals), *(name for name in totals if name not in order)]
        shown = {f"{name}, {operand_in_words(name)}": totals[name] for name in names}
        plot_exponents(shown, folder / EXPONENTS, title=f"{simulated.label}: all layers, step {simulated.observed}")


def _run_record(run: Run) -> dict[str, Any]:
    names = ("label", "stopped", "nonfinite", "skipped", "loss_scale", "guesses")
    return {name: getattr(run, name) for name in names} | {
        "losses": [_finite(loss) for loss in run.losses],
        "final_loss": _finite(run.final_loss),
        "validation": _finite(run.validation),
        "seconds": round(run.seconds, 3),
        "observed_step": run.observed or None,
        "layers": None if run.stats is None else run.stats.to_dict(),
        "report": None if run.report is None else [asdict(row) for row in run.report.rows],
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
