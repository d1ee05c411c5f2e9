# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.calibrate``: ask a GPU for its arithmetic and orders, or compare it with what is known of it."""

import argparse
import datetime
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch

from fmtsim.gemm.model_layers import DTYPES, PASSES, find_models, list_models, parse_tokens, read_shapes
from fmtsim.gemm.targets.ask import Asker, open_asker
from fmtsim.gemm.targets.learned import Group
from fmtsim.gemm.targets.question import Architecture
from fmtsim.gemm.targets.target import Target, find_target, get_target
from fmtsim.gemm.units.unit import get_unit
from fmtsim.lab.cli import names
from fmtsim.lab.cli.main import run_program
from fmtsim.lab.cli.names import Files
from fmtsim.lab.cli.options import (
    EXECUTOR,
    add_device,
    add_json,
    add_layers,
    add_tokens,
    check_positive,
    count,
    flag,
    option,
    workers_of,
)
from fmtsim.lab.cli.output import MISMATCH, answer, format_table, write_json
from fmtsim.lab.cli.products import chosen_dtypes, chosen_shapes
from fmtsim.lab.cli.result_commands import gemm_text, report_gemm
from fmtsim.recipes.serialization import recipe_to_dict
from fmtsim.spec.call import GemmCall
from fmtsim.support.errors import ArgumentError, DeviceError, shown
from fmtsim.support.files import check_file
from fmtsim.support.progress import make_progress
from tools.calibrate.arithmetic import Measured, arithmetics, family_of, measure_all
from tools.calibrate.book import (
    MOST,
    Made,
    book_target,
    choose_kinds,
    families_of,
    lattice,
    make_book,
    similar_kinds,
    small_layers,
)
from tools.calibrate.campaign import SEEDS, Finding, calibrate
from tools.calibrate.evidence import Evidence, load_evidence
from tools.calibrate.gpu import TorchGPU, open_gpu
from tools.calibrate.layers import model_calls, parallel_layers
from tools.calibrate.learn import SMALL, TOPICS, answers_file, check_learner, learn
from tools.calibrate.planfile import plan_file, write_plan
from tools.calibrate.recheck import RuleCheck, recheck
from tools.calibrate.replay import gemm_tasks
from tools.calibrate.unit_calls import kinds_of
from tools.calibrate.unit_check import TorchCard, check_unit, emulate_again

PLAN, EVIDENCE, BOOK, LEARNED = "fmtsim-plan.json", "fmtsim-evidence.json", "fmtsim.book", "fmtsim.trees"
SMALL_ROWS = 1152  # rows of a book of small layers
RECORDINGS = Files("pass a folder of mtc_*.npz, probe_*.npz or recorded calls", folders=True)
SUMMARY = "Measure this GPU's arithmetic and its library's accumulation orders, and write a plan file."
SHOWN = 10
MODES = {"bf16": ("bf16",), "fp16": ("fp16", "fp16 sums"), "tf32": ("tf32",), "fp8_fast": ("e4m3", "e5m2"),
         "fp8_slow": ("e4m3", "e5m2")}  # fmt: skip


QUICK = 64  # calls that --quick measures


