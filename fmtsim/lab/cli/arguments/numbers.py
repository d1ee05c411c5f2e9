# SPDX-License-Identifier: Apache-2.0
"""Arguments of the commands about numbers, formats and matrix products."""

import argparse
from pathlib import Path

from fmtsim.formats.scaling import SCALE_RULES
from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import (
    add_device,
    add_json,
    add_layers,
    add_rounding,
    add_target,
    check_positive,
    check_rounding,
    count,
    flag,
    option,
    repeated,
    tensor_file,
)
from fmtsim.support.errors import ArgumentError
from fmtsim.support.files import check_file

ALL_BITS = 16  # with --all
KINDS = ("float", "int", "codebook", "log", "block", "log_tile")


def declare_formats(parser: argparse.ArgumentParser) -> None:
    option(parser, "pattern", "names or aliases to list, such as 'mx*' (default: all)", metavar=None, nargs="?")
    option(parser, "--kind", "list one kind of format", choices=KINDS)
    codes = parser.add_argument_group("the codes of one format")
    flag(codes, "--codes", "show its codes, of a wide format its landmarks; a block format shows its element")
    flag(codes, "--all", f"every code of a format of 9 to {ALL_BITS} bits, instead of its landmarks only")
    repeated(codes, "--code", "show only this code (17, 0x11 or 0b10001)", "N")
    count(codes, "--columns", "codes side by side (default 4, fewer in a narrow terminal)")
    add_json(parser)


def check_formats(arguments: argparse.Namespace) -> None:
    """Refuse codes of no format, and options of codes without --codes."""
    if not arguments.codes and (arguments.all or arguments.code or arguments.columns is not None):
        raise ArgumentError("--all, --code and --columns show codes of a format; add --codes")
    if arguments.codes and arguments.pattern is None:
        raise ArgumentError("--codes needs the name of a format; fmtsim formats lists them")


def declare_cast(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "numbers", nargs="+", metavar="NUMBER", help="0.1, -3e-5, 0x1.8p-3, inf or nan; - reads standard input"
    )
    repeated(parser, "--to", "the element format", "FORMAT", names.formats, required=True, dest="formats", default=None)
    repeated(parser, "--like", "another library's cast beside fmtsim's own", "LIBRARY", names.profiles, default=[])
    add_rounding(parser)
    add_json(parser)


check_cast = check_rounding


DTYPES = ("float64", "float32", "bfloat16", "float16")


def declare_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "numbers", nargs="+", metavar="NUMBER",
        help="one number, or the consecutive numbers of a block; - reads them from standard input",
    )  # fmt: skip
    option(parser, "--format", "any format; blocks are consecutive numbers", metavar=None, names=names.formats,
           required=True)  # fmt: skip
    option(parser, "--dtype", "dtype in which the numbers are stored before the cast", "float64", choices=DTYPES)
    count(parser, "--block-size", "numbers that share a scale")
    option(parser, "--scale-rule", f"one of {', '.join(SCALE_RULES)}", names=names.scale_rules)
    option(parser, "--like", "another library, such as onnxruntime: the steps of its cast", metavar="LIBRARY",
           names=names.profiles)  # fmt: skip
    add_rounding(parser)
    add_json(parser)


def check_explain(arguments: argparse.Namespace) -> None:
    """Refuse random bits without stochastic rounding, and blocks of no numbers."""
    check_rounding(arguments)
    check_positive(arguments, "block_size")


DATA = ("normal", "uniform", "wide", "cancel")
OUT_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
SLOW_EVERY = 128


def declare_mm(parser: argparse.ArgumentParser) -> None:
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
    option(what, "--b-dtype", "format of b (default: as --dtype)", names=names.formats)
    data = "N(0, 1), uniform in [0, 1), over 16 binades, or pairs that nearly cancel"
    option(what, "--data", data, "normal", choices=DATA)
    option(what, "--seed", "of the data, and of stochastic rounding", 0)
    result = parser.add_argument_group("result")
    option(result, "--out-dtype", "dtype of the result (default float32)", choices=OUT_DTYPES)
    option(result, "--out", "save the result as .npy or .safetensors", metavar="FILE")
    add_json(parser)


