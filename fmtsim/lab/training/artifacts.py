# SPDX-License-Identifier: Apache-2.0
"""What a comparison, or ``fmtsim train --check native``, leaves behind: report, JSON record, table; all or nothing."""

import json
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fmtsim
from fmtsim.formats.interop import dtype_name
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.gemm.products.native import card_description
from fmtsim.gemm.targets.target import get_target
from fmtsim.lab.analysis.page import write_page
from fmtsim.lab.training.checkpoint import Checkpoint
from fmtsim.lab.training.corpus import Corpus
from fmtsim.lab.training.lockstep import HEAD_FORMAT, Lockstep, Mismatch, emulates_head
from fmtsim.lab.training.models import TITLES, source_digest
from fmtsim.lab.training.run import Run, finite
from fmtsim.lab.training.schemes import TrainConfig
from fmtsim.lab.training.verdict import verdict
from fmtsim.spec.call import GemmCall
from fmtsim.spec.gemm_spec import GemmSpec, record_to_dict
from fmtsim.support.files import Content, write_folder

REPORT, RECORD, LAYERS = "report.html", "record.json", "layers.txt"
CHECKPOINT = "checkpoint.safetensors"  # of an unfinished comparison


def write_artifacts(out: Path, record: Mapping[str, Any], baseline: Run, simulated: Run) -> list[Path]:
    """Write report, record and table of a comparison to a folder, and remove its checkpoint; return their paths."""
    return write_folder(out, {**_contents(record, baseline, simulated), CHECKPOINT: None})


def write_unfinished(
    out: Path, config: TrainConfig, corpus: Corpus, checkpoint: Checkpoint, started: Mapping[str, Any] | None = None
) -> str | None:
    """Write the report of what there is of a comparison that was interrupted; return in words where it is, if any."""
    runs = checkpoint.begun
    if not any(run.losses for run in runs):
        return None
    runs[-1].guesses = list(dict.fromkeys(checkpoint.guesses))
    which = ("baseline", "simulated")[len(runs) - 1]
    at = f"after step {len(runs[-1].losses)} of {config.steps} of the {which} run"
    about = settings(config, corpus) | {"ran": as_it_ran(config, runs, started)}
    page = _page(about, runs, [f"Interrupted {at}: this is what there is, without held-out losses."])
    write_folder(out, {REPORT: page})
    return f"{out / REPORT} shows what there is, {at}"


