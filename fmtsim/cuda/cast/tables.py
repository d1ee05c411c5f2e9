# SPDX-License-Identifier: Apache-2.0
"""Casts by table, to formats that are not a grid: codebooks, logarithms, roundings without a kernel of their own.

Two kinds of table, both made on the device by the general kernel, which alone knows how to round, at the first call for
a cast. Of a 16-bit dtype: what each of its patterns becomes (table.cu). Of any narrow dtype: which result a
range of magnitudes has, and where it changes (table.cu); the host decides from the format's values whether ranges
exist in which the result changes at most once.
"""

import math
import struct
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from fmtsim.cuda import runtime
from fmtsim.cuda.cast.any_format import cast_general
from fmtsim.cuda.cast.parameters import DTYPES, NARROW, aligned, code_values, macros, nan_code, values_of
from fmtsim.formats.element import CodebookFormat, FloatFormat, LogFormat
from fmtsim.spec.cast import CastSpec, EncodedParts
from fmtsim.support.replay.gpu import captures

RANGES_WORTH = 1 << 16  # elements that pay for a table of ranges
PATTERNS_WORTH = 1 << 20  # elements that pay for a table of patterns in every multiprocessor
_TABLE = struct.Struct("<2Q3iI")
_WIDEST = 8  # bits of a code
_MOST = 3000  # ranges of a sign: 8 bytes each, for both signs, in shared memory of any GPU
_INFINITY = 0x7F800000
_WORD = 32  # bits of a narrow bucket
_RESIDENT = 6  # blocks of a multiprocessor: what the registers allow
_PATTERNS = 1 << 16
_BESIDE = 2048  # bytes of shared memory beside the entries of patterns
_tables: dict[Hashable, "Table"] = {}


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
    """The bytes of ``struct Table``, the tensors to which they point, and the bytes of shared memory for them."""

    parameters: bytes
    tensors: tuple[torch.Tensor, ...]
    shared: int


