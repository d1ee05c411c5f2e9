# SPDX-License-Identifier: Apache-2.0
"""Runs of ``fmtsim trace``, ``bisect``, ``compare`` and ``verify``."""

import argparse
import os
import re
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fmtsim
from fmtsim.lab.analysis.audit import audit
from fmtsim.lab.analysis.bisect import bisect
from fmtsim.lab.analysis.trace import Trace
from fmtsim.lab.analysis.tracing import trace
from fmtsim.lab.cli import options
from fmtsim.lab.cli.output import MISMATCH, answer, format_items, format_table, origin, versions_of, write_json
from fmtsim.lab.training.training_models import told
from fmtsim.lab.verify import Outcome, workers
from fmtsim.lab.verify.outcome import described, device_of, engines
from fmtsim.lab.verify.units import Replay, merged
from fmtsim.nn import convert
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError
from fmtsim.support.files import check_file, check_folder
from fmtsim.support.progress import make_progress
from fmtsim.support.table import Column

if TYPE_CHECKING:
    from fmtsim.lab.analysis.compare import Comparison


def run_trace(arguments: argparse.Namespace) -> int:
    """Trace and print what was recorded."""
    formats, out = options.formats_given(arguments), options.file_given(arguments, "out", ".safetensors")
    if arguments.target is not None and not formats:
        raise ArgumentError("--target needs --recipe or --format, which convert the model")
    loaded = options.load_model(arguments, count=1, random_text=True)
    model, (batch, loss) = loaded.model, loaded.samples[0]
    if formats:
        convert(model, generator=arguments.seed, **formats, **options.machine_given(arguments))
    hint = "; it was called with the first batch of (model, batches), or else with random bytes; return fitting ones"
    with told(arguments.model, hint), options.simulated(arguments) as run:
        recorded = trace(model, batch, loss, tensors=_tensors(arguments.tensors), level=arguments.level)
    if out is not None:
        recorded.save(out)
    text = str(recorded) if out is None else f"{recorded.summary}; wrote {out}"
    answer(arguments, recorded.to_dict(), lambda: text if run is None else f"{text}\n{run.summary}")
    return 0


def _tensors(text: str | None) -> bool | list[int | str]:
    if text is None or text == "all":
        return text is not None
    words = [word.strip() for word in text.split(",") if word.strip()]
    return [int(word) if word.isascii() and word.isdecimal() else word for word in words]


def run_bisect(arguments: argparse.Namespace) -> int:
    """Bisect and print; 0 where all bits agree, 1 where some do not."""
    texts = arguments.a, arguments.b
    models = [not (text.endswith(".safetensors") or os.path.isfile(text)) for text in texts]
    runs = [_run_of(text, arguments) if model else text for text, model in zip(texts, models, strict=True)]
    try:
        with options.simulated(arguments):
            result = bisect(*runs)
    except FmtsimError as error:
        raise type(error)(re.sub(r"\brun_([ab])\b", lambda run: texts["ab".index(run[1])], str(error))) from error
    except Exception as error:
        if not any(models) or isinstance(error, MemoryError):
            raise
        raise ArgumentError(f"{' against '.join(texts)}: {type(error).__name__}: {error}") from error
    answer(arguments, result.to_dict(), lambda: str(result))
    return 0 if result.equal else MISMATCH


def _run_of(name: str, arguments: argparse.Namespace) -> tuple[Any, ...]:
    loaded = options.load_model(arguments, model=name, count=1, random_text=True)
    return loaded.model, *loaded.samples[0]


def run_audit(arguments: argparse.Namespace) -> int:
    """Audit and print; 0 where all compared bits agree, 1 where some do not."""
    trace = Trace.load(arguments.trace)
    how = {name: getattr(arguments, name) for name in ("target", "rows", "seed", "executor")}
    result = audit(trace, **how)
    answer(arguments, {"equal": result.equal, **result.to_dict()}, lambda: str(result))
    return 0 if result.equal else MISMATCH


ALONE = "array"  # the name of what a .npy file holds

Tensors = Mapping[str, Callable[[], Any]]
"""Tensors of a file by name, read when called."""


