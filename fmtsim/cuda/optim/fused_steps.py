# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on CUDA: rules and schemes that kernels cover, their parameters, and a few launches for all of them.

Moments are codes of codebooks or of expanded groups, or states, weights among them, are floating-point codes, with
scales of blocks, of tensors, or none. Weights are also integers with scales of rows, and logarithms. The definition is
fmtsim/optim: rules.py (the updates), codec.py (scales and codes); the bits are the same.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda import runtime
from fmtsim.cuda.cast.parameters import draw_of, macros
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.element import FloatFormat, IntFormat, LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.optimizer import (
    FLOAT32,
    KIND_BITS,
    PARAMETER_BITS,
    STATE_RULES,
    Book,
    Counter,
    Hyperparameters,
    Numbers,
    ParameterStep,
    Scheme,
    StateFormat,
    in_parameter,
    key_of,
    state_codebook,
)

ENTRIES, WORDS = 30, 15
"""Parameters of a launch: their addresses are arguments, of which 4096 bytes fit."""

BLOCKS = (128, 256, 512, 1024, 2048)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
EXPANDED_GROUP = 128
RULES = {
    "adamw": ("ADAM", ("first", "second")),
    "adam": ("ADAM", ("first", "second")),
    "lion": ("LION", ("first",)),
    "sgd": ("SGD", ("first",)),
    "nesterov": ("NESTEROV", ("first",)),
    "madam(base=2, round_update=True)": ("MADAM", ("second",)),
    "madam(base=2, round_update=False)": ("MADAM_FREELY", ("second",)),
}
"""The kernels' name of a rule, and the states that it has."""

_SCALES = (None, "amax", "inverse", "reciprocal", "power_of_two")
_FP32, _ABSENT = "Slot<32,23,127,0,0,0,0,0,0>", "Slot<0,23,127,0,0,0,0,0,0>"


class Kernels(NamedTuple):
    """How kernels take the states of a scheme under a rule.

    file: Of the kernels. states: Macros of the states. rule: Macros of the rule. resident: Blocks of threads that a
    multiprocessor holds, as the kernels' bounds have it (expanded groups: 92 registers a thread). books: The moments
    are codes of codebooks. by_tensor: There are scales of whole tensors. keeps_weights: The scheme does. rows: Scales
    of weights are of rows. draws: Weights are rounded stochastically. logs: The format of weights that are
    logarithms.
    """

    file: str
    states: Defines
    rule: Defines = (("UPDATE", "ADAM"),)
    resident: int = 4
    books: bool = False
    by_tensor: bool = False
    keeps_weights: bool = False
    rows: bool = False
    draws: bool = False
    logs: LogFormat | None = None

    def macros(self, dtype: torch.dtype, live: bool = False) -> Defines:
        """Return all macros for parameters of a dtype; live: their steps are counted on the device."""
        common = macros(ENTRIES=ENTRIES, TYPE=TYPES[dtype], CAPTURABLE=live, ROWS=self.rows)
        return *self.states, *self.rule, *common

    def scalars(self, rule: str, scheme: Scheme) -> Defines:
        """Return the macros of ``optimizer_scalars.cu``."""
        how = macros(DECOUPLED=rule == "adamw", FOLDED=scheme.folded, AFTER=scheme.decay == "after")
        return *how, *self.rule, *macros(ENTRIES=ENTRIES, TYPE=0, CAPTURABLE=1, ROWS=0)


@lru_cache(maxsize=64)
def kernels_of(rule: str, scheme: Scheme) -> Kernels | None:
    """Return the kernels that know a rule and the states of a scheme, None where none do.

    Those are floating-point codes (``slot_of``) or float32, whose scales are of tensors, of blocks of one size, or
    none; weights that are integers with scales of rows; weights that are logarithms, under Madam; E4M3 in expanded
    groups of 128; and codes of 4 or 8 bits of codebooks whose largest value is 1.
    """
    if rule not in RULES or scheme.nonfinite == "skip":
        return None
    kind, names = RULES[rule]
    kernels = _of_states(scheme, names)
    if kernels is None or (kernels.logs is not None) != kind.startswith("MADAM"):
        return None
    base = () if kernels.logs is None else macros(GAMMA=kernels.logs.gamma, TOP_CODE=kernels.logs.max_code)
    return kernels._replace(rule=(("UPDATE", kind), *base))


