"""Tables for formats that are no grid (table.cu): which result a range of magnitudes has, and where it changes.

The tables are made on the device by the general kernel, which alone knows how to round; the host decides from the
format's values whether ranges exist in which the result changes at most once.
"""

import math
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from fmtsim.cuda.cast.parameters import nan_code
from fmtsim.formats.spec import CodebookFormat, ElementFormat, FloatFormat, LogFormat
from fmtsim.spec.cast import CastSpec

_BUCKETS = struct.Struct("<2Q3iI")
_WIDEST = 8  # bits of a code
_MOST = 3000  # buckets of a sign: 8 bytes each, for both signs, in shared memory of any GPU
_INFINITY = 0x7F800000
_WORD = 32  # bits of a narrow bucket

Encode = Callable[[torch.Tensor], torch.Tensor]


class Layout(NamedTuple):
    """Ranges of magnitudes: ``bits >> shift`` from ``low`` on; the first and the last of them reach to the ends.

    narrow: Bits of a code where a bucket is one word (table.cu), else 0.
    """

    shift: int
    low: int
    size: int
    narrow: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory that the tables take."""
        return (8 if self.narrow else 16) * self.size + 1024


class Table(NamedTuple):
    """The bytes of ``struct Buckets`` with the tensors to which they point, and the ranges."""

    parameters: bytes
    layout: Layout
    tensors: tuple[torch.Tensor, ...]


@lru_cache(maxsize=256)
def layout_of(spec: CastSpec) -> Layout | None:
    """Return the ranges for a cast, None where there are none."""
    fmt = spec.format
    mode = spec.rounding.mode
    if not isinstance(fmt, CodebookFormat | LogFormat | FloatFormat) or fmt.bits > _WIDEST:
        return None
    if mode in ("stochastic", "to_odd") or (isinstance(fmt, FloatFormat) and spec.overflow != "saturate"):
        return None
    turns = _turns(fmt, mode)
    of_signs = [{_bits(turn) for turn in turns if turn > 0}, {_bits(-turn) for turn in turns if turn < 0}]
    narrow = 4 if fmt.bits <= 4 else 8
    if 0.0 not in turns:  # zero is a change in the first range, which narrow buckets cannot say
        layout = _ranges(of_signs, min(_WORD - 2 * narrow, 23), narrow)
        if layout is not None:
            return layout
    at_least = 1 if 0.0 in turns else 0  # zero shares the first range with no other turn
    return _ranges(of_signs, 23, 0, at_least)


def _ranges(of_signs: list[set[int]], most: int, narrow: int, at_least: int = 0) -> Layout | None:
    """Return the widest ranges, 2**most at most, in which the result changes at most once, None where there are none.

    ``at_least`` is the lowest number of the range with the smallest of the turns.
    """
    both = of_signs[0] | of_signs[1]
    for shift in range(most, 12, -1):
        if min(both) >> shift < at_least:
            continue
        low = max((min(both) >> shift) - 1, 0)
        count = (max(both) >> shift) + 2 - low
        if count <= _MOST and all(len({bits >> shift for bits in part}) == len(part) for part in of_signs):
            return Layout(shift, low, count, narrow)
    return None


def _turns(fmt: ElementFormat, mode: str) -> list[float]:
    """Return the points next to which the result changes: between values for nearest modes, at values for others."""
    count = len(fmt.values) if isinstance(fmt, CodebookFormat) else 1 << fmt.bits
    values = sorted({value for value in map(fmt.value, range(count)) if math.isfinite(value)})
    if not mode.startswith("nearest"):
        return values
    if isinstance(fmt, LogFormat):
        return [sign * turn for turn in fmt.thresholds for sign in (1.0, -1.0)]
    return [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]


def _bits(magnitude: float) -> int:
    """Return the bits of the float32 below or at a magnitude."""
    nearest = struct.unpack("<f", struct.pack("<f", magnitude))[0]
    bits: int = struct.unpack("<I", struct.pack("<f", nearest))[0]
    return bits - (nearest > magnitude)


def build(spec: CastSpec, layout: Layout, values: torch.Tensor, encode: Encode) -> Table:
    """Make the tables of a cast on the device of ``values``, without waiting for it.

    Args:
        spec: The cast.
        layout: Its ranges.
        values: float32 by code.
        encode: The general kernel: the codes of a float32 tensor.
    """
    device = values.device
    bounds = torch.arange(layout.low, layout.low + layout.size + 1, device=device) << layout.shift
    starts, ends = bounds[:-1].clone(), bounds[1:] - 1
    starts[0], ends[-1] = 0, _INFINITY
    signs = torch.arange(2, device=device)[:, None] << 31

    def codes_at(magnitudes: torch.Tensor) -> torch.Tensor:
        return encode((magnitudes | signs).to(torch.int32).view(torch.float32)).to(torch.int64)

    first, last = codes_at(starts), codes_at(ends)
    below, above = starts, ends
    for _ in range(31):
        middle = (below + above) >> 1
        same = codes_at(middle) == first
        below, above = torch.where(same, middle, below), torch.where(same, above, middle)
    if layout.narrow:
        offset = torch.where(first == last, (1 << layout.shift) - 1, below - starts) << 32 - layout.shift
        codes = first | last << layout.narrow
        buckets = (offset | codes).to(torch.int32).contiguous()
    else:
        turn = torch.where(first == last, 0, above)
        buckets = torch.stack([turn, first | last << 16], dim=-1).to(torch.int32).contiguous()
    held = torch.zeros(256, dtype=torch.float32, device=device)
    held[: values.numel()] = values
    nan = nan_code(spec.format, spec.overflow)  # type: ignore[arg-type]
    parameters = _BUCKETS.pack(buckets.data_ptr(), held.data_ptr(), *layout[:3], nan)
    return Table(parameters, layout, (buckets, held))
