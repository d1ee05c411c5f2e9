# SPDX-License-Identifier: Apache-2.0
"""Runs of ``fmtsim sweep``, ``memory`` and ``reproduce``."""

import argparse
import dataclasses
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from fmtsim.gemm.models import list_models
from fmtsim.lab.cli.options import check_device, parse_number, workers_of
from fmtsim.lab.cli.output import answer, format_table, json_text, origin
from fmtsim.lab.memory import Lora, Parallel, StoredFormats, serving_memory, training_memory
from studies.claims import Claim, Result, get_claims, run_claim, run_claims
from studies.claims.claim import Verdict
from studies.claims.report import HEADER, LEFT, about, ending, markdown, plot_result, rows_of
from fmtsim.lab.training import sweep_folder
from fmtsim.lab.training.corpus import Corpus, load_corpus, task_corpus
from fmtsim.lab.training.scaling_law import Choice, ScalingLaw, fit_law
from fmtsim.lab.training.sweep import Point, SweepConfig, points_of, speed_of
from fmtsim.lab.training.sweep_result import SweepResult, byte_entropy
from fmtsim.recipes.registry import get_recipe
from fmtsim.support.errors import ArgumentError, FmtsimError
from fmtsim.support.files import Content, check_folder, write_folder
from fmtsim.support.plotting import png
from fmtsim.support.progress import Progress, make_progress

T = TypeVar("T")
HEATMAP, LAW = "heatmap.png", "law.png"
MOST_RUNS = 100_000


def run_sweep(arguments: argparse.Namespace) -> int:
    """Train what the folder lacks, draw the heatmap and print the table; Ctrl-C leaves the runs that are done."""
    points, config = _points(arguments), _config(arguments)
    for point in points:
        config.train_config(point)  # what does not fit fails here
    if arguments.law is not None and arguments.law not in {point.scheme for point in points}:
        raise ArgumentError(
            f"--law {arguments.law} is none of --schemes {arguments.schemes}; add it, or choose one of them"
        )
    check_device(arguments.device)
    workers = workers_of(arguments)
    out = Path(arguments.out).expanduser()
    check_folder(out)
    corpus = _corpus(arguments)
    try:
        with make_progress(not arguments.quiet) as progress:
            runs = sweep_folder.run_sweep(config, points, corpus, out, progress, workers, arguments.executor)
    except KeyboardInterrupt:
        done = len({run.point for run in sweep_folder.read_runs(out)} & set(points))
        raise KeyboardInterrupt(f"{done} of {len(points)} runs are in {out}; the same command goes on") from None
    result = SweepResult(runs=tuple(runs), entropy=byte_entropy(corpus.train), limit=arguments.failed)
    law = None if arguments.law is None else fit_law(result.trained(), arguments.law)
    files = _draw(result, law, out)
    record = {**origin(), "runs": len(runs), "corpus": corpus.name, **result.to_dict(), "files": files}
    if law is not None:
        record["law"] = {name: getattr(law, name) for name in ("constants", "base", "eff_n", "eff_d")}
    tables = "\n\n".join(str(part) for part in (result, law) if part is not None)
    answer(arguments, record, lambda: f"text: {corpus.name}\n{tables}\n\nwritten: {', '.join(files)}")
    return 0


def _choices(law: ScalingLaw) -> list[Choice]:
    """Return every forward with every backward precision, as many times faster as operands have fewer bits than 16."""
    return [
        Choice(first, second, speed_of(first, backward=False), speed_of(second, backward=True))
        for first in law.eff_n for second in law.eff_d
    ]  # fmt: skip


