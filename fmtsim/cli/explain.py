"""``fmtsim explain``: why numbers got their bits."""

import argparse

import fmtsim
from fmtsim.cli.options import add_json, add_rounding, count, option, parse_numbers
from fmtsim.cli.output import answer
from fmtsim.formats.scaling import SCALE_RULES

DTYPES = ("float64", "float32", "bfloat16", "float16")
OPTIONS = ("rounding", "overflow", "random_bits", "block_size", "scale_rule")
DEFECT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "numbers",
        nargs="+",
        metavar="NUMBER",
        help="one number, or the consecutive numbers of a block; - reads them from standard input",
    )
    parser.add_argument("--format", required=True, help="any format; blocks of a block format are cut from the numbers")
    option(parser, "--dtype", "what the numbers are stored in before the cast", "float64", choices=DTYPES)
    count(parser, "--block-size", "numbers that share a scale")
    option(parser, "--scale-rule", f"one of {', '.join(SCALE_RULES)}", metavar="RULE")
    add_rounding(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation; exit with 1 where the engine disagrees with the oracle."""
    import torch

    numbers = parse_numbers(arguments.numbers)
    options = {name: getattr(arguments, name) for name in OPTIONS}
    x = torch.tensor(numbers, dtype=getattr(torch, arguments.dtype))
    explanation = fmtsim.explain(x, arguments.format, generator=arguments.seed, **options)
    answer(arguments, explanation.to_dict(), lambda: str(explanation))
    return 0 if explanation.engine_agrees else DEFECT
