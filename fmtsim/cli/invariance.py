"""``fmtsim invariance``: for which batch sizes a row's result changes on a target."""

import argparse
from pathlib import Path

from fmtsim.analysis.invariance import batch_invariance
from fmtsim.cli.layers import add_layers, chosen_dtypes, chosen_model
from fmtsim.cli.options import add_json, flag, option
from fmtsim.cli.output import answer
from fmtsim.errors import ArgumentError
from fmtsim.files import check_file
from fmtsim.gemm.models import PASSES, parse_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = parser.add_argument_group("which products (default: the layers of gpt2)")
    add_layers(what, "bf16")
    option(what, "--sizes", "rows of the layers' input: 1,77,512 or a range, all of it", "1..512", "LIST")
    flag(what, "--no-gradients", "forward products alone")
    named = "a GPU with its library, such as h200, or a plan file; none for a model that is converted"
    option(parser, "--target", named, metavar="NAME")
    option(parser, "--plot", "save a picture of the sizes with equal results as PNG", metavar="FILE")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; 0 also where a row's result changes."""
    sizes = parse_tokens(arguments.sizes, "--sizes", every=True)
    plot = None if arguments.plot is None else Path(arguments.plot).expanduser()
    if plot is not None and plot.suffix != ".png":
        raise ArgumentError(f"--plot {plot} does not end in .png; choose another name")
    if plot is not None:
        check_file("--plot", plot)
    passes = PASSES[:1] if arguments.no_gradients else PASSES[:2]
    found = batch_invariance(
        chosen_model(arguments), arguments.target, sizes, dtypes=chosen_dtypes(arguments), passes=passes
    )
    if plot is not None:
        found.plot(plot)
    answer(arguments, found.to_dict(), lambda: str(found))
    return 0
