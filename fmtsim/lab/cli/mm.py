# SPDX-License-Identifier: Apache-2.0
"""``fmtsim mm``: one product on a target or a unit: who multiplied, in which order, and how far from the exact sum."""

import argparse
import io
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch

from fmtsim.casts.quantize import quantize
from fmtsim.formats.interop import dtype_name
from fmtsim.gemm.products.matmul import int_mm, mm
from fmtsim.gemm.products.scaled import scaled_mm
from fmtsim.lab.analysis.compare import compare
from fmtsim.lab.analysis.comparison import Comparison
from fmtsim.lab.cli.arguments.mm import SLOW_EVERY
from fmtsim.lab.cli.mm_report import check_text, record_of, text_of
from fmtsim.lab.cli.operands import Operands, make_operands
from fmtsim.lab.cli.options import check_device, read_target, target_given
from fmtsim.lab.cli.output import MISMATCH, answer
from fmtsim.lab.explain.product import explain_mm
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, PlanUnknownWarning
from fmtsim.support.files import check_file, write_file

MAC_LIMIT = 1 << 25  # products of the exact sum that a reader waits for
AGAIN = 2.0  # a product that took fewer seconds is timed a second time, without what the first call compiles
MOST = 1 << 31  # of M, N and K; such a matrix would not fit into the memory of a machine
BOTH = ("target", "unit")  # are passed to verbs also where they are None


def run(arguments: argparse.Namespace) -> int:
    """Multiply, compare with the exact sum (and the device's own unit with its emulation), and print."""
    _check(arguments)
    names = (arguments.dtype, arguments.b_dtype or arguments.dtype)
    operands = make_operands((arguments.m, arguments.n, arguments.k), names, arguments.data, arguments.seed)
    moved = on_device(operands, arguments.device)
    options = chosen_target(arguments)
    native = True if arguments.check else False if arguments.emulate else None
    options["native"] = native
    how = _for_mm(moved, options, arguments)
    explanation = explain_mm(moved.a, moved.b, use_fast_accum=not arguments.slow, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanUnknownWarning)  # that a plan is a guess is said below
        y, first = timed(moved, options, arguments)
        seconds = timed(moved, options, arguments)[1] if first < AGAIN else first
        check = compare(y, timed(moved, {**options, "native": False}, arguments)[0]) if arguments.check else None
    y = y.cpu()
    exact = exact_sums(operands)
    with torch.no_grad():
        comparison, relative = errors(y[: exact.shape[0]], exact)
    record = record_of(arguments, explanation, comparison, relative, y, (first, seconds))
    if check is not None:
        record["native_against_emulated"] = check.to_dict()

    def text() -> str:
        found = text_of(record, explanation, comparison, y, exact)
        return found if check is None else f"{found}\n{check_text(check)}"

    answer(arguments, record, text)
    if arguments.out:
        save(y, Path(arguments.out))
    return 0 if check is None or check.equal else MISMATCH


def on_device(operands: Operands, name: str) -> Operands:
    """Return the operands on a device; raise ArgumentError where there is none of that name."""
    check_device(name)
    return operands._replace(a=operands.a.to(name), b=operands.b.to(name))


