# SPDX-License-Identifier: Apache-2.0
"""Which kernels of the CPU engine take a product or a cast, with which constants, and how threads share the work.

Kernels that take too little, or with more care than is needed, give the right bits late, and so do tiles that a cache
does not hold. ``data/choices.txt`` has a
line for each product and cast; who means to change one records them anew and reads the difference::

    python -m tests.engines.cpu.choices
"""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import fmtsim
from fmtsim.engines.cpu.cast import scaled
from fmtsim.engines.cpu.gemm import engine, tiles
from fmtsim.engines.cpu.runtime import pool
from fmtsim.formats.block import BlockFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec
from fmtsim.spec.datapath import Datapath, sum_dtype
from tests.support.gemm_engine import UNITS, gemm_spec, product, setting

FILE = Path(__file__).with_name("data") / "choices.txt"
PLANS = (
    {},
    {"promote_every": 32},
    {"k_tile": 64, "split": 3, "reduce": "pairwise"},
    {"k_tile": 16, "split": 2, "partial": "bf16"},
)


def said(x: Any) -> str:
    """Return constants as text, large tables as digests."""
    if isinstance(x, np.ndarray):
        text = f"{x.dtype}{list(x.shape)}"
        return text + (f" {hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:8]}" if x.size else "")
    if isinstance(x, np.generic):
        return f"{x.dtype}:{x}"
    if isinstance(x, functools.partial):
        return x.func.__qualname__
    if callable(x):
        return f"{x.__module__}.{x.__qualname__}"
    if isinstance(x, tuple):
        names = getattr(x, "_fields", range(len(x)))
        return f"({', '.join(f'{name}={said(one)}' for name, one in zip(names, x, strict=True))})"
    return str(x)


def products() -> Iterator[str]:
    """Yield what takes a product of each unit, pair of formats, length and plan."""
    for name in fmtsim.list_units():
        for mode in fmtsim.get_unit(name).modes:
            formats = mode.inputs or ("e4m3", "bf16", "fp32")
            for a, b in {(formats[0], formats[0]), (formats[0], formats[-1]), (formats[-1], formats[-1])}:
                for k in (1, 40, 5000):
                    for plan in PLANS if mode.accumulate != "int32" else PLANS[:1]:
                        spec = gemm_spec(mode.datapath, a, b, fmtsim.GemmPlan(**plan))
                        method = engine._method(spec, k)
                        text = "_fused" if method is engine._fused else said(method)
                        if text == "_fused" and isinstance(mode.datapath, Datapath):
                            scaled = (mode.datapath.scale is not None,) * 2
                            text = said(engine.prepared(spec, k, scaled, sum_dtype(mode.datapath).itemsize == 8))
                        yield f"{name} {mode.accumulate} {mode.scale} {a} {b} K={k} {plan} {text}"


def layouts() -> Iterator[str]:
    """Yield under which scale exponents, and in which groups, a kernel takes each block format."""
    noted, real = [], scaled._layout

    def layout(job: Any, group: int, scale: Any) -> Any:
        result = real(job, group, scale)
        noted.append(said((job.block, group, job.cast.grid, scale, result)))
        return result

    with mock.patch.object(scaled, "_layout", layout):
        for name in fmtsim.list_formats():
            if isinstance(fmtsim.get_format(name), BlockFormat):
                noted.clear()
                for x in (torch.ones(3, 5000), torch.ones(260, 130)):
                    fmtsim.quantize(x, name, pad=True)
                    fmtsim.encode(x, name, pad=True)
                yield f"layout {name} {noted}"


def casts() -> Iterator[str]:
    """Yield what takes a cast to each block format."""
    for name in fmtsim.list_formats():
        fmt = fmtsim.get_format(name)
        for mode in ("nearest_even", "stochastic", "up") if isinstance(fmt, BlockFormat) else ():
            spec = CastSpec(format=fmt, rounding=Rounding(mode=mode), overflow="saturate")
            chosen = [choose(spec) for choose in (scaled._quantizing, scaled._encoding)]
            names = ("none" if c is None else f"{c.run.__code__.co_names[1:]} {said(c.grid)}" for c in chosen)
            yield " ".join([name, mode, *names])


