"""compare: say bit for bit how one tensor differs from another, and how far in units of the last place."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fmtsim.analysis import ulp
from fmtsim.errors import ArgumentError, DtypeError
from fmtsim.table import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EDGES = (0, *(1 << power for power in range(63)), ulp.FARTHEST)  # a bucket ends at each, and holds it
_BINS = 1 << 16  # of one step of the search for the median


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place where two tensors differ: its index, both codes as integers and both values."""

    index: tuple[int, ...]
    actual_code: int
    expected_code: int
    actual: float | int
    expected: float | int
    bits: int

    def __str__(self) -> str:
        def shown(code: int, value: float | int) -> str:
            return f"0x{code:0{-(-self.bits // 4)}X} = {value!r}"

        actual, expected = shown(self.actual_code, self.actual), shown(self.expected_code, self.expected)
        return f"{list(self.index)}: actual {actual}, expected {expected}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hold what ``compare`` found; ``print`` shows a table, notebooks an HTML one.

    Args:
        shape: Of both tensors.
        dtype: Of both, by name.
        count: Elements.
        equal_count: Elements with equal bits.
        nan_payloads: Pairs of NaN whose bits differ.
        nan_single: Places where exactly one is NaN.
        zero_signs: Pairs of zeros of different sign.
        first: The first difference in row-major order, None where all bits agree.
        max_ulp, median_ulp: Largest and (lower) median distance; pairs with a NaN have one only where their bits are
            equal. None where no pair has one.
        ulp_histogram: ``(low, high, pairs)`` for the distances 0, 1, 2, 3-4, 5-8, 9-16, ... up to the largest.
        max_absolute: Largest ``|actual - expected|`` of pairs without NaN, in float64.
        max_relative: Largest ``|actual - expected| / |expected|`` of these; inf where a zero was expected.
    """

    shape: tuple[int, ...]
    dtype: str
    count: int
    equal_count: int
    nan_payloads: int = 0
    nan_single: int = 0
    zero_signs: int = 0
    first: Difference | None = None
    max_ulp: int | None = None
    median_ulp: int | None = None
    ulp_histogram: tuple[tuple[int, int, int], ...] = ()
    max_absolute: float = 0.0
    max_relative: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether all bits agree."""
        return self.equal_count == self.count

    @property
    def mismatches(self) -> int:
        """Elements whose bits differ."""
        return self.count - self.equal_count

    def __str__(self) -> str:
        facts = self._facts()
        width = max(len(name) for name, _ in facts)
        lines = [f"{name:<{width}}  {text}" for name, text in facts]
        if self.equal or not self.ulp_histogram:
            return "\n".join(lines)
        bars = ["", *("#" * math.ceil(24 * row[2] / self.count) for row in self.ulp_histogram)]
        rows = [(*row, bar) for row, bar in zip(self._buckets(), bars, strict=True)]
        return "\n".join((*lines, "", *aligned(rows, left=(3,))))

    def _repr_html_(self) -> str:
        left = "<tr><th style='text-align:left'>{}</th><td style='text-align:left'>{}</td></tr>"
        facts = "".join(left.format(escape(name), escape(text)) for name, text in self._facts())
        if self.equal or not self.ulp_histogram:
            return f"<table>{facts}</table>"
        head, *rows = self._buckets()
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<table>{facts}</table><table><tr>{cells}</tr>{body}</table>"

    def plot(self, path: str | Path | None = None, *, title: str = "") -> "Figure":
        """Draw the ulp histogram and return the figure; save a PNG where a path is given."""
        from fmtsim.analysis.plots import plot_ulps

        return plot_ulps({self.dtype: self}, path, title=title)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types, infinite differences as they are."""
        first = None
        if self.first is not None:
            digits = -(-self.first.bits // 4)
            first = {
                "index": list(self.first.index),
                "actual": self.first.actual, "actual_hex": f"0x{self.first.actual_code:0{digits}X}",
                "expected": self.first.expected, "expected_hex": f"0x{self.first.expected_code:0{digits}X}",
            }  # fmt: skip
        names = ("dtype", "count", "equal_count", "nan_payloads", "nan_single", "zero_signs", "max_ulp", "median_ulp")
        return {
            "shape": list(self.shape),
            "equal": self.equal,
            **{name: getattr(self, name) for name in names},
            "max_absolute": self.max_absolute,
            "max_relative": self.max_relative,
            "ulp_histogram": [list(bucket) for bucket in self.ulp_histogram],
            "first": first,
        }

    def _facts(self) -> list[tuple[str, str]]:
        share = f" ({100.0 * self.equal_count / self.count:.4g} %)" if self.count else ""
        facts = [
            ("elements", f"{self.count:,} of {self.dtype}, shape {list(self.shape)}"),
            ("equal bits", f"{self.equal_count:,}{share}"),
        ]
        if self.equal:
            return facts
        others = (
            ("NaN of other bits", self.nan_payloads), ("NaN on one side", self.nan_single),
            ("zero of other sign", self.zero_signs),
        )  # fmt: skip
        facts += [("different", f"{self.mismatches:,}"), *((name, f"{n:,}") for name, n in others if n)]
        if self.max_ulp is not None:
            facts.append(("ulp distance", f"largest {self.max_ulp:,}, median {self.median_ulp:,}"))
        facts.append(("largest difference", f"{self.max_absolute:.4g} absolute, {self.max_relative:.4g} relative"))
        return [*facts, ("first difference", str(self.first))]

    def _buckets(self) -> list[tuple[str, str, str]]:
        rows = [("ulp", "pairs", "%")]
        for low, high, pairs in self.ulp_histogram:
            rows.append((bucket_name(low, high), f"{pairs:,}", f"{100.0 * pairs / self.count:.3g}"))
        return rows


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


def bucket_name(low: int, high: int) -> str:
    """Return the name of a bucket of distances: ``"0"``, ``"3-4"``, ``"2^16"`` for what ends there."""
    if high <= 2:
        return str(high)
    return f"{low}-{high}" if high <= 4096 else f"to 2^{(high - 1).bit_length()}"


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
        a, b = (_capable(x[different]) for x in (a, b))
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
            numbers = [ulp.values(_capable(x[place : place + 1]), kind).item() for x in (a, b)]
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
            a, b = (_capable(x[different]) for x in (a, b))
            apart = ulp.distances(ulp.places(a, self._kind), ulp.places(b, self._kind))
            if self._kind.format is not None:
                apart = apart[~(ulp.values(a, self._kind).isnan() | ulp.values(b, self._kind).isnan())]
            yield apart[(apart >= low) & (apart <= high)]


def _capable(x: Tensor) -> Tensor:
    """Move a piece to a device that has float64."""
    return x.cpu() if x.device.type == "mps" else x
