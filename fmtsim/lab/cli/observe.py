# SPDX-License-Identifier: Apache-2.0
"""``fmtsim observe``: what formats would lose of a model's operands, forward and backward."""

import argparse
import math
from pathlib import Path

import torch

from fmtsim.lab.analysis.observe import ModelObservation, observe
from fmtsim.lab.cli.model_options import configuration, file_given, formats_given, load_plain
from fmtsim.lab.cli.options import check_positive
from fmtsim.lab.cli.output import answer
from fmtsim.lab.training.loading import Loaded
from fmtsim.ptq.calibrate import call
from fmtsim.support.errors import ArgumentError
from fmtsim.support.progress import Progress, make_progress


def run(arguments: argparse.Namespace) -> int:
    """Run the batches and print the operands that lose most; Ctrl-C leaves the report of the steps before it."""
    check_positive(arguments, "steps", "every", "worst")
    if arguments.lr is not None and not 0 < arguments.lr < math.inf:
        raise ArgumentError(f"--lr {arguments.lr:g} is not possible; choose a finite number above 0")
    formats, path = formats_given(arguments), file_given(arguments, "report", ".html")
    loaded = load_plain(arguments, formats, count=arguments.steps)
    seen, losses = observe(loaded.model, every=arguments.every, **formats), list[float]()
    try:
        with make_progress(not arguments.quiet, verb="observe") as show:
            show.stage("steps", len(loaded.samples))
            _run_steps(loaded, seen, losses, arguments, show)
    except KeyboardInterrupt:
        ran, left = f"after {len(losses)} of {len(loaded.samples)} steps", "nothing was written"
        if path is not None and losses:
            _write(path, arguments, loaded, seen, losses, f"Interrupted {ran}")
            left = f"{path} has them"
        raise KeyboardInterrupt(f"{ran}; {left}") from None
    if path is not None:
        _write(path, arguments, loaded, seen, losses)
    worst = seen.worst(arguments.worst, arguments.by)
    record = {
        "model": loaded.name, "data": loaded.data, "losses": losses, "loss_unit": loaded.unit, **seen.to_dict(),
        "worst": [{"layer": layer, "operand": operand, **s.to_dict()} for layer, operand, s in worst],
        "notes": [*_notes(loaded, seen, losses), *seen.notes], "report": None if path is None else str(path),
    }  # fmt: skip
    wrote = [] if path is None else [f"wrote {path}"]
    answer(arguments, record, lambda: "\n".join([str(worst), *record["notes"], *wrote]))
    return 0


def _run_steps(
    loaded: Loaded, seen: ModelObservation, losses: list[float], arguments: argparse.Namespace, show: Progress
) -> None:  # fmt: skip
    """Run the batches forward and backward, and add the loss of each; train where a rate is given."""
    model = loaded.model
    if not any(p.requires_grad for p in model.parameters()):  # a model that is used, not trained
        model.requires_grad_()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = None if arguments.lr is None else torch.optim.AdamW(trained, lr=arguments.lr)
    with torch.random.fork_rng({p.device for p in trained if p.device.type == "cuda"}), seen:
        torch.manual_seed(arguments.seed)
        for i, sample in enumerate(loaded.samples):
            loss = loaded.loss(sample, call(model, sample.batch, i, kind="batch"))
            if not loss.requires_grad:
                raise ArgumentError(f"--model {loaded.name}: its loss depends on no parameter: there is no gradient")
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
            losses.append(loss.item())
            show.step(i + 1, f"loss {losses[-1]:.5g}")


def _notes(loaded: Loaded, seen: ModelObservation, losses: list[float]) -> list[str]:
    """Return what ran, and where the loss was no number."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    mean = f"mean loss {sum(finite) / len(finite):.5g} {loaded.unit}".rstrip() if finite else "no loss is finite"
    lost = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    return [
        f"{loaded.data}; {len(losses)} steps, {len(seen.history)} of them observed; {mean}",
        *([] if lost is None else [f"the loss became {losses[lost]} at step {lost + 1}"]),
    ]


def _write(
    path: Path, arguments: argparse.Namespace, loaded: Loaded, seen: ModelObservation, losses: list[float], *notes: str
) -> None:  # fmt: skip
    seen.save_report(
        path, title=f"What {arguments.recipe or arguments.format or 'its formats'} loses of {loaded.name}",
        notes=[*notes, *_notes(loaded, seen, losses)], curves={"loss": losses}, loss_unit=loaded.unit,
        configuration=configuration(arguments),
    )  # fmt: skip
