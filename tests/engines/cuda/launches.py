# SPDX-License-Identifier: Apache-2.0
"""Every launch of the CUDA engine in the calls of ``tools/sanitize.py``, without a GPU and without a kernel.

What a kernel is specialised by, its grid, its block, its shared memory and its arguments decide speed as well as bits,
and results that have the right bits do not show them. ``data/launches.txt`` has a digest of those of each kernel, and
of what kernels are told of listed formats and of recipes' operands; who means to change them records them anew and
shows the difference::

    python -m tests.engines.cuda.launches --all > before    # each launch on a line; again after the change
    python -m tests.engines.cuda.launches                   # write the file
"""

import contextlib
import hashlib
import importlib
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from fmtsim.engines.cuda.cast import block
from fmtsim.engines.cuda.cast.general import cast_bytes
from fmtsim.engines.cuda.cast.parameters import NARROW, grid_of
from fmtsim.engines.cuda.cast.rotated import plan_of
from fmtsim.engines.cuda.cast.scale_rules import fast_macros, rule_of
from fmtsim.engines.cuda.cast.tables import layout_of
from fmtsim.engines.cuda.gemm import self_test
from fmtsim.engines.cuda.runtime.program import variants
from fmtsim.formats.block import BlockFormat, LogTileFormat, PackedFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.formats.spec import CodebookFormat
from fmtsim.recipes.catalogue import RECIPES
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec
from fmtsim.support.errors import FmtsimError
from fmtsim.support.replay.hooks import Structure
from tests.engines.cuda.emulator import emulated
from tests.engines.cuda.emulator.patching import replaced
from tools import sanitize

FILE = Path(__file__).with_name("data") / "launches.txt"
CPU = torch.device("cpu")
CAPABILITIES = ((8, 0), (9, 0), (12, 0))


class Recorder:
    """A kernel that only says how it was launched."""

    def __init__(self, lines: list[str], name: str) -> None:
        self._lines, self._name = lines, name

    def __call__(self, grid: Any, block: Any, *arguments: Any, shared: int = 0) -> None:
        self._lines.append(f"{self._name} grid={grid} block={block} shared={shared} {' '.join(map(said, arguments))}")

    def bound(self, block: Any, leading: Any, *rest: Any) -> Any:
        if isinstance(leading, tuple):
            return lambda grid, *structures: self(grid, block, *structures, *rest)
        return lambda grid, *words: self(grid, block, f"{leading} of {len(words)}", *rest)


def said(argument: Any) -> str:
    """Return an argument without its address."""
    if isinstance(argument, torch.Tensor):
        return f"{str(argument.dtype)[6:]}{list(argument.shape)}"
    if isinstance(argument, Structure):
        argument = bytes(argument)
    if isinstance(argument, bytes):
        words = np.frombuffer(argument.ljust(-(-len(argument) // 8) * 8, b"\0"), np.uint64)
        addresses = (words > 0x5000 << 32) & (words < 0x8000 << 32)
        return hashlib.sha256(np.where(addresses, 1, words).tobytes()).hexdigest()[:8]
    if isinstance(argument, np.uint64):
        return "address" if 0x5000 << 32 < int(argument) < 0x8000 << 32 else str(argument)
    return f"{argument.dtype}:{argument}" if isinstance(argument, np.generic) else str(argument)


def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return what makes tensors of zeros: no kernel writes results, and some are looked at."""
    return lambda *arguments, **options: make(*arguments, **options).zero_()


def launches(capabilities: Iterable[tuple[int, int]] | None = None) -> Iterator[str]:
    """Yield each launch with the part of the calls that it belongs to; those of products for several GPUs."""
    for capability in CAPABILITIES if capabilities is None else capabilities:
        lines: list[str] = []

        def kernel(file: str, name: str, index: int, defines: Any = (), lines: list[str] = lines) -> Recorder:
            macros = ",".join(f"{key}={value}" for key, value in defines)
            return Recorder(lines, f"{file}:{name} {macros}")

        with (
            emulated(capability),
            replaced({"kernel": kernel}),
            mock.patch.object(self_test, "passes", lambda *_: True),
            mock.patch.object(block, "codes_of_scales", lambda scales, _: scales.to(torch.uint8)),
            mock.patch.multiple(torch, empty=zeroed(torch.empty), empty_like=zeroed(torch.empty_like)),
        ):
            for part in sanitize.PARTS if capability == (9, 0) else ("products",):
                begun = len(lines)
                sanitize.PARTS[part](CPU, True)
                lines[begun:] = sorted(f"{part} {line}" for line in lines[begun:])
            lines += sorted(f"warmup {file}:{name} {macros}" for file, name, macros in variants(capability))
        yield from (f"{capability[0]}.{capability[1]} {line}" for line in lines)


def definitions() -> Iterator[str]:
    """Yield what kernels are told of casts of listed formats and of recipes' operands; None: they do not take them."""
    roundings = [Rounding(), Rounding(mode="up"), Rounding(mode="to_odd"), Rounding(mode="stochastic")]
    roundings += [Rounding(mode="stochastic", random_bits=8, variant=variant) for variant in "ab"]
    formats = [fmt for fmt in map(get_format, list_formats()) if not isinstance(fmt, LogTileFormat | PackedFormat)]
    formats = [fmt for fmt in formats if not (isinstance(fmt, CodebookFormat) and fmt.has_nan)]  # left to torch
    for fmt, rounding, overflow in itertools.product(formats, roundings, ("saturate", "ieee")):
        with contextlib.suppress(FmtsimError):  # a format that has no such rounding
            spec, name = CastSpec(format=fmt, rounding=rounding, overflow=overflow), fmt.name  # type: ignore[arg-type]
            told = said(cast_bytes(spec, None, CPU)), layout_of(spec)
            if isinstance(spec.format, BlockFormat):
                kinds = itertools.product(NARROW, range(4), (False, True))
                fast: Any = [fast_macros(spec, *kind) for kind in kinds]
            else:
                fast = grid_of(spec.format, rounding, overflow)  # type: ignore[arg-type]
            yield f"any formats {type(fmt).__name__} {name} {rounding} {overflow} {told} {fast}"
    for recipe in RECIPES:
        configs = [recipe.linear, *(rule.use for rule in recipe.rules)]
        for i, config in enumerate(filter(None, configs)):
            for operand, quantizer in config.operands.items():
                plan = plan_of(quantizer)
                rotated = None if plan is None else (plan.defines, said(plan.head), said(plan.tail), plan.outside)
                yield f"any operands recipes {recipe.name} {i} {operand} {rule_of(quantizer)} {rotated}"


def digests(lines: Iterable[str] | None = None) -> str:
    """Return capability, part, kernel, how many launches, and a digest of them, a kernel on a line."""
    found = defaultdict(list)
    for line in launches() if lines is None else lines:
        capability, part, kernel, rest = line.split(" ", 3)
        found[capability, part, kernel].append(rest)
    hashed = {key: hashlib.sha256("\n".join(all_).encode()).hexdigest()[:12] for key, all_ in found.items()}
    return "".join(sorted(f"{' '.join(key)} {len(found[key])} {digest}\n" for key, digest in hashed.items()))


if __name__ == "__main__":
    if "--all" in sys.argv:
        for line in itertools.chain(launches(), definitions()):
            print(line)
    else:
        importlib.import_module("fmtsim.engines.cpu")
        FILE.write_text(digests() + digests(definitions()))
