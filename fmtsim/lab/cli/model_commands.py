# SPDX-License-Identifier: Apache-2.0
"""Runs of ``fmtsim observe``, ``attribute``, ``mismatch``, ``ptq`` and ``search``: what formats do to a model."""

import argparse
import dataclasses
import io
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fmtsim.gemm.model_layers import list_models, parse_tokens
from fmtsim.lab.analysis.attribute import attribute
from fmtsim.lab.analysis.mismatch import explain_mismatch
from fmtsim.lab.analysis.observe import ModelObservation, observe
from fmtsim.lab.analysis.page import write_page
from fmtsim.lab.analysis.perplexity import to_perplexity
from fmtsim.lab.cli.options import (
    check_positive,
    configuration,
    file_given,
    formats_given,
    load_model,
    load_plain,
    machine_given,
)
from fmtsim.lab.cli.output import answer, format_table, json_text, origin
from fmtsim.lab.search import Policy, SearchResult, search, search_while_training
from fmtsim.lab.search.find_formats import DEFAULT
from fmtsim.lab.search.in_training import LEARNING
from fmtsim.lab.search.switching import relative_noise
from fmtsim.lab.training.loading import Loaded
from fmtsim.nn.report import report
from fmtsim.ptq import ptq
from fmtsim.ptq.calibrate import call, evaluating
from fmtsim.ptq.export import export
from fmtsim.ptq.ptq_state import state
from fmtsim.recipes.recipe_registry import get_recipe, list_recipes
from fmtsim.recipes.serialization import recipe_to_dict, save_recipe, save_rules
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import check_folder, write_folder
from fmtsim.support.progress import make_progress


def run_observe(arguments: argparse.Namespace) -> int:
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
            # Run the batches forward and backward, and add the loss of each; train where a rate is given.
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
                        raise ArgumentError(
                            f"--model {loaded.name}: its loss depends on no parameter: there is no gradient"
                        )
                    loss.backward()
                    if optimizer is not None:
                        optimizer.step()
                    model.zero_grad()
                    losses.append(loss.item())
                    show.step(i + 1, f"loss {losses[-1]:.5g}")
    except KeyboardInterrupt:
        ran, outcome = f"after {len(losses)} of {len(loaded.samples)} steps", "nothing was written"
        if path is not None and losses:
            _write_report(path, arguments, loaded, seen, losses, f"Interrupted {ran}")
            outcome = f"{path} has them"
        raise KeyboardInterrupt(f"{ran}; {outcome}") from None
    if path is not None:
        _write_report(path, arguments, loaded, seen, losses)
    worst = seen.worst(arguments.worst, arguments.by)
    record = {
        "model": loaded.name, "data": loaded.data, "losses": losses, "loss_unit": loaded.unit, **seen.to_dict(),
        "worst": [{"layer": layer, "operand": operand, **s.to_dict()} for layer, operand, s in worst],
        "notes": [*_observed_notes(loaded, seen, losses), *seen.notes], "report": None if path is None else str(path),
    }  # fmt: skip
    wrote = [] if path is None else [f"wrote {path}"]
    answer(arguments, record, lambda: "\n".join([str(worst), *record["notes"], *wrote]))
    return 0