def declare_calibrate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = parser.add_argument_group("which products (default: the layers of gpt2)")
    add_layers(what, ",".join(DTYPES), "gpt2, llama-8b, ...")
    add_tokens(what)
    flag(what, "--quick", f"at most {QUICK} of these calls, evenly chosen, and one set of data each")
    base = "try this target's plans first, and append its rules to the new ones; with --book, write the difference; "
    base += "with --learn --small, learn from its books, too"
    option(parser, "--base", base, metavar="TARGET", names=names.targets)
    option(parser, "--out", f"file to write, {PLAN} or {EVIDENCE} unless given", metavar="FILE")
    check = parser.add_argument_group("comparing a GPU with its emulation, instead of measuring it")
    run_both = (
        "run calls of every rule of this target, or every kind of call that reaches this unit, and write evidence"
    )
    option(check, "--check", f"{run_both} (h200, hopper.wgmma)", names=names.targets_and_units)
    option(check, "--calls", "calls of every rule", 3)
    book = parser.add_argument_group("querying the cuBLASLt heuristic, which runs no kernel")
    every = "write or continue a plan book and its target: the kernel for every number of rows of the layers of"
    models = f"--model and --shapes, by default of all {len(list_models())} known models ({BOOK} unless named)"
    option(book, "--book", f"{every} {models}", metavar="FILE", nargs="?", const=BOOK)
    kinds = "kinds of calls, such as bf16,fp8_rows (default: all; an unknown kind prints all names)"
    option(book, "--kinds", kinds, metavar="LIST")
    option(book, "--lattice", "add layers with up to N sizes of outputs and of inputs, from 64 to 32768", 0)
    flag(
        book, "--small", f"layers of small models alone, with up to {SMALL_ROWS} rows; with --learn, small sizes alone"
    )
    trees = "write a file of decision trees, trained on this library's results for random sizes"
    option(book, "--learn", f"{trees} ({LEARNED} unless named)", metavar="FILE", nargs="?", const=LEARNED)
    option(book, "--questions", "queries for each group of kinds; some groups take more or fewer", 3_000_000)
    folder = "with --learn, keep the heuristic's results in a folder; what lies there is not queried again"
    option(book, "--answers", f"{folder}, and without a GPU where all do", metavar="DIR")
    option(book, "--workers", "processes that query (default: one per core)", type=int)
    option(check, "--evidence", "check such a file on any machine: emulate its calls again and compare", metavar="FILE",
           names=names.files)  # fmt: skip
    replay = parser.add_argument_group("replaying recorded products, on the CPU")
    folders = "a folder of mtc_*.npz, probe_*.npz or recorded calls; every bit is compared"
    option(replay, "--recordings", folders, metavar="DIR", nargs="+", names=RECORDINGS)
    count(replay, "--limit", "compare about N outputs of each set")
    add_device(parser, "cuda")
    option(parser, "--executor", EXECUTOR, metavar="URL")
    add_json(parser)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Ask, verify and write; 0 where a plan file was written, 1 where a measured unit's bits are not explained.

    With ``--check`` and ``--evidence``: 0 where no bit differs and every rule, or kind of call, was run.
    """
    jobs = {"book": run_book, "learn": run_learn, "check": run_check, "evidence": run_evidence,
            "recordings": run_recordings}  # fmt: skip
    asked = [name for name in jobs if getattr(arguments, name) is not None]
    if len(asked) > 1:
        raise ArgumentError(f"--{asked[0]} and --{asked[1]} are different jobs; give one of them")
    if arguments.executor is not None and asked not in (["book"], ["learn"], ["evidence"]):
        raise ArgumentError("--executor shares the work of --book, --learn and --evidence; leave it out")
    if asked:
        return jobs[asked[0]](arguments)
    calls = chosen_calls(arguments)
    out = check_output(arguments.out or PLAN)

    base = None if arguments.base is None else get_target(arguments.base)
    gpu = open_gpu(arguments.device)
    start = time.perf_counter()
    family = family_of(torch.cuda.get_device_capability(torch.device(arguments.device)))
    measured, findings = ask(gpu, calls, base, arguments.quick, family)
    seconds = time.perf_counter() - start
    target = write(out, gpu, measured, findings, base)

    def text() -> str:
        written = f"{len(calls):,} calls in {seconds:.0f} s; written: {out}, {len(target.rules)} rules"
        return f"{summary(measured, findings)}\n\n{written}\nuse it: fmtsim.mm(a, b, target={str(out)!r})"

    answer(arguments, _record(measured, findings, target, seconds, out), text)
    return 0 if all(unit.known for unit in measured) else MISMATCH


def chosen_calls(arguments: argparse.Namespace) -> list[GemmCall]:
    """Return the calls that the arguments mean."""
    passes = PASSES[:1] if arguments.no_gradients else PASSES
    calls = model_calls(chosen_shapes(arguments), parse_tokens(arguments.tokens), chosen_dtypes(arguments), passes)
    if not calls:
        raise ArgumentError(
            f"--dtypes {arguments.dtypes!r} leaves no call: FP8 takes K and N that are multiples of 16; add a dtype"
        )
    return calls[:: -(-len(calls) // QUICK)] if arguments.quick else calls


def run_check(arguments: argparse.Namespace) -> int:
    """Compare the GPU with a target, and print a line for every rule; or with a unit, and write evidence."""
    check_positive(arguments, "calls")
    target = find_target(arguments.check)
    if not isinstance(target, Target):
        return run_unit(arguments, get_unit(arguments.check).name)
    open_gpu(arguments.device)
    with make_progress(None, transient=True) as progress:
        checks = list(recheck(target, torch.device(arguments.device), calls=arguments.calls, progress=progress))
    names = ("calls", "outputs", "mismatches", "note")
    record = [
        {"rule": x.number, "when": x.when, "kernel": x.kernel, "basis": x.basis}
        | {name: getattr(x, name) for name in names}
        for x in checks
    ]
    answer(arguments, record, lambda: check_table(checks))
    return 0 if all(x.calls and not x.mismatches for x in checks) else MISMATCH


def run_unit(arguments: argparse.Namespace, unit: str) -> int:
    """Compare the GPU with the emulation of a unit, and write the evidence."""
    out = check_output(arguments.out or EVIDENCE, "an evidence file")
    card = TorchCard(arguments.device)
    with make_progress(None, transient=True) as progress:
        progress.stage("kinds of calls", len(kinds_of(unit)))
        checks = check_unit(unit, card, progress.step)
    record = recipe_to_dict(checks)
    write_json(out, record)
    answer(
        arguments,
        record,
        lambda: f"{evidence_table(checks)}\nwritten: {out}; python -m tools.calibrate --evidence {out}",
    )
    return 0 if checks.proves else MISMATCH


def run_evidence(arguments: argparse.Namespace) -> int:
    """Read evidence, emulate its calls again, and show it."""
    evidence = load_evidence(arguments.evidence)
    wrong = emulate_again(evidence, arguments.executor)
    record = recipe_to_dict(evidence) | {"calls_that_differ_here": wrong}
    answer(arguments, record, lambda: evidence_table(evidence, wrong))
    return 0 if evidence.proves and not any(wrong) else MISMATCH


def evidence_table(found: Evidence, wrong: Sequence[int | None] = ()) -> str:
    """Return a line for every kind of calls; ``wrong`` has how many of its calls differ when emulated here."""
    rows = []
    for i, kind in enumerate(found.kinds):
        off = next((call for call in kind.calls if call.mismatches), None)
        notes = ["" if kind.calls else "not run"]
        if off is not None:
            notes.append(
                f"{off.operation} {off.m}x{off.n}x{off.k} {off.a} {off.b} {off.out}, {off.data} data: {off.first}"
            )
        notes += [kind.note, f"emulated here: {wrong[i]} calls differ" if wrong and wrong[i] else ""]
        numbers = [f"{n:,}" if kind.calls else "-" for n in (len(kind.calls), kind.outputs, kind.mismatches)]
        functions = ", ".join(dict.fromkeys(call.function for call in kind.calls))
        rows.append((kind.name, kind.unit, functions, *numbers, "; ".join(filter(None, notes))))
    head = ("kind", "unit", "function", "calls", "outputs", "mismatches", "note")
    about = (
        f"{found.unit} on {found.card}, driver {found.driver}, torch {found.torch}, {found.cublaslt}, "
        f"fmtsim {found.fmtsim}, {found.date}"
    )
    ran = [kind for kind in found.kinds if kind.calls]
    calls, outputs = sum(len(kind.calls) for kind in ran), sum(kind.outputs for kind in ran)
    idle = len(found.kinds) - len(ran)
    total = (
        f"{len(ran)} kinds, {calls:,} calls, {outputs:,} numbers compared, {sum(k.mismatches for k in ran):,} differ"
    )
    again = "; emulated again here, every call has the GPU's bits" if wrong and not any(wrong) and found.proves else ""
    return "\n".join(
        (about, "", format_table(head, rows, left=(0, 1, 2, 6)), "",
         f"{total}{f'; {idle} kinds were not run' if idle else ''}{again}")
    )  # fmt: skip


def run_recordings(arguments: argparse.Namespace) -> int:
    """Replay recorded products through the public verbs, on the CPU; 0 where every bit is the recorded one."""
    check_positive(arguments, "limit")
    tasks = gemm_tasks(arguments.recordings, arguments.limit)
    replays = []
    with make_progress(None, transient=True) as progress:
        progress.stage("sets", len(tasks))
        for done, task in enumerate(tasks):
            replays.append(task.run(lambda share, at=done, name=task.name: progress.step(at + share, name)))  # type: ignore[misc]
    report = report_gemm(replays)
    answer(arguments, report, lambda: gemm_text(replays, report["seconds"]))
    return MISMATCH if report["mismatches"] else 0


def check_table(found: Sequence[RuleCheck]) -> str:
    """Return a line for every rule: what it is about, what ran, and what differs."""
    number = lambda x: "book" if x.number is None else str(x.number)  # noqa: E731
    rows = [
        (number(x), x.basis, x.kernel, _conditions(x.when), f"{x.calls:,}", f"{x.outputs:,}", f"{x.mismatches:,}")
        for x in found
    ]  # fmt: skip
    lines = [format_table(("rule", "basis", "kernel", "when", "calls", "numbers", "differ"), rows, left=(1, 2, 3))]
    lines += [f"{'' if x.number is None else 'rule '}{number(x)}: {x.note}" for x in found if x.note]
    calls, outputs, wrong = (sum(getattr(x, name) for x in found) for name in ("calls", "outputs", "mismatches"))
    idle = sum(not x.calls for x in found)
    lines.append(f"\n{len(found)} rules, {calls:,} calls, {outputs:,} numbers compared, {wrong:,} differ"
                 f"{f'; {idle} rules were not run' if idle else ''}")  # fmt: skip
    return "\n".join(lines)


def _conditions(when: dict[str, Any]) -> str:
    """Return the conditions of a rule in a few words, without those that nearly all rules have."""
    usual = {"operation": ["mm", "linear"], "accumulate": "fp32", "bias": False}
    return " ".join(
        f"{name}={'|'.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in when.items()
        if usual.get(name) != value
    )


def check_output(name: str, what: str = "a plan file, by which target= knows it") -> Path:
    """Return the path of a file to write; refuse one that could not be written, before the GPU works for minutes."""
    out = Path(name).expanduser()
    if out.suffix != ".json":
        raise ArgumentError(f"--out {out} does not end in .json as {what}; choose another")
    check_file("--out", out)
    return out


def ask(
    gpu: Any, calls: Sequence[GemmCall], base: Any, quick: bool, family: str
) -> tuple[list[Measured], list[Finding]]:
    """Measure the units that the calls run on, then find the order of every call."""
    modes = dict.fromkeys(mode for call in calls for mode in next(x for x in MODES.values() if call.a in x))
    with make_progress(None, transient=True) as progress:
        progress.stage("units and calls", len(modes) + len(calls))
        measured: list[Measured] = []
        for unit in measure_all(gpu, [*modes, "int8"], family):
            progress.step(len(measured), f"unit for {unit.mode}")
            measured.append(unit)
        arithmetic_of = arithmetics(measured)
        units = lambda call: arithmetic_of[call.a, call.accumulate]  # noqa: E731
        open_calls = [call for call in calls if (call.a, call.accumulate) in arithmetic_of]
        guess = None if base is None else lambda call: base.find(call).plan
        findings = calibrate(
            gpu, open_calls, units, guess=guess, seeds=SEEDS[:1] if quick else SEEDS,
            advance=lambda done, text: progress.step(len(modes) + done, text),
        )  # fmt: skip
    return measured, findings


def write(out: Path, gpu: Any, measured: list[Measured], found: list[Finding], base: Any) -> Any:
    """Write the plan file and return its target."""
    arithmetic_of = arithmetics(measured)
    target = plan_file(
        out.stem, gpu.library, found, lambda call: arithmetic_of[call.a, call.accumulate], measured=measured, base=base,
        date=datetime.date.today().isoformat(),
    )  # fmt: skip
    write_plan(target, out)
    return target


def summary(measured: list[Measured], found: list[Finding]) -> str:
    """Return a table of calls by dtype and outcome, the units, and the first calls without a plan."""
    lines = [str(unit) for unit in measured]
    rows: dict[tuple[str, str], Counter[str]] = {}
    for finding in found:
        call = finding.call
        speed = ("fast" if call.fast_accum else "slow") if call.operation == "scaled_mm" else ""
        rows.setdefault((f"{call.a} {speed}".strip(), call.operation), Counter())[finding.status] += 1
    table = [
        (dtype, operation, *(f"{count[status]:,}" for status in ("verified", "not found", "skipped")))
        for (dtype, operation), count in rows.items()
    ]
    lines += ["", format_table(("dtype", "call", "verified", "not found", "skipped"), table, left=(0, 1))]
    missing = [finding for finding in found if finding.status != "verified"]
    for finding in missing[:SHOWN]:
        call = finding.call
        lines.append(f"{finding.status}: {call.operation} M={call.m} N={call.n} K={call.k} {call.a}; {finding.note}")
    if len(missing) > SHOWN:
        lines.append(f"... and {len(missing) - SHOWN} more, which the plan file calls guesses; --json has all of them")
    return "\n".join(lines)


def _record(measured: list[Measured], found: list[Finding], target: Any, seconds: float, out: Path) -> dict[str, Any]:
    units = [
        {name: getattr(unit, name) for name in ("mode", "unit", "outputs", "mismatches")}
        | {"arithmetic": repr(unit.arithmetic), "facts": dict(unit.facts)}
        for unit in measured
    ]
    calls = [
        {name: getattr(finding.call, name) for name in ("operation", "m", "n", "k", "a", "fast_accum")}
        | {name: getattr(finding, name) for name in ("status", "outputs", "note")}
        for finding in found
    ]
    return {"library": target.library, "seconds": seconds, "file": str(out), "units": units, "calls": calls}


_QUESTIONS_SHOWN = 10  # questions that are answered otherwise


def run_book(arguments: argparse.Namespace) -> int:
    """Ask the library for a plan book; 0 where it answers 999 of 1000 questions at random as the book does."""
    path, plan = Path(arguments.book).expanduser(), Path(arguments.book).expanduser().with_suffix(".json")
    if path == plan:
        raise ArgumentError(f"--book {path} is the name of the plan file, which is written beside it; choose another")
    check_file("--book", path)
    workers = None if arguments.workers is None else workers_of(arguments)
    kinds = choose_kinds(arguments.kinds)
    families = families_of(book_shapes(arguments), kinds)
    base = None if arguments.base is None else get_target(arguments.base)
    if base is not None and not base.books:
        raise ArgumentError(f"--base {arguments.base} has no book to write the difference to; name a target with one")
    gpu, index = open_card(arguments.device)
    source = f"cublasLtMatmulAlgoGetHeuristic, {datetime.date.today()}"
    make = partial(
        make_book, path, families, partial(open_library, arguments.device, gpu.library), library=gpu.library,
        source=source, executor=arguments.executor, most=SMALL_ROWS if arguments.small else MOST,
    )  # fmt: skip
    try:
        with make_progress(None, transient=True) as progress:
            book = None if base is None else base.books[0]
            result = make(similar=similar_kinds(kinds), workers=workers, base=book, progress=progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{path} has what was asked; the same command goes on") from None
    target = book_target(path, gpu.name, architecture_of(index), family_of(torch.cuda.get_device_capability(index)))
    if target is not None:
        write_plan(target, plan)
    record = {"library": gpu.library, "file": str(path), "bytes": result.size, "families": result.families,
              "asked": result.asked, "checked": result.checked, "different": list(map(str, result.different)),
              "target": None if target is None else str(plan)}  # fmt: skip
    answer(arguments, record, lambda: book_text(path, result, None if target is None else plan))
    return MISMATCH if len(result.different) * 1000 > result.checked else 0


def open_library(device: str, library: str) -> Asker:
    """Open the library in a process, perhaps of another machine; DeviceError where it is not this one."""
    gpu, index = open_card(device)
    if gpu.library != library:
        raise DeviceError(f"a worker has {gpu.library}, not {library}; give the cluster workers with that one alone")
    return open_asker(index, cached=False)


def open_card(device: str) -> tuple[TorchGPU, int]:
    """Return the GPU whose library is asked, and its number."""
    gpu = open_gpu(device)
    return gpu, torch.cuda.current_device() if gpu.device.index is None else gpu.device.index


def architecture_of(index: int) -> str:
    """Return the name of a GPU's architecture."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def run_learn(arguments: argparse.Namespace) -> int:
    """Grow trees from the library's answers, and show how often they are right about answers they never saw."""
    path = Path(arguments.learn).expanduser()
    check_file("--learn", path)
    check_positive(arguments, "questions")
    check_learner()
    workers, topics = workers_of(arguments), SMALL if arguments.small else TOPICS
    folder = None if arguments.answers is None else Path(arguments.answers).expanduser()
    if folder is not None and all(answers_file(folder, topic).is_file() for topic in topics):
        library = f"answers in {folder}"
        architecture = str(np.load(answers_file(folder, topics[0]))["architecture"])
    else:
        gpu, index = open_card(arguments.device)
        library, architecture = gpu.library, architecture_of(index)
    books = () if arguments.base is None else get_target(arguments.base).books
    known = cast(Architecture, architecture) if architecture in get_args(Architecture) else None
    with make_progress(None, transient=True) as progress:
        groups = learn(path, partial(open_library, arguments.device, library), count=arguments.questions,
                       workers=workers, architecture=known, progress=progress, topics=topics,
                       executor=arguments.executor, answers=folder, books=books)  # fmt: skip
    rows = [
        (kind_name(group), f"{group.learned:,}", f"{group.held_out:,}", f"{group.right / group.held_out:.2%}",
         f"{group.certain / group.held_out:.1%}", f"{group.certain_right / max(group.certain, 1):.3%}")
        for group in groups
    ]  # fmt: skip
    head = ("kinds", "learned from", "held out", "right", "certain", "right of these")
    record = {"library": library, "file": str(path), "bytes": path.stat().st_size,
              "groups": [dict(zip(head, row, strict=True)) for row in rows]}  # fmt: skip
    answer(arguments, record, lambda: f"{format_table(head, rows, left=(0,))}\nwritten: {path}")
    return 0