def chosen_target(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return target, unit or datapath, plan and accumulator as the verbs take them."""
    options = {name: value for name, value in read_target(arguments).items() if value is not None or name in BOTH}
    if arguments.plan is None and arguments.slow and arguments.target is None:
        source = f"--slow: a new chain every {SLOW_EVERY} products"
        options["plan"] = GemmPlan(promote_every=SLOW_EVERY, source=source)
    if arguments.accumulate is not None:
        options["accumulate"] = arguments.accumulate
    return options


def timed(operands: Operands, options: dict[str, Any], arguments: argparse.Namespace) -> tuple[torch.Tensor, float]:
    """Return the product and the seconds it took."""
    dtype = _out_dtype(operands, arguments)
    path = options.get("datapath")
    stochastic = path is not None and path.rounding.mode == "stochastic"
    shared = {"generator": arguments.seed} if stochastic else {}
    narrow = all(x.dtype.is_floating_point and x.dtype.itemsize == 1 for x in (operands.a, operands.b))
    start = time.perf_counter()
    if operands.a.dtype == operands.b.dtype == torch.int8:
        chosen = {name: options.get(name) for name in ("target", "unit", "datapath", "native")}
        y = int_mm(operands.a, operands.b, **chosen)
    elif options["target"] is not None and narrow:
        one = torch.ones((), device=operands.a.device)
        y = scaled_mm(
            operands.a, operands.b, one, one, out_dtype=dtype, use_fast_accum=not arguments.slow, **options
        )  # fmt: skip
    else:
        y = mm(operands.a, operands.b, **_for_mm(operands, options, arguments), **shared)
    if y.is_cuda:
        torch.cuda.synchronize(y.device)
    return y, time.perf_counter() - start


def exact_sums(operands: Operands) -> torch.Tensor:
    """Return the exact sums, rounded once to float64 (int64 for integers), of as many rows as take a few seconds."""
    k, n = operands.b.shape
    rows = operands.a[: max(1, MAC_LIMIT // max(1, n * k))]
    if rows.dtype == torch.int8:
        return rows.long() @ operands.b.long()
    return mm(rows, operands.b, unit="exact", accumulate="fp64", out_dtype=torch.float64,
              a_format=operands.a_format, b_format=operands.b_format)  # fmt: skip


def errors(y: torch.Tensor, exact: torch.Tensor) -> tuple[Comparison, torch.Tensor]:
    """Return the comparison with the exact sums in y's dtype, and all relative errors of sums that are not zero."""
    if y.dtype == torch.int32:
        nearest = exact.to(torch.int32)
    else:
        nearest = quantize(exact, y.dtype, overflow="ieee", out_dtype=torch.float64).to(y.dtype)
    wide, reference = y.double(), exact.double()
    counted = (reference != 0) & reference.isfinite() & wide.isfinite()
    return compare(y, nearest), ((wide - reference) / reference).abs()[counted]


def save(y: torch.Tensor, path: Path) -> None:
    """Write the product to a .npy or .safetensors file.

    Raises:
        ArgumentError: the suffix is another, or .npy has no such dtype.
        DataError: the file cannot be written.
    """
    if path.suffix == ".safetensors":
        try:
            import safetensors.torch
        except ImportError:
            raise ArgumentError(
                f"--out {path} needs safetensors; pip install 'fmtsim[train]', or choose .npy"
            ) from None
        write_file(path, safetensors.torch.save({"y": y}))
        return
    name = dtype_name(y.dtype)
    if path.suffix != ".npy" or not hasattr(numpy, name):
        raise ArgumentError(f"--out {path} cannot hold {name}; choose a name that ends in .safetensors"
                            + (" or .npy" if hasattr(numpy, name) else ""))  # fmt: skip
    content = io.BytesIO()
    numpy.save(content, y.numpy())
    write_file(path, content.getvalue())


def _check(arguments: argparse.Namespace) -> None:
    given = target_given(arguments)
    if len(given) != 1:
        what = "several of them are given" if given else "none is given"
        raise ArgumentError(f"fmtsim mm takes one of --target, --unit and --datapath, but {what}; try --target h200")
    for name in ("m", "n", "k"):
        size = getattr(arguments, name)
        if not 1 <= size < MOST:
            allowed = "1 or more" if size < 1 else f"1 to {MOST - 1:,}"
            raise ArgumentError(f"{name.upper()} = {size} is not possible; choose {allowed}")
    if not 0 <= arguments.seed < 1 << 62:
        raise ArgumentError(f"--seed {arguments.seed} is not allowed; choose 0 to 2**62 - 1")
    if arguments.out:
        check_file("--out", Path(arguments.out))
    if arguments.check and (arguments.target is None or arguments.emulate):
        what = "--emulate forbids it" if arguments.emulate else "a unit or datapath alone is not a GPU"
        raise ArgumentError(f"--check native runs the GPU that --target names, but {what}; pass --target h200")
    if arguments.slow and arguments.plan is not None:
        raise ArgumentError(
            f"--slow and --plan both give an accumulation order; write --plan promote_every={SLOW_EVERY},..."
        )


def _out_dtype(operands: Operands, arguments: argparse.Namespace) -> torch.dtype:
    if operands.a.dtype == torch.int8:
        return torch.int32
    half = arguments.accumulate == "fp16" and arguments.target is not None
    usual = "float64" if operands.a.dtype == torch.float64 else "float16" if half else "float32"
    return getattr(torch, arguments.out_dtype or usual)  # type: ignore[no-any-return]


def _for_mm(operands: Operands, options: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of mm; a target's accumulator is torch's switch."""
    given = {
        "out_dtype": _out_dtype(operands, arguments), "allow_tf32": operands.tf32, "a_format": operands.a_format,
        "b_format": operands.b_format,
    }  # fmt: skip
    if options["target"] is None or options.get("accumulate") != "fp16":
        return given | options
    rest = {name: value for name, value in options.items() if name != "accumulate"}
    return {**given, **rest, "allow_fp16_accumulation": True}
