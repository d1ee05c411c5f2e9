# SPDX-License-Identifier: Apache-2.0
"""Update rules and state schemes that the kernels of optimizers cover, and the specialisation for each.

Moments are codes of codebooks or of expanded groups, or states, weights among them, are floating-point codes, with
scales of blocks, of tensors, or none. Weights are also integers with scales of rows, and logarithms. The definition is
fmtsim/optim: rules.py (the updates), codec.py (scales and codes); the bits are the same.
"""

import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from fmtsim.cuda.cast.parameters import macros
from fmtsim.cuda.runtime import Defines
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat, IntFormat, LogFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.optimizer import FLOAT32, STATE_RULES, Scheme, StateFormat, book_of

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
        return _of_slots(scheme, moments, slots)
    if scheme.weights is not None:
        return None
    e4m3, every = get_format("e4m3"), list(moments.values())
    if all(fmt.expand and fmt.block == (1, EXPANDED_GROUP) and fmt.format == e4m3 for fmt in every):
        plain = all(not fmt.stochastic and not fmt.least and fmt.least_of == "numbers" for fmt in every)
        return Kernels("optimizer_expanded.cu", (), resident=2) if plain else None
    (block, bits), *others = {(fmt.block, fmt.bits) for fmt in every}
    if others or block[1] is None or any(book_of(fmt) is None for fmt in every):
        return None
    return Kernels("optimizer.cu", _books_of(block[1], bits, names), books=True)


def _of_slots(scheme: Scheme, moments: dict[str, StateFormat], slots: dict[str, str | None]) -> Kernels | None:
    weight_format = scheme.weights
    if any(fmt.stochastic for fmt in moments.values()):
        return None
    if weight_format is not None and (weight_format.format is None or scheme.minimum or scheme.whole_blocks):
        return None
    weights, logs = _weights_of(weight_format)
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
    return Kernels("optimizer.cu", states, (), resident, False, by_tensor, weight_format is not None, rows, draws, logs)


def _weights_of(state: StateFormat | None) -> tuple[str | None, LogFormat | None]:
    """Return the kernels' state of weights, None where they do not know it, and the format of logarithms."""
    if state is None:
        return _ABSENT, None
    fmt = state.format
    if isinstance(fmt, LogFormat) and state.rule == "fixed" and state.block == (None, None) and fmt.bits in (8, 16):
        return f"Logs<{fmt.bits}>", fmt
    return integer_of(state) if isinstance(fmt, IntFormat) else slot_of(state), None


def integer_of(state: StateFormat) -> str | None:
    """Return the kernels' Integer of a state, None where they do not know its codes: they know whole bytes."""
    fmt, how = state.format, state.rounding
    assert isinstance(fmt, IntFormat)  # _weights_of has looked
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
