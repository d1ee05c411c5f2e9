# SPDX-License-Identifier: Apache-2.0
"""What a function says while it is written down: which kernels it starts, which keys it draws, what may differ."""

import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Key = TypeVar("Key")


class Structure(NamedTuple):
    """Name an argument of a kernel that is a structure: values as ``struct`` packs them, tensors as their addresses."""

    layout: struct.Struct
    values: tuple[Tensor | int | bytes | None, ...]

    def __bytes__(self) -> bytes:
        return self.layout.pack(*map(word_of, self.values))


def word_of(value: Any) -> Any:
    """Return what ``struct`` packs for a value: the address of a tensor, 0 for None, a structure's bytes."""
    if value is None:
        return 0
    if isinstance(value, Tensor):
        return value.data_ptr()
    return bytes(value) if isinstance(value, Structure) else value


class Launch:
    """A launch of a kernel that a program does without calling this object: it packs words and calls the driver.

    Attributes:
        pack: Packs words into bytes at an offset.
        fill: Returns new memory for words, with ``bytes`` and the ``address`` that the driver takes.
    """

    __slots__ = ("fill", "pack")
    pack: Callable[..., None]
    fill: Callable[[], Any]

    def __call__(self, blocks: tuple[int, ...], *words: Any) -> None:
        """Launch so many blocks of threads."""
        raise NotImplementedError

    def driver_call(self, blocks: tuple[int, ...]) -> tuple[Any, ...]:
        """Return a function and its arguments before stream, address and 0, which returns an error first, or 0."""
        raise NotImplementedError


class _Thread(threading.local):
    recorder: Any = None  # a Recorder of recorder.py, which imports this file, or None


THREAD = _Thread()
"""Who writes down what the running thread does."""


def launched(
    start: Callable[..., None], fixed: Sequence[Any], given: Sequence[Any], *, words: bool = False, **options: Any
) -> None:
    """Say that ``start(*fixed, *given, **options)`` launches a kernel.

    Args:
        start: A function, to which nothing happens between calls; a ``Launch`` is written down as what it does.
        fixed, options: What is the same in each.
        given: Tensors, None, numbers, bytes, ``Structure``; no addresses in any other way.
        words: ``start`` takes what ``word_of`` makes of them.
    """
    if THREAD.recorder is not None:
        THREAD.recorder.launch(partial(start, **options) if options else start, fixed, given, words=words)


def drawn(draw: Callable[..., Sequence[Key]], *source: Any) -> Key:
    """Return a key that is drawn in each call: ``draw(count, *source)`` draws ``count`` from a source, in order.

    A call that is repeated draws from all its sources before anything else.
    """
    key: Key = draw(1, *source)[0] if THREAD.recorder is None else THREAD.recorder.draw(draw, *source)
    return key


def packed(key: Any, data: bytes, pack: Callable[[Any], bytes]) -> bytes:
    """Return bytes for a launch, those that ``pack`` made of a key."""
    if THREAD.recorder is not None and key is not None:
        THREAD.recorder.note(key, data, pack)
    return data


def refuse() -> None:
    """Refuse to record the running call: its result depends on more than its tensors, or it changes state."""
    if THREAD.recorder is not None:
        THREAD.recorder.fits = False