MOST = 1 << 31  # of M, N and K; such a matrix would not fit into the memory of a machine


def check_mm(arguments: argparse.Namespace) -> None:
    """Refuse sizes and names of files that are not possible, and a target that is missing."""
    if arguments.target is None:
        raise ArgumentError("fmtsim mm needs --target; try --target h200, or --target hopper.wgmma for a unit alone")
    for name in ("m", "n", "k"):
        size = getattr(arguments, name)
        if not 1 <= size < MOST:
            allowed = "1 or more" if size < 1 else f"1 to {MOST - 1:,}"
            raise ArgumentError(f"{name.upper()} = {size} is not possible; choose {allowed}")
    if not 0 <= arguments.seed < 1 << 62:
        raise ArgumentError(f"--seed {arguments.seed} is not allowed; choose 0 to 2**62 - 1")
    if arguments.out:
        if Path(arguments.out).suffix not in (".npy", ".safetensors"):
            raise ArgumentError(f"--out {arguments.out} does not end in .npy or .safetensors; choose another name")
        check_file("--out", Path(arguments.out))
    if arguments.slow and arguments.plan is not None:
        raise ArgumentError(
            f"--slow and --plan both give an accumulation order; write --plan promote_every={SLOW_EVERY},..."
        )


def declare_identify(parser: argparse.ArgumentParser) -> None:
    files = ".npy, .npz, .pt or .safetensors; FILE:NAME picks one tensor of a file"
    parser.add_argument("a", metavar="A", help=f"[M, K]: {files}")
    parser.add_argument("b", metavar="B", help="[K, N]")
    parser.add_argument("y", metavar="Y", help="[M, N], the result to explain")
    option(parser, "--dtype", "of operands that a .npy file holds as integer codes, such as bfloat16", metavar="DTYPE")
    option(parser, "--out-dtype", "of a result that a .npy file holds as integer codes", metavar="DTYPE")
    option(parser, "--bias", "[N], what was added to every row", metavar="FILE")
    option(parser, "--scale-a", "scales of a, as scaled_mm takes them; with --scale-b", metavar="FILE")
    option(parser, "--scale-b", "scales of b", metavar="FILE")
    option(parser, "--target", "look at this GPU with its library, or this unit, alone", metavar="NAME",
           names=names.targets_and_units)  # fmt: skip
    flag(parser, "--thorough", "try every way to cut K into up to 128 parts, which takes minutes")
    option(parser, "--probe", "write operands that tell the explanations apart, as a and b", metavar="FILE.pt")
    again = "operands and result of another run, such as that of --probe, which have to fit too"
    repeated(parser, "--refine", again, default=[], metavar=("A", "B", "Y"), nargs=3)
    add_json(parser)


def check_identify(arguments: argparse.Namespace) -> None:
    """Refuse files that are not there or of no kind that is read, and one that cannot be written."""
    extras = filter(None, (arguments.bias, arguments.scale_a, arguments.scale_b))
    for text in (arguments.a, arguments.b, arguments.y, *extras, *(text for run in arguments.refine for text in run)):
        tensor_file(text)
    if (arguments.scale_a is None) != (arguments.scale_b is None):
        raise ArgumentError("--scale-a and --scale-b belong together; pass both, a file with 1.0 for the other")
    if arguments.probe:
        check_file("--probe", Path(arguments.probe))


def declare_identify_cast(parser: argparse.ArgumentParser) -> None:
    files = ".npy, .npz, .pt or .safetensors; FILE:NAME picks one tensor of a file"
    parser.add_argument("x", metavar="X", help=f"what was cast: {files}")
    parser.add_argument("result", metavar="RESULT", help="what came out: values, float8, or codes as integers")
    option(parser, "--scale", "the scales beside codes; bytes are E8M0 codes", metavar="FILE")
    option(parser, "--format", "look at this format alone", names=names.formats)
    option(parser, "--dtype", "of x, where a .npy file holds integer codes of it, such as bfloat16", metavar="DTYPE")
    option(parser, "--probe", "write numbers that tell the explanations apart", metavar="FILE.pt")
    again = "numbers and result of another run, such as that of --probe, which have to fit too"
    repeated(parser, "--refine", again, default=[], metavar=("X", "RESULT"), nargs=2)
    add_json(parser)


