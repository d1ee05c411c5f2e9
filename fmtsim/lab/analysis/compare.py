# SPDX-License-Identifier: Apache-2.0
"""compare: say bit for bit how one tensor differs from another, and how far in units of the last place."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fmtsim.lab.analysis import ulp
from fmtsim.lab.analysis.comparison import Comparison, Difference
from fmtsim.support.errors import ArgumentError, DtypeError
from fmtsim.support.float64 import capable

_EDGES = (0, *(1 << power for power in range(63)), ulp.FARTHEST)  # a bucket ends at each, and holds it
_BINS = 1 << 16  # of one step of the search for the median


def compare(actual: Any, expected: Any) -> Comparison:
    """Compare two tensors bit for bit and measure how far apart they are.

    The distance of two numbers in units of the last place (ulp) is that of their codes in the total order of the
    dtype: neighbours are 1 apart, -0 and +0 too, the largest value and Inf too. A NaN has a distance, 0, only to the
    same bits. Distances of 2**63 and more (64-bit numbers of opposite sign) count as 2**63 - 1.

    Tensors are read in pieces of a million elements: nothing whole is copied, whatever strides or devices.

    Args:
        actual, expected: Torch tensors or numpy arrays of one shape and one dtype: any floating-point type with
            eight bits or more (and ml_dtypes' smaller ones, one code a byte), integers, bool. They may be on
            different devices.

    Returns:
        The comparison; ``.equal`` says whether all bits agree.

    Raises:
        ArgumentError: an operand is not a dense tensor or array, or the shapes differ.
        DtypeError: the dtypes differ, or have no order of codes.

    Example:
        >>> import torch
        >>> print(compare(torch.tensor([1.0, 2.0, 3.0000002]), torch.tensor([1.0, 2.0, 3.0])))
        elements            3 of float32, shape [3]
        equal bits          2 (66.67 %)
        different           1
        ulp distance        largest 1, median 0
        largest difference  2.384e-07 absolute, 7.947e-08 relative
        first difference    [2]: actual 0x40400001 = 3.000000238418579, expected 0x40400000 = 3.0
        <BLANKLINE>
        ulp  pairs     %
          0      2  66.7  ################
          1      1  33.3  ########
    """
    first, second = ulp.read_codes(actual, "actual"), ulp.read_codes(expected, "expected")
    if first.kind.name != second.kind.name:
        raise DtypeError(
            f"actual has dtype {first.kind.name}, expected {second.kind.name}; bits compare within one dtype: "
            "convert one of them"
        )
    if first.raw.shape != second.raw.shape:
        shapes = f"{list(first.raw.shape)}, expected {list(second.raw.shape)}"
        raise ArgumentError(f"actual has shape {shapes}; reshape or index one of them (nothing is broadcast)")
    return _Count(first.raw, second.raw, first.kind).result()


class _Count:
    """Count differences piece by piece."""

    def __init__(self, actual: Tensor, expected: Tensor, kind: ulp.Kind) -> None:
        self._actual, self._expected, self._kind = actual, expected, kind
        self._equal = self._payloads = self._single = self._zeros = 0
        self._largest = 0
        self._buckets = torch.zeros(len(_EDGES), dtype=torch.int64)
        self._absolute = self._relative = 0.0
        self._first: Difference | None = None
        seen = 0
        for a, b in ulp.chunks(actual, expected):
            if torch.equal(a, b):
                self._equal += a.numel()
            else:
                self._add(a, b, seen)
            seen += a.numel()
        self._buckets[0] += self._equal

    def _add(self, a: Tensor, b: Tensor, seen: int) -> None:
        different = a != b
        if self._first is None:
            self._first = self._difference(a, b, int(different.nonzero()[0]), seen)
        a, b = (capable(x[different]) for x in (a, b))
        self._equal += different.numel() - a.numel()
        x, y = ulp.values(a, self._kind), ulp.values(b, self._kind)
        nan_x, nan_y = x.isnan(), y.isnan()
        self._payloads += int((nan_x & nan_y).sum())
        self._single += int((nan_x ^ nan_y).sum())
        self._zeros += int(((x == 0) & (y == 0)).sum())
        numbers = ~(nan_x | nan_y)
        apart = ulp.distances(ulp.places(a, self._kind), ulp.places(b, self._kind))[numbers]
        if not apart.numel():
            return
        self._largest = max(self._largest, int(apart.max()))
        edges = torch.tensor(_EDGES, device=apart.device)
        self._buckets += torch.bincount(torch.bucketize(apart, edges), minlength=len(_EDGES)).cpu()
        x, y = x[numbers], y[numbers]
        gaps = (x - y).abs() if self._kind.format is not None else apart.double()
        self._absolute = max(self._absolute, float(gaps.max()))
        relative = torch.where(gaps == 0, gaps, gaps / y.abs())
        # Inf differs from the other Inf, and from all numbers, by Inf.
        self._relative = max(self._relative, float(relative.nan_to_num(nan=math.inf, posinf=math.inf).max()))

    def _difference(self, a: Tensor, b: Tensor, place: int, seen: int) -> Difference:
        kind, codes = self._kind, [int(x[place]) & ((1 << self._kind.bits) - 1) for x in (a, b)]
        if kind.format is None:
            sign = 1 << (kind.bits - 1) if kind.signed else 0
            numbers: list[float | int] = [(code ^ sign) - sign for code in codes]
        else:
            numbers = [ulp.values(capable(x[place : place + 1]), kind).item() for x in (a, b)]
        index, rest = [], place + seen
        for size in reversed(self._actual.shape):
            rest, position = divmod(rest, size)
            index.append(position)
        return Difference(
            index=tuple(reversed(index)), actual_code=codes[0], expected_code=codes[1], actual=numbers[0],
            expected=numbers[1], bits=kind.bits,
        )  # fmt: skip

    def result(self) -> Comparison:
        pairs = int(self._buckets.sum())
        used = self._buckets.nonzero().flatten().tolist()
        last = used[-1] if used else -1
        lows = (0, *(edge + 1 for edge in _EDGES))
        return Comparison(
            shape=tuple(self._actual.shape), dtype=self._kind.name, count=self._actual.numel(),
            equal_count=self._equal, nan_payloads=self._payloads, nan_single=self._single, zero_signs=self._zeros,
            first=self._first, max_ulp=self._largest if pairs else None,
            median_ulp=self._median((pairs - 1) // 2) if pairs else None,
            ulp_histogram=tuple((lows[i], _EDGES[i], int(self._buckets[i])) for i in range(last + 1)),
            max_absolute=self._absolute, max_relative=self._relative,
        )  # fmt: skip

    def _median(self, rank: int) -> int:
        """Return the distance of a rank: its bucket is known, and is narrowed in as many passes as it needs."""
        sums = self._buckets.cumsum(0)
        bucket = int(torch.searchsorted(sums, rank, right=True))
        rank -= int(sums[bucket] - self._buckets[bucket])
        low, high = (0 if bucket == 0 else _EDGES[bucket - 1] + 1), _EDGES[bucket]
        while low < high:
            step = -(-(high - low + 1) // _BINS)
            counts = torch.zeros(_BINS, dtype=torch.int64)
            for apart in self._apart(low, high):
                counts += torch.bincount((apart - low) // step, minlength=_BINS).cpu()
            sums = counts.cumsum(0)
            place = int(torch.searchsorted(sums, rank, right=True))
            rank -= int(sums[place] - counts[place])
            low = low + place * step
            high = min(high, low + step - 1)
        return low

    def _apart(self, low: int, high: int) -> Iterator[Tensor]:
        """Yield the distances from low to high, low above 0, of pairs without NaN."""
        for a, b in ulp.chunks(self._actual, self._expected):
            different = a != b
            a, b = (capable(x[different]) for x in (a, b))
            apart = ulp.distances(ulp.places(a, self._kind), ulp.places(b, self._kind))
            if self._kind.format is not None:
                apart = apart[~(ulp.values(a, self._kind).isnan() | ulp.values(b, self._kind).isnan())]
            yield apart[(apart >= low) & (apart <= high)]
