# SPDX-License-Identifier: Apache-2.0
"""Compile, cache and load kernels: CUDA C++ through NVRTC, with cuda-core.

This module imports cuda-core, and launch.py the driver's bindings, at the first call. A kernel is a file of
the engine's rooms specialised by macros; ``#include "x.cuh"`` lines are replaced by the file before compiling, because
the disk cache takes self-contained sources alone.
"""

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fmtsim.cuda.runtime.launch import Kernel, checked
from fmtsim.support.compilation import compiling
from fmtsim.support.errors import DeviceError
from fmtsim.support.folder import kernel_folder, load, save
from fmtsim.support.replay.gpu import captures

KERNELS = Path(__file__).parents[1]
OLDEST = (8, 0)

Defines = tuple[tuple[str, str], ...]
Program = tuple[str, str, Defines]  # the file of a kernel, its name, and macros
Programs = tuple[Program, ...]
_INCLUDE = re.compile(r'^#include "([a-z0-9_]+\.cuh)"$', re.MULTILINE)
_COMMENT = re.compile(r"[ \t]*//.*")
_loading = threading.Lock()


def why_unavailable(device: torch.device | int | None = None) -> str | None:
    """Return why the CUDA engine cannot run on a device (None: any), with the next step; None where it can."""
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm {torch.version.hip}; kernels are CUDA C++ for NVIDIA GPUs"
    if not torch.cuda.is_available():
        build = "was built without CUDA" if torch.version.cuda is None else "sees no CUDA device; look at nvidia-smi"
        return f"torch {torch.__version__} {build}"
    for package, how in (("core", "'fmtsim[cuda]'"), ("bindings", "cuda-bindings")):
        if importlib.util.find_spec("cuda") is None or importlib.util.find_spec(f"cuda.{package}") is None:
            return f"cuda-{package} is missing: pip install {how}"
    indices = range(torch.cuda.device_count()) if device is None else [index_of(device)]
    reasons = [_why_not(index) for index in indices]
    return None if None in reasons else reasons[0]


def available(device: torch.device | int | None = None) -> bool:
    """Return True if the CUDA engine runs on a device, or on any device where none is named."""
    return why_unavailable(device) is None


@cache
def serves(index: int) -> bool:
    """Return True if the engine runs on a device; where it does not, one warning says why, and torch ops take over."""
    reason = why_unavailable(index)
    if reason is not None:
        warnings.warn(f"tensors on cuda:{index} are served by torch operations, not by kernels: {reason}", stacklevel=2)
    return reason is None


@cache
def _why_not(index: int) -> str | None:
    major, minor = capability(index)
    if (major, minor) < OLDEST:
        name = torch.cuda.get_device_name(index)
        return f"{name} has compute capability {major}.{minor}; kernels need {OLDEST[0]}.{OLDEST[1]} or later"
    return None


def index_of(device: torch.device | int | None) -> int:
    """Return the number of a CUDA device; the current one where none is named."""
    if isinstance(device, int):
        return device
    return torch.cuda.current_device() if device is None or device.index is None else device.index


def device_index(tensor: torch.Tensor) -> int:
    """Return the number of the CUDA device that a tensor is on."""
    return tensor.get_device()


@cache
def capability(index: int) -> tuple[int, int]:
    """Return the compute capability of a device, ``(9, 0)``."""
    return torch.cuda.get_device_capability(index)


@cache
def multiprocessors(index: int) -> int:
    """Return the number of a device's multiprocessors, for grids of a whole number of waves."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def shared_limit(index: int) -> int:
    """Return the most bytes of shared memory that one block may take on a device."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    torch.cuda.init()
    return int(checked(driver.cuDeviceGetAttribute(attribute, index), "shared_limit"))


@cache
def architecture(index: int) -> str:
    """Return the architecture that kernels are compiled for on a device, ``"sm_90"``."""
    major, minor = capability(index)
    return f"sm_{major}{minor}"