def kind_name(group: Group) -> str:
    """Return a few words that name a group of kinds."""
    first = group.kinds[0]
    words = ["batches of", first.a] if group.batched else [first.a]
    words += [{"16f": "sums in fp16", "tf32": "", "32f": ""}[first.compute], "with bias" if first.bias else ""]
    words += [f"scaling {first.scaling}" if first.scaling != "none" else ""]
    others = len(group.kinds) - 1
    return " ".join(filter(None, words)) + (f", {others} more" if others else "")


def book_shapes(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """Return outputs and inputs of the layers of a book that the arguments mean."""
    if arguments.lattice < 0:
        raise ArgumentError(f"--lattice {arguments.lattice} is not possible; choose 0 or more sizes")
    if arguments.small:
        return small_layers()
    from_file = [(n, k) for n, k, _ in read_shapes(arguments.shapes)] if arguments.shapes else []
    names = arguments.models or ([] if arguments.shapes else list_models())
    shapes = [pair for model in find_models(names) for pair in parallel_layers(model)]
    return [*shapes, *from_file, *lattice(arguments.lattice)]


def book_text(path: Path, made: Made, plan: Path | None) -> str:
    """Tell what came of making a book."""
    lines = [f"{made.asked:,} families asked; {path} has {made.families:,} in {made.size:,} bytes"]
    if made.checked:
        wrong = len(made.different)
        lines.append(f"{made.checked:,} questions at random, {wrong:,} with another answer than the book")
        lines += [f"  {shown(question)}" for question in made.different[:_QUESTIONS_SHOWN]]
    if plan is None:
        lines.append("no plan file: the orders behind cuBLASLt's choices are known on sm_90, sm_100 and sm_103 alone")
    else:
        lines.append(f"written: {plan}; use it: fmtsim.mm(a, b, target={str(plan)!r})")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program("python -m tools.calibrate", SUMMARY, declare_calibrate, run_calibrate, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
