# SPDX-License-Identifier: Apache-2.0
"""Prove what a finite space allows: every input, where tests take samples::

    python -m tools.prove casts --record casts.jsonl   # 2^32 float32 x formats x roundings x overflow: hours, goes on
    python -m tools.prove minifloats                   # nearest even of every ExMy of up to 8 bits
    python -m tools.prove blocks                       # all codes x all scale codes of block formats
    python -m tools.prove products                     # all 2^16 pairs of FP8 codes on every unit that takes them

The CPU engine is held to definitions in exact fractions, which share nothing with it; the status is 1 where
a bit differs.
"""

import argparse
import hashlib
import itertools
import json
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

import fmtsim
from fmtsim.casts.ops import load_engine
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.display import count_of
from fmtsim.formats.element import OVERFLOWS, ElementFormat, FloatFormat, IntFormat
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.representable import result_dtype
from fmtsim.lab.cli.output import origin, versions_of
from fmtsim.lab.verify.outcome import bits_of
from fmtsim.rounding.modes import MODES, Rounding
from fmtsim.rounding.oracle import decode_value, encode_value, floor_log2, round_value
from fmtsim.spec.cast import CastSpec, EncodedParts

INF = 0x7F800000  # as a pattern of float32, past the magnitudes of all numbers
BLOCK, CHUNK = 1 << 28, 1 << 19  # inputs that are hashed together; inputs, codes and values that stay in a cache
NEAREST = {"nearest_even": 1, "nearest_away": 2, "nearest_toward_zero": 0, "nearest_to_odd": -1}
PACKAGES = ("fmtsim", "torch", "numpy", "numba")


class Proof(NamedTuple):
    """What is proved, by a name that a record finds again, and what proves it."""

    name: str
    run: Callable[[], dict[str, Any]]


class Steps(NamedTuple):
    """A cast of one sign as a step function: the code of each pattern from a start to the next start."""

    starts: numpy.ndarray  # patterns of float32 magnitudes, ascending from 0
    codes: numpy.ndarray


def pattern_from(t: Fraction, above: bool) -> int:
    """Return the pattern of the least float32 magnitude that is at least t, or above t; of Inf beyond all numbers."""
    if t == 0:
        return int(above)
    e = max(floor_log2(t), -126)
    units = t / Fraction(2) ** (e - 23)
    n = math.floor(units) + 1 if above else math.ceil(units)
    return min(((e + 126) << 23) + n, INF)


def defined(fmt: FloatFormat | IntFormat, mode: str, overflow: str, negative: bool) -> Steps:
    """Return the steps that follow from the list of values alone: what is nearest, what is next in a direction."""
    nan = next((c for c in _codes(fmt) if decode_value(c, fmt) != decode_value(c, fmt)), None)
    if isinstance(fmt, FloatFormat) and fmt.nan == "ieee":
        assert nan is not None
        nan += (1 << (fmt.mantissa_bits - 1)) - 1  # the quiet NaN
    grid = _magnitudes(fmt, negative)
    if not grid:  # no value has this sign: zero, or NaN
        beyond = nan if overflow == "ieee" and nan is not None else 0
        return Steps(numpy.array([0, 1]), numpy.array([0, beyond]))
    away = {"up": not negative, "down": negative}.get(mode)
    starts, codes = [0], [grid[0][1]]
    values = [*grid, (_next(fmt, grid), _beyond(fmt, mode, overflow, negative, grid, nan))]
    for (low, code), (high, upper) in itertools.pairwise(values):
        odd = code % 2 == 1
        if mode in NEAREST:
            ties_up = {1: odd, 2: True, 0: False, -1: not odd}[NEAREST[mode]]
            start = pattern_from((low + high) / 2, not ties_up)
        elif away or (mode == "to_odd" and not odd):
            start = pattern_from(low, True)
        else:
            start = pattern_from(high, False)
        starts.append(start)
        codes.append(upper)
    last = codes[-2] if overflow == "saturate" else _infinity(fmt, negative, grid, nan)
    steps = dict(zip(starts, codes, strict=True))  # of thresholds that no float32 tells apart, the last counts
    return Steps(*map(numpy.array, zip(*sorted((steps | {INF: last}).items()), strict=True)))


