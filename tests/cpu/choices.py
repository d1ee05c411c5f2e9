"""Which kernels of the CPU engine take a product or a cast, and with which constants, for all units and block formats.

Kernels that take too little, or with more care than is needed, give the right bits late. ``data/choices.txt`` has a
line for each product and cast; who means to change one records them anew and reads the difference::

    python -m tests.cpu.choices
"""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fmtsim
from fmtsim.cpu.cast import selection
from fmtsim.cpu.gemm import engine
from fmtsim.formats.block import BlockFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec
from fmtsim.spec.datapath import Datapath, sum_dtype
from tests.support.gemm_engine import gemm_spec

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
                        method = engine._method(spec.text, k)
                        text = said(method)
                        if text == "_fused" and isinstance(mode.datapath, Datapath):
                            scaled = (mode.datapath.scale is not None,) * 2
                            text = said(engine.prepared(spec.text, k, scaled, sum_dtype(mode.datapath).itemsize == 8))
                        yield f"{name} {mode.accumulate} {mode.scale} {a} {b} K={k} {plan} {text}"


def casts() -> Iterator[str]:
    """Yield what takes a cast to each block format."""
    for name in fmtsim.list_formats():
        fmt = fmtsim.get_format(name)
        for mode in ("nearest_even", "stochastic", "up") if isinstance(fmt, BlockFormat) else ():
            spec = CastSpec(format=fmt, rounding=Rounding(mode=mode), overflow="saturate")
            words = object() if mode == "stochastic" else None
            chosen = [choose(spec, words) for choose in (selection.quantizer, selection.encoder)]
            yield " ".join(
                [name, mode, *("none" if c is None else f"{c.run.__code__.co_names} {said(c.grid)}" for c in chosen)]
            )


def lines() -> list[str]:
    """Return all lines, each with a digest of what was chosen."""
    found: dict[str, list[str]] = {}
    for line in [*products(), *casts()]:
        words = line.split(" ")
        key = " ".join(words[:5]) if "K=" in line else words[0]
        found.setdefault(key, []).append(line)
    return [
        f"{key} {len(all_)} {hashlib.sha256(chr(10).join(sorted(all_)).encode()).hexdigest()[:12]}"
        for key, all_ in sorted(found.items())
    ]


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("\n".join(lines()) + "\n")
