# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on CUDA: the parameters that kernels take, and a few launches for all of them."""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.cast.parameters import draw_of
from fmtsim.cuda.optim.schemes import BLOCKS, ENTRIES, RULES, TYPES, WORDS, Kernels, kernels_of
from fmtsim.formats.spec import LogFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.optimizer import (
    KIND_BITS,
    PARAMETER_BITS,
    Book,
    Counter,
    Hyperparameters,
    Numbers,
    ParameterStep,
    Scheme,
    book_of,
    in_parameter,
    key_of,
)

THREADS, CHUNK = 256, 2048
_FOUND = 6  # words of a parameter between the two kernels of scales of tensors
_SCALARS = 64  # bytes of struct Scalars
_NO_BOOKS = bytes(32)
_ALIGNED = 16
_MOMENTS = [f"{slot}{part}" for part in ("", "_scale") for slot in ("first", "second")]
_GROUPS = [f"{slot}{part}" for part in ("_power", "_centre") for slot in ("first", "second")]
_WEIGHTS = ["weights", "weights_scale"]
_KEPT = ("first", "second", "weights")


class Launch(NamedTuple):
    """The parameters of one launch.

    table: int64 [ENTRIES, WORDS], struct Entry of the kernels. entries: Of parameters. chunks: Of all of them.
    """

    table: np.ndarray
    entries: int
    chunks: int


def supports_optimizer(rule: str, scheme: Scheme) -> bool:
    """Return True if kernels know a rule and the states of a scheme."""
    return rule in RULES and kernels_of(rule, scheme) is not None


def optimizer_steps(
    rule: str, steps: Sequence[ParameterStep], scheme: Scheme, counter: Counter
) -> Sequence[ParameterStep]:
    """Do the steps that kernels cover, of parameters on devices that they run on; return the others.

    Steps with equal scalars share launches, and so do those of a group that are counted on the device.
    """
    kernels = kernels_of(rule, scheme) if rule in RULES else None
    if kernels is None:
        return steps
    uncovered: list[ParameterStep] = []
    together: dict[tuple[torch.device, torch.dtype, Numbers | Hyperparameters, int], list[ParameterStep]] = {}
    for step in steps:
        if _takes(step, kernels):
            p = step.parameter
            together.setdefault((p.device, p.dtype, step.live or step.numbers, step.step), []).append(step)
        else:
            uncovered.append(step)
    for (device, _, scalars, number), group in together.items():
        parts = launches([_row(step, kernels) for step in group])
        parameters = [step.parameter for step in group]
        launch(parts, parameters, kernels, rule, scheme, scalars, counter(device), group[0].seed, number)
        for step in group:
            if step.live is None:
                step.done()
    return uncovered


def _takes(step: ParameterStep, kernels: Kernels) -> bool:
    """Return True if the kernels take a parameter; small ones of a scheme with codes have float32 moments."""
    p, g = step.parameter, step.gradient
    plain = p.dtype is g.dtype and p.dtype in TYPES and p.is_contiguous() and g.is_contiguous()
    if not plain or (p.data_ptr() | g.data_ptr()) % _ALIGNED:
        return False
    if kernels.keeps_weights and "weights" not in step.formats:
        return _is_plain(step) and kernels.logs is None
    moments = [fmt for slot, fmt in step.formats.items() if slot != "weights"]
    return not kernels.books or all(fmt.format is None or fmt.block[1] in BLOCKS for fmt in moments)


def _is_plain(step: ParameterStep) -> bool:
    return all(fmt.format is None for fmt in step.formats.values())


def _row(step: ParameterStep, kernels: Kernels) -> tuple[int, ...]:
    """Return a parameter's row for ``launches``."""
    p, state, weights = step.parameter, step.state, step.formats.get("weights")
    expanded = kernels.file == "optimizer_expanded.cu"
    names = _MOMENTS + (_GROUPS if expanded else _WEIGHTS)
    parts = [state[name].data_ptr() if name in state else 0 for name in names]
    row = weights.block_of(tuple(p.shape)) if weights is not None and kernels.rows else 0
    if weights is not None and in_parameter(weights, p.dtype):
        parts[-2:] = 0, 0
    parts += [] if expanded else [row, 0]
    count = 0 if step.live is None else state["step"].data_ptr()
    offset = key_of(0, 0, step.index, "weights").offset
    plain = _is_plain(step)
    return p.data_ptr(), step.gradient.data_ptr(), *parts, count, plain, offset, p.numel(), row or CHUNK