def _of_states(scheme: Scheme, names: tuple[str, ...]) -> Kernels | None:
    moments = {name: getattr(scheme, name) for name in names}
    slots = {name: slot_of(fmt) for name, fmt in moments.items()}
    if None not in slots.values():
        weight_format = scheme.weights
        if any(fmt.stochastic for fmt in moments.values()):
            return None
        if weight_format is not None and (weight_format.format is None or scheme.minimum or scheme.whole_blocks):
            return None
        weights, logs = weight_slot(weight_format)
        if weights is None:
            return None
        rows = weight_format is not None and weight_format.block == (1, None) and weight_format.scaling is not None
        if rows and any(fmt.scaling is not None for fmt in moments.values()):
            return None
        every = [*moments.values(), FLOAT32 if weight_format is None or rows or logs else weight_format]
        blocks = {fmt.block for fmt in every if fmt.scaling is not None}
        outer, block = blocks.pop() if blocks else (1, 0)
        by_tensor = outer is None
        if blocks or not (by_tensor or block in (0, *BLOCKS)):
            return None
        draws = weight_format is not None and weight_format.stochastic
        states = _states(block or 0, slots.get("first"), slots.get("second"), weights)
        resident = 2 if rows else 3 if draws else 4
        return Kernels(
            "optimizer.cu", states, (), resident, False, by_tensor, weight_format is not None, rows, draws, logs
        )
    if scheme.weights is not None:
        return None
    e4m3, every = get_format("e4m3"), list(moments.values())
    if all(fmt.expand and fmt.block == (1, EXPANDED_GROUP) and fmt.format == e4m3 for fmt in every):
        plain = all(not fmt.stochastic and not fmt.least and fmt.least_of == "numbers" for fmt in every)
        return Kernels("optimizer_expanded.cu", (), resident=2) if plain else None
    (block, bits), *others = {(fmt.block, fmt.bits) for fmt in every}
    if others or block[1] is None or any(state_codebook(fmt) is None for fmt in every):
        return None
    return Kernels("optimizer.cu", _books_of(block[1], bits, names), books=True)


def weight_slot(state: StateFormat | None) -> tuple[str | None, LogFormat | None]:
    """Return the kernels' state of weights, None where they do not know it, and the format of logarithms."""
    if state is None:
        return _ABSENT, None
    fmt = state.format
    if isinstance(fmt, LogFormat) and state.rule == "fixed" and state.block == (None, None) and fmt.bits in (8, 16):
        return f"Logs<{fmt.bits}>", fmt
    return integer_slot(state) if isinstance(fmt, IntFormat) else slot_of(state), None


def integer_slot(state: StateFormat) -> str | None:
    """Return the kernels' Integer of a state, None where they do not know its codes: they know whole bytes."""
    fmt, how = state.format, state.rounding
    assert isinstance(fmt, IntFormat)  # weight_slot has looked
    if fmt.bits != 8 or not fmt.signed or fmt.half_offset or fmt.fraction_bits or state.rule not in _SCALES:
        return None
    drawn = how.bits if how.mode == "stochastic" else 0
    if how != (Rounding(mode="stochastic", random_bits=how.random_bits) if drawn else Rounding()):
        return None
    rule = f"{_bits(float(fmt.max))}u,{_SCALES.index(state.rule)},{_bits(state.least)}u"
    return f"Integer<{fmt.min_code},{fmt.max_code},{rule},{drawn}>"


