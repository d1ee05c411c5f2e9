"""``fmtsim explain``: why numbers got their bits."""

import argparse

from fmtsim.cli.output import add_json_argument, add_rounding_arguments, parse_number, print_json
from fmtsim.formats.scaling import SCALE_RULES

DTYPES = ("float64", "float32", "bfloat16", "float16")
DEFECT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "numbers", nargs="+", metavar="NUMBER", help="one number, or the consecutive numbers of a block"
    )
    parser.add_argument("--format", required=True, help="any format; blocks of a block format are cut from the numbers")
    parser.add_argument("--dtype", choices=DTYPES, default="float64",
                        help="what the numbers are stored in before the cast (default float64)")  # fmt: skip
    parser.add_argument("--block-size", type=int, metavar="N", help="numbers that share a scale")
    parser.add_argument("--scale-rule", metavar="RULE", help=f"one of {', '.join(SCALE_RULES)}")
    add_rounding_arguments(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation; exit with 1 where the engine disagrees with the oracle."""
    import torch

    from fmtsim.explain import explain

    numbers = [parse_number(text) for text in arguments.numbers]
    explanation = explain(
        torch.tensor(numbers, dtype=getattr(torch, arguments.dtype)),
        arguments.format,
        rounding=arguments.rounding,
        overflow=arguments.overflow,
        generator=arguments.seed,
        random_bits=arguments.random_bits,
        block_size=arguments.block_size,
        scale_rule=arguments.scale_rule,
    )
    if arguments.json:
        print_json(explanation.to_dict())
    else:
        print(explanation)
    return 0 if explanation.engine_agrees else DEFECT
