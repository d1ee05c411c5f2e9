# SPDX-License-Identifier: Apache-2.0
"""Runs of ``fmtsim mm`` and ``invariance``: one product explained bit for bit, and batch sizes that change bits."""

import argparse
import io
import time
import warnings
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from fmtsim.casts.quantize import encode, quantize
from fmtsim.formats.block import ScaledFormat
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.interop import codes_to_tensor, dtype_name, torch_dtype
from fmtsim.formats.registry import get_format
from fmtsim.gemm.model_layers import PASSES, Shape, layer_shapes, parse_tokens, read_shapes
from fmtsim.gemm.products.matmul import int_mm, mm
from fmtsim.gemm.products.resolver import check_target
from fmtsim.gemm.products.scaled_mm import scaled_mm
from fmtsim.gemm.targets.target import Target, find_target
from fmtsim.gemm.units.unit import is_unit
from fmtsim.lab.analysis.compare import Comparison, compare
from fmtsim.lab.analysis.invariance import batch_invariance
from fmtsim.lab.analysis.ulp import read_codes
from fmtsim.lab.cli.arguments.numbers import SLOW_EVERY
from fmtsim.lab.cli.options import check_device, read_target
from fmtsim.lab.cli.output import MISMATCH, answer
from fmtsim.lab.cli.result_commands import load_tensors
from fmtsim.lab.explain.identify import REFINED, identify
from fmtsim.lab.explain.product import explain_mm
from fmtsim.lab.training.training_models import is_function, module_of
from fmtsim.lab.verify.probe_operands import cancel_neighbours, spread
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, PlanUnknownWarning
from fmtsim.support.files import check_file, write_file


def chosen_shapes(arguments: argparse.Namespace) -> list[Shape]:
    """Return the layers that the arguments mean: those of gpt2 where they mean none."""
    shapes = layer_shapes(arguments.models or ([] if arguments.shapes else ["gpt2"]))
    return shapes + (read_shapes(arguments.shapes) if arguments.shapes else [])


def chosen_dtypes(arguments: argparse.Namespace) -> list[str]:
    """Return the names that ``--dtypes`` lists."""
    return [word.strip() for word in arguments.dtypes.split(",") if word.strip()]


def chosen_model(arguments: argparse.Namespace) -> Any:
    """Return the layers of the arguments as ``fmtsim.lab.analysis`` takes them, a module where a file has one."""
    files = [name for name in arguments.models if is_function(name)]
    if files and (len(arguments.models) > 1 or arguments.shapes):
        raise ArgumentError(f"--model {files[0]} is asked about alone; leave other models and --shapes out")
    if not files and arguments.target is None:
        raise ArgumentError("--target is missing: name a GPU with its library, such as h200, or a plan file")
    return module_of(files[0]) if files else chosen_shapes(arguments)


class Operands(NamedTuple):
    """Two matrices, a [M, K] and b [K, N], and the formats that their dtypes do not say."""

    a: torch.Tensor
    b: torch.Tensor
    a_format: Any
    b_format: Any
    tf32: bool


def make_operands(sizes: tuple[int, int, int], formats: tuple[str, str], kind: str, seed: int) -> Operands:
    """Return random operands; the columns of b have K contiguous, as FP8 kernels want it.

    Args:
        sizes: M, N and K.
        formats: Of a and of b, by name: floating-point formats or int8 (whose codes are all equally likely).
        kind: One of ``DATA`` (the arguments of ``fmtsim mm``); numbers beyond a format's range saturate.
        seed: Of both.

    Raises:
        ArgumentError: a format is a block format, or of integers other than int8.
        FormatError: a format is unknown.
    """
    names = [get_format(name).name for name in formats]
    m, n, k = sizes
    a, a_format = _matrix(m, k, names[0], kind, 2 * seed)
    b, b_format = _matrix(n, k, names[1], kind, 2 * seed + 1)
    return Operands(a, b.t(), a_format, b_format, names == ["tf32", "tf32"])


def _matrix(rows: int, columns: int, name: str, kind: str, seed: int) -> tuple[torch.Tensor, str | None]:
    """Return a matrix on a format, and the format's name where torch has no dtype for it."""
    fmt = get_format(name)
    generator = torch.Generator().manual_seed(seed)
    if name == "int8":
        return torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8), None
    if isinstance(fmt, ScaledFormat) or not isinstance(fmt, FloatFormat):
        raise ArgumentError(f"{name} is neither a floating-point format nor int8; choose e4m3, bf16 or another eXmY")
    x = _numbers(rows, columns, kind, generator)
    dtype = torch_dtype(fmt)
    if dtype is None or name == "e2m1":
        return quantize(x, fmt, overflow="saturate", out_dtype=torch.float32), None if name == "tf32" else name
    return codes_to_tensor(encode(x, fmt, overflow="saturate").unpacked(), fmt), None


