"""A step of Adam on many parameters whose states are floating-point codes: a few launches for all of them.

Scales are of blocks, of tensors, or there are none; weights may be kept as codes too. The definition is fmtsim/optim:
rules.py (the update), codec.py (scales and codes); the bits are the same.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmtsim.cuda.cast.parameters import draw_of
from fmtsim.cuda.optim.moments import ENTRIES, THREADS, Launch, common_defines, packed_numbers
from fmtsim.cuda.runtime import program as runtime
from fmtsim.cuda.runtime.program import Defines
from fmtsim.formats.spec import FloatFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey

RULES = ("none", "amax", "inverse", "reciprocal", "power_of_two")
FOUND = 6  # words of a parameter between the two kernels of scales of tensors
RESIDENT, RESIDENT_RANDOM = 4, 3  # blocks of threads that a multiprocessor holds, as the kernels' bounds have it


class Slot(NamedTuple):
    """How one state is kept.

    format: Of codes, one that ``takes`` lets pass; None for float32. rule: Of scales, one of RULES. least: What amax is
    raised to. random_bits: Of stochastic rounding, 0 for nearest even.
    """

    format: FloatFormat | None = None
    rule: str = "none"
    least: float = 0.0
    random_bits: int = 0

    def macro(self) -> str:
        """Return the parameters of the kernels' Slot."""
        fmt = self.format
        if fmt is None:
            return "32,23,127,0,0,0,0,0,0"
        least = struct.unpack("<I", struct.pack("<f", self.least))[0]
        fields = (fmt.bits, fmt.mantissa_bits, fmt.exponent_bias, fmt.max_code, int(fmt.infinities), fmt.nan_code)
        return ",".join(map(str, (*fields, RULES.index(self.rule), f"{least}u", self.random_bits)))


NO_WEIGHTS = "0,23,127,0,0,0,0,0,0"


def takes(fmt: FloatFormat, rounding: Rounding) -> bool:
    """Say whether the kernels know a format under a rounding: signed, of 8 or 16 bits, with NaN, within float32."""
    usual = fmt.signed and fmt.has_subnormals and fmt.has_zero and fmt.bits in (8, 16) and fmt.nan in ("ieee", "top")
    if not usual or not 1 <= fmt.exponent_bias <= 127 or not 1 <= fmt.mantissa_bits <= 14:
        return False
    if not 1 <= fmt.max < 2.0**128:
        return False
    if rounding.mode == "nearest_even":
        return True
    bits = rounding.random_bits
    drawn = bits is not None and bits <= 23 - fmt.mantissa_bits and fmt.exponent_bias == 127
    return drawn and rounding == Rounding(mode="stochastic", random_bits=bits)


class States(NamedTuple):
    """How all states are kept. block: Numbers that share a scale, 0 where these are of tensors or there are none."""

    first: Slot
    second: Slot
    weights: Slot | None
    block: int

    @property
    def by_tensor(self) -> bool:
        """Whether there are scales of whole tensors."""
        return not self.block and any(slot is not None and slot.rule != "none" for slot in self[:3])


def adam(
    parts: Sequence[Launch],
    like: Tensor,
    states: States,
    numbers: tuple[float, ...],
    zeroing: bool,
    counter: Tensor,
    key: RandomKey,
) -> None:
    """Do a step of many parameters in place.

    Args:
        parts, like, numbers, zeroing, counter: As of ``fmtsim.cuda.optim.moments.adam``.
        states: How they are kept; a block is one of BLOCKS there.
        key: Of random words; what rows have for a place is added to the offset.
    """
    index, defines = runtime.device_index(like), _defines(states, like.dtype)
    update = runtime.kernel("moments_floats.cu", "adam", index, defines)
    stochastic = states.weights is not None and states.weights.random_bits
    most = (RESIDENT_RANDOM if stochastic else RESIDENT) * runtime.multiprocessors(index)
    scalars = packed_numbers(numbers, zeroing)
    draw = draw_of(Rounding(mode="stochastic") if stochastic else Rounding(), key)
    found: list[Tensor | None] = [None] * len(parts)
    if states.by_tensor:
        tops = runtime.kernel("moments_floats.cu", "tops", index, defines)
        found = list(torch.zeros((len(parts), ENTRIES * FOUND), dtype=torch.int32, device=like.device))
    for (table, entries, chunks), each in zip(parts, found, strict=True):
        rows = table.tobytes(), np.int32(entries), np.int64(chunks), scalars
        if each is not None:
            tops(min(chunks, most), THREADS, *rows, each)
        update(min(chunks, most), THREADS, *rows, draw, each, counter)


@lru_cache(maxsize=32)
def _defines(states: States, dtype: torch.dtype) -> Defines:
    weights = NO_WEIGHTS if states.weights is None else states.weights.macro()
    macros = ("FIRST", states.first.macro()), ("SECOND", states.second.macro()), ("WEIGHTS", weights)
    return (("BLOCK", str(states.block)), *macros, *common_defines(dtype))


def variants() -> Iterator[tuple[str, str, Defines]]:
    """Yield the kernels of some schemes for float32 parameters: scales of tensors, of blocks, and none."""
    e4m3 = FloatFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, nan="top", infinities=False)
    fp16 = FloatFormat(name="fp16", exponent_bits=5, mantissa_bits=10)
    bf16 = FloatFormat(name="bf16", exponent_bits=8, mantissa_bits=7)
    by_tensor = _defines(
        States(Slot(e4m3, "power_of_two"), Slot(fp16, "power_of_two"), Slot(fp16, "power_of_two"), 0), torch.float32
    )
    yield "moments_floats.cu", "tops", by_tensor
    yield "moments_floats.cu", "adam", by_tensor
    yield (
        "moments_floats.cu",
        "adam",
        _defines(States(Slot(e4m3, "amax"), Slot(e4m3, "amax"), None, 128), torch.float32),
    )
    yield "moments_floats.cu", "adam", _defines(States(Slot(), Slot(), Slot(bf16, random_bits=16), 0), torch.bfloat16)
