# SPDX-License-Identifier: Apache-2.0
"""Launch a kernel on torch's current stream with the driver's own call and little Python around it.

The layout of arguments in memory is computed once for each kernel and types of arguments, and compared with the
kernel's parameters; after that a launch fills one buffer and calls ``cuLaunchKernel``.
"""

import ctypes
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from fmtsim.support.errors import DeviceError
from fmtsim.support.replay.gpu import current_gpu, current_stream
from fmtsim.support.replay.hooks import THREAD, Launch, Structure, launched, word_of

SLOT = 16  # every argument begins at a multiple of as many bytes, which suits structures of 16-byte words too
USUAL_SHARED = 48 * 1024  # bytes of dynamic shared memory that need no function attribute
NO_CONTEXT = (201, 400)  # errors of a thread that has not used CUDA: it has no context, and its stream 0 no device
HINTS = {
    1: "the grid, the block or the shared memory is larger than the device allows",
    2: "the device is out of memory; free tensors or call torch.cuda.empty_cache()",
    209: "the kernel was compiled for another architecture",
    701: "a block needs more registers or shared memory than a multiprocessor has",
}
_WORD = np.uint64(0)

Extent = int | tuple[int, ...]  # of a grid, or of a block of threads: up to three dimensions
Bound = Callable[..., None]


class Kernel:
    """A kernel on one device; calling it launches it on torch's current stream of that device.

    Args:
        handle: What cuda-core's ``ObjectCode.get_kernel`` returned.
        name: The kernel's name, for messages.
        index: Number of the device.
    """

    __slots__ = ("_context", "_function", "_handle", "_index", "_launch", "_layouts", "_name", "_shared", "_sizes")

    def __init__(self, handle: Any, name: str, index: int) -> None:
        from cuda.bindings import driver

        self._handle, self._name, self._index = handle, name, index  # the handle keeps the module loaded
        self._launch = driver.cuLaunchKernel
        self._layouts: dict[tuple[type, ...], _Layout] = {}
        self._shared = USUAL_SHARED
        with torch.cuda.device(index):
            torch.cuda.current_stream().query()  # makes the device's context the thread's
            self._context = checked(driver.cuCtxGetCurrent(), name)
            self._function = checked(driver.cuKernelGetFunction(driver.CUkernel(int(handle.handle))), name)
            checked(driver.cuFuncLoad(self._function), name)  # a graph could not capture that
        self._sizes = [parameter.size for parameter in handle.arguments_info]

    def __call__(self, grid: Extent, block: Extent, *arguments: Any, shared: int = 0) -> None:
        """Launch: tensors pass their address, None a null pointer, numpy scalars their value, bytes a structure.

        A structure that holds addresses is a ``Structure``, so that a launch can be repeated (fmtsim/support/replay).

        ``grid`` and ``block`` are ints or tuples of up to three; ``shared`` is the dynamic shared memory in bytes.

        Raises:
            DeviceError: The driver refuses the launch.
            TypeError: The arguments are not what the kernel takes.
        """
        kinds = tuple(map(type, arguments))
        layout = self._layouts.get(kinds)
        if layout is None:
            layout = self._layouts[kinds] = self._checked(_Layout(arguments))
        if shared > self._shared:
            # Allow launches with this much dynamic shared memory.
            from cuda.bindings import driver

            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuFuncSetAttribute(self._function, attribute, shared)
            if int(error):
                raise self._refused(int(error), f"shared={shared}")
            self._shared = shared
        if THREAD.recorder is not None:
            start = _Start(self, block, shared, layout.pack, layout.memory, layout.free)
            launched(start, (_three_dimensions(grid),), arguments, words=True)
        memory = layout.fill(arguments)
        self._start(_three_dimensions(grid), _three_dimensions(block), shared, memory.address)
        layout.free.append(memory)

    def bound(self, block: Extent, leading: int | tuple[int, ...], *rest: Any) -> Bound:
        """Return a launch for calls that repeat, which takes the grid and the leading arguments alone.

        Args:
            block: As in a call.
            leading: How many arguments each launch brings: tensors, None, or integers of 64 bits as Python ints; or the
                sizes of as many structures.
            rest: The arguments after these, the same in each launch.

        Returns:
            A function of the grid and of the leading arguments.

        Raises:
            TypeError: The arguments are not what the kernel takes.
        """
        words = isinstance(leading, int)
        first = [_WORD] * leading if isinstance(leading, int) else [bytes(size) for size in leading]
        layout = self._checked(_Layout((*first, *rest)))
        codes = "".join("Q8x" if words else f"{size}s{-size % SLOT}x" for size in layout.sizes[: len(first)])
        pack, fill = struct.Struct(f"={codes}").pack_into, partial(layout.fill, (*first, *rest))
        start = _Start(self, block, 0, pack, fill, layout.free)

        def launch(grid: Extent, *arguments: Any) -> None:
            blocks = _three_dimensions(grid)
            launched(start, (blocks,), arguments, words=True)
            start(blocks, *map(word_of, arguments))

        return launch

    def _start(self, blocks: tuple[int, ...], threads: tuple[int, ...], shared: int, address: int) -> None:
        """Ask the driver for a launch with arguments at an address."""
        if current_gpu() == self._index:
            stream = current_stream(self._index)
            (error,) = self._launch(self._function, *blocks, *threads, shared, stream, address, 0)
            if error and int(error) in NO_CONTEXT:
                error = self._launch_in_context(blocks, threads, shared, address)
        else:
            with torch.cuda.device(self._index):
                error = self._launch_in_context(blocks, threads, shared, address)
        if error:
            grid, block = (size[0] if size[1:] == (1, 1) else size for size in (blocks, threads))
            raise self._refused(int(error), f"grid={grid}, block={block}, shared={shared}")

    def _launch_in_context(self, blocks: tuple[int, ...], threads: tuple[int, ...], shared: int, address: int) -> Any:
        """Make the device's context the thread's and launch."""
        from cuda.bindings import driver

        checked(driver.cuCtxSetCurrent(self._context), self._name)
        stream = current_stream(self._index)
        return self._launch(self._function, *blocks, *threads, shared, stream, address, 0)[0]

    def _refused(self, error: int, how: str) -> DeviceError:
        hint = f"; {HINTS[error]}" if error in HINTS else ""
        return DeviceError(
            f"{self._name} cannot be launched on cuda:{self._index} with {how}: {_error_text(error)}{hint}"
        )

    def _checked(self, layout: "_Layout") -> "_Layout":
        """Return a layout whose sizes are the kernel's; raise TypeError for another."""
        if layout.sizes != self._sizes:
            raise TypeError(f"{self._name} takes arguments of {self._sizes} bytes, not of {layout.sizes}")
        return layout


