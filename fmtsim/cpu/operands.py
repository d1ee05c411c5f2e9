"""Operands of matrix products: what kernels read from tensors, and the layouts that they work on.

A *slot* is a place in the order of products that a plan gives; ``order[slot]`` is its index along K, or -1 where
zeros fill up. Block b begins at slot ``b * pitch_of(block)``. Rows of the first operand lie as ``[group][row][slot]``
with groups of 64 slots, or of a block where that is longer; the second operand comes in panels of 64 columns,
``[slot][column]``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import overload, register_jitable

from fmtsim.cpu.jit import bits32, float32_of
from fmtsim.formats.spec import FloatFormat

EMPTY = -16384  # exponent of a zero
TOP_BYTE = 127  # byte of the largest exponent of a row or panel; zeros have 0, other numbers at least 64
_NO_TABLE = np.zeros(1, np.float32)
_CODES = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An operand as the packing kernels read it.

    ``array`` [rows, K] is float32, uint8 codes of ``table``, bfloat16 as int16 or binary16 as uint16; ``emin`` and
    ``top`` bound the exponents of the format, ``bits`` counts those of a significand.
    """

    array: np.ndarray
    table: np.ndarray
    emin: int
    top: int
    bits: int

    @property
    def fixed(self) -> bool:
        """Whether bytes can hold the exponents of whatever the format has."""
        return self.top - self.emin <= TOP_BYTE // 2


def source_of(tensor: torch.Tensor, fmt: FloatFormat, operand: FloatFormat | None) -> Source:
    """Return a tensor of a format's values as Source; ``operand`` is the format whose exponents count."""
    lowest = fmt if operand is None else operand
    table, array = _NO_TABLE, tensor.detach()
    if array.dtype in _CODES:
        table = torch.arange(256, dtype=torch.uint8).view(array.dtype).float().numpy()
        array = array.view(torch.uint8)
    elif array.dtype == torch.bfloat16:
        array = array.view(torch.int16)
    elif array.dtype == torch.float16:
        array = array.view(torch.uint16)
    elif array.dtype != torch.float32:
        array = array.float()  # values of a format that float32 holds
    return Source(array.numpy(), table, max(lowest.min_exponent, -126), fmt.max_exponent, fmt.mantissa_bits + 1)


@register_jitable
def pitch_of(block: int) -> int:
    """Return the slots from one block to the next: its length where that divides 64, else whole 64s."""
    return block if 64 % block == 0 else (block + 63) // 64 * 64


class Rows(NamedTuple):
    """The first operand of a slab."""

    values: np.ndarray  # float64 or float32 [group][row][slot], times 1 + eps
    exponents: np.ndarray  # int32 [group][row][slot]: a byte four times, or a half twice
    signs: np.ndarray  # int32 [block][word][row]
    top: np.ndarray  # int32 [row]: the largest exponent


class Panel(NamedTuple):
    """The second operand of a slab, 64 columns."""

    values: np.ndarray  # [slot][64]
    exponents: np.ndarray  # int8 or int16 [slot][64]
    signs: np.ndarray  # int32 [block][word][64]
    top: np.int32  # the largest exponent


def number(raw, table):  # type: ignore[no-untyped-def]
    """Return the float32 of a raw number: float32, uint8 code by table, bfloat16 as int16, binary16 as uint16."""
    raise NotImplementedError


@overload(number)
def _number_of(raw, table):  # type: ignore[no-untyped-def]
    if raw == types.float32:
        return lambda raw, table: raw
    if raw == types.uint8:
        return lambda raw, table: table[raw]
    if raw == types.int16:
        return lambda raw, table: float32_of(np.int32(raw) << np.int32(16))
    return lambda raw, table: _binary16(np.int32(raw))


@register_jitable
def _binary16(code):  # type: ignore[no-untyped-def]
    magnitude = code & 0x7FFF
    number = float32_of(np.int32(magnitude << 13)) * np.float32(2.0**112)
    if magnitude >= 0x7C00:
        number = float32_of(np.int32(0x7F800000 | (magnitude & 0x3FF) << 13))
    return float32_of(bits32(number) | np.int32((code & 0x8000) << 16))