@cache
def source_of(file: str) -> str:
    """Return the text of ``<file>`` with its includes in place, each once, and without comments: keys ignore them."""
    seen: set[str] = set()

    def expand(text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            name = match.group(1)
            if name in seen:
                return ""
            seen.add(name)
            return expand(_read(name).replace("#pragma once\n", ""))

        return _INCLUDE.sub(replace, text)

    return re.sub(r"\n{2,}", "\n", _COMMENT.sub("", expand(_read(file)))).lstrip("\n")


def _read(name: str) -> str:
    """Return the text of a kernel file or header, whose names are unique among the rooms of the engine."""
    (path,) = KERNELS.rglob(name)
    return path.read_text(encoding="utf-8")


@cache
def compiled(file: str, arch: str, defines: Defines = ()) -> Any:
    """Return the machine code of a kernel file for an architecture; needs no GPU.

    Raises:
        DeviceError: NVRTC refuses the source or does not know the architecture.
    """
    with _loading:  # threads that import cuda.core for the first time trip over each other
        from cuda.core import ObjectCode, Program, ProgramOptions
        from cuda.core.utils import make_program_cache_key

        folder = cache_folder()
    source = source_of(file)
    options = ProgramOptions(
        name=file,
        arch=f"{arch}a" if "wgmma." in source else arch,  # an instruction that one architecture alone has
        std="c++17",
        fma=False,  # a contracted multiply-add rounds once where the definition rounds twice
        ftz=False,
        prec_div=True,
        prec_sqrt=True,
        define_macro=list(defines) or None,
        device_as_default_execution_space=True,  # NVRTC 13.0 takes lambdas for the host's
    )
    key = make_program_cache_key(code=source, code_type="c++", options=options, target_type="cubin").hex()
    path = folder and folder / f"{Path(file).stem}-{key}.cubin"
    cached = path and load(path)
    if cached:
        return ObjectCode.from_cubin(cached, name=file)
    try:
        with compiling(file, folder):
            code = Program(source, "c++", options).compile("cubin")
    except Exception as error:  # cuda-core raises several types, NVRTC's log in their text
        macros = " ".join(f"-D{name}={value}" for name, value in defines)
        log = str(error).replace("\0", "").rstrip()
        raise DeviceError(f"NVRTC cannot compile {file} for {arch} ({macros}): {log}") from error
    if path is not None:
        save(path, bytes(code.code))
    return code


@cache
def cache_folder() -> Path | None:
    """Return the folder of the engine's caches, None (with one warning) where no folder can be written."""
    return kernel_folder("cuda")


def finished(x: torch.Tensor) -> None:
    """Wait for what is queued on a tensor's device, so that any stream may read a cached table."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()


@cache
def kernel(file: str, name: str, index: int, defines: Defines = ()) -> Kernel:
    """Return kernel ``name`` of ``<file>`` on device ``index``, compiled and loaded at the first call.

    ``defines`` are macros as pairs of strings.

    Raises:
        DeviceError: The kernel cannot be compiled for the device, or is not loaded yet while a CUDA graph is captured.
    """
    if captures():
        raise DeviceError(
            f"{name} ({file}) is not loaded on cuda:{index} yet, and a CUDA graph being captured cannot load it; run "
            "the call once, or fmtsim.cuda.warmup(), before the capture"
        )
    code = compiled(file, architecture(index), defines)
    with _loading:
        try:
            handle = code.get_kernel(name)
        except Exception as error:  # cuda-core's own types
            where = f"cuda:{index} ({architecture(index)})"
            raise DeviceError(f"{name} ({file}) cannot be loaded on {where}: {error}") from error
        return Kernel(handle, name, index)


# Kernels compiled and loaded before they are needed.


def warmup(device: torch.device | int | None = None, *, advance: Callable[[int, int], None] | None = None) -> int:
    """Compile and load the engine's kernels for a device, so that no later call waits for the compiler.

    Args:
        device: A CUDA device or its number; None takes the current one.
        advance: Called with how many programs are compiled, from 0 on, and how many there are.

    Returns:
        How many kernels are ready. Each kind of kernel is there in the specialisations that common calls take; a rarer
        one is still compiled by the first call that needs it, so run a call once before capturing it in a CUDA graph.

    Machine code is cached on disk (``FMTSIM_CACHE_DIR``): the first call takes seconds to minutes, later processes much
    less. Raises DeviceError where the engine cannot run on the device, or a kernel does not compile.
    """
    reason = why_unavailable(device)
    if reason is not None:
        raise DeviceError(reason)
    index = index_of(device)
    arch = architecture(index)
    chosen = variants(capability(index))
    programs = list(dict.fromkeys((file, defines) for file, _, defines in chosen))
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        done = pool.map(lambda item: compiled(item[0], arch, item[1]), programs)
        for count in range(len(programs) + 1):
            if count:
                next(done)
            if advance is not None:
                advance(count, len(programs))
    for file, name, defines in chosen:
        kernel(file, name, index, defines)
    return len(chosen)


@cache
def variants(capability: tuple[int, int]) -> Programs:
    """Return a representative of every specialisation of every kernel that a compute capability runs."""
    return tuple(dict.fromkeys(variant for module in sources() for variant in variants_of(module, capability)))


def sources() -> tuple[str, ...]:
    """Return the names of the modules that have kernels."""
    folder = Path(__file__).parents[1]
    names = (module.name for module in pkgutil.walk_packages([str(folder)], "fmtsim.cuda."))
    return tuple(name for name in names if hasattr(importlib.import_module(name), "variants") and name != __name__)


def variants_of(module: str, capability: tuple[int, int]) -> Iterator[Program]:
    """Yield the specialisations of a module's kernels; some modules have the same for every device."""
    function = importlib.import_module(module).variants
    return iter(function(capability) if inspect.signature(function).parameters else function())
