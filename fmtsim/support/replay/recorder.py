# SPDX-License-Identifier: Apache-2.0
"""What a call of a function does, as lines of Python that do it again."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from re import MULTILINE, escape, findall, finditer, sub
from types import CodeType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from fmtsim.support.errors import DeviceError
from fmtsim.support.replay.gpu import current_stream
from fmtsim.support.replay.hooks import THREAD, Launch, Structure

Result = TypeVar("Result")
Key = TypeVar("Key")

_LARGEST: Final = 4096  # numbers of a tensor that a program may keep
_SMALL: Final = 1 << 16  # bytes of a tensor that may lie in one memory with others
_ALIGNED: Final = 256  # bytes, of where each of these begins
_aten = torch.ops.aten
_EMPTY: Final = (
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
)  # fmt: skip
# Functions of torch do what these operators do in less time: they do not look at the operator's schema.
_FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    _aten.mm.default: torch.mm, _aten.zeros.default: torch.zeros, _aten._to_copy.default: torch.Tensor.to,
} | ({_aten.mm.dtype: torch.mm} if "dtype" in _aten.mm.overloads() else {})  # fmt: skip
_VIEWS: Final = (
    _aten.transpose.int, _aten.t.default, _aten.view.default, _aten._unsafe_view.default, _aten.slice.Tensor,
)  # fmt: skip
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
# What code of inductor's calls, in half the time of torch's own functions.
_empty_on_gpu: Callable[..., Tensor] | None = getattr(_guards, "_empty_strided_cuda", None)
_viewed: Callable[..., Tensor] = getattr(_guards, "_reinterpret_tensor", None) or (
    lambda x, shape, strides, offset: x.as_strided(shape, strides, x.storage_offset() + offset)
)


class Program(NamedTuple):
    """Hold what repeats a call, given its tensors, which pairs of them are one tensor, and the GPU that it runs on."""

    run: Callable[..., Any]
    same: Sequence[tuple[int, int]]
    gpu: int | None


class _Line(NamedTuple):
    """Hold a line of a program, the places that it reads and makes, and whether it does more than that."""

    text: str
    reads: Sequence[int]
    makes: Sequence[int] = ()
    acts: bool = True


class Recorder(TorchDispatchMode):
    """Write down what runs under it.

    A tensor or a key that each call has anew is ``t3`` in a program's text, another value ``c4``: by its place.

    Args:
        tensors: Those that every call has.

    Attributes:
        fits: Whether that may be repeated.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.fits = True
        self._device = next((t.device for t in tensors if t is not None), None)
        on_gpu = self._device is not None and self._device.type == "cuda"
        self._take = (_empty_on_gpu if on_gpu else None) or partial(_empty_strided, self._device)  # memory
        self._names: list[str] = []  # by places
        self._places = WeakTensorKeyDictionary()  # of tensors that are still there
        self._keys: dict[int, tuple[Any, int]] = {}  # those that were drawn, by their identity, and their places
        self._draws: dict[Any, list[int]] = {}  # places of keys, by what draws them
        self._memory: list[tuple[int, int]] = []  # first and last address of what is not constant
        self._constants: dict[str, Any] = {}
        self._lines: list[_Line] = []
        self._views: dict[Any, int] = {}  # by what they are views of, and how
        self._bases: dict[int, tuple[int, int]] = {}  # of views: what they lie in, and how many numbers on
        self._shown: set[int] = set()  # views of what a call was given: torch counts what is written into those
        self._packs: dict[Any, int] = {}  # places of bytes, by their key and the function that makes them of it
        self._notes: list[tuple[bytes, int, int]] = []  # bytes that stand for a key, the places of both
        self._unused: set[int] = set()  # keys that no launch has got
        self._fills: list[Callable[[], Any]] = []  # which make memory for the launches that a program does itself
        self._small: dict[int, int] = {}  # bytes of small tensors that a program takes, by their places
        self._same: list[tuple[int, int]] = []
        for t in tensors:
            if t is not None and t in self._places:
                self._same.append((self._place(t), len(self._names)))
            self._new(t)
        self._given = len(self._names)

    def run(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns, which is written down."""
        with self:
            THREAD.recorder = self
            try:
                return function()
            finally:
                THREAD.recorder = None

    def program(self, result: Any) -> Program | None:
        """Return what repeats it, None where nothing may."""
        returned: list[int] = []
        lines = [f" return {self._text(result, returned)}"]
        if not self.fits or self._unused or self._device is None or self._shown.intersection(returned):
            return None
        needed = set(returned)
        for line in reversed(self._lines):
            if line.acts or needed.intersection(line.makes):
                touched = {place for place in (*line.reads, *line.makes) if self._names[place].startswith("t")}
                done = "".join(f"; {self._names[place]} = None" for place in sorted(touched - needed))
                lines.append(f" {line.text}{done}")
                needed |= touched
        lines += self._small_tensors(lines)
        if self._fills:  # a program takes the memory of all its launches at once, and no other call meanwhile
            names = ", ".join(f"b{i}, a{i}" for i in range(len(self._fills)))
            free, new = self._constant([]), self._constant(partial(_memories, tuple(self._fills)))
            lines.insert(1, f" {free}.append(taken)")
            lines += [f" memory, {names} = taken", f" except IndexError: taken = {new}()"]
            lines += [f" try: taken = {free}.pop()"]
        if self._fills or self._device.type == "cuda":
            lines.append(f" stream = {self._constant(current_stream)}({self._constant(self._device.index)})")
        for draw, places in self._draws.items():  # a draw of several takes little longer than one
            names, (function, *source) = ", ".join(self._names[place] for place in places), draw
            arguments = ", ".join(map(self._constant, (len(places), *source)))
            lines.append(f" {names}, = {self._constant(function)}({arguments})")
        text = "\n".join([f"def run({', '.join(self._names[: self._given])}):", *reversed(lines)])
        exec(_compiled(text), self._constants)
        gpu = self._device.index if self._device.type == "cuda" else None
        return Program(self._constants["run"], self._same, gpu)

    def _small_tensors(self, lines: list[str]) -> list[str]:
        """Let small tensors of which launches alone get the addresses lie in one memory, and return lines that take it.

        Args:
            lines: Of the program; those that took a tensor each are removed.
        """
        end, text = 0, "\n".join(lines)
        for place, nbytes in self._small.items():
            name = self._names[place]
            ends, uses = f"; {name} = None", len(findall(rf"\b{name}\b(?!\.data_ptr\(\))", text))
            if uses == 1 + text.count(ends):  # the line that takes it is the only one beside addresses
                text = sub(rf"^ {name} = .*$", "", text.replace(ends, ""), flags=MULTILINE)
                text = sub(rf"\b{name}\.data_ptr\(\)", f"small + {end}", text)
                end += -(-nbytes // _ALIGNED) * _ALIGNED
        if not end:
            return []
        lines[:] = text.split("\n")
        assert self._device is not None
        arguments = ", ".join(map(self._constant, ((end,), (1,), torch.uint8)))
        return [" small = memory_of_small.data_ptr()", f" memory_of_small = {self._constant(self._take)}({arguments})"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch and write it down."""
        kwargs, THREAD.recorder = kwargs or {}, None  # launches inside are the operation's
        try:
            result = func(*args, **kwargs)
        finally:
            THREAD.recorder = self
        if self.fits:
            self._operation(func, args, kwargs, result)
        return result

    def _operation(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        outputs = [made] if isinstance(made, Tensor) else made
        tensors = isinstance(outputs, list | tuple) and all(isinstance(t, Tensor) for t in outputs)
        if not tensors or func is _aten.lift_fresh.default or any(t.device != self._device for t in outputs):
            self.fits = False  # a number of it, or one of the host's
            return
        if func in _EMPTY or (func is _aten.zeros.default and made.is_cuda):
            place = self._make(self._take, (tuple(made.shape), made.stride(), made.dtype), made)
            if made.nbytes <= _SMALL:
                self._small[place] = made.nbytes
            if func not in _EMPTY:  # filled by the driver, in less time than by torch
                name = self._names[place]
                text = f"{self._constant(_fill_with_zeros)}({name}.data_ptr(), {made.nbytes}, stream)"
                self._lines.append(_Line(text, [place]))
        elif func is _aten.detach.default:
            self._hold(made, self._place(args[0]))
        elif func in _VIEWS:
            self._view(args[0], made)
        elif all(t not in self._places for t in outputs) or made is args[0]:
            self._call(func, args, kwargs, [] if made is args[0] else outputs, single=outputs is not made)
        else:
            self.fits = False

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any], made: Sequence[Tensor], *, single: bool) -> None:
        """Write down an operation that made tensors, or none where it wrote into one."""
        reads: list[int] = []
        arguments = [self._text(x, reads) for x in args]
        arguments += [f"{name}={self._text(x, reads)}" for name, x in kwargs.items()]
        copies = func is _aten._to_copy.default and (kwargs.keys() != {"dtype"} or args[0].dtype == kwargs["dtype"])
        function = func if copies else _FUNCTIONS.get(func, func)
        text, places = f"{self._constant(function)}({', '.join(arguments)})", [self._new(t) for t in made]
        if places:
            names = ", ".join(self._names[place] for place in places)
            text = f"{names} = {text}" if single else f"{names}, = {text}"
        acts = func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags
        self._lines.append(_Line(text, reads, places, acts))

    def _view(self, x: Tensor, made: Tensor) -> None:
        """Write down a view, as one of memory that was taken or given."""
        place = self._place(x)
        base, moved = self._bases.get(place, (place, 0))
        moved += int(made.storage_offset() - x.storage_offset())
        how = base, tuple(made.shape), made.stride(), moved
        if how in self._views:
            self._hold(made, self._views[how])
            return
        where = self._views[how] = self._make(_viewed, how[1:], made, base)
        self._bases[where] = base, moved
        if base < self._given:
            self._shown.add(where)

    def _make(self, function: Callable[..., Tensor], values: tuple[Any, ...], made: Tensor, *reads: int) -> int:
        """Write down that a function made a tensor of tensors at some places, and of values."""
        place = self._new(made)
        arguments = ", ".join((*(self._names[read] for read in reads), *map(self._constant, values)))
        self._lines.append(
            _Line(f"{self._names[place]} = {self._constant(function)}({arguments})", reads, [place], False)
        )
        return place

    def launch(self, start: Callable[..., None], fixed: Sequence[Any], given: Sequence[Any], *, words: bool) -> None:
        """Write down a launch (``launched``); what the driver refuses is asked for again, which raises its error."""
        reads: list[int] = []
        texts = [*map(self._constant, fixed), *(self._text(x, reads, words=words) for x in given)]
        text = f"{self._constant(start)}({', '.join(texts)})"
        if isinstance(start, Launch):
            place, call = len(self._fills), map(self._constant, start.driver_call(*fixed))
            self._fills.append(start.fill)
            words_of = "".join(f", {word}" for word in texts[len(fixed) :])
            pack = f"{self._constant(start.pack)}(b{place}, 0{words_of})"
            text = f"{pack}; {next(call)}({', '.join(call)}, stream, a{place}, 0)[0] and {text}"
        self._lines.append(_Line(text, reads))

    def draw(self, draw: Callable[..., Sequence[Key]], *source: Any) -> Key:
        """Draw a key, in each call, before all else."""
        THREAD.recorder = None
        with _disable_current_modes():
            key = draw(1, *source)[0]
        THREAD.recorder = self
        place = self._new(None)
        self._keys[id(key)] = key, place
        self._unused.add(place)
        self._draws.setdefault((draw, *source), []).append(place)
        return key

    def note(self, key: Any, data: bytes, pack: Callable[[Any], bytes]) -> None:
        """Remember what bytes stand for a key, for launches that get them."""
        if id(key) in self._keys:
            place = self._keys[id(key)][1]
            how = place, *((pack.func, *pack.args) if isinstance(pack, partial) else (pack,))
            if how not in self._packs:
                made = self._packs[how] = self._new(None)
                text = f"{self._names[made]} = {self._constant(pack)}({self._names[place]})"
                self._lines.append(_Line(text, [place], [made], False))
            self._notes.append((data, place, self._packs[how]))
        elif self._notes or self._unused:
            self.fits = False  # it may be one that was drawn, moved on

    def _new(self, t: Tensor | None) -> int:
        """Return a place for what each call has anew."""
        place = len(self._names)
        self._names.append(f"t{place}")
        if t is not None:
            self._hold(t, place)
        return place

    def _hold(self, t: Tensor, place: int) -> None:
        """Record that a tensor lies at a place."""
        self._places[t] = place
        memory = t.untyped_storage()
        self._memory.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes()))

    def _place(self, t: Tensor) -> int:
        """Return the place of a tensor; one that the recorded call did not make is a constant."""
        place: int | None = self._places.get(t)
        if place is None:
            self.fits &= t.numel() <= _LARGEST and t.device == self._device and not self._moves(t.data_ptr())
            place = self._places[t] = len(self._names)
            self._names.append(self._constant(t))
        return place

    def _constant(self, x: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = x
        return name

    def _text(self, x: Any, reads: list[int], *, words: bool = False) -> str:
        """Return the text of a value, or of what ``word_of`` makes of it; reads: takes the places that it names."""
        if x is None:
            return "0" if words else "None"
        if isinstance(x, Tensor):
            place = self._place(x)
            if words:  # the address alone: no view is made for it
                place, moved = self._bases.get(place, (place, 0))
                reads.append(place)
                return f"{self._names[place]}.data_ptr()" + (f" + {moved * x.element_size()}" if moved else "")
            reads.append(place)
            return self._names[place]
        if isinstance(x, Structure):
            values = [self._text(value, reads, words=True) for value in x.values]
            return f"{self._constant(x.layout.pack)}({', '.join(values)})"
        if isinstance(x, bytes):
            # The same of bytes, which hold addresses in no other way than `Structure`.
            for start in range(0, len(x) - 7, 4):
                if self._moves(int.from_bytes(x[start : start + 8], "little")):
                    self.fits = False
            pieces, end = [], 0
            notes = [(m.span(), place, made) for raw, place, made in self._notes for m in finditer(escape(raw), x)]
            for (start, stop), place, made in sorted(notes, key=lambda note: (note[0][0], -note[0][1])):
                self._unused.discard(place)
                if start >= end:  # else part of one that was longer
                    reads.append(made)
                    pieces += [self._constant(x[end:start]), self._names[made]]
                    end = stop
            return f"b''.join(({', '.join((*pieces, self._constant(x[end:])))}))" if pieces else self._constant(x)
        if isinstance(x, int | np.integer) and self._moves(int(x)):
            self.fits = False
        if isinstance(x, list | tuple) and any(isinstance(item, Tensor | tuple | list) for item in x):
            parts, kind = "".join(f"{self._text(item, reads)}, " for item in x), type(x)
            return f"[{parts}]" if kind is list else f"{'' if kind is tuple else self._constant(kind)}({parts})"
        return self._constant(x.item() if words and isinstance(x, np.generic) else x)

    def _moves(self, address: int) -> bool:
        """Return True if a number is an address in memory that each call allocates anew."""
        return any(first <= address < last for first, last in self._memory)


@lru_cache(maxsize=1024)
def _compiled(text: str) -> CodeType:
    return compile(text, "<fmtsim.support.replay>", "exec")


def _memories(fills: Sequence[Callable[[], Any]]) -> tuple[Any, ...]:
    """Return memory for launches, which has to live on, and of each its bytes and the address for the driver."""
    memories = [fill() for fill in fills]
    return memories, *(part for memory in memories for part in (memory.bytes, memory.address))


def _fill_with_zeros(address: int, nbytes: int, stream: int) -> None:
    """Fill memory of a GPU with zeros, on a stream."""
    from cuda.bindings import driver

    (error,) = driver.cuMemsetD8Async(address, 0, nbytes, stream)
    if error:
        raise DeviceError(f"memory of a GPU cannot be filled with zeros: {error!r}")


def _empty_strided(device: torch.device | None, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
