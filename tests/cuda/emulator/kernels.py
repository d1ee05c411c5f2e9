# SPDX-License-Identifier: Apache-2.0
"""Kernel files as shared libraries of the host, and their launches."""

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fmtsim.cuda import runtime
from fmtsim.support.replay.hooks import Structure, launched

COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
HERE = Path(__file__).parent
FLAGS = [
    "-std=c++17", "-Og", "-ffp-contract=off", "-frounding-math", "-fno-strict-aliasing", "-fwrapv", "-fPIC", "-shared",
    "-w", "-fvisibility=hidden", *(["-march=native"] if platform.machine() == "x86_64" else []),
]  # fmt: skip
KINDS = ("an integer", "a floating-point number", "a pointer", "a structure")

_ENTRY = """
extern "C" __attribute__((visibility("default"))) int fmtsim_describe(host::Parameter* out) {{
  return host::describe(&{name}, out);
}}
extern "C" __attribute__((visibility("default"))) const char* fmtsim_launch(
    const unsigned* grid, const unsigned* size, void** values, unsigned shared, int reversed) {{
  return host::launch([](void** all) {{ host::call(&{name}, all); }}, grid, size, values, shared, reversed);
}}
"""

_running = threading.Lock()


class EmulatorError(RuntimeError):
    """Report a kernel that cannot be compiled for the host, or that does on it what it must not do."""


class HostKernel:
    """A kernel on the host; called like ``fmtsim.cuda.runtime.Kernel``, with tensors on the CPU."""

    def __init__(
        self,
        file: str,
        name: str,
        defines: runtime.Defines = (),
        capability: tuple[int, int] = (9, 0),
        *,
        reversed_order: bool = False,
    ) -> None:
        self._library = _library(runtime.source_of(file), file, name, tuple(defines), capability)
        parameters = (ctypes.c_int * 128)()
        count = self._library.fmtsim_describe(parameters)
        self._parameters = [(parameters[2 * i], parameters[2 * i + 1]) for i in range(count)]
        self._name = name
        self._reversed = reversed_order

    def __call__(
        self, grid: int | tuple[int, ...], block: int | tuple[int, ...], *arguments: Any, shared: int = 0
    ) -> None:
        """Run every block of the grid."""
        launched(self, (grid, block), arguments, shared=shared)
        grids, blocks = _dimensions(grid), _dimensions(block)
        if not 0 < blocks[0] * blocks[1] * blocks[2] <= 1024 or min(grids) < 1 or max(grids[1:]) > 65535:
            raise EmulatorError(f"{self._name}: grid={grid}, block={block} cannot be launched")
        if len(arguments) != len(self._parameters):
            raise EmulatorError(f"{self._name} takes {len(self._parameters)} arguments, not {len(arguments)}")
        buffers = [
            self._buffer(place, value, *parameter)
            for place, (value, parameter) in enumerate(zip(arguments, self._parameters, strict=True))
        ]
        pointers = (ctypes.c_void_p * max(len(buffers), 1))(*(ctypes.addressof(buffer) for buffer in buffers))
        with _running:
            error = self._library.fmtsim_launch(grids, blocks, pointers, shared, self._reversed)
        if error is not None:
            raise EmulatorError(f"{self._name}: {error.decode()}")

    def bound(self, block: int | tuple[int, ...], leading: int | tuple[int, ...], *rest: Any) -> Callable[..., None]:
        """Return what ``Kernel.bound`` of the engine returns."""
        return lambda grid, *given: self(
            grid, block, *(np.uint64(v) if isinstance(v, int) else v for v in given), *rest
        )

    def _buffer(self, place: int, value: Any, width: int, kind: int) -> Any:
        """Return an argument as bytes in memory, held to the parameter's width and kind."""
        if value is None or isinstance(value, torch.Tensor):
            if value is not None and value.device.type != "cpu":
                raise EmulatorError(f"argument {place} of {self._name} is on {value.device}; pass a tensor on the CPU")
            given, data = 2, np.uint64(0 if value is None else value.data_ptr()).tobytes()
        elif isinstance(value, bytes | Structure):
            given, data = 3, bytes(value)
        elif isinstance(value, np.generic):
            data = value.tobytes()
            given = 3 if isinstance(value, np.void) else 1 if isinstance(value, np.floating) else 0
            given = 2 if kind == 2 and isinstance(value, np.uint64) else given
        else:
            raise TypeError(f"{value!r} has no width in C; wrap it in a numpy scalar")
        if (len(data), given) != (width, kind):
            raise EmulatorError(f"argument {place} of {self._name} is {KINDS[kind]} of {width} bytes; {value!r} is not")
        return ctypes.create_string_buffer(data, width)


def _dimensions(size: int | tuple[int, ...]) -> Any:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (ctypes.c_uint * 3)(*(int(extent) for extent in sizes), *([1] * (3 - len(sizes))))


@cache
def _library(source: str, file: str, name: str, defines: runtime.Defines, capability: tuple[int, int]) -> Any:
    if COMPILER is None:
        raise EmulatorError("no C++ compiler: install g++ to run kernels on the host")
    # Where this checkout lies is not a part of the key: copies of it, in which checks run, compile nothing again.
    flags = [*_flags(capability), *(f"-D{key}={value}" for key, value in defines)]
    headers = "".join(path.read_text() for path in sorted(HERE.glob("*.h")))
    text = f'#include "host.h"\n#line 1 "{file}"\n{source}{_ENTRY.format(name=name)}'
    key = hashlib.sha256("\0".join([COMPILER, platform.node(), *flags, headers, text]).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"fmtsim-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        begun = _precompiled_header(folder, headers, capability)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            (Path(work) / "kernel.cpp").write_text(text)
            command = [COMPILER, *begun, *flags, f"-I{HERE}", "-o", f"{work}/kernel.so", f"{work}/kernel.cpp"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise EmulatorError(f"{file} does not compile for the host: {done.stderr[:4000]}")
            os.replace(f"{work}/kernel.so", library)
    loaded = ctypes.CDLL(str(library))
    loaded.fmtsim_launch.restype = ctypes.c_char_p
    return loaded


def _flags(capability: tuple[int, int]) -> list[str]:
    macros = ["-DFMTSIM_HOST", f"-D__CUDA_ARCH__={10 * (10 * capability[0] + capability[1])}"]
    return [*FLAGS, *macros, *shlex.split(os.environ.get("FMTSIM_EMULATOR_FLAGS", ""))]


def _precompiled_header(folder: Path, headers: str, capability: tuple[int, int]) -> list[str]:
    """Return the flag with which g++ takes host.h as it was read once: most of a small kernel's compilation."""
    flags = _flags(capability)
    key = hashlib.sha256("\0".join([str(COMPILER), platform.node(), *flags, headers]).encode()).hexdigest()[:16]
    place = folder / f"header-{key}"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            target = Path(work) / "made" / "host.h.gch"
            target.parent.mkdir()
            command = [str(COMPILER), *flags, "-x", "c++-header", "-o", str(target), str(HERE / "host.h")]
            if subprocess.run(command, capture_output=True).returncode:
                return []
            with contextlib.suppress(OSError):  # another process was first
                os.replace(target.parent, place)
    return [f"-I{place}"]
