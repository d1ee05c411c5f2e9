# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled and loaded before they are needed."""

import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from fmtsim.engines.cuda.runtime import program
from fmtsim.support.errors import DeviceError


def warmup(device: torch.device | int | None = None, *, advance: Callable[[int, int], None] | None = None) -> int:
    """Compile and load the engine's kernels for a device, so that no later call waits for the compiler.

    Args:
        device: A CUDA device or its number; None takes the current one.
        advance: Called with how many programs are compiled, from 0 on, and how many there are.

    Returns:
        How many kernels are ready. Each kind of kernel is there in the specialisations that common calls take; a rarer
        one is still compiled by the first call that needs it, so run a call once before capturing it in a CUDA graph.

    Machine code is kept on disk (``FMTSIM_CACHE_DIR``): the first call takes seconds to minutes, later processes much
    less. Raises DeviceError where the engine cannot run on the device, or a kernel does not compile.
    """
    reason = program.why_unavailable(device)
    if reason is not None:
        raise DeviceError(reason)
    index = program.index_of(device)
    arch = program.architecture(index)
    chosen = variants(program.capability(index))
    programs = list(dict.fromkeys((file, defines) for file, _, defines in chosen))
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        done = pool.map(lambda item: program.compiled(item[0], arch, item[1]), programs)
        for count in range(len(programs) + 1):
            if count:
                next(done)
            if advance is not None:
                advance(count, len(programs))
    for file, name, defines in chosen:
        program.kernel(file, name, index, defines)
    return len(chosen)


@cache
def variants(capability: tuple[int, int]) -> program.Programs:
    """Return a representative of every specialisation of every kernel that a compute capability runs."""
    return tuple(dict.fromkeys(variant for module in sources() for variant in variants_of(module, capability)))


def sources() -> tuple[str, ...]:
    """Return the names of the modules that have kernels."""
    folder = Path(__file__).parents[1]
    names = (module.name for module in pkgutil.walk_packages([str(folder)], "fmtsim.engines.cuda."))
    return tuple(name for name in names if hasattr(importlib.import_module(name), "variants") and name != __name__)


def variants_of(module: str, capability: tuple[int, int]) -> Iterator[program.Program]:
    """Yield the specialisations of a module's kernels; some modules have the same for every device."""
    function = importlib.import_module(module).variants
    return iter(function(capability) if inspect.signature(function).parameters else function())