class OptimizerBatch:
    """A group of parameters that the kernels take all, with what stays between steps worked out.

    A step of many small parameters costs the host more time than the device; this is the fast path for it. It is taken
    only while parameters, states and gradients are what they were: one device and dtype, contiguous, every gradient
    there, all of one step.

    Args:
        steps: Of one step of the group, all of which the kernels took.
        rule, scheme: Theirs.
    """

    def __init__(self, steps: Sequence[ParameterStep], rule: str, scheme: Scheme) -> None:
        kernels = kernels_of(rule, scheme)
        assert kernels is not None  # they took the steps
        self._kernels, self._rule, self._scheme = kernels, rule, scheme
        self.live = steps[0].live is not None
        self._names = (*_KEPT, "step") if self.live else _KEPT
        self.parameters = [step.parameter for step in steps]
        self.states = [step.state for step in steps]
        self._ids = list(map(id, self.states))
        self._dtype, self._device = steps[0].parameter.dtype, steps[0].parameter.get_device()
        self._moments = [tuple(map(step.state.get, self._names)) for step in steps]
        self._shapes = [step.parameter.shape for step in steps]
        self._parts = launches([_row(step, kernels) for step in steps])

    def launches(self, present: set[int]) -> Sequence[Launch] | None:
        """Return the launches of a step with the gradients that are there now, None where ``optimizer_steps`` has to.

        Args:
            present: The ``id`` of each state that the optimizer has now.
        """
        if not present.issuperset(self._ids):
            return None
        addresses = []
        for p, shape, state, tensors in zip(self.parameters, self._shapes, self.states, self._moments, strict=True):
            if not self._is_as_before(p, shape, state, tensors):
                return None
            assert p.grad is not None
            addresses.append((p.data_ptr(), p.grad.data_ptr()))
        table = np.array(addresses, np.int64)
        if (table % _ALIGNED).any():
            return None
        for i, part in enumerate(self._parts):
            start = i * len(part.table)
            part.table[: part.entries, :2] = table[start : start + part.entries]
        return self._parts

    def _is_as_before(self, p: Tensor, shape: torch.Size, state: Mapping[str, Any], tensors: tuple[Any, ...]) -> bool:
        g, dtype = p.grad, self._dtype
        if g is None or g.dtype is not dtype or g.layout is not torch.strided or not g.is_contiguous():
            return False
        if p.dtype is not dtype or p.shape != shape or g.shape != shape or not p.is_contiguous():
            return False
        if p.get_device() != self._device or not all(map(is_, map(state.get, self._names), tensors)):
            return False
        return self.live or state["step"] == self.states[0]["step"]

    def step(
        self, parts: Sequence[Launch], scalars: Numbers | Hyperparameters, counter: Tensor, seed: int, number: int
    ) -> None:
        """Do the step of which ``launches`` returned the launches; number: of the step, where the host counts."""
        launch(parts, self.parameters, self._kernels, self._rule, self._scheme, scalars, counter, seed, number)
        for state in () if self.live else self.states:
            state["step"] = number