def _codes(fmt: ElementFormat) -> range:
    return range(count_of(fmt))


def _magnitudes(fmt: FloatFormat | IntFormat, negative: bool) -> list[tuple[Fraction, int]]:
    """Return the finite magnitudes of a sign, ascending, with the first code of each; zero has a code of both signs."""
    if negative and not fmt.signed:
        return []
    grid: dict[Fraction, int] = {}
    for code in _codes(fmt):
        value = decode_value(code, fmt)
        if math.isfinite(value) and (not isinstance(fmt, IntFormat) or value >= fmt.min):
            if value == 0 and (code == 0 or negative):
                grid[Fraction(0)] = max(grid.get(Fraction(0), 0), code) if math.copysign(1, value) < 0 else code
            elif value and (value < 0) == negative:
                grid.setdefault(abs(Fraction(value)), code)
    if negative and isinstance(fmt, FloatFormat) and not fmt.has_subnormals:  # several codes are -0
        grid[Fraction(0)] = 1 << (fmt.bits - 1)
    return sorted(grid.items())


def _next(fmt: FloatFormat | IntFormat, grid: list[tuple[Fraction, int]]) -> Fraction:
    """Return the value that would follow the largest one."""
    top = grid[-1][0]
    if isinstance(fmt, IntFormat):
        return top + Fraction(1, 1 << fmt.fraction_bits)
    return top + Fraction(2) ** (max(floor_log2(top), fmt.min_exponent) - fmt.mantissa_bits)


def _infinity(fmt: ElementFormat, negative: bool, grid: list[tuple[Fraction, int]], nan: int | None) -> int:
    infinity = next((c for c in _codes(fmt) if decode_value(c, fmt) == (-math.inf if negative else math.inf)), nan)
    return grid[-1][1] if infinity is None else infinity


def _beyond(
    fmt: ElementFormat, mode: str, overflow: str, negative: bool, grid: list[tuple[Fraction, int]], nan: int | None
) -> int:
    leaves = overflow == "ieee" and (mode in NEAREST or mode == ("down" if negative else "up"))
    return _infinity(fmt, negative, grid, nan) if leaves else grid[-1][1]


def bisected(fmt: ElementFormat, mode: str, overflow: str, negative: bool) -> Steps:
    """Return the steps of the rounding oracle, which is monotone: between equal codes nothing changes."""

    @cache
    def code(pattern: int) -> int:
        x = float(numpy.uint32(pattern | negative << 31).view(numpy.float32))
        return encode_value(x, fmt, mode, overflow)  # type: ignore[arg-type]

    def starts(low: int, high: int) -> Iterator[int]:
        """Yield where the code changes in (low, high]."""
        if code(low) != code(high):
            if high - low == 1:
                yield high
            else:
                middle = (low + high) // 2
                yield from starts(low, middle)
                yield from starts(middle, high)

    found = [0, *starts(0, INF)]
    return Steps(numpy.array(found), numpy.array([code(start) for start in found]))


def steps_of(fmt: ElementFormat, mode: str, overflow: str, negative: bool) -> tuple[Steps, str]:
    """Return the steps of a cast and where they are from."""
    if isinstance(fmt, FloatFormat) or (isinstance(fmt, IntFormat) and not fmt.half_offset):
        return defined(fmt, mode, overflow, negative), "definition"
    return bisected(fmt, mode, overflow, negative), "oracle"


