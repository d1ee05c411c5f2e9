# SPDX-License-Identifier: Apache-2.0
"""Operands of matrix products: what kernels read from tensors, and the layouts that they work on.

A *slot* is a place in the order of products that a plan gives; ``order[slot]`` is its index along K, or -1 where
zeros fill up. Block b begins at slot ``b * pitch_of(block)``. Rows of the first operand lie as ``[group][row][slot]``
with groups of 64 slots, or of a block where that is longer; the second operand comes in panels of 64 columns,
``[slot][column]``.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numba.extending import register_jitable

from fmtsim.cpu.runtime.pool import array_of
from fmtsim.formats.spec import FloatFormat
from fmtsim.spec.datapath import Datapath

EMPTY = -16384  # exponent of a zero
TOP_BYTE = 127  # byte of the largest exponent of a row or panel; zeros have 0, other numbers at least 64


class Source(NamedTuple):
    """An operand as the packing kernels read it.

    ``array`` [rows, K] is float32, uint8 codes of ``table``, bfloat16 as int16 or binary16 as uint16; ``scales``
    [rows, ceil(K / every)] is float32, or empty. ``emin`` and ``top`` bound the exponents of a number, ``bits`` counts
    those of a significand, scale included.
    """

    array: np.ndarray
    table: np.ndarray
    emin: int
    top: int
    bits: int
    scales: np.ndarray
    every: int
    scale_emin: int

    def part(self, first: int, count: int) -> "Source":
        """Return ``count`` rows from ``first`` on, contiguous along K."""
        rows = slice(first, first + count)
        return self._replace(array=np.ascontiguousarray(self.array[rows]), scales=self.scales[rows])


def is_fixed(source: Source) -> bool:
    """Return True if bytes hold the exponents of all values of an operand's format."""
    return source.top - source.emin <= TOP_BYTE // 2 and source.scales.size == 0


def limits_of(unit: Datapath, head: int, k: int) -> tuple[int, int]:
    """Return the smallest and largest product exponent for which no sum leaves the accumulator's normal range.

    ``head`` counts the bits of a term above its exponent, ``k`` the products of a sum.
    """
    fmt = unit.accumulator
    lowest = fmt.min_exponent - fmt.mantissa_bits + (unit.fraction_bits or 0)
    lowest = max(lowest, fmt.min_exponent)  # a subnormal sum has no exponent of its own
    lowest = lowest if unit.min_exponent is None else max(lowest, unit.min_exponent)
    return lowest, fmt.max_exponent - 1 - head - k.bit_length()


def without_scales(source: Source) -> Source:
    """Return an operand without its scales."""
    return source._replace(scales=_NO_SCALES)


_NO_TABLE = np.zeros(1, np.float32)
_NO_SCALES = np.zeros((0, 0), np.float32)
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def source_of(fmt: FloatFormat, unit: Datapath, scaled: bool) -> Source:
    """Return the Source of a format before its data are known: small arrays stand in for them."""
    lowest = fmt if unit.operand is None else unit.operand
    emin, bits, nothing = max(lowest.min_exponent, -126), fmt.mantissa_bits + 1, np.zeros((1, 1), np.float32)
    if unit.scale is None or not scaled:
        return Source(nothing, _NO_TABLE, emin, fmt.max_exponent, bits, _NO_SCALES, 1, 0)
    top, bits = fmt.max_exponent + unit.scale.max_exponent, bits + unit.scale.mantissa_bits + 1
    return Source(nothing, _NO_TABLE, emin, top, bits, nothing, unit.scale_block, max(unit.scale.min_exponent, -127))


def read_array(tensor: torch.Tensor, *, wide: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return a tensor as kernels read it (``Source.array``), and the table of its codes' values.

    With ``wide`` float64 and int8 stay as they are; else they become float32, which holds their values.
    """
    tensor = tensor.detach()
    if tensor.dtype in _CODES:
        return array_of(tensor.view(torch.uint8)), _table_of(tensor.dtype)
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    elif tensor.dtype == torch.float16:
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype != torch.float32 and not wide:
        tensor = tensor.float()
    return array_of(tensor), _NO_TABLE


@lru_cache(maxsize=16)
def _table_of(dtype: torch.dtype) -> np.ndarray:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()


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
    """The second operand of a slab, 64 columns.

    Where values are float64 and exponents bytes, exponents and signs lie in the order of ``simd.weave``.
    """

    values: np.ndarray  # [slot][64]
    exponents: np.ndarray  # int8, as pack_bytes orders them, or int16 [slot][64]
    signs: np.ndarray  # int32 [block][word][64]
    top: np.int32  # the largest exponent


class Grouped(NamedTuple):
    """An operand of a unit with groups: values, and for each group a scale and its exponent.

    ``values`` as in Rows or Panel, or int32; ``scales`` float64 and ``exponents`` [group][row], or [group][64].
    """

    values: np.ndarray
    scales: np.ndarray
    exponents: np.ndarray
    rows: int