def about(config: TrainConfig, corpus: Corpus, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every record begins with: versions, machine, options and text."""
    digest = source_digest(config.architecture)
    settings = asdict(config) | {name: getattr(config, name).to_dict() for name in ("simulated", "baseline")}
    return {
        "fmtsim": fmtsim.__version__,
        "torch": torch.__version__,
        "machine": {"processor": platform.processor() or platform.machine(), **machine},
        "config": settings | ({} if digest is None else {"architecture_sha256": digest}),
        "corpus": {name: getattr(corpus, name) for name in ("name", "bytes", "files", "truncated", "sha256")},
    }


def settings(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """Return what a comparison's record begins with, which decides its bits."""
    return about(config, corpus, {"threads": torch.get_num_threads()})


def make_record(
    config: TrainConfig, corpus: Corpus, baseline: Run, simulated: Run, started: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return everything about a comparison as JSON types; numbers that are not finite are None.

    ``started`` says when and by which command line.
    """
    gaps = {name: getattr(simulated, name) - getattr(baseline, name) for name in ("final_loss", "validation")}
    record = {
        **settings(config, corpus), "ran": as_it_ran(config, (baseline, simulated), started),
        "baseline": _run_record(baseline), "simulated": _run_record(simulated),
        "gap": {name: finite(gap) for name, gap in gaps.items()},
    }  # fmt: skip
    return record | {"verdict": verdict(record)}


def as_it_ran(config: TrainConfig, runs: Sequence[Run], started: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what ran, every default filled in: command, duration, parameters, and how each run multiplies."""
    took = {run.label: f"{run.seconds:.1f} s, {len(run.losses)} of {config.steps} steps" for run in runs}
    facts = {**(started or {}), "duration": took, "parameters": f"{runs[0].parameters:,}"}
    for name, scheme in (("baseline", config.baseline), ("simulated", config.simulated)):
        linear = scheme.linear_config() if scheme.recipe is None else scheme.recipe.linear or LinearConfig()
        linear = linear.on(**scheme.machine)
        facts[name] = {
            "recipe": "none" if scheme.recipe is None else scheme.recipe.name,
            "formats": str(linear.on()), "scaling": scheme.scaling_in_force,
            "target": linear.fprop.machine.removeprefix("on ") or "none: products of float32",
            "exceptions": [] if scheme.recipe is None else [str(rule) for rule in scheme.recipe.rules],
            "autocast": scheme.autocast or "none", "optimizer": str(scheme.states),
            "gradients reduced by": scheme.reduced_by,
        }  # fmt: skip
    summaries = [run.report.summary for run in runs if run.report is not None]
    return facts | ({"coverage": summaries[-1]} if summaries else {})


def _contents(record: Mapping[str, Any], baseline: Run, simulated: Run) -> dict[str, Content | None]:
    parts = [f"{_title(record)}: {simulated.label} against {baseline.label}"]
    for run in (baseline, simulated):
        if run.stats is not None:
            steps = ", ".join(map(str, run.stats.history))
            parts.append(f"{run.label}: operands in steps {steps}\n\n{run.stats}\n\n{run.report}")
    about = {key: value for key, value in record.items() if key not in ("baseline", "simulated", "gap", "verdict")}
    held_out = {f"held-out loss, {run.label}": run.validation for run in (baseline, simulated)}
    return {
        REPORT: _page({**about, **held_out}, (baseline, simulated)),
        LAYERS: "\n\n".join(parts) + "\n",
        RECORD: json.dumps(record, indent=1, allow_nan=False) + "\n",
    }


def _page(about: Mapping[str, Any], runs: Sequence[Run], notes: Sequence[str] = ()) -> str:
    """Return the report of the runs that there are, the baseline first; the last one's operands are shown."""
    names = [f"{name}: {run.label}" for name, run in zip(("baseline", "simulated"), runs, strict=False)]
    config = dict(about["config"])
    for name in ("baseline", "simulated"):  # what was not set took a default, which "ran" has
        config[name] = {key: value for key, value in config[name].items() if value is not None}
    last, records = runs[-1], dict(zip(("baseline", "simulated"), map(_run_record, runs), strict=False))
    remarks = [*notes, *(f"{run.label}: stopped, {run.stopped}" for run in runs if run.stopped)]
    if last.nonfinite:
        remarks.append(f"Steps with gradients that were not finite: {last.nonfinite}, skipped: {last.skipped}")
    if any(run.stats is not None for run in runs[:-1]):
        remarks.append(
            f"Heatmaps and exponents are of {last.label}; those of the baseline are in {LAYERS} and {RECORD}"
        )
    remarks += last.report.notes if last.report is not None else ()
    if last.guesses:
        remarks.append(
            f"Products whose accumulation order was guessed: {len(last.guesses)}. The first: {last.guesses[0]}"
        )
    return write_page(
        None, title=f"{_title(about)}: {' against '.join(run.label for run in reversed(runs))}",
        curves=dict(zip(names, (run.losses for run in runs), strict=True)), loss_unit="nats per byte",
        observation=last.stats, coverage=None if last.report is None else last.report.coverage,
        configuration={"ran": about["ran"], **about, "config": config}, notes=remarks, verdict=verdict(records),
        attribution=last.costs,
    )  # fmt: skip


def _title(about: Mapping[str, Any]) -> str:
    architecture = about["config"]["architecture"]
    return f"{TITLES.get(architecture, architecture)} on {about['corpus']['name']}"


def _run_record(run: Run) -> dict[str, Any]:
    names = ("label", "stopped", "nonfinite", "skipped", "loss_scale", "guesses", "parameters", "costs")
    observed = None if run.stats is None else run.stats.to_dict()
    system = ("optimizer", "state_bytes", "ranks", "reduction", "gathered")
    return {name: getattr(run, name) for name in (*names, *system)} | {
        "losses": [finite(loss) for loss in run.losses],
        "final_loss": finite(run.final_loss),
        "validation": finite(run.validation),
        "seconds": round(run.seconds, 3),
        "layers": None if observed is None else observed["layers"],
        "history": None if observed is None else observed["history"],
        "report": None if run.report is None else [asdict(row) for row in run.report.rows],
        "summary": None if run.report is None else run.report.summary,
    }


CHECK_RECORD, CHECK_TEXT = "check.json", "check.txt"


def make_check_record(config: TrainConfig, corpus: Corpus, result: Lockstep) -> dict[str, Any]:
    """Return everything about a run in lockstep as JSON types."""
    target = None if config.simulated.target is None else get_target(config.simulated.target)
    timed = (*result.labels, "optimizer and comparison")
    record = about(config, corpus, card_description(config.device))
    record["config"]["head"] = HEAD_FORMAT if emulates_head(config) else "high precision or the recipe's"
    return record | {
        "target": None if target is None else {"name": target.name, "library": target.library},
        "sides": list(result.labels), "optimizer": str(config.simulated.states), "parameters": result.parameters,
        "steps": result.steps, "equal": result.equal, "numbers_compared": result.compared,
        "mismatch": None if result.mismatch is None else _mismatch(result.mismatch), "stopped": result.stopped,
        "losses": result.losses,
        "seconds": {name: round(taken, 3) for name, taken in zip(timed, result.seconds, strict=True)},
        "weights_sha256": list(result.digest), "products": [_product(call, spec) for call, spec in result.products],
        "guesses": result.guesses,
    }  # fmt: skip


def check_text(record: dict[str, Any]) -> str:
    """Return a record as a text for people."""
    config = record["config"]
    scheme, model = config["simulated"], config["model"]
    machine = ", ".join(str(value) for value in record["machine"].values() if value)
    target = (record["target"] or {"name": "none"})["name"]
    fast = {(False, False): "slow", (True, False): "fast forward, slow backward", (True, True): "fast"}
    if scheme["recipe"] is not None:
        products = {"recipe": scheme["recipe"]["name"]}
    else:
        products = {"formats": f"{scheme['format']}, gradients {scheme['grad_format'] or 'as usual beside it'}",
                    "gemm": fast[scheme["fast_accum"], scheme["fast_backward"]]}  # fmt: skip
    rows = {
        "result": _verdict(record),
        "sides": f"{' against '.join(record['sides'])}; target {target}",
        "machine": f"{machine}, torch {record['torch']}",
        "model": f"{record['parameters']:,} parameters: " + ", ".join(f"{name} {size}" for name, size in model.items()),
        "batch": f"{config['batch_size']} windows, lr {config['lr']}, seed {config['seed']}"
        + (f", {config['ranks']} ranks, gradients by {scheme['reduction']}" if config["ranks"] > 1 else ""),
        "optimizer": record["optimizer"],
        **products,
        "head": f"{config['head']}; attention in {scheme['autocast'] or 'float32'}, the same code on both sides",
        "compared": f"{record['numbers_compared']:,} numbers: every loss, gradient and weight of every step",
        "losses": f"{record['losses'][0]:.4f} to {record['losses'][-1]:.4f}" if record["losses"] else "none",
        "weights": ", ".join(f"SHA-256 {code[:16]}" for code in record["weights_sha256"]),
        "plans": _bases(record),
        "time": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in record["seconds"].items()),
    }
    lines = [f"{name:<9} {text}" for name, text in rows.items()]
    lines += ["", "products:", *(f"  {product['text']}" for product in record["products"])]
    return "\n".join(lines + [f"guess: {guess}" for guess in record["guesses"]])


def _verdict(record: dict[str, Any]) -> str:
    if record["mismatch"] is not None:
        return f"DIFFERENT at {record['mismatch']['text']}"
    agree = f"no bit differs after {record['steps']:,} steps"
    if record["stopped"] is None:
        return agree
    return f"{agree}, then {record['stopped']}" if record["equal"] else f"stopped: {record['stopped']}"


def _bases(record: dict[str, Any]) -> str:
    bases = Counter(product["basis"] for product in record["products"])
    return ", ".join(f"{count} {basis}" for basis, count in sorted(bases.items())) or "none asked"


def write_check(out: Path, record: dict[str, Any], text: str, dump: Callable[[Any], str]) -> list[Path]:
    """Write both files to a folder, all or nothing; ``dump`` makes text of a record."""
    return write_folder(out, {CHECK_RECORD: dump(record) + "\n", CHECK_TEXT: text + "\n"})


def _mismatch(mismatch: Mismatch) -> dict[str, Any]:
    return {
        "step": mismatch.step, "kind": mismatch.kind, "tensor": mismatch.tensor, "product": mismatch.product,
        "text": str(mismatch), **mismatch.comparison.to_dict(),
    }  # fmt: skip


def _product(call: GemmCall, found: GemmSpec) -> dict[str, Any]:
    out = dtype_name(call.out)
    fast = f", fast_accum={call.fast_accum}" if call.operation == "scaled_mm" else ""
    layouts = f"{call.a_layout} x {call.b_layout}"
    return {
        "text": f"{call.operation} [{call.m}, {call.k}] {call.a} x [{call.k}, {call.n}] {call.b} -> {out}{fast}, "
        f"{layouts}, split {found.plan.split}: {found.basis}",
        "basis": found.basis,
        "unit": found.unit,
        "plan": record_to_dict(found.plan),
    }