def cast(fmt: ElementFormat, mode: str, overflow: str, blocks: Iterable[int] = range(16)) -> dict[str, Any]:
    """Compare quantize and encode of all float32 inputs, or of some of 16 blocks of them, with the steps.

    Returns:
        What was compared, how many results differ and the first that does, and a hash of each block's codes.
    """
    spec = CastSpec(format=fmt, rounding=Rounding(mode=mode), overflow=overflow)  # type: ignore[arg-type]
    engine, dtype, begin = load_engine("cpu"), result_dtype(fmt, torch.float32), time.perf_counter()
    (above, truth), (below, _) = steps_of(fmt, mode, overflow, False), steps_of(fmt, mode, overflow, True)
    nan = encode_value(math.nan, fmt)
    decoded = torch.tensor([decode_value(code, fmt) for code in _codes(fmt)], dtype=dtype)
    values = torch.arange(len(decoded)).to(code_dtype(fmt.bits)).numpy(), decoded.numpy()
    hashes, differ, first, count = [], 0, "", 0
    for block in blocks:
        total = hashlib.sha256()
        for start in range(block * BLOCK, (block + 1) * BLOCK, CHUNK):
            x = torch.from_numpy(numpy.arange(start, start + CHUNK, dtype=numpy.uint32).view(numpy.float32))
            steps, low = (above, start) if start < 1 << 31 else (below, start - (1 << 31))
            expected = [torch.from_numpy(right) for right in _runs(steps, low, low + CHUNK, nan, values)]
            out = torch.empty(CHUNK, dtype=dtype)
            engine.quantize(x, spec, None, out)
            codes = engine.encode(x, spec, None).codes
            total.update(codes.numpy().tobytes())
            count += 2 * CHUNK
            for what, got, right in zip(("code", "value"), (codes, out), expected, strict=True):
                if not torch.equal(bits_of(got), bits_of(right)):
                    wrong = (bits_of(got) != bits_of(right)).nonzero().reshape(-1)
                    differ += len(wrong)
                    i = int(wrong[0])
                    text = f"{what} of {start + i:#010x} ({x[i].item()!r}) is {got[i].item()!r}"
                    first = first or f"{text}, expected {right[i].item()!r}"
        hashes.append(total.hexdigest()[:16])
    seconds = round(time.perf_counter() - begin, 1)
    return {"against": truth, "compared": count, "differences": differ, "first": first, "seconds": seconds,
            "blocks": hashes}  # fmt: skip


def _runs(steps: Steps, low: int, high: int, nan: int, tables: Iterable[numpy.ndarray]) -> Iterator[numpy.ndarray]:
    """Yield what tables of all codes have for the patterns from low to below high."""
    starts, codes = numpy.append(steps.starts, INF + 1), numpy.append(steps.codes, nan)
    begin, end = numpy.searchsorted(starts, low, "right") - 1, numpy.searchsorted(starts, high - 1, "right")
    lengths = numpy.diff(numpy.clip(numpy.append(starts[begin:end], high), low, high))
    for table in tables:
        yield numpy.repeat(table[codes[begin:end]], lengths)


def catalogue(options: argparse.Namespace) -> Iterator[Proof]:
    """Yield the casts to element formats that float32 does not hold itself."""
    kinds = itertools.chain(*map(fmtsim.list_formats, ("float", "int", "codebook", "log")))
    for name in options.format or [name for name in kinds if name not in ("fp32", "fp64")]:
        fmt = fmtsim.get_format(name)
        for mode in options.rounding or [mode for mode in MODES if mode != "stochastic"]:
            for overflow in OVERFLOWS if isinstance(fmt, FloatFormat) else (fmt.default_overflow,):
                yield Proof(f"{name} {mode} {overflow}", partial(cast, fmt, mode, overflow, range(options.blocks)))