def convert(x: torch.Tensor, to: torch.Tensor, spec: CastSpec, slot: int) -> bool:
    """Cast contiguous x by a table; return True if that was done.

    Args:
        x: Elements of any dtype.
        to: Values of a dtype that holds them, or codes of ``slot`` bits.
        spec: The cast.
        slot: 0 for values.

    False for float64, too few elements, stochastic rounding, formats of more than 8 bits, a device without the shared
    memory, and a first call during the capture of a CUDA graph.
    """
    result = slot or 8 * to.element_size()
    if x.dtype not in NARROW or spec.rounding.mode == "stochastic" or spec.format.bits > _WIDEST:
        return False
    if result not in (4, 8, 16, 32):
        return False
    index = runtime.device_index(x)
    table, layout = _pattern_table(x, to, spec, slot), None
    if table is None:
        layout = layout_of(spec) if x.numel() >= RANGES_WORTH else None
        table = None if layout is None else _range_table(x, spec, layout)
    if table is None:
        return False
    entry = 0 if layout is not None else 16 if result == 16 else 8
    defines = convert_macros(entry, x.dtype, to.dtype, result, aligned(x, to), 0 if layout is None else layout.narrow)
    chosen = {name: int(value) for name, value in defines}
    beside = 1024 if layout is not None else _BESIDE
    resident = max(min(chosen["RESIDENT"], runtime.shared_limit(index) // (table.shared + beside)), 1)
    blocks = min(resident * runtime.multiprocessors(index), -(-x.numel() // (chosen["THREADS"] * chosen["RUN"])))
    arguments = x, to, np.int64(x.numel()), table.parameters
    runtime.kernel("table.cu", "convert", index, defines)(blocks, chosen["THREADS"], *arguments, shared=table.shared)
    return True


def _pattern_table(x: torch.Tensor, to: torch.Tensor, spec: CastSpec, slot: int) -> Table | None:
    """Return the table of all patterns of a cast; None for other dtypes, small tensors and small shared memory."""
    index, values = runtime.device_index(x), not slot and to.element_size() == 2
    shared = _PATTERNS * (2 if values else 1) + 1024
    if x.element_size() != 2 or x.numel() < PATTERNS_WORTH or runtime.shared_limit(index) < shared + _BESIDE:
        return None

    def make() -> Table:
        points = torch.arange(_PATTERNS, device=x.device, dtype=torch.int32).to(torch.int16).view(x.dtype)
        entries = torch.empty(_PATTERNS, dtype=to.dtype if values else torch.uint8, device=x.device)
        cast_general(points, EncodedParts(entries), spec)
        by_code = values_of(spec.format, x.device)  # type: ignore[arg-type]
        parameters = _TABLE.pack(entries.data_ptr(), by_code.data_ptr(), 0, 0, _PATTERNS, 0)
        return Table(parameters, (entries, by_code), shared)

    return _remembered((spec, x.dtype, index, values), x, make)


@lru_cache(maxsize=256)
def layout_of(spec: CastSpec) -> Layout | None:
    """Return the ranges for a cast, None where there are none."""
    fmt = spec.format
    rule, saturates = spec.rounding.rule, spec.overflow == "saturate"
    if not isinstance(fmt, CodebookFormat | LogFormat | FloatFormat) or fmt.bits > _WIDEST:
        return None
    if (
        rule.random
        or (rule.looks_at_parity and not rule.is_nearest)
        or (isinstance(fmt, FloatFormat) and not saturates)
    ):
        return None  # a mode such as to_odd has values that nothing beside them rounds to: two changes at one point
    # The points at which the result changes: midpoints of values for nearest modes, values for others.
    values = sorted({value for value in code_values(fmt) if math.isfinite(value)})
    if not rule.is_nearest:
        changes = values
    elif isinstance(fmt, LogFormat):
        changes = [sign * point for point in fmt.thresholds for sign in (1.0, -1.0)]
    else:
        changes = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]
    of_signs = [{_bits(x) for x in changes if x > 0}, {_bits(-x) for x in changes if x < 0}]
    narrow = 4 if fmt.bits <= 4 else 8
    if 0.0 not in changes:  # zero is a change in the first range, which narrow buckets cannot say
        layout = _widest_ranges(of_signs, min(_WORD - 2 * narrow, 23), narrow)
        if layout is not None:
            return layout
    at_least = 1 if 0.0 in changes else 0  # zero shares the first range with no other change
    return _widest_ranges(of_signs, 23, 0, at_least)


def _widest_ranges(of_signs: list[set[int]], most: int, narrow: int, at_least: int = 0) -> Layout | None:
    """Return the widest ranges, 2**most at most, in which the result changes at most once, None where there are none.

    ``at_least`` is the lowest number of the range with the smallest of the changes.
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


def _bits(magnitude: float) -> int:
    """Return the bits of the float32 below or at a magnitude."""
    nearest = struct.unpack("<f", struct.pack("<f", magnitude))[0]
    bits: int = struct.unpack("<I", struct.pack("<f", nearest))[0]
    return bits - (nearest > magnitude)


def _range_table(x: torch.Tensor, spec: CastSpec, layout: Layout) -> Table | None:
    """Return the table of ranges of a cast, which some hundred small kernels build at the first call."""

    def make() -> Table:
        # made on the device, without waiting for it
        values, device = values_of(spec.format, x.device), x.device
        bounds = torch.arange(layout.low, layout.low + layout.size + 1, device=device) << layout.shift
        starts, ends = bounds[:-1].clone(), bounds[1:] - 1
        starts[0], ends[-1] = 0, _INFINITY
        signs = torch.arange(2, device=device)[:, None] << 31

        def codes_at(magnitudes: torch.Tensor) -> torch.Tensor:
            points = (magnitudes | signs).to(torch.int32).view(torch.float32)
            codes = torch.empty(points.shape, dtype=torch.uint8, device=device)
            cast_general(points, EncodedParts(codes), spec)
            return codes.to(torch.int64)

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
            change = torch.where(first == last, 0, above)
            buckets = torch.stack([change, first | last << 16], dim=-1).to(torch.int32).contiguous()
        nan = nan_code(spec.format, spec.overflow)  # type: ignore[arg-type]
        parameters = _TABLE.pack(buckets.data_ptr(), values.data_ptr(), *layout[:3], nan)
        return Table(parameters, (buckets, values), layout.shared)

    return _remembered((spec, runtime.device_index(x)), x, make)


def _remembered(key: Hashable, x: torch.Tensor, make: Callable[[], Table]) -> Table | None:
    """Return a table, built at the first call; None where that call is captured by a CUDA graph."""
    if key not in _tables:
        if captures(x.device):
            return None
        _tables[key] = make()
        runtime.finished(x)
    return _tables[key]


@lru_cache(maxsize=64)
def convert_macros(
    entry: int, dtype: torch.dtype, out: torch.dtype, result: int, vectors: bool, narrow: int
) -> runtime.Defines:
    """Return the macros of table.cu; entry: 0 for ranges."""
    if entry:  # results of a vector are 16 bytes or less
        run, vector, threads = 16, {32: 4, 16: 8}.get(result, 16), 512 if entry == 8 else 1024
    else:
        run = vector = 8 if result < 32 or dtype.itemsize == 2 else 4
        threads = 256
    kinds = {"ENTRY": entry, "INPUT": DTYPES[dtype], "OUTPUT": DTYPES.get(out, 0), "RESULT": result, "NARROW": narrow}
    resident = {0: _RESIDENT, 8: 3, 16: 1}[entry]
    return macros(**kinds, RUN=run, VECTOR=vector, VECTORS=vectors, THREADS=threads, RESIDENT=resident)
