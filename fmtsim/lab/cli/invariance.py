# SPDX-License-Identifier: Apache-2.0
"""``fmtsim invariance``: for which batch sizes a row's result changes on a target."""

import argparse
from pathlib import Path

from fmtsim.gemm.models import PASSES, parse_tokens
from fmtsim.lab.analysis.invariance import batch_invariance
from fmtsim.lab.cli.layers import chosen_dtypes, chosen_model
from fmtsim.lab.cli.output import answer
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import check_file


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
