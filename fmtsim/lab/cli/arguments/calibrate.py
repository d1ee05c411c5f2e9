# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim calibrate``."""

import argparse

from fmtsim.gemm.models import DTYPES, list_models
from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_device, add_json, add_layers, add_tokens, flag, option

PLAN, EVIDENCE, BOOK, LEARNED = "fmtsim-plan.json", "fmtsim-evidence.json", "fmtsim.book", "fmtsim.trees"
QUICK = 64  # calls that --quick measures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = parser.add_argument_group("which products (default: the layers of gpt2)")
    add_layers(what, ",".join(DTYPES), "gpt2, llama-8b, ...")
    add_tokens(what)
    flag(what, "--quick", f"at most {QUICK} of these calls, evenly chosen, and one set of data each")
    base = "try this target's plans first, and append its rules to the new ones"
    option(parser, "--base", base, metavar="TARGET", known=names.targets)
    option(parser, "--out", f"file to write, {PLAN} or with --unit {EVIDENCE} unless given", metavar="FILE")
    check = parser.add_argument_group("comparing a GPU with a plan file, instead of measuring it")
    run_both = "run calls of every rule of this target on the GPU and in emulation, and compare the bits"
    option(check, "--check", run_both, metavar="TARGET", known=names.targets)
    option(check, "--calls", "calls of every rule", 3)
    book = parser.add_argument_group("querying the cuBLASLt heuristic, which runs no kernel")
    every = "write or continue a plan book and its target: the kernel for every number of rows of the layers of"
    known = f"--model and --shapes, by default of all {len(list_models())} known models ({BOOK} unless named)"
    option(book, "--book", f"{every} {known}", metavar="FILE", nargs="?", const=BOOK)
    kinds = "kinds of calls, such as bf16,fp8_rows (default: all; an unknown kind prints all names)"
    option(book, "--kinds", kinds, metavar="LIST")
    option(book, "--lattice", "add layers with up to N sizes of outputs and of inputs, from 64 to 32768", 0)
    trees = "write a file of decision trees, trained on this library's results for random sizes"
    option(book, "--learn", f"{trees} ({LEARNED} unless named)", metavar="FILE", nargs="?", const=LEARNED)
    option(book, "--questions", "queries for each group of kinds; some groups take more or fewer", 3_000_000)
    option(book, "--workers", "processes that query (default: one per core)", type=int)
    one = parser.add_argument_group("comparing a GPU with the emulation of its matrix unit, instead of measuring it")
    all_kinds = "run every kind of call that reaches this unit on the GPU and in emulation, compare, and write evidence"
    option(one, "--unit", f"{all_kinds} (hopper.wgmma, blackwell.tcgen05)", metavar="NAME", known=names.units)
    option(one, "--evidence", "check such a file on any machine: emulate its calls again and compare", metavar="FILE")
    add_device(parser, "cuda")
    add_json(parser)