def _draw(result: SweepResult, law: ScalingLaw | None, out: Path) -> list[str]:
    """Draw what there is where matplotlib is installed; return the files of the sweep."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no heatmap: matplotlib is not installed (pip install 'fmtsim[viz]')", file=sys.stderr)
    else:
        result.plot(out / HEATMAP)
        if law is not None:
            law.plot(_choices(law), out / LAW)
    return sorted(str(path) for path in out.iterdir() if path.suffix in (".json", ".jsonl", ".png"))


def _points(arguments: argparse.Namespace) -> list[Point]:
    schemes = _list(arguments.schemes, "--schemes", str)
    rates = _list(arguments.lr, "--lr", parse_number)
    widths, steps, seeds = (_integers(getattr(arguments, name), f"--{name}") for name in ("widths", "steps", "seeds"))
    total = len(schemes) * len(rates) * len(widths) * len(steps) * len(seeds)
    if total > MOST_RUNS:
        raise ArgumentError(
            f"the lists make {total:,} runs; choose at most {MOST_RUNS:,}, in several sweeps if need be"
        )
    return points_of(schemes, rates, widths, steps, seeds)


def _config(arguments: argparse.Namespace) -> SweepConfig:
    names = ("layers", "heads", "context", "batch_size", "final_rate", "device")
    clip = None if arguments.clip == 0 else arguments.clip
    return SweepConfig(architecture=arguments.model, clip=clip, **{name: getattr(arguments, name) for name in names})


def _corpus(arguments: argparse.Namespace) -> Corpus:
    if not arguments.tasks:
        return load_corpus(arguments.data, arguments.context)
    if arguments.data is not None:
        raise ArgumentError(f"--tasks is a text of its own; leave --data {arguments.data} or --tasks out")
    return task_corpus()


def _list(text: str, option: str, read: Callable[[str], T]) -> list[T]:
    items = [read(word.strip()) for word in text.split(",") if word.strip()]
    if not items:
        raise ArgumentError(f"{option} {text!r} is empty; write a list, such as a,b,c")
    return items


def _integers(text: str, option: str) -> list[int]:
    """Read numbers and ranges: ``1,2,8..11``."""
    numbers: list[int] = []
    for word in _list(text, option, str):
        first, dots, last = word.partition("..")
        if not (first.isdecimal() and (last.isdecimal() if dots else True)) or len(first + last) > 30:
            raise ArgumentError(
                f"{option} {word!r} is neither a number nor a range; write 3, or 0..3 for 0, 1, 2 and 3"
            )
        low, high = int(first), int(last or first)
        if not low <= high < low + MOST_RUNS:
            raise ArgumentError(f"{option} {word} has no numbers, or too many; write the smaller one first")
        numbers += range(low, high + 1)
    return numbers


# Records that training_memory takes, and the options of their fields where these have other names.
RECORDS: dict[str, tuple[Any, dict[str, str]]] = {
    "formats": (StoredFormats, {"loss": "loss_format"}), "parallel": (Parallel, {}),
    "lora": (Lora, {"rank": "lora", "layers": "lora_layers"}),
}  # fmt: skip
FIELDS = {
    keyword: {field.name: options.get(field.name, field.name) for field in dataclasses.fields(record)}
    for keyword, (record, options) in RECORDS.items()
}
# Options of the verbs, each a keyword or a record's field of that name; ``model`` comes first.
TRAINING, SERVING = (
    [option for name in [*inspect.signature(verb).parameters][1:] for option in FIELDS.get(name, {name: name}).values()]
    for verb in (training_memory, serving_memory)
)


def run_memory(arguments: argparse.Namespace) -> int:
    """Print the estimate."""
    if arguments.model == "list":
        print("\n".join(list_models()))
        return 0
    model = arguments.model if arguments.params is None else arguments.params
    verb, allowed, others = (
        (serving_memory, SERVING, [*TRAINING, "level"]) if arguments.serve else (training_memory, TRAINING, SERVING)
    )
    wrong = next(iter(_given(arguments, [name for name in others if name not in allowed])), None)
    if wrong is not None:
        why = "training; leave it or --serve out" if arguments.serve else "serving; add --serve, or leave it out"
        raise ArgumentError(f"--{wrong.replace('_', '-')} is about {why}")
    options = _given(arguments, allowed)
    if options.get("master") == "none":
        options["master"] = None
    try:
        for keyword, fields in {} if arguments.serve else FIELDS.items():
            values = {field: options.pop(option) for field, option in fields.items() if option in options}
            options |= {keyword: RECORDS[keyword][0](**values)} if values else {}
        if arguments.level is not None:
            if "recipe" not in options:
                raise ArgumentError(f"--level {arguments.level} is a recipe's; pass --recipe fp8lm as well")
            options["recipe"] = get_recipe(options["recipe"], kind="training").at_level(arguments.level)
        estimate = verb(model, **options)
    except FmtsimError as error:
        raise type(error)(_in_options(str(error), arguments.model is None)) from error
    formulas = f"\n\n{estimate.formulas()}" if arguments.formulas else ""
    answer(arguments, estimate.to_dict(), lambda: f"{estimate}{formulas}")
    return 0


def _in_options(message: str, by_number: bool) -> str:
    """Return what the verbs say with options in the place of their keywords: ``--lora 16`` for ``lora=16``."""

    fields = {field: option for names in FIELDS.values() for field, option in names.items()}

    def spelled(keyword: re.Match[str]) -> str:
        name = "params" if keyword[1] == "model" and by_number else fields.get(keyword[1], keyword[1])
        return f"--{name.replace('_', '-')} {keyword[2]}"

    names = "|".join(("model", *fields, *TRAINING, *SERVING))
    return re.sub(rf"\b({names})=('[^']*'|[^\s;,]+)", spelled, message)


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


WORSE, BROKE_OFF = 1, 3


def run_reproduce(arguments: argparse.Namespace) -> int:
    """Run the claims and print their table.

    Returns 0 where every claim shows at least what is recorded of it, 1 where one shows less, 3 where one broke off.
    """
    claims = [claim for claim in get_claims(arguments.claims) if not (arguments.quick and claim.slow)]
    if arguments.seeds is not None and arguments.seeds < 1:
        raise ArgumentError(f"--seeds {arguments.seeds} runs nothing; choose 1 or more")
    if arguments.first_seed < 0:
        raise ArgumentError(f"--first-seed {arguments.first_seed} is negative; choose 0 or more")
    if not claims:
        raise ArgumentError("every claim named with --only is slow; leave --quick out")
    if arguments.list:
        names = ("name", "recorded", "says", "source", "notes", "bounds", "slow")
        record = [{name: getattr(claim, name) for name in names} | {"card": bool(claim.card)} for claim in claims]
        rows = [
            (claim.name, claim.recorded, "slow, GPU" if claim.card else "slow" if claim.slow else "", claim.says)
            for claim in claims
        ]
        header = ("claim", "recorded", "", "what it says")
        answer(arguments, record, lambda: format_table(header, rows, left=(0, 1, 2, 3)))
        return 0
    if arguments.out is not None:
        check_folder(arguments.out)
    if arguments.budget is not None and arguments.device is None:
        raise ArgumentError("--budget is of --device; add that, or leave it out")
    workers = workers_of(arguments)
    run = _run_all if arguments.device is None else _run_on_card
    results = run(claims, arguments, workers)
    answer(arguments, _record(results), lambda: _text(results, arguments.markdown))
    if arguments.out is not None:
        _write(arguments.out, results)
    # An experiment that broke off is worse than one that shows less.
    return BROKE_OFF if any(r.error for r in results) else WORSE if any(r.worse for r in results) else 0


def _text(results: Sequence[Result], as_markdown: bool) -> str:
    if as_markdown:
        return markdown(results).removesuffix("\n")
    parts = [format_table(HEADER, rows_of(results), left=LEFT)]
    for result in results:
        if result.worse:
            parts.append(f"\n{about(result.claim)}" + (f"\n  broke off: {result.error}" if result.error else ""))
    return "\n".join([*parts, f"\n{_summary(results)}"])


def _run_all(claims: Sequence[Claim], arguments: argparse.Namespace, workers: int) -> list[Result]:
    """Run claims below a bar on a terminal; elsewhere a line says how each one ended."""
    results, quiet, executor = {}, arguments.quiet, arguments.executor
    seeds = {"seeds": arguments.seeds, "first_seed": arguments.first_seed}
    with make_progress(False if quiet else None, transient=True) as progress:
        progress.stage("claims", len(claims))
        if executor is not None or (workers > 1 and sum(claim.slow for claim in claims) > 1):
            every = run_claims(claims, workers, **seeds, executor=executor)
        else:
            every = (
                run_claim(claim, partial(_tell, progress, at, claim.name), **seeds) for at, claim in enumerate(claims)
            )
        for done, result in enumerate(every, 1):
            results[result.claim.name] = result
            progress.step(done, result.claim.name)
            if not quiet and not sys.stderr.isatty():
                print(f"{result.claim.name}: {ending(result)}, {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return [results[claim.name] for claim in claims]


def _run_on_card(claims: Sequence[Claim], arguments: argparse.Namespace, workers: int) -> list[Result]:
    """Run those of the claims that have a size for a GPU, or all that are named."""
    from studies.claims.card import run_on_card

    if arguments.out is None:
        raise ArgumentError("--device keeps each training in a folder, and goes on there; pass --out DIR")
    check_device(arguments.device)
    claims = [claim for claim in claims if claim.card or arguments.claims]
    how = {name: getattr(arguments, name) for name in ("device", "seeds", "first_seed", "executor")}
    with make_progress(False if arguments.quiet else None) as progress:
        return run_on_card(
            claims, arguments.out, progress, budget=_seconds(arguments.budget), workers=workers, **how
        )  # fmt: skip


def _seconds(budget: str | None) -> float | None:
    """Return how long a budget such as 25min is."""
    if budget is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", budget)
    if match is None:
        raise ArgumentError(f"--budget {budget} is no time; pass a number of s, min or h, such as 25min")
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


def _tell(progress: Progress, done: int, name: str, share: float) -> None:
    progress.step(done + share, name)


def _record(results: Sequence[Result]) -> dict[str, object]:
    worse = [result.claim.name for result in results if result.worse]
    return {"worse": worse, "claims": [result.to_dict() for result in results]}


def _summary(results: Sequence[Result]) -> str:
    counts = Counter("broke off" if result.error else result.verdict for result in results)
    tally = ", ".join(f"{counts[word]} {word}" for word in (*get_args(Verdict), "broke off") if counts[word])
    worse = ", ".join(result.claim.name for result in results if result.worse)
    recorded = f"WORSE than recorded: {worse}" if worse else "nothing is worse than recorded"
    seconds = sum(result.seconds for result in results)
    return f"{len(results)} claim{'s' if len(results) > 1 else ''}, {seconds:.0f} s: {tally}; {recorded}"


def _write(folder: Path, results: Sequence[Result]) -> None:
    contents: dict[str, Content] = {"claims.md": markdown(results), "claims.json": json_text(_record(results)) + "\n"}
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'fmtsim[viz]')", file=sys.stderr)
    else:
        drawn = {f"{result.claim.name}.png": plot_result(result) for result in results}
        contents |= {name: png(figure) for name, figure in drawn.items() if figure is not None}
    write_folder(folder, contents)
