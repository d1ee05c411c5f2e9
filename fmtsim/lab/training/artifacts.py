# SPDX-License-Identifier: Apache-2.0
"""What a comparison, or ``fmtsim train --check native``, leaves behind: report, JSON record, table; all or nothing."""

import json
import math
import platform
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fmtsim
from fmtsim.formats.interop import dtype_name
from fmtsim.gemm.layers.config import PRODUCTS, LinearConfig
from fmtsim.gemm.products.native import card_description
from fmtsim.gemm.targets.target import get_target
from fmtsim.lab.analysis.page import write_page
from fmtsim.lab.analysis.page.page import flat
from fmtsim.lab.analysis.stats import operand_in_words
from fmtsim.lab.training.corpus import Corpus
from fmtsim.lab.training.lockstep import HEAD_FORMAT, Lockstep, emulates_head
from fmtsim.lab.training.run import Checkpoint, Run, finite
from fmtsim.lab.training.schemes import TrainConfig
from fmtsim.lab.training.training_models import TITLES, source_digest
from fmtsim.spec.gemm_spec import record_to_dict
from fmtsim.support.errors import ArgumentError, DataError, first_line
from fmtsim.support.files import Content, write_folder
from fmtsim.support.records import parse_json

Words = list[tuple[str, str]]
SEEDS = "Larger than the scatter of seeds?"
LOOK, TRY, MADE = "Where to look first", "What to try", "What it is made of"
# Student's t for both sides together 5 %, by degrees of freedom from 1; beyond, that of 8.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)
_BLOCKS = 10  # of the last half of the steps, whose mean gaps scatter
_LEAST, _MOST = 5e-3, 0.1  # of the loss: one seed tells no smaller step of it from chance, and any larger one
_LEAST_OF_SEEDS = 1e-3  # likewise of several seeds
_SHARE = 0.1  # of a part of the gap: what a forward operand has to cost to be named
_NOISE = 0.01  # squared error of a gradient, relative to its square, from which an operand is named
_LOUD = 0.1  # likewise where the part that it belongs to does not stand out
_PARTS = {
    "operands": "operands and what else the scheme changes",
    "arithmetic": "arithmetic (its products against float32 ones)",
    "optimizer": "optimizer, its states and reductions",
}
_WHOLE = (*_PARTS, *PRODUCTS)  # names that are of no operand


class Step(NamedTuple):
    """One step of the loss: its size in nats, and what it has to exceed to be told from chance, None if not known."""

    size: float
    floor: float | None

    @property
    def clear(self) -> bool | None:
        """Whether it stands out of chance."""
        return None if self.floor is None else abs(self.size) > self.floor


class Suspect(NamedTuple):
    """Name an operand or product to look at, or a part of the scheme (which has no layer), and why."""

    layer: str
    operand: str
    why: str

    def __str__(self) -> str:
        where = f"{self.layer}, {self.operand} ({operand_in_words(self.operand)})" if self.layer else self.operand
        return f"{where}: {self.why}"


def verdict(record: Mapping[str, Any]) -> Words:
    """Return pairs of a question and its answer for one comparison, or for what there is of one."""
    baseline, simulated = record["baseline"], record.get("simulated")
    if simulated is None or not simulated["losses"]:
        return [("Gap", "not known: the simulated run had not begun")]
    gap, whole = _gap_within(baseline, simulated)
    known = "one seed does not tell; train with other --seed and --out, and call fmtsim report on all folders"
    words, steps = [("Gap", gap), (SEEDS, f"not known: {known}")], parts_of(record)
    if whole is not None and whole.size:
        words.insert(1, (MADE, _made_of({part: f"{one.size:+.4f}" for part, one in steps.items()})))
    return words + _next(suspects(simulated, steps), whole and whole.clear, simulated, record.get("ran", {}))


def _made_of(parts: Mapping[str, str]) -> str:
    if len(parts) == 1:
        return f"{_PARTS[next(iter(parts))]}: the runs differ in nothing else"
    sizes = ", ".join(f"{size} {_PARTS[part]}" for part, size in parts.items())
    return f"{sizes}; each measured by training once more without it, one after another"


