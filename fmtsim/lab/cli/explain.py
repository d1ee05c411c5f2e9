# SPDX-License-Identifier: Apache-2.0
"""``fmtsim explain``: why numbers got their bits."""

import argparse

import fmtsim
from fmtsim.lab.cli.options import parse_numbers
from fmtsim.lab.cli.output import answer

OPTIONS = ("rounding", "overflow", "random_bits", "block_size", "scale_rule")
DEFECT = 1


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation; exit with 1 where the engine disagrees with the oracle."""
    import torch

    numbers = parse_numbers(arguments.numbers)
    options = {name: getattr(arguments, name) for name in OPTIONS}
    x = torch.tensor(numbers, dtype=getattr(torch, arguments.dtype))
    explanation = fmtsim.explain(x, arguments.format, generator=arguments.seed, **options)
    answer(arguments, explanation.to_dict(), lambda: str(explanation))
    return 0 if explanation.engine_agrees else DEFECT
