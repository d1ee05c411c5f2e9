"""``fmtsim train``: train a small GPT in a baseline precision and under simulated precision, side by side."""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.cli.checks import check_device, check_threads
from fmtsim.cli.output import add_json_argument, format_table, jsonable, parse_record, print_json
from fmtsim.cli.train_summary import summary
from fmtsim.errors import ArgumentError
from fmtsim.progress import make_progress

if TYPE_CHECKING:
    from fmtsim.training.loop import TrainConfig
    from fmtsim.training.schemes import Scheme

INTERRUPTED = 130
MISMATCH = 1
SIZES = {
    "steps": "optimizer steps of each run",
    "batch-size": "windows of text a step",
    "context": "bytes the model sees at once",
    "width": "features",
    "layers": "transformer blocks",
    "heads": "attention heads a block",
}
DEFAULTS = {"steps": 600, "batch_size": 16, "context": 64, "width": 128, "layers": 2, "heads": 4, "lr": 4e-3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _add_scheme(parser.add_argument_group("what is simulated"))
    _add_machine(parser.add_argument_group("who multiplies (float32 sums in no particular order, or one of these)"))
    how = parser.add_argument_group("model and training")
    for name, text in SIZES.items():
        default = DEFAULTS[name.replace("-", "_")]
        how.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    how.add_argument("--lr", type=float, default=DEFAULTS["lr"], help=f"peak learning rate (default {DEFAULTS['lr']})")
    how.add_argument("--seed", type=int, default=0, metavar="N",
                     help="of weights, batches and stochastic rounding (default 0)")  # fmt: skip
    how.add_argument("--data", metavar="PATH", help="a text file or a folder of them; by default Python's own sources")
    how.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu (default), cuda or cuda:1")
    how.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    output = parser.add_argument_group("output")
    output.add_argument("--out", default="fmtsim-train", metavar="DIR",
                        help="folder for pictures and records (default fmtsim-train)")  # fmt: skip
    output.add_argument("--quiet", action="store_true", help="show no progress")
    add_json_argument(parser)


def _add_scheme(group: "argparse._ArgumentGroup") -> None:
    from fmtsim.training.schemes import SCALINGS

    group.add_argument("--recipe", metavar="NAME",
                       help="a published scheme, such as te_nvfp4, or a JSON file, instead of the options below; "
                            "'list' prints all names")  # fmt: skip
    options = {
        "format": (None, "NAME", "format of activations and weights (default e4m3)"),
        "grad-format": (None, "NAME", "of gradients; by default e5m2 beside element formats of 8 bits and fewer, "
                                      "else as --format"),
        "rounding": (None, "MODE", "of activations and weights (default nearest_even)"),
        "grad-rounding": (None, "MODE", "of gradients, such as stochastic (default nearest_even)"),
        "baseline": ("fp32", "NAME", "fp32 (default, nothing quantised), bf16, fp16 or any format"),
    }  # fmt: skip
    for name, (default, metavar, text) in options.items():
        group.add_argument(f"--{name}", default=default, metavar=metavar, help=text)
    group.add_argument("--scaling", choices=SCALINGS,
                       help="what shares a scale; by default tensor for element formats of 8 bits and fewer, none for "
                            "wider ones; block formats have blocks of their own")  # fmt: skip


def _add_machine(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--target", metavar="NAME", help="a machine with its library, such as h200, or a plan file")
    group.add_argument("--unit", metavar="NAME", help="a matrix unit alone, such as hopper.wgmma or exact")
    group.add_argument("--datapath", metavar="FIELD=VALUE,...",
                       help="a unit of your own, such as block=32,fraction_bits=10")  # fmt: skip
    group.add_argument("--plan", metavar="FIELD=VALUE,...", help="an order of sums, such as promote_every=128")
    group.add_argument("--fast-accum", action="store_true",
                       help="use_fast_accum=True of a target's forward products; gradients promote sums")  # fmt: skip
    group.add_argument("--fast-backward", action="store_true", help="use_fast_accum=True for gradients as well")
    group.add_argument("--check", choices=("native",),
                       help="native: instead of the comparison with a baseline, train with the device's own products "
                            "and with emulated ones in lockstep, and stop at the first bit of a loss, gradient or "
                            "weight that differs; 1 is returned then")  # fmt: skip
    group.add_argument("--minutes", type=float, metavar="N",
                       help="with --check: begin no step after so many minutes, and write what was found")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Train both models, write the artifacts and print a summary; 130 after Ctrl-C, with nothing written.

    With ``--check native`` both models are the same, and 1 says that a bit differs.
    """
    from fmtsim.training.artifacts import check_output, make_record, write_artifacts
    from fmtsim.training.corpus import load_corpus
    from fmtsim.training.loop import compare_schemes

    if arguments.recipe == "list":
        return _list_recipes()
    config = _config(arguments)
    check_device(arguments.device)
    out = Path(arguments.out).expanduser()
    check_output(out)
    if arguments.minutes is not None and not (arguments.check and arguments.minutes > 0):
        raise ArgumentError(f"--minutes {arguments.minutes:g} limits --check native; pass both, and a number above 0")
    if arguments.check:
        return _check(arguments, config, out)
    corpus = load_corpus(arguments.data, config.model.context)
    try:
        with _threads(arguments.threads), make_progress(not arguments.quiet) as progress:
            baseline, simulated = compare_schemes(config, corpus, progress)
            record = make_record(config, corpus, baseline, simulated)
        paths = write_artifacts(out, record, baseline, simulated)
    except KeyboardInterrupt:
        print(f"\nfmtsim: interrupted; nothing was written to {out}", file=sys.stderr)
        return INTERRUPTED
    if arguments.json:
        print_json({**record, "files": [str(path) for path in paths]})
    else:
        print(summary(record, baseline, simulated))
        print("\nwritten: " + ", ".join(str(path) for path in paths))
    return 0


def _list_recipes() -> int:
    from fmtsim.recipes import get_recipe, list_recipes

    rows = [(name, get_recipe(name).source) for name in list_recipes()]
    print(format_table(("recipe", "source"), rows, left=(0, 1)))
    return 0


def _check(arguments: argparse.Namespace, config: "TrainConfig", out: Path) -> int:
    """Train natively and emulated in lockstep; 0 where all bits agree after all steps, else 1."""
    from fmtsim.training.corpus import load_corpus
    from fmtsim.training.evidence import check_text, make_check_record, write_check
    from fmtsim.training.lockstep import check_native

    corpus = load_corpus(arguments.data, config.model.context)
    try:
        with _threads(arguments.threads), make_progress(not arguments.quiet) as progress:
            result = check_native(config, corpus, progress, arguments.minutes)
    except KeyboardInterrupt:
        print(f"\nfmtsim: interrupted; nothing was written to {out}", file=sys.stderr)
        return INTERRUPTED
    record = make_check_record(config, corpus, result)
    text = check_text(record)
    paths = write_check(out, record, text, lambda found: json.dumps(jsonable(found), indent=1, allow_nan=False))
    if arguments.json:
        print_json({**record, "files": [str(path) for path in paths]})
    else:
        print(f"{text}\n\nwritten: {', '.join(str(path) for path in paths)}")
    return 0 if result.equal else MISMATCH


def _config(arguments: argparse.Namespace) -> "TrainConfig":
    from fmtsim.formats.registry import get_format
    from fmtsim.training.gpt import GPTConfig
    from fmtsim.training.loop import TrainConfig
    from fmtsim.training.schemes import Scheme

    for name in filter(None, (arguments.format, arguments.grad_format, arguments.baseline)):
        get_format(name)  # an unknown name fails here, with close matches
    sizes = {name: getattr(arguments, name) for name in ("context", "width", "layers", "heads")}
    simulated = (
        _recipe(arguments)
        if arguments.recipe is not None
        else Scheme(
            format=arguments.format or "e4m3",
            grad_format=arguments.grad_format,
            scaling=arguments.scaling,
            rounding=arguments.rounding or "nearest_even",
            grad_rounding=arguments.grad_rounding or "nearest_even",
            **_machine(arguments),
        )
    )
    return TrainConfig(
        simulated=simulated,
        baseline=Scheme(format=arguments.baseline, grad_format=arguments.baseline),
        model=GPTConfig(**sizes),
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        lr=arguments.lr,
        seed=arguments.seed,
        device=arguments.device,
    )


def _recipe(arguments: argparse.Namespace) -> "Scheme":
    """Return the scheme of a recipe, which nothing else may describe."""
    from fmtsim.recipes import get_recipe
    from fmtsim.training.schemes import HIGH_PRECISION, Scheme

    others = ("format", "grad_format", "scaling", "rounding", "grad_rounding", "target", "unit", "datapath", "plan",
              "fast_accum", "fast_backward", "check")  # fmt: skip
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name)]
    if given:
        raise ArgumentError(
            f"--recipe says everything about formats and machines; leave {' and '.join(given)} out, or put it into a "
            "recipe file of your own"
        )
    return Scheme(format=HIGH_PRECISION, recipe=get_recipe(arguments.recipe))


def _machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the machine's options as a Scheme takes them."""
    from fmtsim.spec.datapath import Datapath
    from fmtsim.spec.plan import GemmPlan

    given = [name for name in ("target", "unit", "datapath") if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise ArgumentError(
            f"fmtsim train takes one of --target, --unit and --datapath, not {' and '.join(f'--{n}' for n in given)}"
        )
    if arguments.plan is not None and not given:
        raise ArgumentError("--plan is an order of sums on a machine; pass --target, --unit or --datapath as well")
    if arguments.fast_accum and arguments.target is None:
        raise ArgumentError("--fast-accum chooses between a library's kernels; pass --target as well")
    own = None if arguments.datapath is None else parse_record(arguments.datapath, Datapath, "--datapath")
    return {
        "target": arguments.target,
        "unit": arguments.unit if own is None else own,
        "plan": None if arguments.plan is None else parse_record(arguments.plan, GemmPlan, "--plan"),
        "fast_accum": arguments.fast_accum,
        "fast_backward": arguments.fast_backward,
    }


def _threads(count: int | None) -> contextlib.AbstractContextManager[None]:
    """Run with that many torch threads, then restore the number."""
    from fmtsim.bench.timing import bounded_threads

    if count is None:
        return contextlib.nullcontext()
    check_threads(count)
    return bounded_threads(count)