def _numbers(rows: int, columns: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    if kind == "uniform":
        return torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    if kind == "wide":
        return spread((rows, columns), (-8, 9), generator)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if kind == "cancel":
        cancel_neighbours(x, generator)
    return x


MAC_LIMIT = 1 << 25  # products of the exact sum that a reader waits for
AGAIN = 2.0  # a product that took fewer seconds is timed a second time, without what the first call compiles


def run_mm(arguments: argparse.Namespace) -> int:
    """Multiply, compare with the exact sum (and the device's own unit with its emulation), and print."""
    library = isinstance(find_target(read_target(arguments)["target"]), Target)
    if arguments.check and (not library or arguments.emulate):
        what = "--emulate forbids it" if arguments.emulate else "a unit or datapath alone is not a GPU"
        raise ArgumentError(f"--check native runs the GPU that --target names, but {what}; pass --target h200")
    names = (arguments.dtype, arguments.b_dtype or arguments.dtype)
    operands = make_operands((arguments.m, arguments.n, arguments.k), names, arguments.data, arguments.seed)
    check_device(arguments.device)
    moved = operands._replace(a=operands.a.to(arguments.device), b=operands.b.to(arguments.device))
    options = {name: value for name, value in read_target(arguments).items() if value is not None}
    options["target"] = check_target("fmtsim mm", options["target"])
    if arguments.plan is None and arguments.slow and is_unit(options["target"]):
        source = f"--slow: a new chain every {SLOW_EVERY} products"
        options["plan"] = GemmPlan(promote_every=SLOW_EVERY, source=source)
    if arguments.accumulate is not None:
        options["accumulate"] = arguments.accumulate
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
    count = relative.numel()
    error = {
        "max": relative.max().item() if count else 0.0, "median": relative.median().item() if count else 0.0,
        "rms": relative.square().mean().sqrt().item() if count else 0.0,
    }  # fmt: skip
    codes, speed = _hex(y[0, :SHOWN]), arguments.m * arguments.n * arguments.k / seconds
    record = {
        "explanation": dict(explanation.rows), "verified": explanation.verified,
        "data": "uniform" if y.dtype == torch.int32 else arguments.data, "seed": arguments.seed,
        "rows_checked": comparison.shape[0], "relative_error": error, "against_exact": comparison.to_dict(),
        "first_outputs": codes, "seconds": seconds, "seconds_of_first_call": first, "products_per_second": speed,
    }  # fmt: skip
    if check is not None:
        record["native_against_emulated"] = check.to_dict()

    def text() -> str:
        rows = "all outputs" if exact.shape[0] == y.shape[0] else f"the first {exact.shape[0]} of {y.shape[0]} rows"
        values = zip(codes, y[0, :SHOWN].double().tolist(), exact[0, :SHOWN].tolist(), strict=True)
        width = max(len(heading) for heading, _ in explanation.rows)
        lines = [
            str(explanation), f"{'data':<{width}}  {record['data']}, seed {arguments.seed}", "",
            f"relative error of {rows} against the exact sums:",
            f"  largest {error['max']:.3g}, median {error['median']:.3g}, root mean square {error['rms']:.3g}", "",
            f"bits against the exact sums rounded to {comparison.dtype}:",
            *(f"  {line}".rstrip() for line in str(comparison).splitlines()), "", "first outputs:",
            *(f"  {code} = {value!r}  (exact {sum_!r})" for code, value, sum_ in values), "",
            f"{seconds:.3g} s, {speed:.3g} products/s (first call {first:.3g} s)",
        ]  # fmt: skip
        return "\n".join(lines if check is None else [*lines, check_text(check)])

    answer(arguments, record, text)
    if arguments.out:
        save(y, Path(arguments.out))
    return 0 if check is None or check.equal else MISMATCH


def timed(operands: Operands, options: dict[str, Any], arguments: argparse.Namespace) -> tuple[torch.Tensor, float]:
    """Return the product and the seconds it took."""
    dtype, target = _out_dtype(operands, options, arguments), options["target"]
    stochastic = isinstance(target, Datapath) and target.rounding.mode == "stochastic"
    shared = {"generator": arguments.seed} if stochastic else {}
    narrow = all(x.dtype.is_floating_point and x.dtype.itemsize == 1 for x in (operands.a, operands.b))
    start = time.perf_counter()
    if operands.a.dtype == operands.b.dtype == torch.int8:
        y = int_mm(operands.a, operands.b, target=target, native=options.get("native"))
    elif not is_unit(target) and narrow:
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
    return mm(rows, operands.b, target="exact", accumulate="fp64", out_dtype=torch.float64,
              formats=(operands.a_format, operands.b_format))  # fmt: skip


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


def _out_dtype(operands: Operands, options: dict[str, Any], arguments: argparse.Namespace) -> torch.dtype:
    if operands.a.dtype == torch.int8:
        return torch.int32
    half = arguments.accumulate == "fp16" and not is_unit(options["target"])
    usual = "float64" if operands.a.dtype == torch.float64 else "float16" if half else "float32"
    return getattr(torch, arguments.out_dtype or usual)  # type: ignore[no-any-return]


def _for_mm(operands: Operands, options: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of mm; a target's accumulator is torch's switch."""
    machine = {
        "out_dtype": _out_dtype(operands, options, arguments), "allow": "tf32" if operands.tf32 else None,
        "formats": (operands.a_format, operands.b_format),
    }  # fmt: skip
    if is_unit(options["target"]) or options.get("accumulate") != "fp16":
        return machine | options
    rest = {name: value for name, value in options.items() if name != "accumulate"}
    return {**machine, **rest, "allow": "fp16_accumulation"}


SHOWN = 4


def check_text(check: Comparison) -> str:
    """Return whether a GPU and its emulation agree, and where they do not."""
    said = "native and emulated: all bits agree" if check.equal else "native against emulated (expected):"
    return f"\n{said}" if check.equal else "\n".join(["", said, *(f"  {line}" for line in str(check).splitlines())])


def _hex(values: torch.Tensor) -> list[str]:
    raw, kind = read_codes(values, "y")
    mask, digits = (1 << kind.bits) - 1, kind.bits // 4
    return [f"0x{code & mask:0{digits}X}" for code in raw.tolist()]


# What notes of ``identify`` say, and how it is done here.
_IN_OPTIONS = {
    REFINED: "--probe probe.pt writes some; run the kernel on them, and add --refine probe.pt:a probe.pt:b Y",
    "bias= ": "--bias ", "scale_a= and scale_b= ": "--scale-a and --scale-b ", "thorough=True ": "--thorough ",
}  # fmt: skip


def run_identify(arguments: argparse.Namespace) -> int:
    """Name what fits and print it; 1 where nothing fits."""
    extras = {name: read_tensor(text, None) for name in ("bias", "scale_a", "scale_b")
              if (text := getattr(arguments, name)) is not None}  # fmt: skip
    runs = [(arguments.a, arguments.b, arguments.y), *arguments.refine]
    dtypes = (arguments.dtype, arguments.dtype, arguments.out_dtype)
    first, *others = [[read_tensor(text, dtype) for text, dtype in zip(run, dtypes, strict=True)] for run in runs]
    result = identify(*first, **extras, target=arguments.target, thorough=arguments.thorough)
    for run in others:
        result = result.refine(*run)
    notes = tuple(reduce(lambda note, words: note.replace(*words), _IN_OPTIONS.items(), note) for note in result.notes)
    result = replace(result, notes=notes)
    if arguments.probe:
        content = io.BytesIO()
        torch.save(dict(zip("ab", result.probe(), strict=True)), content)
        write_file(arguments.probe, content.getvalue())
    answer(arguments, result.to_dict(), lambda: str(result).replace(".explanations", "--json"))
    return 0 if result.groups else MISMATCH


def read_tensor(text: str, dtype: str | None, *, codes: bool = False) -> torch.Tensor:
    """Return the one tensor of a file; integers become values of a dtype, or stay with ``codes``."""
    tensors = load_tensors(text)
    if len(tensors) != 1:
        raise ArgumentError(f"{text} has {len(tensors)} tensors, {', '.join(tensors)}; pick one with {text}:NAME")
    content = next(iter(tensors.values()))()
    if isinstance(content, numpy.ndarray) and content.dtype.kind in "uV" and dtype is None and not codes:
        raise ArgumentError(f"{text} holds {content.dtype}, codes of some dtype; pass --dtype or --out-dtype, bfloat16")
    if isinstance(content, numpy.ndarray):
        content = torch.from_numpy(content.view(f"i{content.itemsize}") if content.dtype.kind in "uV" else content)
    as_dtype = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and (not isinstance(as_dtype, torch.dtype) or as_dtype.itemsize != content.itemsize):
        raise ArgumentError(f"{text} holds {content.itemsize} bytes an element, which are not {dtype}")
    return content if as_dtype is None else content.view(as_dtype)


def run_invariance(arguments: argparse.Namespace) -> int:
    """Print what was found; 0 also where a row's result changes."""
    sizes = parse_tokens(arguments.sizes, "--sizes", every=True)
    plot = None if arguments.plot is None else Path(arguments.plot).expanduser()
    if plot is not None and plot.suffix != ".png":
        raise ArgumentError(f"--plot {plot} does not end in .png; choose another name")
    if plot is not None:
        check_file("--plot", plot)
    passes = PASSES[:1] if arguments.no_gradients else PASSES[:2]
    invariance = batch_invariance(
        chosen_model(arguments), arguments.target, sizes, dtypes=chosen_dtypes(arguments), passes=passes
    )
    if plot is not None:
        invariance.plot(plot)
    answer(arguments, invariance.to_dict(), lambda: str(invariance))
    return 0