def run_compare(arguments: argparse.Namespace) -> int:
    """Compare and print; 0 where all bits agree, 1 where some do not or a tensor is missing."""
    if arguments.plot:
        check_file("--plot", Path(arguments.plot))
    actual, expected = load_tensors(arguments.actual), load_tensors(arguments.expected)
    for text, tensors in ((arguments.actual, actual), (arguments.expected, expected)):
        if not tensors:
            raise ArgumentError(f"{text} has no tensors to compare; fmtsim bisect compares what fmtsim trace wrote")
    if len(actual) == len(expected) == 1:  # two tensors, whatever they are called
        (other,), (name,) = actual, expected
        if other != name and ALONE not in (other, name) and ":" not in arguments.actual + arguments.expected:
            print(f"{other} of {arguments.actual} is compared with {name} of {arguments.expected}", file=sys.stderr)
        actual = {name: actual[other]}
    comparisons: dict[str, Comparison] = {}
    errors: dict[str, str] = {}
    for name in dict.fromkeys((*expected, *actual)):
        if name not in actual or name not in expected:
            errors[name] = f"only in {arguments.expected if name in expected else arguments.actual}"
            continue
        try:
            comparisons[name] = fmtsim.compare(actual[name](), expected[name]())
        except DataError:
            raise
        except FmtsimError as error:
            if len(expected) == 1:
                raise
            errors[name] = str(error)
    equal = not errors and all(c.equal for c in comparisons.values())
    record = {"equal": equal, "errors": errors, "tensors": {name: c.to_dict() for name, c in comparisons.items()}}
    answer(arguments, record, lambda: _compare_text(comparisons, errors))
    if arguments.plot:
        from fmtsim.lab.analysis.compare import plot_ulps

        plot_ulps(comparisons, arguments.plot)
    return 0 if equal else MISMATCH


def load_tensors(text: str) -> Tensors:
    """Return the tensors of a file, or the one that ``FILE:NAME`` names; each is read when it is asked for.

    Raises:
        ArgumentError: there is no such file or tensor, or its suffix is not known.
        DataError: the file cannot be read.
    """
    path, name = options.tensor_file(text)
    tensors = _open(path)
    if not name:
        return tensors
    if name not in tensors:
        raise ArgumentError(f"{path} has no tensor {name!r}; it has {', '.join(tensors) or 'none'}")
    return {name: tensors[name]}


def _open(path: Path) -> Tensors:
    suffix = options.ALIAS_SUFFIXES.get(path.suffix, path.suffix)
    if suffix == ".safetensors":
        try:
            from safetensors import safe_open
        except ImportError:
            raise DataError(f"{path} needs safetensors, which is not installed; pip install 'fmtsim[train]'") from None

        def read(name: str) -> Any:
            try:
                with safe_open(path, framework="pt") as file:
                    return file.get_tensor(name)
            except Exception as error:  # safetensors on a damaged file, or torch on a dtype that it lacks
                raise DataError(f"cannot read {name} of {path}: {error}") from error

        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
        except Exception as error:
            raise DataError(f"cannot read {path}: {error}") from error
        return {name: lambda name=name: read(name) for name in names}  # type: ignore[misc]
    import numpy

    if suffix == ".pt":
        saved = _reading(path, lambda: torch.load(path, map_location="cpu", weights_only=True))
        tensors = {ALONE: saved} if isinstance(saved, torch.Tensor) else saved
        if not isinstance(tensors, dict) or not all(isinstance(x, torch.Tensor) for x in tensors.values()):
            raise DataError(f"{path} holds neither a tensor nor a dict of tensors; save one with torch.save")
        return {str(name): lambda x=x: x for name, x in tensors.items()}  # type: ignore[misc]

    def reader(name: str) -> Callable[[], Any]:
        return lambda: _reading(path, lambda: content if name == ALONE and path.suffix == ".npy" else content[name])

    if path.suffix == ".npz":  # numpy leaves a file open that is not an archive
        _reading(path, lambda: zipfile.ZipFile(path).close())
    # Pages of a .npy file are read as they are compared; "c" because torch wants memory it may write to.
    content = _reading(path, lambda: numpy.load(path, mmap_mode="c", allow_pickle=False))
    return {name: reader(name) for name in ([ALONE] if path.suffix == ".npy" else content.files)}


