# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim mm``."""

import argparse

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_device, add_json, add_target, flag, option

DATA = ("normal", "uniform", "wide", "cancel")
OUT_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
SLOW_EVERY = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for name in ("m", "n", "k"):
        parser.add_argument(name, type=int, metavar=name.upper(), help=f"{name.upper()} of [M, K] x [K, N]")
    how = parser.add_argument_group("simulated arithmetic (one of these)")
    add_target(how)
    option(how, "--accumulate", "fp32, fp16 or fp64, if the target or unit has several", metavar="FORMAT")
    flag(how, "--slow", f"use_fast_accum=False; for a unit: a new chain every {SLOW_EVERY} products")
    where = parser.add_argument_group("where")
    add_device(where)
    flag(where, "--emulate", "emulate even if the device is the target")
    check = "native: run the device's own unit and its emulation, and compare the bits; exit code 1 if they differ"
    option(where, "--check", check, choices=("native",))
    what = parser.add_argument_group("operands")
    option(what, "--dtype", "format of both operands", "e4m3", "FORMAT", names.formats)
    option(what, "--b-dtype", "format of b (default: as --dtype)", metavar="FORMAT", known=names.formats)
    data = "N(0, 1), uniform in [0, 1), over 16 binades, or pairs that nearly cancel"
    option(what, "--data", data, "normal", choices=DATA)
    option(what, "--seed", "of the data, and of stochastic rounding", 0)
    result = parser.add_argument_group("result")
    option(result, "--out-dtype", "dtype of the result (default float32)", choices=OUT_DTYPES)
    option(result, "--out", "save the result as .npy or .safetensors", metavar="FILE")
    add_json(parser)