def _observed_notes(loaded: Loaded, seen: ModelObservation, losses: list[float]) -> list[str]:
    """Return what ran, and where the loss was no number."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    mean = f"mean loss {sum(finite) / len(finite):.5g} {loaded.unit}".rstrip() if finite else "no loss is finite"
    lost = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    return [
        f"{loaded.data}; {len(losses)} steps, {len(seen.history)} of them observed; {mean}",
        *([] if lost is None else [f"the loss became {losses[lost]} at step {lost + 1}"]),
    ]


def _write_report(
    path: Path, arguments: argparse.Namespace, loaded: Loaded, seen: ModelObservation, losses: list[float], *notes: str
) -> None:  # fmt: skip
    seen.save_report(
        path, title=f"What {arguments.recipe or arguments.format or 'its formats'} loses of {loaded.name}",
        notes=[*notes, *_observed_notes(loaded, seen, losses)], curves={"loss": losses}, loss_unit=loaded.unit,
        configuration=configuration(arguments),
    )  # fmt: skip


def run_attribute(arguments: argparse.Namespace) -> int:
    """Print the costs, the dearest first, and the layers to leave in high precision."""
    formats = formats_given(arguments)
    out, page = file_given(arguments, "out", ".json"), file_given(arguments, "report", ".html")
    loaded = load_plain(arguments, formats, count=1)
    sample = loaded.samples[0]
    costs = attribute(
        loaded.model, sample.batch, partial(loaded.loss, sample), exact=arguments.exact, logits=loaded.logits,
        generator=arguments.seed, progress=not arguments.quiet, **formats,
    )  # fmt: skip
    how = {"share": arguments.share, "by": arguments.by}
    rules, advice = costs.rules(**how), costs.advice(**how)
    if out is not None:
        save_rules(rules, out)
    if page is not None:
        title = f"What {arguments.recipe or arguments.format or 'its formats'} costs {loaded.name}"
        write_page(page, title=title, attribution=costs, notes=[loaded.data, *advice.splitlines()],
                   configuration=configuration(arguments))  # fmt: skip
    written = [str(path) for path in (out, page) if path is not None]
    record = {
        "model": loaded.name, "data": loaded.data, **costs.to_dict(), "rules": [recipe_to_dict(rule) for rule in rules],
        "files": written,
    }  # fmt: skip
    parts = [str(costs), loaded.data, "", advice, *([f"wrote {' and '.join(written)}"] if written else [])]
    answer(arguments, record, lambda: "\n".join(parts))
    return 0


_EXPORTS = {"compressed-tensors": ".", "torchao": "model.safetensors", "gguf": "model.gguf"}


_DTYPES = {None: "bf16", "bfloat16": "bf16", "float16": "fp16", "float32": "tf32"}


def run_mismatch(arguments: argparse.Namespace) -> int:
    """Print what the orders of two engines do; 0 also where they differ."""
    decode = parse_tokens(arguments.decode, "--decode", every=True)
    model: Any = arguments.model
    batch = None
    if model not in list_models():
        loaded = load_model(arguments, count=1, random_text=not arguments.measure)
        model, batch = loaded.model, loaded.samples[0].batch if arguments.measure else None
    elif arguments.measure:
        raise ArgumentError(f"--measure runs a model, and --model {model} names shapes alone; pass FILE.py:function")
    mismatch = explain_mismatch(
        model, batch, trainer=arguments.trainer, rollout=arguments.rollout, trainer_tokens=arguments.trainer_tokens,
        prefill=arguments.prefill, decode=decode, dtype=_DTYPES[arguments.dtype],
    )  # fmt: skip
    answer(arguments, mismatch.to_dict(), lambda: str(mismatch))
    return 0


def run_ptq(arguments: argparse.Namespace) -> int:
    """Quantise, measure before and after, and write what ``--out`` asks for; Ctrl-C writes nothing."""
    if arguments.scheme == "list":
        rows = [(name, get_recipe(name).source) for name in list_recipes(kind="ptq")]
        print(format_table(("scheme", "source"), rows, left=(0, 1)))
        return 0
    check_positive(arguments, "batches")
    scheme, machine = get_recipe(arguments.scheme, kind="ptq"), machine_given(arguments)
    out = None if arguments.out is None else Path(arguments.out).expanduser()
    if out is not None:
        check_folder(out)
    elif arguments.export is not None:
        raise ArgumentError(f"--export {arguments.export} without --out; name the folder that it goes to")
    loaded = load_model(arguments, count=arguments.batches, held_out=True)
    loss = loaded.measured()
    exact = _outputs(loaded) if loss is None else []
    how = {"ignore": arguments.ignore or None, "rules": arguments.rules or (), **machine}
    ptq(loaded.model, scheme, [s.batch for s in loaded.samples], progress=not arguments.quiet, **how)
    quantisation = report(loaded.model)
    record: dict[str, Any] = {"model": loaded.name, "data": loaded.data, "loss_unit": loaded.unit}
    if loss is None:
        record["output_noise"] = sum(map(relative_noise, _outputs(loaded), exact)) / len(exact)
    else:
        record["loss"] = {"exact": loss, "quantised": loaded.measured()}
    record |= {"report": dataclasses.asdict(quantisation), "files": []}
    if out is not None:
        # The state that fmtsim.load_state takes, the scheme and the report.
        quantised, content = state(loaded.model), io.BytesIO()
        torch.save(quantised, content)
        contents: dict[str, bytes | str | None] = {
            "model.pt": content.getvalue(), "scheme.json": json.dumps(quantised["recipe"], indent=2) + "\n",
            "report.json": json_text({**origin(), **record}) + "\n",
        }  # fmt: skip
        record["files"] = list(map(str, write_folder(out, contents)))
        if arguments.export is not None:
            files = export(loaded.model, out / _EXPORTS[arguments.export], arguments.export)
            record["files"] += map(str, files.files)
    wrote = [f"wrote {', '.join(record['files'])}"] if out is not None else []
    answer(arguments, record, lambda: "\n".join([str(quantisation), "", *_loss_lines(loaded, record), *wrote]))
    return 0


def _outputs(loaded: Loaded) -> list[Any]:
    with evaluating(loaded.model), torch.no_grad():
        return [call(loaded.model, sample.batch, i, kind="batch") for i, sample in enumerate(loaded.held_out)]


def _loss_lines(loaded: Loaded, record: dict[str, Any]) -> list[str]:
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
        unit = loaded.unit.replace("nats", "perplexity")
        lines.append(f"{unit}: {to_perplexity(before):.5g} before, {to_perplexity(after):.5g} after")
    return lines


_FOUND = ("formats", "cost", "budget", "loss", "losses", "costs", "left_out", "tried", "chances", "reference")


def run_search(arguments: argparse.Namespace) -> int:
    """Search, print the choice and write it."""
    check_positive(arguments, "batches", "samples")
    _check_training(arguments)
    if (arguments.bits is None) == (arguments.budget is None):
        raise ArgumentError("pass exactly one of --bits (of both operands) and --budget (bit operations of a batch)")
    machine = machine_given(arguments)
    out, plot = file_given(arguments, "out", ".json"), file_given(arguments, "plot", ".png")
    weights = file_given(arguments, "weights", ".pt")
    more = machine | {"bits": arguments.bits, "progress": not arguments.quiet, "ignore": arguments.ignore or None}
    if arguments.schemes is not None:
        more["formats"] = [word.strip() for word in arguments.schemes.split(",") if word.strip()]
    loaded = load_model(arguments, count=arguments.batches)
    result = (_afterwards if arguments.while_training is None else _in_training)(arguments, loaded, more)
    if out is not None:
        save_recipe(result.recipe(), out)
    if plot is not None:
        result.plot(plot)
    if weights is not None:
        torch.save(loaded.model.state_dict(), weights)
    files = [str(path) for path in (out, plot, weights) if path is not None]
    wrote = [f"wrote {' and '.join(files)}"] if files else []
    record = {
        "model": loaded.name, "data": loaded.data, **{name: getattr(result, name) for name in _FOUND}, "files": files,
    }  # fmt: skip
    answer(arguments, record, lambda: "\n".join([str(result), loaded.data, *wrote]))
    return 0


def _afterwards(arguments: argparse.Namespace, loaded: Loaded, more: dict[str, Any]) -> SearchResult:
    if arguments.samples is not None:
        more["policy"] = Policy(steps=arguments.samples, seed=arguments.seed)
    if arguments.sensitivity:
        sample, recipes = loaded.samples[0], [get_recipe(name, kind="ptq") for name in more.get("formats", DEFAULT)]
        loss = partial(loaded.loss, sample)
        more["sensitivity"] = {
            recipe.name: attribute(loaded.model, sample.batch, loss, recipe.linear, generator=arguments.seed,
                                   progress=more["progress"])
            for recipe in recipes
        }  # fmt: skip
    batches = [sample.batch for sample in loaded.samples]
    return search(loaded.model, batches, arguments.budget, executor=arguments.executor, **more)


def _in_training(arguments: argparse.Namespace, loaded: Loaded, more: dict[str, Any]) -> SearchResult:
    """Train on the batches in turn; a quarter of the steps is warm-up."""
    warmup = arguments.while_training // 4
    policy = dataclasses.replace(LEARNING, steps=arguments.while_training - warmup, seed=arguments.seed)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=arguments.lr)

    def loss_of(step: int) -> torch.Tensor:
        sample = loaded.samples[step % len(loaded.samples)]
        return loaded.loss(sample, call(loaded.model, sample.batch, step, kind="batch"))

    return search_while_training(
        loaded.model, loss_of, optimizer, arguments.budget, policy=policy, warmup=warmup, **more
    )


def _check_training(arguments: argparse.Namespace) -> None:
    check_positive(arguments, "while_training")
    if arguments.while_training is None:
        if arguments.weights is not None:
            raise ArgumentError("--weights are those of a search while training; pass --while-training STEPS as well")
        return
    for name in ("samples", "sensitivity", "executor"):
        if getattr(arguments, name):
            raise ArgumentError(f"--{name} is of a search without training; leave it or --while-training out")
    if not arguments.lr > 0:
        raise ArgumentError(f"--lr {arguments.lr} is not a learning rate; choose a number above 0")