def _reading(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # numpy raises many types on a damaged file
        raise DataError(f"cannot read {path}: {type(error).__name__}: {error}") from error


_COMPARED = (
    Column("tensor", lambda item: item[0]), Column("dtype", lambda item: item[1].dtype),
    Column("elements", lambda item: item[1].count, ">,"), Column("different", lambda item: item[1].mismatches, ">,"),
    Column("max ulp", lambda item: item[1].max_ulp, ">,", absent="-"),
    Column("median", lambda item: item[1].median_ulp, ">,", absent="-"),
    Column("max relative", lambda item: item[1].max_relative, ">.3g"),
    Column("SQNR dB", lambda item: item[1].sqnr_db, ">.4g"),
)  # fmt: skip


def _compare_text(comparisons: Mapping[str, "Comparison"], errors: Mapping[str, str]) -> str:
    if len(comparisons) == 1 and not errors:
        return str(next(iter(comparisons.values())))
    parts = [format_items(_COMPARED, comparisons.items())] if comparisons else []
    parts += [f"{name}: {message}" for name, message in errors.items()]
    parts += [f"{name}: first difference {c.first}" for name, c in comparisons.items() if not c.equal]
    if not errors and all(c.equal for c in comparisons.values()):
        parts.append("all bits agree")
    return "\n".join(parts)


PACKAGES = ("fmtsim", "torch", "numpy", "numba", "cuda-core", "cuda-bindings")
SHOWN = 20


def run_verify(arguments: argparse.Namespace) -> int:
    """Run the checks; 0 where all bits agree, 1 where one does not."""
    parts = _parts(arguments)
    # Refuse arguments of a half that does not run, and gemm with nothing to compare.
    options.check_positive(arguments, "workers")
    for name, option in (("formats", "--format"), ("exhaustive", "--exhaustive")):
        if parts == ("gemm",) and getattr(arguments, name):
            raise ArgumentError(f"{option} has no meaning for fmtsim verify gemm; leave it out")
    if "gemm" in parts and not arguments.device:
        recorded = "a checkout replays recordings: python -m tools.calibrate --recordings DIR"
        raise ArgumentError(f"fmtsim verify gemm needs a device; pass --device cuda ({recorded})")
    if arguments.record is not None:
        check_folder(arguments.record.parent, "--record")

    device = device_of(arguments.device) if arguments.device else None
    number = workers.default_workers(device) if arguments.workers is None else arguments.workers
    if device is not None and not arguments.json:
        print(f"{described(device)}\n")
    names = tuple(arguments.formats) if arguments.formats else None
    job = workers.Job(parts, device, names, arguments.exhaustive, arguments.plant_error)
    start = time.perf_counter()
    tasks = job.tasks()
    with make_progress(None, transient=True) as progress:
        progress.stage("checks", sum(map(len, tasks.values())))
        outcomes = workers.run(job, tasks, number, lambda name, done: progress.step(done, name))
    outcomes |= {"gemm": merged(outcomes["gemm"])} if "gemm" in outcomes else {}
    seconds = time.perf_counter() - start
    reports = {part: _REPORTS[part](outcomes[part], device) for part in parts}
    record = {"device": described(device), **reports} if device is not None else reports[parts[0]]

    def text() -> str:
        texts = []
        if "casts" in outcomes:
            texts.append(_casts_text(outcomes["casts"], reports["casts"], arguments.exhaustive))
        if "gemm" in outcomes:
            texts.append(gemm_text(outcomes["gemm"], reports["gemm"]["seconds"]))
        if len(reports) > 1:
            ending = f"{seconds:.0f} s with {number} process{'es' if number > 1 else ''}"
            failed = any(report["mismatches"] for report in reports.values())
            texts += [_total(reports), f"{ending}; {_verdict(failed)}"]
        return "\n\n".join(texts)

    answer(arguments, record, text)
    if arguments.record is not None:
        about = {**origin(), "versions": versions_of(PACKAGES), "workers": number, "wall_seconds": seconds}
        write_json(arguments.record, about | record)
    return MISMATCH if any(report["mismatches"] for report in reports.values()) else 0


def _verdict(failed: object) -> str:
    return "MISMATCHES" if failed else "all bits agree"


def _total(reports: dict[str, Any]) -> str:
    names = {"casts": ("outcomes", "cases"), "gemm": ("sets", "outputs")}
    rows = []
    for part, report in reports.items():
        checks, results = (report[name] for name in names[part])
        rows.append((part, len(checks), results, report["mismatches"], report["seconds"]))
    rows.append(("all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))))  # type: ignore[arg-type]
    lines = [(name, *(f"{number:,.0f}" for number in numbers)) for name, *numbers in rows]
    return format_table(("part", "checks", "results compared", "mismatches", "seconds of work"), lines)


def _parts(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.what is not None:
        return (arguments.what,)
    if not arguments.device or arguments.formats or arguments.exhaustive:
        return ("casts",)
    return ("casts", "gemm")


def _report_casts(outcomes: list[Outcome], device: torch.device | None) -> dict[str, Any]:
    return {
        "engines": list(engines(device)),
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in ("seconds", "cases", "mismatches")},
        "outcomes": [outcome.to_dict() for outcome in outcomes],
    }  # fmt: skip


def report_gemm(found: list[Replay], device: torch.device | None = None) -> dict[str, Any]:
    """Return the record of checks of products."""
    names = ("seconds", "outputs", "mismatches")
    totals = {name: sum(getattr(replay, name) for replay in found) for name in names}
    return {**totals, "sets": [replay.to_dict() for replay in found]}


_REPORTS: dict[str, Callable[..., dict[str, Any]]] = {"casts": _report_casts, "gemm": report_gemm}


def _casts_text(outcomes: list[Outcome], report: dict[str, Any], exhaustive: bool) -> str:
    failed = [outcome for outcome in outcomes if outcome.mismatches]
    parts = [_summary(outcomes, exhaustive)]
    parts += [
        f"{failure.check} {failure.format}: {failure.mismatches:,} of {failure.cases:,} differ; {failure.first}"
        for failure in failed[:SHOWN]
    ]
    if len(failed) > SHOWN:
        parts.append(f"... and {len(failed) - SHOWN} more formats; --json has all of them")
    parts.append(f"engines: {', '.join(report['engines'])}; {report['seconds']:.0f} s; {_verdict(failed)}")
    return "\n\n".join(parts)


def gemm_text(found: list[Replay], seconds: float) -> str:
    """Return a table of checks of products, and the first differences."""
    failed = [replay for replay in found if replay.mismatches]
    rows = []
    for replay in found:
        cases = f"{replay.cases:,}" + (f" of {replay.cases + replay.skipped:,}" if replay.skipped else "")
        plan = ", ".join(f"{count} {basis}" for basis, count in replay.plans) or "-"
        rows.append(
            (replay.set, replay.machine, cases, f"{replay.outputs:,}", f"{replay.mismatches:,}", plan,
             f"{replay.seconds:.1f}")
        )  # fmt: skip
    parts = [
        format_table(("set", "machine", "cases", "outputs", "mismatches", "plan", "seconds"), rows, left=(0, 1, 5))
    ]
    for replay in failed[:SHOWN]:
        number = f"{replay.mismatches:,} of {replay.outputs:,} differ; " if replay.outputs else ""
        guesses = (
            f" ({replay.in_guesses:,} of these where the accumulation order is a guess)" if replay.in_guesses else ""
        )
        parts.append(f"{replay.set}: {number}{replay.first}{guesses}")
    outputs = sum(replay.outputs for replay in found)
    parts.append(f"{len(found)} sets, {outputs:,} outputs; {seconds:.0f} s; {_verdict(failed)}")
    return "\n\n".join(parts)


def _summary(outcomes: list[Outcome], each: bool) -> str:
    rows: dict[tuple[str, ...], list[int]] = {}
    for outcome in outcomes:
        key = (outcome.check, outcome.format) if each else (outcome.check,)
        row = rows.setdefault(key, [0, 0, 0])
        for place, number in enumerate((1, outcome.cases, outcome.mismatches)):
            row[place] += number
    header = ("check", "format", "cases", "mismatches") if each else ("check", "formats", "cases", "mismatches")
    lines = [
        (*key, *(() if each else (str(count),)), f"{cases:,}", f"{mismatches:,}")
        for key, (count, cases, mismatches) in rows.items()
    ]
    return format_table(header, lines, left=(0, 1) if each else (0,))