def minifloats(options: argparse.Namespace) -> Iterator[Proof]:
    """Yield nearest even to every ExMy: finite values alone, and with infinities and NaN as in IEEE 754."""
    for nan, e, m in itertools.product(("none", "ieee"), range(1, 8), range(7)):
        if e + m <= 7 and (nan == "none" or (m and e > 1)):
            fmt = FloatFormat(
                name=f"e{e}m{m}_{nan}", exponent_bits=e, mantissa_bits=m, nan=nan, infinities=nan == "ieee"
            )
            overflow = nan.replace("none", "saturate")
            yield Proof(fmt.name, partial(cast, fmt, "nearest_even", overflow, range(options.blocks)))


def blocks(options: argparse.Namespace) -> Iterator[Proof]:
    """Yield the block formats whose elements and scales have at most 8 bits."""
    for name in options.format or fmtsim.list_formats("block"):
        fmt = fmtsim.get_format(name)
        if isinstance(fmt, BlockFormat) and fmt.bits <= 8 and fmt.scale.bits <= 8 and not fmt.zero_point:
            yield Proof(name, partial(decoded, fmt))


def decoded(fmt: BlockFormat) -> dict[str, Any]:
    """Compare decode of every element code times every scale code with their product, rounded once, tensor scale 1."""
    elements = [decode_value(code, fmt.element) for code in _codes(fmt.element)]
    scales = [decode_value(code, fmt.scale) for code in range(1 << fmt.scale.bits)]
    rows, columns = fmt.block[0] or 1, fmt.block[1] or len(elements)
    padded = -(-len(elements) // columns) * columns
    codes = (torch.arange(padded) % len(elements)).repeat(len(scales) * rows, 1).to(code_dtype(fmt.bits))
    each = torch.tensor(scales, dtype=torch.float32)[:, None].repeat(1, padded // columns)
    parts = EncodedParts(codes, each, torch.ones(()) if fmt.tensor_scale else None)
    spec = CastSpec(format=fmt, rounding=Rounding(), overflow=fmt.element.default_overflow)
    products = [[_product(x, s) for x in elements] for s in scales]
    expected = torch.tensor(products)[:, torch.arange(padded) % len(elements)].repeat_interleave(rows, 0)
    differ, first = 0, ""
    for name in ("cpu", "torch_engine"):
        out = torch.empty(codes.shape)
        load_engine(name).decode(parts, spec, out)
        wrong = (bits_of(out) != bits_of(expected)).nonzero()
        differ += len(wrong)
        for row, column in wrong[:1].tolist():
            pair = f"scale {scales[row // rows]!r}, element {elements[column % len(elements)]!r}"
            first = first or f"{name}: {pair}: {out[row, column].item()!r}, expected {expected[row, column].item()!r}"
    return {"compared": 2 * len(elements) * len(scales), "differences": differ, "first": first}


def _product(x: float, s: float) -> float:
    """Return x * s in float32, rounded once to nearest even."""
    if not (math.isfinite(x) and math.isfinite(s) and x and s):
        return x * s
    return round_value(Fraction(x) * Fraction(s), fmtsim.get_format("fp32"), "nearest_even", "ieee")


def products(options: argparse.Namespace) -> Iterator[Proof]:
    """Yield all pairs of FP8 formats of every unit with each sum that it has."""
    names = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz,
             "e5m2fnuz": torch.float8_e5m2fnuz}  # fmt: skip
    arithmetic = set()
    for unit in fmtsim.list_units():
        for mode in fmtsim.get_unit(unit).modes:
            inputs = [name for name in mode.inputs or ("e4m3", "e5m2") if name in names]
            if getattr(mode.datapath, "scale", None) is None and (mode.datapath, mode.inputs) not in arithmetic:
                arithmetic.add((mode.datapath, mode.inputs))  # one proof for units that are equal
                for a, b in itertools.product(inputs, inputs):
                    what = f"{unit} {mode.accumulate} {a} {b}"
                    yield Proof(what, partial(multiplied, unit, mode, (a, b), (names[a], names[b])))


def multiplied(
    unit: str, mode: Any, names: tuple[str, str], dtypes: tuple[torch.dtype, torch.dtype],
    codes: Iterable[int] = range(256),
) -> dict[str, Any]:  # fmt: skip
    """Compare one product of every pair of codes, alone and added to numbers, with the oracle of products."""
    from fmtsim.spec.gemm_spec import GemmSpec
    from tests.support.product_oracle import gemm_oracle

    a, b = (torch.tensor([*codes], dtype=torch.uint8).view(dtype)[:, None] for dtype in dtypes)
    spec = GemmSpec(datapath=mode.datapath, plan=fmtsim.GemmPlan(), a=fmtsim.get_format(names[0]),
                    b=fmtsim.get_format(names[1]))  # fmt: skip
    compared = differ = 0
    first = ""
    for addend in (None, 0.3125, -(2.0**-9) * 1.5):
        dtype = fmtsim.mma(a[:1], b[:1], target=unit, accumulate=mode.accumulate).dtype
        c = None if addend is None else torch.full((len(a), len(b)), addend, dtype=dtype)
        got = fmtsim.mma(a, b, c, target=unit, accumulate=mode.accumulate)
        rows = gemm_oracle(a.double().tolist(), b.double().tolist(), spec, c=None if c is None else c.tolist())
        right = torch.tensor(rows, dtype=torch.float64).to(dtype)
        wrong = ((bits_of(got) != bits_of(right)) & ~(got.isnan() & right.isnan())).nonzero()
        compared, differ = compared + got.numel(), differ + len(wrong)
        for i, j in wrong[:1].tolist():
            text = f"codes {i:#04x}, {j:#04x} + {addend}: {got[i, j].item()!r}, expected {right[i, j].item()!r}"
            first = first or text
    return {"compared": compared, "differences": differ, "first": first}


PROOFS = {"casts": catalogue, "minifloats": minifloats, "blocks": blocks, "products": products}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.prove", description=__doc__.split("::")[0])
    parser.add_argument("what", choices=PROOFS)
    parser.add_argument("--format", action="append", help="only this format; repeatable")
    parser.add_argument("--rounding", action="append", choices=[m for m in MODES if m != "stochastic"])
    parser.add_argument("--blocks", type=int, default=16, help="casts: how many of 16 blocks of inputs (default all)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after that")
    parser.add_argument("--record", type=Path, help="append lines of JSON; what it has already is not done again")
    options = parser.parse_args(arguments)
    lines = options.record.read_text().splitlines() if options.record and options.record.exists() else []
    finished = {(line["what"], line["name"], len(line.get("blocks", ()))) for line in map(json.loads, lines)}
    torch.set_num_threads(1)  # tensors are small; on a busy machine threads wait for each other
    made_by = about()  # before anything runs: a commit that follows is not what runs
    end, failed, compared = time.monotonic() + 60 * options.minutes, 0, 0
    for proof in PROOFS[options.what](options):
        if time.monotonic() > end:
            break
        if (options.what, proof.name, options.blocks * (PROOFS[options.what] in (catalogue, minifloats))) in finished:
            continue
        outcome = proof.run()
        failed, compared = failed + outcome["differences"], compared + outcome["compared"]
        shown = (f"{name}={value}" for name, value in outcome.items() if name != "blocks" and value != "")
        print(f"{proof.name}:", *shown, flush=True)
        if options.record:
            with options.record.open("a") as file:
                file.write(json.dumps({"what": options.what, "name": proof.name, **outcome, **made_by}) + "\n")
    print(f"{compared:,} results compared, {failed:,} differ")
    return 1 if failed else 0


def about() -> dict[str, Any]:
    """Return what a line of a record says about its making: commit, machine, versions, time."""
    git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else "")
    return {
        "commit": git.stdout.strip() or "not in git",
        "machine": cpu[1] if cpu else platform.processor(),
        "date": origin()["date"],
        "python": platform.python_version(),
        "versions": versions_of(PACKAGES),
    }


if __name__ == "__main__":
    sys.exit(main())