def check_identify_cast(arguments: argparse.Namespace) -> None:
    """Refuse files that are not there or of no kind that is read, and one that cannot be written."""
    refined = (text for run in arguments.refine for text in run)
    for text in filter(None, (arguments.x, arguments.result, arguments.scale, *refined)):
        tensor_file(text)
    if arguments.probe:
        check_file("--probe", Path(arguments.probe))


def declare_invariance(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("which products (default: the layers of gpt2)")
    add_layers(what, "bf16")
    option(what, "--sizes", "rows of the layers' input: a list (1,77,512) or a range (1..512)", "1..512", "LIST")
    flag(what, "--no-gradients", "forward products only")
    named = "a GPU with its library, such as h200, or a plan file; leave it out for a converted model"
    option(parser, "--target", named, names=names.targets)
    option(parser, "--plot", "save a picture of the sizes with equal results as PNG", metavar="FILE")
    add_json(parser)


def declare_convert_checkpoint(parser: argparse.ArgumentParser) -> None:
    source = "the checkpoint: a folder, a .safetensors or a .gguf file; without --out also a block format"
    parser.add_argument("folder", metavar="FOLDER", help=source)
    option(parser, "--to", "the block format", names=names.formats, required=True)
    out = "the folder to write, which must not exist yet; without it, say what would be lost, and exit with 1 if any is"
    option(parser, "--out", out, metavar="DIR", type=Path)
    layouts = "compressed-tensors: 2-d weights; gpt-oss: MXFP4; deepseek: E4M3 in blocks, scales as float32"
    option(parser, "--layout", layouts, "compressed-tensors", choices=("compressed-tensors", "gpt-oss", "deepseek"))
    scales = "rule: the format's own; own: those of the checkpoint, or the format's next above where it lacks one; "
    scales += "best: of both, for each weight, those that lose less"
    option(parser, "--scales", scales, "best", choices=("best", "rule", "own"))
    option(parser, "--weights", "a regular expression: weights to encode that are not quantised", metavar="PATTERN")
    option(parser, "--ignore", "a regular expression: weights to leave in high precision", metavar="PATTERN")
    flag(parser, "--quiet", "show no progress")
    add_json(parser)


def declare_vectors(parser: argparse.ArgumentParser) -> None:
    option(parser, "format", "any format that fmtsim.encode takes", metavar=None, names=names.formats, nargs="?")
    option(parser, "--out", "the folder to write; README.md there says how to use it", metavar="DIR", type=Path)
    count(parser, "--block-size", "numbers that share a scale")
    option(parser, "--scale-rule", f"one of {', '.join(SCALE_RULES)}", names=names.scale_rules)
    add_rounding(parser)
    check = parser.add_argument_group("comparing what a kernel made of such inputs, instead of writing them")
    option(check, "--check", "the folder that --out wrote", metavar="DIR", type=Path)
    files = ".npy, .npz, .pt or .safetensors; FILE:NAME picks a tensor"
    option(check, "--decode", f"values that a kernel made of codes and scales: {files}", metavar="FILE")
    option(check, "--encode", "codes that it made of inputs; scales too where the file names them", metavar="FILE")
    flag(check, "--all", "list all differences, not the first of each group")
    add_json(parser)


def check_vectors(arguments: argparse.Namespace) -> None:
    """Refuse half of either job, both jobs at once, and files that are not there."""
    results = [text for text in (arguments.decode, arguments.encode) if text]
    if arguments.check is None:
        if results:
            raise ArgumentError("--decode and --encode are compared with vectors; add --check DIR")
        if arguments.format is None or arguments.out is None:
            raise ArgumentError("vectors writes a format's inputs into a folder; pass FORMAT --out DIR, or --check DIR")
        check_explain(arguments)
        return
    if arguments.format is not None or arguments.out is not None:
        raise ArgumentError("--check reads the folder that --out wrote, with its format; leave FORMAT and --out out")
    if not results:
        raise ArgumentError("--check compares a kernel's results; pass --decode FILE, --encode FILE, or both")
    for text in results:
        tensor_file(text)
