# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim calibrate``."""

import argparse

from fmtsim.cli.options import add_device, add_json, add_layers, add_tokens, flag, option
from fmtsim.gemm.models import DTYPES, list_models

PLAN, EVIDENCE, BOOK, LEARNED = "fmtsim-plan.json", "fmtsim-evidence.json", "fmtsim.book", "fmtsim.trees"
QUICK = 64  # calls that --quick asks about


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    what = parser.add_argument_group("which products (default: the layers of gpt2)")
    add_layers(what, ",".join(DTYPES), "gpt2, llama-8b, ...")
    add_tokens(what)
    flag(what, "--quick", f"at most {QUICK} of these calls, spread over them, and one set of data each")
    base = "keep the rules of this target behind the new ones, and try its plans first"
    option(parser, "--base", base, metavar="TARGET")
    option(parser, "--out", f"file to write, {PLAN} or with --unit {EVIDENCE} unless given", metavar="FILE")
    check = parser.add_argument_group("comparing a GPU with a plan file, instead of asking it")
    run_both = "run calls of every rule of this target on the GPU and emulated; compare"
    option(check, "--check", run_both, metavar="TARGET")
    option(check, "--calls", "calls of every rule", 3)
    book = parser.add_argument_group("asking cuBLASLt itself for its choices, which runs nothing")
    every = "write a plan book, or go on with it, and a target: what runs for every number of rows of the layers of"
    known = f"--model and --shapes, by default of all {len(list_models())} known models ({BOOK} unless named)"
    option(book, "--book", f"{every} {known}", metavar="FILE", nargs="?", const=BOOK)
    kinds = "kinds of calls, such as bf16,fp8_rows (default: all; an unknown one is answered with their names)"
    option(book, "--kinds", kinds, metavar="LIST")
    option(book, "--lattice", "further layers whose outputs and inputs are at most so many sizes from 64 to 32768", 0)
    trees = "write a file of decision trees, learned from this library's answers to random questions"
    option(book, "--learn", f"{trees} ({LEARNED} unless named)", metavar="FILE", nargs="?", const=LEARNED)
    option(book, "--questions", "questions about each of the trees' topics, for some more or fewer", 3_000_000)
    option(book, "--workers", "processes that ask (default: one a core)", type=int)
    one = parser.add_argument_group("holding a GPU to the emulation of its matrix unit, instead of asking it")
    all_kinds = "run every kind of call that reaches this unit on the GPU and emulated; compare, and write evidence"
    option(one, "--unit", f"{all_kinds} (hopper.wgmma, blackwell.tcgen05)", metavar="NAME")
    option(one, "--evidence", "read such a file, on any machine: emulate its calls again and show it", metavar="FILE")
    add_device(parser, "cuda")
    add_json(parser)
