# SPDX-License-Identifier: Apache-2.0
"""Calls of functions by their kind: the first runs as it is, the second is written down, later ones are repeated."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from torch import Tensor

from fmtsim.support.replay.gpu import captures, current_gpu
from fmtsim.support.replay.hooks import THREAD
from fmtsim.support.replay.recorder import Program, Recorder

Result = TypeVar("Result")

_MOST: Final = 256  # kinds of calls that are remembered together
_ONCE: Final = object()  # a kind of call that was seen once


class Programs:
    """Run functions, and repeat what they ask of a device."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def run(
        self, key: Hashable, tensors: Sequence[Tensor | None], function: Callable[[], Result], alike: int = 0
    ) -> tuple[Result, Hashable]:
        """Return what a function returns, and what made it: the same object for all calls that one recording repeats.

        Args:
            key: What the function decides by, beside dtypes, shapes, strides, devices and alignment of its tensors.
            tensors: Those that it reads, all on one device; no other but constants.
            function: What is to be done. It returns tensors and other values in tuples, lists and named tuples.
            alike: So many tensors at the end have the dtypes, shapes, strides and alignment that ``key`` implies.

        Returns:
            The result, and the recording that made it or was made of it; None where there is none.
        """
        if THREAD.recorder is not None:
            return function(), None
        kinds = [key]
        for t in tensors[: len(tensors) - alike]:
            if t is None:
                kinds.append(None)
            else:
                kinds += t.dtype, t.shape, t.stride(), t.get_device(), t.data_ptr() % 16
        key = tuple(kinds)
        program = self._found.get(key)
        if (
            type(program) is Program
            and (program.gpu is None or program.gpu == current_gpu())
            and (not program.same or all(tensors[one] is tensors[other] for one, other in program.same))
        ):
            return program.run(*tensors), program.run
        if program is _ONCE and not any(t is not None and captures(t.device) for t in tensors):
            recorder = Recorder(tensors)
            result = recorder.run(function)
            program = self._found[key] = recorder.program(result)
            return result, None if program is None else program.run
        if program is None and key not in self._found:
            if len(self._found) >= _MOST:
                self._found.clear()
            self._found[key] = _ONCE
        return function(), None


def repeated(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that repeats what its calls ask of a GPU: of tensors, numbers and text, also in lists."""
    programs = Programs()

    def run(*arguments: Any) -> Result:
        tensors: list[Tensor] = []
        key: list[Hashable] = []
        for x in arguments:
            items = x if isinstance(x, list | tuple) else (x,)
            key.append(len(items))
            for item in items:
                if isinstance(item, Tensor):
                    tensors.append(item)
                    key.append(Tensor)  # whose kind ``Programs.run`` adds
                else:
                    key.append(item)
        if not all(map(_is_on_gpu, tensors)):
            return function(*arguments)
        return programs.run(tuple(key), tensors, partial(function, *arguments))[0]

    return run


def _is_on_gpu(t: Tensor) -> bool:
    return t.is_cuda