def _three_dimensions(size: Extent) -> tuple[int, ...]:
    return (size, 1, 1) if isinstance(size, int) else (*size, 1, 1)[:3]


class _Memory:
    """Bytes that hold the arguments of one launch, and the pointers to them for the driver."""

    __slots__ = ("address", "bytes", "pointers")

    def __init__(self, offsets: list[int], size: int) -> None:
        self.bytes = ctypes.create_string_buffer(size + SLOT)
        start = -ctypes.addressof(self.bytes) % SLOT
        self.bytes = (ctypes.c_char * size).from_buffer(self.bytes, start)
        base = ctypes.addressof(self.bytes)
        self.pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self.pointers)


class _Start(Launch):
    """A launch of a kernel with given threads; ``free`` holds memory that no launch of any thread is using."""

    __slots__ = ("_free", "_kernel", "_shared", "_threads")

    def __init__(
        self, kernel: Kernel, block: Extent, shared: int, pack: Callable[..., None], fill: Callable[[], _Memory],
        free: list[_Memory],
    ) -> None:  # fmt: skip
        self._kernel, self._threads, self._shared, self._free = kernel, _three_dimensions(block), shared, free
        self.pack, self.fill = pack, fill

    def __call__(self, blocks: tuple[int, ...], *words: Any) -> None:
        try:
            memory = self._free.pop()
        except IndexError:  # the first launch, or as many at once as never before
            memory = self.fill()
        self.pack(memory.bytes, 0, *words)
        self._kernel._start(blocks, self._threads, self._shared, memory.address)
        self._free.append(memory)

    def driver_call(self, blocks: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the driver's function, and its arguments as far as the bytes of shared memory."""
        return self._kernel._launch, self._kernel._function, *blocks, *self._threads, self._shared


class _Layout:
    """Offsets of arguments of certain types; ``free`` holds memory that no launch of any thread is using."""

    __slots__ = ("_offsets", "_pointers", "_size", "_structures", "free", "pack", "sizes")

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        codes = [_code(value) for value in arguments]
        self.sizes = [struct.calcsize(f"={code}") for code in codes]
        self._offsets, self._size = [], 0
        text = "="
        for code, size in zip(codes, self.sizes, strict=True):
            self._offsets.append(self._size)
            text += f"{code}{-size % SLOT}x"
            self._size += size + -size % SLOT
        self._structures = [(i, n) for i, n in enumerate(self.sizes) if isinstance(arguments[i], bytes | Structure)]
        self._pointers = [i for i, value in enumerate(arguments) if value is None or isinstance(value, torch.Tensor)]
        self.pack = struct.Struct(text).pack_into
        self.free: list[_Memory] = []

    def fill(self, arguments: tuple[Any, ...]) -> _Memory:
        """Return memory that holds the arguments; put it back into ``free`` after the launch, which copies it."""
        values = list(arguments)
        for place, size in self._structures:
            values[place] = data = bytes(arguments[place])
            if len(data) != size:
                raise TypeError(f"a structure of {size} bytes was given {len(data)}")
        try:
            memory = self.free.pop()
        except IndexError:
            memory = self.memory()
        for place in self._pointers:
            values[place] = word_of(values[place])
        self.pack(memory.bytes, 0, *values)
        return memory

    def memory(self) -> _Memory:
        """Return new memory for as many arguments."""
        return _Memory(self._offsets, self._size)


def _code(value: Any) -> str:
    """Return the code of ``struct`` for an argument."""
    if value is None or isinstance(value, torch.Tensor):
        return "Q"
    if isinstance(value, bytes):
        return f"{len(value)}s"
    if isinstance(value, Structure):
        return f"{value.layout.size}s"
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        kind = {"b": "?", "i": " bh i   q", "u": " BH I   Q", "f": "  e f   d"}[value.dtype.kind]
        return kind[value.dtype.itemsize if len(kind) > 1 else 0]
    raise TypeError(f"{value!r} has no width in C; wrap it in a numpy scalar")


def checked(answer: tuple[Any, ...], what: str) -> Any:
    """Return the first result of a call of the driver, or raise its error as a DeviceError."""
    error, *results = answer
    if int(error):
        raise DeviceError(f"{what}: {_error_text(int(error))}")
    return results[0] if results else None


def _error_text(error: int) -> str:
    from cuda.bindings import driver

    status, text = driver.cuGetErrorString(driver.CUresult(error))
    return f"{driver.CUresult(error).name} ({text.decode() if not int(status) else error})"