def shares() -> Iterator[str]:
    """Yield how products, which are not computed, and casts are cut for some numbers of threads."""
    noted: list[Any] = []

    class Tile(tiles.Tile):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            job, *where, share = given
            noted.append((*where, share.__name__, self.weight, self.padded, self.source is job.a))

        def run(self) -> None:
            pass

    def run(function: Any, count: int, align: int, weight: int = 1) -> None:
        noted.append((count, align, weight))
        if function.__name__ != "tiles":  # of a product
            function(0, count)

    def cut(label: str, verb: Any, *given: Any, **named: Any) -> str:
        noted.clear()
        verb(*given, **named)
        return f"shares {label} {noted}"

    x = torch.zeros(130, 4100)
    before = pool._threads
    for threads in (2, 16):
        with mock.patch.object(tiles, "Tile", Tile), mock.patch.object(pool, "run", run):
            pool.set_num_threads(threads)
            for path in UNITS:
                few = path in ("floor64", "wide", "two_stage", "pairwise", "integers")  # cut as another one
                for m, n, k in (
                    ((700, 150, 200),)
                    if few
                    else ((1, 1, 8), (5, 2000, 40), (700, 150, 200), (1030, 1100, 64), (3000, 70, 130))
                ):
                    a, b, spec, scale_a, scale_b = setting(path, m, n, k)
                    yield cut(f"{path} {threads}", product, a, b, spec, scale_a=scale_a, scale_b=scale_b)
            for parts in (40, 400):  # whose sums are kept apart
                plan, k = fmtsim.GemmPlan(k_tile=16, split=parts), 16 * parts
                spec = gemm_spec(UNITS["floor32"][0], "e4m3", plan=plan)
                a, b = (torch.zeros(rows, k, dtype=torch.float8_e4m3fn) for rows in (700, 450))
                yield cut(f"parts {threads}", product, a, b, spec)
            for name in ("e4m3", "mxfp4", "nvfp4", "mxfp8_e4m3", "int8_channel", "nf4"):
                yield cut(f"{name} {threads}", fmtsim.quantize, x, name, pad=True)
                yield cut(f"{name} encoded {threads}", lambda name=name: fmtsim.encode(x, name, pad=True).decode())
            yield cut(f"together {threads}", tiles._together, lambda start, stop: None, 7, 9)
        yield f"shares {threads} {[pool.threads_for(weight) for weight in (0, 1, 131071, 131072, 200_000, 1 << 20)]}"
        for count, align, weight in ((0, 1, 1), (1, 1, 1), (130_000, 64, 1), (1_000_001, 64, 1), (5, 1, 40_000)):
            parts: list[tuple[int, int]] = []
            pool.run(lambda start, stop, parts=parts: parts.append((start, stop)), count, align, weight)
            yield f"shares {threads} {count} {align} {weight} {sorted(parts)}"
    pool.set_num_threads(before)


PARTS = {"products": (products,), "casts": (casts, layouts), "shares": (shares,)}


def lines(part: str) -> list[str]:
    """Return the lines of a part, each with a digest of what was chosen."""
    found: dict[str, list[str]] = {}
    for line in (line for lines_of in PARTS[part] for line in lines_of()):
        words = line.split(" ")
        key = " ".join(words[:5]) if "K=" in line else words[0]
        found.setdefault(key, []).append(line)
    return [
        f"{part} {key} {len(all_)} {hashlib.sha256(chr(10).join(sorted(all_)).encode()).hexdigest()[:12]}"
        for key, all_ in sorted(found.items())
    ]


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("\n".join(line for part in PARTS for line in lines(part)) + "\n")
