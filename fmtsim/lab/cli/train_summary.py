# SPDX-License-Identifier: Apache-2.0
"""What ``fmtsim train`` prints at its end."""

import math
from typing import Any

from fmtsim.formats.registry import get_format
from fmtsim.lab.analysis.losses import badness
from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.analysis.stats import OperandStats, in_order, operand_in_words
from fmtsim.lab.cli.output import format_table
from fmtsim.lab.training.run import Run


def summary(record: dict[str, Any], baseline: Run, simulated: Run) -> str:
    """Return what a reader wants to know first: both losses, their gap, and where bits were lost."""
    corpus = record["corpus"]
    cut = ", cut at the limit" if corpus["truncated"] else ""
    runs = (("baseline", baseline), ("simulated", simulated))
    rows = [(name, r.label, _loss(r.final_loss), _loss(r.validation), f"{r.seconds:.1f}") for name, r in runs]
    gap = (simulated.final_loss - baseline.final_loss, simulated.validation - baseline.validation)
    rows.append(("gap", "", _loss(gap[0], "+"), _loss(gap[1], "+"), ""))
    header = ("run", "precision", "train loss", "held-out loss", "seconds")
    size = f"{corpus['bytes'] / 1e6:.1f} MB" if corpus["bytes"] >= 1e5 else f"{corpus['bytes']:,} bytes"
    files = f"{corpus['files']} file{'' if corpus['files'] == 1 else 's'}"
    parts = [
        f"text: {corpus['name']}, {size} in {files}{cut}",
        format_table(header, rows, left=(0, 1)),
        *(f"{run.label}: stopped, {run.stopped}" for run in (baseline, simulated) if run.stopped),
        "(losses in nats per byte; train loss is the mean of the last tenth of the steps)",
        *_system(baseline, simulated),
    ]
    if simulated.nonfinite:
        skipped = f", {simulated.skipped} of them skipped; the loss ended at a scale of {simulated.loss_scale:g}"
        parts.append(f"steps with gradients that were not finite: {simulated.nonfinite}" + (
            skipped if simulated.skipped else ", all of them taken"))  # fmt: skip
    if simulated.stats is not None and simulated.stats.layers:
        parts += ["", _lost_bits(simulated)]
    if simulated.guesses:
        parts += ["", _guessed(simulated.guesses)]
    return "\n".join(parts)


def _system(baseline: Run, simulated: Run) -> list[str]:
    """Return lines about optimizers, reductions and gathered weights, where these are not the baseline's."""
    lines = []
    if simulated.optimizer != baseline.optimizer:
        kept = [f"{run.optimizer}, {run.state_bytes:.2f} bytes a parameter" for run in (simulated, baseline)]
        lines.append(f"weights and optimizer states: {kept[0]} (baseline: {kept[1]})")
    if simulated.reduction or baseline.reduction:
        lines.append(f"gradients: {simulated.reduction} (baseline: {baseline.reduction.partition(' (')[0]})")
    if simulated.gathered:
        share = simulated.state_bytes / simulated.ranks + get_format(simulated.gathered).bits / 8
        lines.append(
            f"weights: ranks share them and the states out and gather weights in {simulated.gathered}, {share:.2f} "
            "bytes a parameter on each; the bits are those of whole ones"
        )
    return lines


def _guessed(guesses: list[str]) -> str:
    """Return what a reader should know about plans that are guesses: how many, one of them, and what to do."""
    first = guesses[0].partition(";")[0]
    many = len(guesses) > 1
    others = f" (and {len(guesses) - 1} other products, in record.json)" if many else ""
    return (
        f"{first}{others}: {'their' if many else 'its'} accumulation order was guessed.\n"
        "Record such calls on the machine and name the plan file as --target, give an order as --plan, or take "
        "--unit for the arithmetic alone."
    )


def _loss(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if math.isfinite(value) else "-"


def _by_operand(stats: Observation) -> dict[str, OperandStats]:
    """Add up the statistics of all layers for each operand."""
    total: dict[str, OperandStats] = {}
    for operands in stats.layers.values():
        for name, s in operands.items():
            total.setdefault(name, OperandStats()).merge(s)
    return {name: total[name] for name in in_order(total)}


def _lost_bits(run: Run) -> str:
    rows = [
        (operand, operand_in_words(operand), s.format, f"{s.underflow_percent:.2f}", f"{s.saturation_percent:.3f}",
         f"{s.sqnr_db:.1f}")
        for operand, s in _by_operand(run.stats).items()  # type: ignore[arg-type]  # summary checked it
    ]  # fmt: skip
    header = ("operand", "of", "format", "underflow %", "saturation %", "SQNR dB")
    assert run.stats is not None
    looks = len(run.stats.history)
    layer, operand, worst = max(
        ((layer, name, s) for layer, operands in run.stats.layers.items() for name, s in operands.items()),
        key=lambda item: (badness(item[2], "underflow") + item[2].saturation_percent, -item[2].sqnr_db),
    )
    return (
        f"where bits were lost in {looks} observed step{'s' * (looks > 1)}, all layers together (each: report.html)\n"
        f"{format_table(header, rows, left=(0, 1, 2))}\n"
        f"hardest hit: {operand} of {layer}, {worst.underflow_percent:.1f} % underflow, "
        f"{worst.saturation_percent:.2g} % saturation, SQNR {worst.sqnr_db:.1f} dB"
    )
