# SPDX-License-Identifier: Apache-2.0
"""What a comparison shows, in words: is there a gap, which layers and operands to look at, what to try.

All of it is of records as JSON types (``record.json``), so that runs of several folders are judged alike.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fmtsim.lab.analysis.stats import operand_in_words

Words = list[tuple[str, str]]
SEEDS = "Larger than the scatter of seeds?"
# Student's t for both sides together 5 %, by degrees of freedom from 1; beyond, that of 8.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)
_BLOCKS = 10  # of the last half of the steps, whose mean gaps scatter
_NOISE = 0.01  # squared error of a gradient, relative to its square, from which an operand is named before others
_GROWS = 1.0  # percentage points of underflow and saturation that are a trend


class Suspect(NamedTuple):
    """Name an operand to look at, and why."""

    layer: str
    operand: str
    why: str

    def __str__(self) -> str:
        return f"{self.layer}, {self.operand} ({operand_in_words(self.operand)}): {self.why}"


def verdict(record: Mapping[str, Any]) -> Words:
    """Return pairs of a question and its answer for one comparison, or for what there is of one."""
    baseline, simulated = record["baseline"], record.get("simulated")
    if simulated is None or not simulated["losses"]:
        return [("Gap", "not known: the simulated run had not begun")]
    gap, clear = _gap_within(baseline, simulated)
    return [("Gap", gap), (SEEDS, _seeds(clear)), *_next(suspects(simulated), clear, simulated["nonfinite"])]


def _next(found: Sequence[Suspect], clear: bool | None, nonfinite: Any) -> Words:
    names = "; ".join(f"{i}. {one}" for i, one in enumerate(found, 1))
    return [
        ("Where to look first", names or "no operand costs loss, adds noise or loses more with time"),
        ("What to try", _advice(found, clear, nonfinite)),
    ]


def verdict_of_seeds(records: Sequence[Mapping[str, Any]]) -> Words:
    """Return the verdict of runs that differ in their seed alone: the interval of their mean gap, and where to look.

    Operands are those that most seeds name; of as many, what the first seeds name counts.
    """
    gaps = [one["gap"]["final_loss"] for one in records]
    finite = [gap for gap in gaps if gap is not None]
    if len(finite) < len(gaps):
        return [("Gap", f"{len(gaps) - len(finite)} of {len(gaps)} runs stopped before their end")]
    mean, spread = statistics.fmean(finite), statistics.stdev(finite)
    half = _T[min(len(finite) - 2, len(_T) - 1)] * spread / math.sqrt(len(finite))
    clear = abs(mean) > half
    baselines = statistics.stdev(one["baseline"]["final_loss"] for one in records)
    answer = f"{'yes' if clear else 'no'}: the interval has {'no ' if clear else ''}zero in it"
    size = f"{mean:+.4f} ± {half:.4f} nats per byte, the mean of {len(finite)} seeds and its 95 % interval (Student)"
    scatter = f"losses of the baseline itself scatter by {baselines:.4f} from seed to seed (standard deviation)"
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in (one for record in records for one in suspects(record["simulated"])):
        reasons.setdefault((one.layer, one.operand), []).append(one.why)
    order = sorted(reasons, key=lambda name: -len(reasons[name]))[:3]
    found = [Suspect(*name, f"in {len(reasons[name])} of {len(records)} seeds; {reasons[name][0]}") for name in order]
    shared = f"{answer}; {scatter}, gaps less, as both runs of a seed share weights and batches"
    return [("Gap", size), (SEEDS, shared), *_next(found, clear, any(r["simulated"]["nonfinite"] for r in records))]


def _gap_within(baseline: Mapping[str, Any], simulated: Mapping[str, Any]) -> tuple[str, bool | None]:
    """Return the gap in words, and whether it is more than it wanders by within the run; None where that is unknown."""
    if simulated["stopped"]:
        return f"the simulated run did not end: {simulated['stopped']}", True
    pairs = list(zip(simulated["losses"], baseline["losses"], strict=False))
    if any(loss is None for pair in pairs for loss in pair):
        return "not known: a loss of the baseline is not finite", None
    if all(a == b for a, b in pairs):
        return f"none: all {len(pairs)} losses are equal, bit for bit", False
    gaps = [a - b for a, b in pairs]
    mean = statistics.fmean(gaps[-max(1, len(gaps) // 10) :])
    said = f"{mean:+.4f} nats per byte over the last tenth of {len(gaps)} steps"
    half = gaps[len(gaps) // 2 :]
    size = len(half) // _BLOCKS
    if size < 2:
        return f"{said}; too few steps to tell that from chance", None
    means = [statistics.fmean(half[i * size : (i + 1) * size]) for i in range(_BLOCKS)]
    wander = 2 * statistics.stdev(means)
    clear = abs(mean) > wander
    how = f"two standard deviations of {_BLOCKS} means of {size} steps in the last half"
    return f"{said}, {'more' if clear else 'no more'} than the {wander:.4f} by which it wanders ({how})", clear


def _seeds(clear: bool | None) -> str:
    known = "one seed does not tell; train with other --seed and --out, and call fmtsim report on all folders"
    if clear is False:
        return f"nothing speaks for it: the gap is within what it wanders by in this run. For certain: {known}"
    return f"not known: {known}"


def suspects(run: Mapping[str, Any], most: int = 3) -> list[Suspect]:
    """Return the operands to look at first: by cost in loss or noise where that was measured, else by their trend.

    SQNR does not count: its floor is the format's, in every layer alike.
    """
    chosen: dict[str, Suspect] = {}
    for one in (*_costly(run.get("costs")), *_growing(run.get("history"))):
        chosen.setdefault(one.layer, one)
    return list(chosen.values())[:most]


def _costly(costs: Mapping[str, Any] | None) -> Iterator[Suspect]:
    """Yield operands whose gradients are noisy, then those that cost loss, the dearest first."""
    rows = [] if costs is None else costs["rows"]
    noisy = [row for row in rows if (row["gradient_noise"] or 0.0) >= _NOISE]
    for row in sorted(noisy, key=lambda row: -row["gradient_noise"]):
        share = f"{100 * row['gradient_noise']:.2g} %"
        yield Suspect(row["layer"], row["operand"], f"its rounding adds noise of {share} of the gradient's square")
    dear = [row for row in rows if (row["loss"] or 0.0) > 0]
    for row in sorted(dear, key=lambda row: -row["loss"]):
        yield Suspect(row["layer"], row["operand"], f"its rounding costs {row['loss']:.2g} nats of a batch's loss")


def _growing(history: Mapping[Any, Any] | None) -> Iterator[Suspect]:
    """Yield operands of which more underflows or saturates in the last third of observed steps than in the first."""
    steps = list((history or {}).values())
    third = len(steps) // 3
    if not third:
        return
    grown: list[tuple[float, Suspect]] = []
    for layer, operands in steps[-1].items():
        for operand in operands:
            for name in ("underflow", "saturation"):
                values = [step.get(layer, {}).get(operand, {}).get(f"{name}_percent") for step in steps]
                first, last = (_mean(part) for part in (values[:third], values[-third:]))
                if first is not None and last is not None and last - first >= _GROWS:
                    why = f"its {name} grew from {first:.2g} to {last:.2g} %"
                    grown.append((last - first, Suspect(layer, operand, why)))
    yield from (one for _, one in sorted(grown, key=lambda pair: -pair[0]))


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def _advice(found: Sequence[Suspect], clear: bool | None, nonfinite: Any) -> str:
    if clear is False:
        return "fewer bits, or more steps: gaps of few steps may open later"
    advice = ["loss scaling, or gradients of a larger range (--grad-format e5m2)"] if nonfinite else []
    if any("saturation" in one.why for one in found):
        advice.append("a format with a larger range, or scales from current maxima (--scaling tensor or tile128)")
    if any(one.operand.startswith("g") for one in found):
        advice.append("stochastic rounding of gradients (--grad-rounding stochastic), or finer scales of theirs")
    if any(not one.operand.startswith("g") for one in found):
        advice.append("finer scales (--scaling block32)")
    if found:
        layers = " and ".join(f'Rule(name="^{one.layer}$")' for one in found)
        advice.append(f"these layers in high precision: fmtsim.convert(rules=) with {layers}")
    return "; ".join(advice) or "another seed first, then finer scales (--scaling block32)"