def _bits(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def _states(block: int, first: str | None, second: str | None, weights: str | None) -> Defines:
    return macros(BLOCK=block, FIRST=first or _ABSENT, SECOND=second or _ABSENT, WEIGHTS=weights)


def _books_of(block: int, bits: int, names: tuple[str, ...] = ("first", "second")) -> Defines:
    first, second = f"Book<{bits},false>", f"Book<{bits},true>"
    return _states(block, first if "first" in names else None, second if "second" in names else None, _ABSENT)


def slot_of(state: StateFormat) -> str | None:
    """Return the kernels' Slot of a state, None where they do not know its codes.

    They know float32, and floating-point codes with a sign, of 8 or 16 bits, with NaN, within float32.
    """
    fmt, how = state.format, state.rounding
    if fmt is None:
        return _FP32
    if not isinstance(fmt, FloatFormat) or state.expand or state.rule not in _SCALES:
        return None
    usual = fmt.signed and fmt.has_subnormals and fmt.has_zero and fmt.bits in (8, 16) and fmt.nan in ("ieee", "top")
    if (
        not usual
        or not 1 <= fmt.exponent_bias <= 127
        or not 1 <= fmt.mantissa_bits <= 14
        or not 1 <= fmt.max < 2.0**128
    ):
        return None
    bits = how.random_bits or 0
    if how.mode != "nearest_even":
        drawn = 0 < bits <= 23 - fmt.mantissa_bits and fmt.exponent_bias == 127
        if not drawn or how != Rounding(mode="stochastic", random_bits=bits):
            return None
    fields = (fmt.bits, fmt.mantissa_bits, fmt.exponent_bias, fmt.max_code, int(fmt.infinities), fmt.nan_code)
    return f"Slot<{','.join(map(str, (*fields, _SCALES.index(state.rule), f'{_bits(state.least)}u', bits)))}>"


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield kernels for float32 parameters: codebooks of every block size, some schemes of floats, every rule; and some
    of bfloat16, and of steps that are counted on the device.
    """
    e4m3 = FloatFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, nan="top", infinities=False)
    fp16 = FloatFormat(name="fp16", exponent_bits=5, mantissa_bits=10)
    bf16 = FloatFormat(name="bf16", exponent_bits=8, mantissa_bits=7)
    power = (slot_of(StateFormat(format=fmt, scaling=STATE_RULES["power_of_two"])) for fmt in (e4m3, fp16, fp16))
    amax = slot_of(StateFormat(format=e4m3, scaling=replace(STATE_RULES["amax"], block=(1, 128))))
    by_tensor, usual = _states(0, *power), _books_of(256, 8)
    states = [_books_of(block, bits) for block, bits in ((128, 4), *((block, 8) for block in BLOCKS))]
    for name, defines in [("optimize", macros_of_states) for macros_of_states in states] + [
        (name, by_tensor) for name in ("tops", "optimize")
    ]:
        yield "optimizer.cu", name, Kernels("", defines).macros(torch.float32)
    yield "optimizer.cu", "optimize", Kernels("", _states(128, amax, amax, _ABSENT)).macros(torch.float32)
    yield "optimizer_expanded.cu", "optimize", Kernels("", ()).macros(torch.float32)
    yield "optimizer.cu", "optimize", Kernels("", usual).macros(torch.bfloat16)
    yield "optimizer.cu", "optimize", Kernels("", usual).macros(torch.float32, live=True)
    drawn = slot_of(StateFormat(format=bf16, rounding=Rounding(mode="stochastic", random_bits=16)))
    yield "optimizer.cu", "optimize", Kernels("", _states(0, _FP32, _FP32, drawn)).macros(torch.bfloat16)
    for rule in ("LION", "SGD", "NESTEROV"):
        once = Kernels("", _books_of(256, 8, ("first",)), (("UPDATE", rule),))
        yield "optimizer.cu", "optimize", once.macros(torch.float32)
    rows = Kernels("", _states(0, _FP32, _FP32, f"Integer<-128,127,{_bits(127.0)}u,2,0u,32>"), rows=True)
    yield "optimizer.cu", "optimize", rows.macros(torch.float32)
    logs = Kernels("", _states(0, None, _FP32, "Logs<16>"), (("UPDATE", "MADAM"), *macros(GAMMA=2048, TOP_CODE=32767)))
    yield "optimizer.cu", "optimize", logs.macros(torch.float32)
    for scheme in (Scheme(name="", folded=True, decay="after"), Scheme(name="")):
        yield "optimizer_scalars.cu", "scalars", rows.scalars("adamw", scheme)


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
        addresses, dtype = [], self._dtype
        for p, shape, state, tensors in zip(self.parameters, self._shapes, self.states, self._moments, strict=True):
            # parameter, gradient and state are as before, but for their memory
            g = p.grad
            if g is None or g.dtype is not dtype or g.layout is not torch.strided or not g.is_contiguous():
                return None
            if p.dtype is not dtype or p.shape != shape or g.shape != shape or not p.is_contiguous():
                return None
            if p.get_device() != self._device or not all(map(is_, map(state.get, self._names), tensors)):
                return None
            if not self.live and state["step"] != self.states[0]["step"]:
                return None
            addresses.append((p.data_ptr(), g.data_ptr()))
        table = np.array(addresses, np.int64)
        if (table % _ALIGNED).any():
            return None
        for i, part in enumerate(self._parts):
            start = i * len(part.table)
            part.table[: part.entries, :2] = table[start : start + part.entries]
        return self._parts

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
    books = {name: state_codebook(getattr(scheme, name)) for name in names}
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