def parts_of(record: Mapping[str, Any]) -> dict[str, Step]:
    """Return what the gap is made of: the steps from the simulated run to the baseline, one part taken away in each."""
    baseline, simulated = record["baseline"], record["simulated"]
    steps, before = dict[str, Step](), simulated["losses"]
    for part, losses in (simulated.get("parts") or {"operands": None}).items():
        after = baseline["losses"] if losses is None else losses
        steps[part] = _step(before, after)
        before = after
    return steps


def _step(before: Sequence[float | None], after: Sequence[float | None]) -> Step:
    """Return the mean difference over the last tenth of the steps, which chance moves by what it wanders by."""
    # 1. a run that stopped is worse than any other
    if None in before or None in after:
        return Step(math.inf if None not in after else -math.inf if None not in before else math.nan, 0.0)
    gaps: list[float] = [a - b for a, b in zip(before, after, strict=False)]  # type: ignore[operator]
    mean = statistics.fmean(gaps[-max(1, len(gaps) // 10) :])
    # 2. two runs drift apart by chance: four standard deviations of the means of blocks in the last half, of which one
    #    may be an outlier; but chance moves no run by a tenth of its loss
    half, loss = gaps[len(gaps) // 2 :], abs(after[-1] or 0.0)
    size = len(half) // _BLOCKS
    if size < 2:
        return Step(mean, None)
    means = [statistics.fmean(half[i * size : (i + 1) * size]) for i in range(_BLOCKS)]
    usual = sorted(means, key=lambda x: abs(x - statistics.median(means)))[:-1]
    return Step(mean, max(min(4 * statistics.stdev(usual), _MOST * loss), _LEAST * loss))


def _next(found: Sequence[Suspect], clear: bool | None, run: Mapping[str, Any], ran: Mapping[str, Any]) -> Words:
    names = "; ".join(f"{i}. {one}" for i, one in enumerate(found, 1))
    parts, keep = {one.operand for one in found}, layers_to_keep(found)
    gradients = {part for part in parts - set(_WHOLE) if part.startswith("g")}
    command, out = shlex.split(ran.get("command", "fmtsim train")), "fmtsim-train"
    if "--out" in command[:-1]:
        place = command.index("--out")
        out, command = command[place + 1], command[:place] + command[place + 2 :]
    again = shlex.join([*command, "--rules", f"{out}/{RULES}", "--out", f"{out}-rules"])
    advice = {  # and where it is given
        "loss scaling, or gradients of a larger range (--grad-format e5m2)": run["nonfinite"],
        f"another --target: {_narrowest(run)}": parts & {"arithmetic", *PRODUCTS},
        "float32 states and reductions (--state fp32 --reduction fp32)": "optimizer" in parts,
        "stochastic rounding of gradients (--grad-rounding stochastic), or finer scales of theirs": gradients,
        "finer scales (--scaling block32)": parts - set(_WHOLE) - gradients,
        f"{' and '.join(keep)} in high precision: {again}": keep,
    }
    text = "; ".join(text for text, applies in advice.items() if applies) or "another seed first"
    if clear is False and not found:
        text = "fewer bits, or more steps: gaps of few steps may open later"
    return [(LOOK, names or "nothing: no operand, product or state stands out of the scatter"), (TRY, text)]


def layers_to_keep(found: Sequence[Suspect]) -> list[str]:
    """Return the layers whose operands or products are named."""
    return list(dict.fromkeys(one.layer for one in found if one.layer))


def _narrowest(run: Mapping[str, Any]) -> str:
    """Return what of a Datapath loses most, over all observed products."""
    lost: dict[str, list[float]] = {}
    for operand in (one for layer in (run.get("layers") or {}).values() for one in layer.values()):
        for loss, bits in operand.get("bits_lost", {}).items():
            lost.setdefault(loss, []).append(math.inf if bits is None else bits)
    if not lost:
        return "a unit that adds with more bits"
    worst = max(lost, key=lambda loss: statistics.fmean(lost[loss]))
    wider = {"alignment": "more fraction_bits", "accumulator": "a wider accumulator", "output": "a wider output"}
    means = ", ".join(f"{statistics.fmean(bits):z.1f} bits in {loss}" for loss, bits in lost.items())
    return f"{wider[worst]} (products lose {means})"


def verdict_of_seeds(records: Sequence[Mapping[str, Any]]) -> Words:
    """Return the verdict of runs that differ in their seed alone: the interval of their mean gap, and where to look.

    Operands are those that most seeds name; of as many, what the first seeds name counts.
    """
    gaps = [one["gap"]["final_loss"] for one in records]
    finite = [gap for gap in gaps if gap is not None]
    if len(finite) < len(gaps):
        stopped = [one for one, gap in zip(records, gaps, strict=True) if gap is None]
        found = suspects(stopped[0]["simulated"], parts_of(stopped[0]))
        words = [("Gap", f"{len(stopped)} of {len(gaps)} runs stopped before their end")]
        return words + _next(found, True, stopped[0]["simulated"], stopped[0].get("ran", {}))
    (mean, half), least = _interval(finite), _LEAST_OF_SEEDS * abs(records[0]["baseline"]["final_loss"])
    seeds = [parts_of(one) for one in records]
    # where each seed alone stands out their scatter decides nothing: one of them may be much worse
    alone = {part: all(steps[part].clear and steps[part].size > 0 for steps in seeds) for part in seeds[0]}
    clear = abs(mean) > half or any(alone.values())
    baselines = statistics.stdev(one["baseline"]["final_loss"] for one in records)
    answer = f"{'yes' if clear else 'no'}: the interval has {'no ' if abs(mean) > half else ''}zero in it"
    answer += ", but each seed alone stands out of its scatter" if clear and abs(mean) <= half else ""
    size = f"{mean:+.4f} ± {half:.4f} nats per byte, the mean of {len(finite)} seeds and its 95 % interval (Student)"
    scatter = f"losses of the baseline itself scatter by {baselines:.4f} from seed to seed (standard deviation)"
    # parts likewise: each has a mean and an interval
    parts = {part: _interval([steps[part].size for steps in seeds]) for part in seeds[0]}
    steps = {part: Step(size, least if alone[part] else max(half, least)) for part, (size, half) in parts.items()}
    sizes = _made_of({part: f"{size:+.4f} ± {half:.4f}" for part, (size, half) in parts.items()})
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in (one for record in records for one in suspects(record["simulated"], steps)):
        reasons.setdefault((one.layer, one.operand), []).append(one.why)
    order = sorted(reasons, key=lambda name: -len(reasons[name]))[:3]
    found = [Suspect(*name, f"in {len(reasons[name])} of {len(records)} seeds; {reasons[name][0]}") for name in order]
    shared = f"{answer}; {scatter}, gaps less, as both runs of a seed share weights and batches"
    worst = max((record["simulated"] for record in records), key=lambda run: bool(run["nonfinite"]))
    words = [("Gap", size), (MADE, sizes), (SEEDS, shared)]
    return words + _next(found, clear, worst, records[0].get("ran", {}))


def _interval(sizes: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half its 95 % interval."""
    half = _T[min(len(sizes) - 2, len(_T) - 1)] * statistics.stdev(sizes) / math.sqrt(len(sizes))
    return statistics.fmean(sizes), half


def _gap_within(baseline: Mapping[str, Any], simulated: Mapping[str, Any]) -> tuple[str, Step | None]:
    """Return the gap in words and as a step of the loss; None where a loss of the baseline is not finite."""
    if simulated["stopped"]:
        return f"the simulated run did not end: {simulated['stopped']}", Step(math.inf, 0.0)
    pairs = list(zip(simulated["losses"], baseline["losses"], strict=False))
    if any(loss is None for pair in pairs for loss in pair):
        return "not known: a loss of the baseline is not finite", None
    if all(a == b for a, b in pairs):
        return f"none: all {len(pairs)} losses are equal, bit for bit", Step(0.0, 0.0)
    whole = _step(simulated["losses"], baseline["losses"])
    said = f"{whole.size:+.4f} nats per byte over the last tenth of {len(pairs)} steps, from one seed"
    if whole.floor is None:
        return f"{said}; too few steps to tell that from chance", whole
    how = f"the {whole.floor:.4f} by which it wanders in the last half of this run; other seeds may differ"
    return f"{said}; {'more' if whole.clear else 'no more'} than {how}", whole


def suspects(run: Mapping[str, Any], steps: Mapping[str, Step], most: int = 3) -> list[Suspect]:
    """Return what to look at first: the parts of the gap that stand out of the scatter, the largest first.

    The arithmetic and the optimizer are parts of their own. Then follow their operands and products by cost, those of
    the backward pass by noise of the gradient. SQNR does not count: its floor is the format's, in every layer alike.
    """
    found: list[Suspect] = []
    rows = [] if run.get("costs") is None else run["costs"]["rows"]
    for part, step in sorted(steps.items(), key=lambda item: -item[1].size):
        dear = bool(step.clear) and step.size > 0
        # 1. Its rows, in parts of what makes them stand out: of the part's own size, or of the scatter. Of a part that
        #    stands out also a row that has most of what all have, and one whose noise needs no statistics.
        least = _SHARE * step.size if dear and math.isfinite(step.size) else step.floor
        mine = [row for row in rows if (row["operand"] in PRODUCTS) == (part == "arithmetic")]
        costs = [(row["loss"] or 0.0) if not dear or row.get("kl") is None else row["kl"] for row in mine]
        weighed, half_of_all = [], sum(cost for cost in costs if cost > 0) / 2
        for row, cost in zip(mine, costs, strict=True):
            noise, most_of = row["gradient_noise"] or 0.0, cost > half_of_all and cost > _NOISE * step.size
            if least and (cost >= least or (dear and most_of)):
                moved = "" if row.get("kl") is None else f", and predictions by {row['kl']:.2g} nats (KL)"
                why = f"its rounding moves a batch's loss by {row['loss']:+.2g} nats{moved}"
                weighed.append((cost / least, Suspect(row["layer"], row["operand"], why)))
            elif noise >= (_NOISE if dear else _LOUD) and step.size > 0:
                why = f"its rounding adds noise of {100 * noise:.2g} % of the gradient's square"
                weighed.append((noise / _NOISE, Suspect(row["layer"], row["operand"], why)))
        # 2. The part itself, but for operands that are named.
        machine = next((row["format"] for row in mine if part == "arithmetic"), "on the target")
        what = {"arithmetic": f"products {machine}", "optimizer": run.get("optimizer"), "operands": "all together"}
        size = "it stopped the run" if step.size == math.inf else f"{step.size:+.4f} nats of the loss are its own"
        if dear and not (part == "operands" and weighed):
            found.append(Suspect("", part, f"{what[part]}: {size}"))
        found += [one for _, one in sorted(weighed, key=lambda pair: -pair[0])]
    # 3. The first of each layer; parts have none.
    chosen: dict[str, Suspect] = {}
    for one in found:
        chosen.setdefault(one.layer or one.operand, one)
    return list(chosen.values())[:most]


REPORT, RECORD, LAYERS, RULES = "report.html", "record.json", "layers.txt", "rules.json"
CHECKPOINT = "checkpoint.safetensors"  # of an unfinished comparison


def write_artifacts(out: Path, record: Mapping[str, Any], baseline: Run, simulated: Run) -> list[Path]:
    """Write report, record and table of a comparison to a folder, and remove its checkpoint; return their paths."""
    parts = [f"{_title(record)}: {simulated.label} against {baseline.label}"]
    for run in (baseline, simulated):
        if run.stats is not None:
            steps = ", ".join(map(str, run.stats.history))
            parts.append(f"{run.label}: operands in steps {steps}\n\n{run.stats}\n\n{run.report}")
    about = {key: value for key, value in record.items() if key not in ("baseline", "simulated", "gap", "verdict")}
    held_out = {f"held-out loss, {run.label}": run.validation for run in (baseline, simulated)}
    contents: dict[str, Content | None] = {
        REPORT: _page({**about, **held_out}, (baseline, simulated)), LAYERS: "\n\n".join(parts) + "\n",
        RECORD: json.dumps(record, indent=1, allow_nan=False) + "\n", CHECKPOINT: None, RULES: None,
    }  # fmt: skip
    # rules that leave the named layers in high precision, ahead of those that the run had
    if keep := layers_to_keep(suspects(record["simulated"], parts_of(record))):
        rules = [*({"name": f"^{re.escape(name)}$"} for name in keep), *record["config"]["simulated"]["rules"]]
        contents[RULES] = json.dumps({"rules": rules}, indent=2) + "\n"
    return write_folder(out, contents)


def write_unfinished(
    out: Path, config: TrainConfig, corpus: Corpus, checkpoint: Checkpoint, started: Mapping[str, Any] | None = None
) -> str | None:
    """Write the report of what there is of a comparison that was interrupted; return in words where it is, if any."""
    runs = checkpoint.begun
    if not any(run.losses for run in runs):
        return None
    runs[-1].guesses = list(dict.fromkeys(checkpoint.guesses))
    parts = (f"run without {part}" for part in config.simulated.simpler(config.baseline))
    which = ("baseline run", "simulated run", *parts)[len(runs) - 1]
    at, runs = f"after step {len(runs[-1].losses)} of {config.steps} of the {which}", runs[:2]
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
            "exceptions": [str(rule) for rule in (*scheme.rules, *(scheme.recipe.rules if scheme.recipe else ()))],
            "autocast": scheme.autocast or "none", "optimizer": str(scheme.states),
            "gradients reduced by": scheme.reduced_by,
        }  # fmt: skip
    summaries = [run.report.summary for run in runs if run.report is not None]
    return facts | ({"coverage": summaries[-1]} if summaries else {})


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
        configuration={"ran": about["ran"], **about, "config": config}, notes=remarks,
        verdict=verdict({**records, "ran": about["ran"]}),
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
        "parts": {part: None if of is None else [finite(x) for x in of] for part, of in run.parts.items()},
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
    mismatch, products = result.mismatch, []
    for call, spec in result.products:
        fast = f", fast_accum={call.fast_accum}" if call.operation == "scaled_mm" else ""
        text = f"{call.operation} [{call.m}, {call.k}] {call.a} x [{call.k}, {call.n}] {call.b}"
        order = f"{call.a_layout} x {call.b_layout}, split {spec.plan.split}: {spec.basis}"
        products.append({
            "text": f"{text} -> {dtype_name(call.out)}{fast}, {order}", "basis": spec.basis, "unit": spec.unit,
            "plan": record_to_dict(spec.plan),
        })  # fmt: skip
    return record | {
        "target": None if target is None else {"name": target.name, "library": target.library},
        "sides": list(result.labels), "optimizer": str(config.simulated.states), "parameters": result.parameters,
        "steps": result.steps, "equal": result.equal, "numbers_compared": result.compared,
        "mismatch": None if mismatch is None else {
            "step": mismatch.step, "kind": mismatch.kind, "tensor": mismatch.tensor, "product": mismatch.product,
            "text": str(mismatch), **mismatch.comparison.to_dict(),
        },
        "stopped": result.stopped,
        "losses": result.losses,
        "seconds": {name: round(taken, 3) for name, taken in zip(timed, result.seconds, strict=True)},
        "weights_sha256": list(result.digest), "products": products,
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
    bases = Counter(product["basis"] for product in record["products"])
    result = f"no bit differs after {record['steps']:,} steps"
    if record["mismatch"] is not None:
        result = f"DIFFERENT at {record['mismatch']['text']}"
    elif record["stopped"] is not None:
        result = f"{result}, then {record['stopped']}" if record["equal"] else f"stopped: {record['stopped']}"
    rows = {
        "result": result,
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
        "plans": ", ".join(f"{count} {basis}" for basis, count in sorted(bases.items())) or "none asked",
        "time": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in record["seconds"].items()),
    }
    lines = [f"{name:<9} {text}" for name, text in rows.items()]
    lines += ["", "products:", *(f"  {product['text']}" for product in record["products"])]
    return "\n".join(lines + [f"guess: {guess}" for guess in record["guesses"]])


def write_check(out: Path, record: dict[str, Any], text: str, dump: Callable[[Any], str]) -> list[Path]:
    """Write both files to a folder, all or nothing; ``dump`` makes text of a record."""
    return write_folder(out, {CHECK_RECORD: dump(record) + "\n", CHECK_TEXT: text + "\n"})


Record = Mapping[str, Any]
_OWN = ("ran.command", "ran.date", "ran.duration", "config.seed")  # of each run, whatever is compared


def read_record(folder: Path) -> Record:
    """Return the record of a run.

    Raises:
        DataError: The folder has none, or it is damaged.
    """
    path = folder / RECORD
    try:
        record = parse_json(path.read_text(encoding="utf-8"), nan=True)
        if not all(record[run]["losses"] for run in ("baseline", "simulated")) or not record["ran"]:
            raise ValueError("it has no losses")
    except OSError:
        raise DataError(f"{folder} has no {RECORD}; pass folders that fmtsim train --out wrote to the end") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the record of a run ({first_line(error)}); train it again") from None
    return record  # type: ignore[no-any-return]


def overlay(folders: Sequence[Path]) -> tuple[str, str]:
    """Return a report of several runs, as HTML, and its verdict in lines.

    Curves that are equal have one entry of the legend; each simulated run's gap is to the baseline of its own folder.
    Runs that differ in their seed alone have a verdict together.

    Raises:
        ArgumentError: One folder, or one twice.
        DataError: A folder has no record, or a damaged one.
    """
    if len(set(folders)) < max(2, len(folders)):
        raise ArgumentError(
            f"report lays two or more different runs over each other, not {', '.join(map(str, folders))}; "
            f"the report of a single one is {folders[0] / REPORT}"
        )
    names = [
        folder.resolve().name if len({f.resolve().name for f in folders}) == len(folders) else str(folder)
        for folder in folders
    ]
    records = dict(zip(names, map(read_record, folders), strict=True))
    try:
        curves: dict[str, list[float]] = {}
        against: dict[str, str] = {}
        for run in ("baseline", "simulated"):
            for name, record in records.items():
                label = f"{name} baseline" if run == "baseline" else name
                curves[label] = [math.nan if loss is None else loss for loss in record[run]["losses"]]
                against[label] = f"{name} baseline"
        fields = ("ran", "config", "corpus", "machine", "fmtsim", "torch")
        rows = {name: dict(flat({key: record[key] for key in fields})) for name, record in records.items()}
        differing, equal = dict[str, Any](), dict[str, Any]()
        for key in dict.fromkeys(key for row in rows.values() for key in row):
            values = {name: row.get(key, "-") for name, row in rows.items()}
            (equal if len(set(values.values())) == 1 else differing)[key] = values
        same = {key: next(iter(values.values())) for key, values in equal.items()}
        # Groups of runs that differ in their seed alone.
        groups: dict[Any, dict[str, Record]] = {}
        for name, record in records.items():
            described = tuple(item for item in rows[name].items() if not item[0].startswith(_OWN))
            groups.setdefault(described, {})[name] = record
        told = _table(list(groups.values()))
        page = write_page(
            None, title=" against ".join(names), curves=curves, against=against, loss_unit="nats per byte",
            verdict=told,
            configuration={"differs": differing, "in all": same},
            notes=[f"Heatmaps, exponents and costs of a run are in {REPORT} of its folder"],
        )  # fmt: skip
        return page, "\n".join(": ".join(row[:1] + row[1 if len(row) == 2 else 2 :]) for row in told[1:])
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        places = ", ".join(str(folder / RECORD) for folder in folders)
        raise DataError(
            f"one of {places} is damaged ({type(error).__name__}: {first_line(error)}); train it again"
        ) from error


def _table(groups: Sequence[Mapping[str, Record]]) -> list[tuple[str, ...]]:
    """Return a row for each run, or for runs that differ in their seed alone: target, gap, verdict; then other answers.

    Answers that several rows share stand once.
    """
    rows, others = [("run", "simulated", "gap", "verdict")], dict[tuple[str, str], list[str]]()
    for group in groups:
        seeds = len({record["config"]["seed"] for record in group.values()}) > 1
        for names in [list(group)] if seeds else [[name] for name in group]:
            records = [group[name] for name in names]
            words = dict(verdict_of_seeds(records) if seeds else verdict(records[0]))
            simulated = records[0].get("simulated", {}).get("label", "")
            rows.append((", ".join(names), simulated, words.pop("Gap"), words.pop(SEEDS, "not known")))
            for pair in words.items():
                others.setdefault(pair, []).append(rows[-1][0])
    answers = [(question, answer, runs) for (question, answer), runs in others.items()]
    return [*rows, *((q if len(r) == len(rows) - 1 else f"{', '.join(r)}: {q}", a) for q, a, r in answers)]
