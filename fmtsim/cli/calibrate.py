"""``fmtsim calibrate``: ask the GPU for its unit's arithmetic and its library's orders of sums; write a plan file."""

import argparse
import datetime
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.cli.output import add_json_argument, format_table, print_json
from fmtsim.errors import ArgumentError
from fmtsim.progress import make_progress

if TYPE_CHECKING:
    from fmtsim.calibration.arithmetic import Measured
    from fmtsim.calibration.campaign import Finding
    from fmtsim.calibration.recheck import RuleCheck
    from fmtsim.spec.call import GemmCall

MISMATCH = 1
SHOWN = 10
QUICK = 64  # calls that --quick asks about
DTYPES = ("bf16", "fp16", "tf32", "fp8_fast", "fp8_slow")
MODES = {"bf16": ("bf16",), "fp16": ("fp16", "fp16 sums"), "tf32": ("tf32",), "fp8_fast": ("e4m3", "e5m2"),
         "fp8_slow": ("e4m3", "e5m2")}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = parser.add_argument_group("which products (default: the layers of gpt2)")
    what.add_argument("--model", action="append", metavar="NAME", dest="models", default=[],
                      help="linear layers of this model: gpt2, llama-8b, ...; may be repeated")  # fmt: skip
    what.add_argument("--shapes", metavar="FILE", help="layers of your own: a line 'outputs inputs [bias]' for each")
    what.add_argument("--tokens", default="1..8192", metavar="LIST",
                      help="rows of the layers' input: 1,77,512 or a range, whose powers of two are taken "
                           "(default 1..8192)")  # fmt: skip
    what.add_argument("--dtypes", default=",".join(DTYPES), metavar="LIST", help=f"of {', '.join(DTYPES)}")
    what.add_argument("--no-gradients", action="store_true", help="forward products alone")
    what.add_argument("--quick", action="store_true",
                      help=f"at most {QUICK} of these calls, spread over them, and one set of data each")  # fmt: skip
    parser.add_argument("--base", metavar="TARGET",
                        help="keep the rules of this target behind the new ones, and try its plans first")  # fmt: skip
    parser.add_argument("--out", default="fmtsim-plan.json", metavar="FILE",
                        help="plan file to write (default fmtsim-plan.json)")  # fmt: skip
    check = parser.add_argument_group("holding a card to a plan file, instead of asking it")
    check.add_argument("--check", metavar="TARGET",
                       help="run calls of every rule of this target on the card and emulated; compare")  # fmt: skip
    check.add_argument("--calls", type=int, default=3, metavar="N", help="calls of every rule (default 3)")
    parser.add_argument("--device", default="cuda", metavar="DEVICE", help="cuda (default) or cuda:1")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, verify and write; 0 where a plan file was written, 1 where a measured unit's bits are not explained.

    With ``--check``: 0 where no bit differs and every rule was run.
    """
    if arguments.check is not None:
        return run_check(arguments)
    calls = chosen_calls(arguments)
    out = Path(arguments.out).expanduser()
    check_output(out)
    from fmtsim.calibration.card import open_card
    from fmtsim.gemm.targets.target import get_target

    base = None if arguments.base is None else get_target(arguments.base)
    card = open_card(arguments.device)
    start = time.perf_counter()
    measured, found = ask(card, calls, base, arguments.quick, _family(arguments.device))
    seconds = time.perf_counter() - start
    record = write(out, card, measured, found, base)
    if arguments.json:
        print_json(_record(measured, found, record, seconds, out))
    else:
        print(summary(measured, found))
        print(f"\n{len(calls):,} calls in {seconds:.0f} s; written: {out}, {len(record.rules)} rules")
        print(f"use it: fmtsim.mm(a, b, target={str(out)!r})")
    return 0 if all(unit.known for unit in measured) else MISMATCH


def chosen_calls(arguments: argparse.Namespace) -> "list[GemmCall]":
    """Return the calls that the arguments mean."""
    from fmtsim.calibration.models import PASSES, layer_shapes, model_calls, parse_tokens, read_shapes

    shapes = layer_shapes(arguments.models or ([] if arguments.shapes else ["gpt2"]))
    if arguments.shapes:
        shapes += read_shapes(arguments.shapes)
    dtypes = [word.strip() for word in arguments.dtypes.split(",") if word.strip()]
    passes = PASSES[:1] if arguments.no_gradients else PASSES
    calls = model_calls(shapes, parse_tokens(arguments.tokens), dtypes, passes)
    if not calls:
        raise ArgumentError(
            f"--dtypes {arguments.dtypes!r} leaves no call: FP8 takes K and N that are multiples of 16; add a dtype"
        )
    return calls[:: -(-len(calls) // QUICK)] if arguments.quick else calls


def run_check(arguments: argparse.Namespace) -> int:
    """Hold the card to a target, and print a line for every rule."""
    import torch

    from fmtsim.calibration.card import open_card
    from fmtsim.calibration.recheck import recheck
    from fmtsim.gemm.targets.target import get_target

    if arguments.calls < 1:
        raise ArgumentError(f"--calls {arguments.calls} is not possible; choose 1 or more")
    target = get_target(arguments.check)
    open_card(arguments.device)
    with make_progress(None, transient=True) as progress:
        progress.stage("rules", len(target.rules))
        advance = lambda number, kernel: progress.step(number, f"rule {number}, {kernel}")  # noqa: E731
        found = list(recheck(target, torch.device(arguments.device), calls=arguments.calls, advance=advance))
    if arguments.json:
        print_json([
            {"rule": x.number, "when": x.rule.when, "kernel": x.rule.kernel, "basis": x.rule.basis, "calls": x.calls,
             "outputs": x.outputs, "mismatches": x.mismatches, "note": x.note}
            for x in found
        ])  # fmt: skip
    else:
        print(check_table(found))
    return 0 if all(x.calls and not x.mismatches for x in found) else MISMATCH


def check_table(found: "Sequence[RuleCheck]") -> str:
    """Return a line for every rule: what it is about, what ran, and what differs."""
    rows = [
        (str(x.number), x.rule.basis, x.rule.kernel, _conditions(x.rule.when), f"{x.calls:,}", f"{x.outputs:,}",
         f"{x.mismatches:,}")
        for x in found
    ]  # fmt: skip
    lines = [format_table(("rule", "basis", "kernel", "when", "calls", "numbers", "differ"), rows, left=(1, 2, 3))]
    lines += [f"rule {x.number}: {x.note}" for x in found if x.note]
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


def check_output(out: Path) -> None:
    """Refuse a plan file that could not be written, before the GPU works for minutes."""
    if out.suffix != ".json":
        raise ArgumentError(f"--out {out} does not end in .json, by which target= knows a plan file; choose another")
    if not out.parent.is_dir():
        raise ArgumentError(f"--out {out}: there is no folder {out.parent}; create it, or choose another")


def ask(
    card: Any, calls: "Sequence[GemmCall]", base: Any, quick: bool, family: str
) -> "tuple[list[Measured], list[Finding]]":
    """Measure the units that the calls run on, then find the order of every call."""
    from fmtsim.calibration.arithmetic import arithmetics, measure_all
    from fmtsim.calibration.campaign import SEEDS, calibrate

    modes = dict.fromkeys(mode for call in calls for mode in _modes(call))
    with make_progress(None, transient=True) as progress:
        progress.stage("units and calls", len(modes) + len(calls))
        measured: list[Measured] = []
        for unit in measure_all(card, [*modes, "int8"], family):
            progress.step(len(measured), f"unit for {unit.mode}")
            measured.append(unit)
        known = arithmetics(measured)
        units = lambda call: known[call.a, call.accumulate]  # noqa: E731
        left = [call for call in calls if (call.a, call.accumulate) in known]
        guess = None if base is None else _guess(base)
        found = calibrate(
            card, left, units, guess=guess, seeds=SEEDS[:1] if quick else SEEDS,
            advance=lambda done, text: progress.step(len(modes) + done, text),
        )  # fmt: skip
    return measured, found


def _guess(base: Any) -> Any:
    import warnings

    def guess(call: "GemmCall") -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return base.resolve(call).plan

    return guess


def _modes(call: "GemmCall") -> tuple[str, ...]:
    return next(modes for modes in MODES.values() if call.a in modes)


def _family(device: str) -> str:
    import torch

    from fmtsim.calibration.arithmetic import family_of

    return family_of(torch.cuda.get_device_capability(torch.device(device)))


def write(out: Path, card: Any, measured: "list[Measured]", found: "list[Finding]", base: Any) -> Any:
    """Write the plan file and return its target."""
    from fmtsim.calibration.arithmetic import arithmetics
    from fmtsim.calibration.planfile import plan_file, write_plan

    known = arithmetics(measured)
    target = plan_file(
        out.stem, card.library, found, lambda call: known[call.a, call.accumulate], measured=measured, base=base,
        date=datetime.date.today().isoformat(),
    )  # fmt: skip
    write_plan(target, out)
    return target


def summary(measured: "list[Measured]", found: "list[Finding]") -> str:
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


def _record(
    measured: "list[Measured]", found: "list[Finding]", target: Any, seconds: float, out: Path
) -> dict[str, Any]:
    return {
        "library": target.library,
        "seconds": seconds,
        "file": str(out),
        "units": [
            {"mode": unit.mode, "unit": unit.unit, "arithmetic": repr(unit.arithmetic), "outputs": unit.outputs,
             "mismatches": unit.mismatches, "facts": dict(unit.facts)}
            for unit in measured
        ],
        "calls": [
            {"operation": finding.call.operation, "m": finding.call.m, "n": finding.call.n, "k": finding.call.k,
             "a": finding.call.a, "fast_accum": finding.call.fast_accum, "status": finding.status,
             "outputs": finding.outputs, "note": finding.note}
            for finding in found
        ],
    }  # fmt: skip