def launches(rows: Sequence[tuple[int, ...]]) -> list[Launch]:
    """Return the launches for parameters, one row of numbers for each.

    A row has addresses, 0 where there is nothing: of parameter and gradient (of one dtype of TYPES, contiguous,
    multiples of 16), of both moments' codes and scales. Then, of expanded groups, of both moments' powers and centres;
    of others, of codes and scales of weights, how many of them share a scale if those are of rows, and 0. Then the
    address of the count of steps, if it lies on the device, whether the moments are float32 whatever those of the
    others are, the place of random words (``weights`` of ``fmtsim.spec.optimizer.key_of`` without the step), the number
    of elements, and how many elements a block of threads takes at a time.
    """
    parts = []
    for start in range(0, len(rows), ENTRIES):
        part = np.array(rows[start : start + ENTRIES], np.int64)
        table = np.zeros((ENTRIES, WORDS), np.int64)
        table[: len(part), : WORDS - 1] = part[:, :-1]
        chunks = -(-part[:, -2] // part[:, -1])
        ends = np.cumsum(chunks)
        table[: len(part), WORDS - 1] = ends - chunks
        parts.append(Launch(table, len(part), int(ends[-1])))
    return parts


def launch(
    parts: Sequence[Launch],
    parameters: Sequence[Tensor],
    kernels: Kernels,
    rule: str,
    scheme: Scheme,
    scalars: Numbers | Hyperparameters,
    counter: Tensor,
    seed: int,
    step: int,
) -> None:
    """Start the kernels of one step of parameters on what ``launches`` made of them.

    Args:
        parts: The launches.
        parameters: Of one device and dtype.
        kernels: Those of ``kernels_of(rule, scheme)``.
        rule, scheme: The rule, and the states.
        scalars: Those of the step; where steps are counted on the device, what they are worked out from.
        counter: int64, 0-d; grows by the number of elements of gradients that are not finite.
        seed, step: Of random words; the step of the host's count alone.
    """
    like = parameters[0]
    index, defines = runtime.device_index(like), kernels.macros(like.dtype, isinstance(scalars, Hyperparameters))
    update = runtime.kernel(kernels.file, "optimize", index, defines)
    tops = runtime.kernel(kernels.file, "tops", index, defines) if kernels.by_tensor else None
    most = kernels.resident * runtime.multiprocessors(index)
    tensor_amaxes: list[Tensor | None] = [None] * len(parts)
    if kernels.by_tensor:
        tensor_amaxes = list(torch.zeros((len(parts), ENTRIES * _FOUND), dtype=torch.int32, device=like.device))
    steps: Sequence[tuple[bytes, Tensor | None]]
    if isinstance(scalars, Hyperparameters):
        # Count the step on the device and work its scalars out there, in memory that struct Step of each launch names.
        defines = kernels.scalars(rule, scheme)
        count = runtime.kernel("optimizer_scalars.cu", "scalars", runtime.device_index(like), defines)
        lr = scalars.lr if isinstance(scalars.lr, Tensor) else None
        packed = struct.pack("<6d", 0.0 if lr is not None else scalars.lr, *scalars[1:])
        packed += struct.pack(
            "<Q2i", 0 if lr is None else lr.data_ptr(), lr is not None and lr.dtype is torch.float64, 0
        )
        scalars_bytes = torch.empty((len(parts), ENTRIES * _SCALARS), dtype=torch.uint8, device=like.device)
        steps = []
        for (table, entries, _), out in zip(parts, scalars_bytes, strict=True):
            count(1, 32, table.tobytes(), np.int32(entries), packed, np.int32(PARAMETER_BITS + KIND_BITS), out)
            steps.append((struct.pack("<12fQ2i", *[0.0] * 12, out.data_ptr(), scheme.nonfinite == "zero", 0), out))
    else:
        steps = [(_step(scalars, scheme), None)] * len(parts)
    # struct Draw and struct Books, and the bytes of shared memory that codebooks take
    key = key_of(seed, step, 0, "first")
    draw = draw_of(Rounding(mode="stochastic") if kernels.draws else Rounding(), key)
    if kernels.logs is not None:
        common, shared = (draw, _octave(kernels.logs, like.device)[0]), 0
    elif kernels.books:
        books, there = _books(scheme, RULES[rule][1], like.device)
        common, shared = (draw, books), 4 * there.numel()
    else:
        common, shared = (draw, _NO_BOOKS), 0
    for (table, entries, chunks), (scalar, _), amaxes in zip(parts, steps, tensor_amaxes, strict=True):
        more = () if kernels.file == "optimizer_expanded.cu" else (*common, amaxes)
        arguments = table.tobytes(), np.int32(entries), np.int64(chunks), scalar, *more, counter
        if chunks and tops is not None:
            tops(min(chunks, most), THREADS, *arguments)
        if chunks:
            update(min(chunks, most), THREADS, *arguments, shared=shared)
    torch.autograd.graph.increment_version(parameters)  # autograd may have saved them for a backward


def _step(numbers: Numbers, scheme: Scheme) -> bytes:
    """Return struct Step of scalars of the host."""
    # the correction is that of a beta below 1, or 1: never below the least that quotient() takes
    inverse = np.float32(1) / np.float32(numbers.correction)
    return struct.pack("<12fQ2i", *numbers, inverse, 0, scheme.nonfinite == "zero", 0)


@lru_cache(maxsize=64)
def _books(scheme: Scheme, names: tuple[str, ...], device: torch.device) -> tuple[bytes, Tensor]:
    """Return struct Books and what it points to: values and words of the moments' codebooks.

    A rule of one moment has its codebook twice.
    """
    books = {name: book_of(getattr(scheme, name)) for name in names}
    first, second = (books.get(name) or next(iter(books.values())) for name in ("first", "second"))
    assert isinstance(first, Book) and isinstance(second, Book)  # by the kernels
    buckets = len(first.words) // 2
    words = [np.concatenate([book.values for book in (first, second)]).view(np.int32), first.words]
    words += [second.words[:buckets], np.zeros(-3 * buckets % 4, np.int32)]
    there = torch.from_numpy(np.concatenate(words)).to(device)
    packed = struct.pack("<Q2i2f8x", there.data_ptr(), buckets, first.lowest, first.least, second.least)
    return packed, there


@lru_cache(maxsize=8)
def _octave(fmt: LogFormat, device: torch.device) -> tuple[bytes, Tensor]:
    """Return struct Books of logarithms, and what it points to."""
    there = torch.tensor(fmt.magnitudes[: fmt.gamma], dtype=torch.float32, device=device)
    return struct.pack("<Q24x", there.data_ptr()), there
