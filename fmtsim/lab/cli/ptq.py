# SPDX-License-Identifier: Apache-2.0
"""``fmtsim ptq``: quantise a trained model, and say what that costs in loss."""

import argparse
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import torch

from fmtsim.lab.cli.model_options import load_model, machine_given
from fmtsim.lab.cli.options import check_positive
from fmtsim.lab.cli.output import answer, format_table, json_text, origin
from fmtsim.lab.search.switching import relative_noise
from fmtsim.lab.training.loading import Loaded
from fmtsim.ptq import get_ptq_recipe, list_ptq_recipes, ptq, ptq_report, ptq_state
from fmtsim.ptq.calibrate import call, evaluating
from fmtsim.ptq.export import export
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import check_folder, write_folder

_EXPORTS = {"compressed-tensors": ".", "torchao": "model.safetensors", "gguf": "model.gguf"}


def run(arguments: argparse.Namespace) -> int:
    """Quantise, measure before and after, and write what ``--out`` asks for; Ctrl-C writes nothing."""
    if arguments.scheme == "list":
        rows = [(name, get_ptq_recipe(name).source) for name in list_ptq_recipes()]
        print(format_table(("scheme", "source"), rows, left=(0, 1)))
        return 0
    if arguments.model is None:
        raise ArgumentError("--model is missing; fmtsim ptq --help shows what is allowed")
    check_positive(arguments, "batches")
    scheme, machine = get_ptq_recipe(arguments.scheme), machine_given(arguments)
    out = None if arguments.out is None else Path(arguments.out).expanduser()
    if out is not None:
        check_folder(out)
    elif arguments.export is not None:
        raise ArgumentError(f"--export {arguments.export} without --out; name the folder that it goes to")
    loaded = load_model(arguments, count=arguments.batches, held_out=True)
    loss = loaded.measured()
    exact = _outputs(loaded) if loss is None else []
    ptq(loaded.model, scheme, [s.batch for s in loaded.samples], progress=not arguments.quiet, **machine)
    report = ptq_report(loaded.model)
    record: dict[str, Any] = {"model": loaded.name, "data": loaded.data, "loss_unit": loaded.unit}
    if loss is None:
        record["output_noise"] = _noise(_outputs(loaded), exact)
    else:
        record["loss"] = {"exact": loss, "quantised": loaded.measured()}
    record |= {"report": dataclasses.asdict(report), "files": []}
    if out is not None:
        record["files"] = _write(out, loaded, {**origin(), **record})
        if arguments.export is not None:
            found = export(loaded.model, out / _EXPORTS[arguments.export], arguments.export)
            record["files"] += map(str, found.files)
    wrote = [f"wrote {', '.join(record['files'])}"] if out is not None else []
    answer(arguments, record, lambda: "\n".join([str(report), "", *_found(loaded, record), *wrote]))
    return 0


def _outputs(loaded: Loaded) -> list[Any]:
    """Return what the model makes of the held-out batches."""
    with evaluating(loaded.model), torch.no_grad():
        return [call(loaded.model, sample.batch, i, kind="batch") for i, sample in enumerate(loaded.held_out)]


def _noise(outputs: list[Any], exact: list[Any]) -> float:
    return sum(map(relative_noise, outputs, exact)) / len(exact)


def _found(loaded: Loaded, record: dict[str, Any]) -> list[str]:
    """Return which batches were run, and what quantisation changed there."""
    apart = loaded.held_out is not loaded.samples
    where = f"{len(loaded.held_out)} batches that were not calibrated on" if apart else "the batch of the calibration"
    lines = [f"calibrated on {loaded.data}"]
    if "output_noise" in record:
        return [
            *lines,
            f"squared error of the outputs relative to their squares, on {where}: {record['output_noise']:.3g}",
        ]
    before, after = record["loss"].values()
    lines.append(
        f"loss on {where}: {before:.5g} before, {after:.5g} after ({after - before:+.2g}) {loaded.unit}".rstrip()
    )
    if loaded.unit:
        each = loaded.unit.replace("nats", "perplexity")
        lines.append(f"{each}: {_perplexity(before):.5g} before, {_perplexity(after):.5g} after")
    return lines


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else loss


def _write(out: Path, loaded: Loaded, record: dict[str, Any]) -> list[str]:
    """Write the state that ``fmtsim.load_ptq`` takes, the scheme and the report."""
    state, content = ptq_state(loaded.model), io.BytesIO()
    torch.save(state, content)
    scheme = json.dumps(state["recipe"], indent=2) + "\n"
    paths = write_folder(
        out, {"model.pt": content.getvalue(), "scheme.json": scheme, "report.json": json_text(record) + "\n"}
    )
    return list(map(str, paths))
