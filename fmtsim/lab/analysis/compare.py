# SPDX-License-Identifier: Apache-2.0
"""compare: state bit for bit how one tensor differs from another, and by how many units of the last place."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, overload

import torch
from torch import Tensor

from fmtsim.casts.arguments import refuse_others, spelled
from fmtsim.lab.analysis import ulp
from fmtsim.lab.analysis.compare_ways import WaysComparison, compare_ways
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError, DtypeError
from fmtsim.support.float64 import capable
from fmtsim.support.plotting import COLOURS, label_axes, new_panels, saved, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        actual, expected = (f"{code} = {value!r}" for code, value in zip(self.hex, self.values, strict=True))
        return f"{list(self.index)}: actual {actual}, expected {expected}"

    @property
    def values(self) -> tuple[float | int, float | int]:
        """The actual value and the expected one."""
        return self.actual, self.expected

    @property
    def hex(self) -> tuple[str, str]:
        """Both codes in hexadecimal, with the digits of their width."""
        digits = -(-self.bits // 4)
        return f"0x{self.actual_code:0{digits}X}", f"0x{self.expected_code:0{digits}X}"

    def to_dict(self) -> dict[str, Any]:
        """Return index, values and codes as JSON types."""
        actual, expected = self.hex
        codes = {"actual": self.actual, "actual_hex": actual, "expected": self.expected, "expected_hex": expected}
        return {"index": list(self.index), **codes}


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
        sqnr_db: ``10 log10(sum expected^2 / sum (actual - expected)^2)`` of the pairs whose expected value is finite,
            summed in float64, so that its last bits depend on the order in memory. inf without an error; -inf where all
            that was expected is zero, and where an actual value or an error is NaN or infinite.
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
    sqnr_db: float = math.inf

    @property
    def equal(self) -> bool:
        """Whether all bits agree."""
        return self.equal_count == self.count

    @property
    def mismatches(self) -> int:
        """Elements whose bits differ."""
        return self.count - self.equal_count

    def __str__(self) -> str:
        lines = table.aligned(self._facts())
        if self.equal or not self.ulp_histogram:
            return "\n".join(lines)
        bars = ["", *("#" * math.ceil(24 * row[2] / self.count) for row in self.ulp_histogram)]
        rows = [(*row, bar) for row, bar in zip(self._buckets(), bars, strict=True)]  # 24 signs for all elements
        return "\n".join((*lines, "", *table.aligned(rows, left=(3,))))

    def __repr__(self) -> str:
        return "\n".join(table.aligned(self._facts()))

    def _repr_html_(self) -> str:
        facts = table.facts_html(self._facts())
        return facts if self.equal or not self.ulp_histogram else facts + table.html(self._buckets(), left=())

    def plot(self, path: str | Path | None = None, *, title: str = "", ax: Any = None) -> "Figure":
        """Draw the ulp histogram, into ``ax`` if given, and return the figure; save a PNG where a path is given."""
        return plot_ulps({self.dtype: self}, path, title=title, ax=ax)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types, infinite differences as they are."""
        first = None if self.first is None else self.first.to_dict()
        histogram = [list(bucket) for bucket in self.ulp_histogram]
        lists = {"shape": list(self.shape), "ulp_histogram": histogram, "first": first}
        return {"equal": self.equal} | asdict(self) | lists

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
        facts.append(("SQNR", f"{self.sqnr_db:.4g} dB"))
        return [*facts, ("first difference", str(self.first))]

    def _buckets(self) -> list[tuple[str, str, str]]:
        rows = [("ulp", "pairs", "%")]
        for low, high, pairs in self.ulp_histogram:
            rows.append((bucket_name(low, high), f"{pairs:,}", f"{100.0 * pairs / self.count:.3g}"))
        return rows


def bucket_name(low: int, high: int) -> str:
    """Return the name of a bucket of distances: ``"0"``, ``"3-4"``, ``"2^16"`` for what ends there."""
    if high <= 2:
        return str(high)
    return f"{low}-{high}" if high <= 4096 else f"to 2^{(high - 1).bit_length()}"


def plot_ulps(
    comparisons: Mapping[str, Comparison], path: str | Path | None = None, *, title: str = "", ax: Any = None
) -> "Figure":
    """Draw how many pairs lie how many units of the last place apart, as bars side by side, on a logarithmic scale.

    Args:
        comparisons: What ``fmtsim.compare`` found, by label.
        path: Where to save a PNG; None only returns the figure.
        title: Heading.
        ax: Axes to draw into.

    Raises:
        ArgumentError: there is nothing to draw.
    """
    if not any(comparison.ulp_histogram for comparison in comparisons.values()):
        raise ArgumentError("plot_ulps got no pair of numbers; compare tensors that hold some")
    buckets = max((c.ulp_histogram for c in comparisons.values()), key=len)
    # 1. A group of bars for each bucket, one of each comparison.
    figure, (panel,) = new_panels(*_SIZE, ax)
    width = 0.85 / len(comparisons)
    for i, (label, c) in enumerate(comparisons.items()):
        centres = [place + (i - (len(comparisons) - 1) / 2) * width for place in range(len(c.ulp_histogram))]
        shares = [100.0 * pairs / c.count for _, _, pairs in c.ulp_histogram]
        panel.bar(centres, shares, width=width, color=COLOURS[i % 7], label=label)
    # 2. A logarithmic scale down to a third of the smallest share.
    smallest = min(100.0 * pairs / c.count for c in comparisons.values() for _, _, pairs in c.ulp_histogram if pairs)
    panel.set_yscale("log")
    panel.set_ylim(smallest / 3, 150.0)
    panel.set_axisbelow(True)
    named = range(0, len(buckets), -(-len(buckets) // _NAMED))
    panel.set_xticks(named, [bucket_name(*buckets[place][:2]) for place in named], rotation=35)
    panel.set_xlim(-0.7, max(len(buckets), 6) - 0.3)  # a single bar is no wall
    label_axes(panel, "distance in units of the last place", "% of elements")
    if len(comparisons) > 1:
        panel.legend(frameon=False)
    set_title(panel, title)
    return saved(figure, path)


_SIZE, _NAMED = (7.5, 3.6), 16  # of a picture in inches, whatever the distances; buckets with a name in it
_EDGES = (0, *(1 << power for power in range(63)), ulp.FARTHEST)  # a bucket ends at each, and holds it
_BINS = 1 << 16  # of one step of the search for the median


@overload
def compare(actual: Any, expected: Any, *, like: None = ..., cast: bool = ...) -> Comparison: ...
@overload
def compare(actual: Callable[..., Any], expected: Sequence[Any], *, like: Sequence[str]) -> WaysComparison: ...
@spelled
def compare(
    actual: Any, expected: Any, *more: Never, like: Any = None, cast: bool = False, **others: Never
) -> Comparison | WaysComparison:
    """Compare two tensors bit for bit and measure how far apart they are.

    With ``like=("torch", "torch.compile")``, ``actual`` is a function of pointwise operations and ``expected`` the
    tuple of its inputs: the result says how compiled code on a GPU differs from eager code, and names the operations
    whose rounding vanished (``WaysComparison``).

    The distance of two numbers in units of the last place (ulp) is that of their codes in the total order of the
    dtype: neighbours are 1 apart, -0 and +0 too, the largest value and Inf too. A NaN has a distance, 0, only to the
    same bits. Distances of 2**63 and more (64-bit numbers of opposite sign) count as 2**63 - 1.

    Tensors are read in pieces of a million elements: nothing whole is copied, whatever strides or devices.

    Args:
        actual, expected: Torch tensors or numpy arrays of one shape and one dtype: any floating-point type with
            eight bits or more (and ml_dtypes' smaller ones, one code a byte), integers, bool. They may be on
            different devices.
        like: A pair of ways to run a function, or None for two tensors.
        cast: Compare numbers of two dtypes as float32, or as float64 if one of them is that or an integer.

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
        SQNR                143.9 dB
        first difference    [2]: actual 0x40400001 = 3.000000238418579, expected 0x40400000 = 3.0
        <BLANKLINE>
        ulp  pairs     %
          0      2  66.7  ################
          1      1  33.3  ########
    """
    refuse_others(compare, more, others)
    if like is not None:
        return compare_ways(actual, expected, like, compare)
    first, second = ulp.read_codes(actual, "actual"), ulp.read_codes(expected, "expected")
    if cast and first.kind.name != second.kind.name:
        exact = any(codes.kind.format is None or codes.kind.name == "float64" for codes in (first, second))
        values = (ulp.values(codes.raw, codes.kind) for codes in (first, second))
        first, second = (ulp.read_codes(x if exact else x.float(), "a value") for x in values)
    if first.kind.name != second.kind.name:
        raise DtypeError(
            f"actual has dtype {first.kind.name}, expected {second.kind.name}; bits compare within one dtype: "
            "cast one of them, or pass cast=True for the wider values"
        )
    if first.raw.shape != second.raw.shape:
        shapes = f"{list(first.raw.shape)}, expected {list(second.raw.shape)}"
        raise ArgumentError(f"actual has shape {shapes}; reshape or index one of them (nothing is broadcast)")
    return _Differences(first.raw, second.raw, first.kind).result()


class _Differences:
    """Count differences piece by piece."""

    def __init__(self, actual: Tensor, expected: Tensor, kind: ulp.Kind) -> None:
        self._actual, self._expected, self._kind = actual, expected, kind
        self._equal = self._payloads = self._single = self._zeros = self._largest = 0
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
        # 1. Keep the pairs of other bits, and describe the very first one.
        different = a != b
        if self._first is None:
            self._first = self._difference(a, b, int(different.nonzero()[0]), seen)
        a, b = (capable(x[different]) for x in (a, b))
        self._equal += different.numel() - a.numel()
        # 2. Pairs with NaN, of which none has a distance, and pairs of zeros.
        x, y = ulp.values(a, self._kind), ulp.values(b, self._kind)
        nan_x, nan_y = x.isnan(), y.isnan()
        self._payloads += int((nan_x & nan_y).sum())
        self._single += int((nan_x ^ nan_y).sum())
        self._zeros += int(((x == 0) & (y == 0)).sum())
        numbers = ~(nan_x | nan_y)
        # 3. Distances of the codes in units of the last place.
        apart = ulp.distances(ulp.places(a, self._kind), ulp.places(b, self._kind))[numbers]
        if not apart.numel():
            return
        self._largest = max(self._largest, int(apart.max()))
        edges = torch.tensor(_EDGES, device=apart.device)
        self._buckets += torch.bincount(torch.bucketize(apart, edges), minlength=len(_EDGES)).cpu()
        # 4. Differences of the values; those of integers are their distances, which float64 rounds once.
        x, y = x[numbers], y[numbers]
        gaps = (x - y).abs() if self._kind.format is not None else apart.double()
        self._absolute = max(self._absolute, float(gaps.max()))
        relative = torch.where(gaps == 0, gaps, gaps / y.abs())
        # Inf differs from the other Inf, and from all numbers, by Inf.
        self._relative = max(self._relative, float(relative.nan_to_num(nan=math.inf, posinf=math.inf).max()))

    def _difference(self, a: Tensor, b: Tensor, place: int, seen: int) -> Difference:
        kind, codes = self._kind, [int(x[place]) & ((1 << self._kind.bits) - 1) for x in (a, b)]
        if kind.format is None:  # integers of 64 bits are more than float64 holds
            sign = 1 << (kind.bits - 1) if kind.signed else 0
            numbers: list[float | int] = [(code ^ sign) - sign for code in codes]
        else:
            numbers = [ulp.values(capable(x[place : place + 1]), kind).item() for x in (a, b)]
        index, flat = [], place + seen
        for size in reversed(self._actual.shape):
            flat, position = divmod(flat, size)
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
            max_absolute=self._absolute, max_relative=self._relative, sqnr_db=self._sqnr(),
        )  # fmt: skip

    def _sqnr(self) -> float:
        """Return signal to noise in dB."""
        signal = noise = 0.0
        if self._equal == self._actual.numel():
            return math.inf

        def norm(x: Tensor) -> float:
            # Of x divided by its largest element, because a square of float64 may overflow.
            largest = float(x.abs().max()) if x.numel() else 0.0
            if not math.isfinite(largest):
                return math.inf
            return largest * float(torch.linalg.vector_norm(x / largest)) if largest else 0.0

        for a, b in ulp.chunks(self._actual, self._expected):
            x, y = ulp.values(capable(a), self._kind), ulp.values(capable(b), self._kind)
            x, y = x[y.isfinite()], y[y.isfinite()]
            signal, noise = math.hypot(signal, norm(y)), math.hypot(noise, norm(x - y))
        if noise == 0.0:
            return math.inf
        return -math.inf if signal == 0.0 or noise == math.inf else 20.0 * math.log10(signal / noise)

    def _median(self, rank: int) -> int:
        """Return the distance of a rank."""
        # 1. Its bucket follows from the counts.
        sums = self._buckets.cumsum(0)
        bucket = int(torch.searchsorted(sums, rank, right=True))
        rank -= int(sums[bucket] - self._buckets[bucket])
        low, high = (0 if bucket == 0 else _EDGES[bucket - 1] + 1), _EDGES[bucket]
        # 2. Each pass over the tensors divides that into bins and goes on with the bin of the rank.
        while low < high:
            step = -(-(high - low + 1) // _BINS)
            counts = torch.zeros(_BINS, dtype=torch.int64)
            for a, b in ulp.chunks(self._actual, self._expected):
                different = a != b
                a, b = (capable(x[different]) for x in (a, b))
                apart = ulp.distances(ulp.places(a, self._kind), ulp.places(b, self._kind))
                if self._kind.format is not None:
                    apart = apart[~(ulp.values(a, self._kind).isnan() | ulp.values(b, self._kind).isnan())]
                inside = apart[(apart >= low) & (apart <= high)]  # low is above 0: equal pairs are in bucket 0
                counts += torch.bincount((inside - low) // step, minlength=_BINS).cpu()
            sums = counts.cumsum(0)
            bin_index = int(torch.searchsorted(sums, rank, right=True))
            rank -= int(sums[bin_index] - counts[bin_index])
            low = low + bin_index * step
            high = min(high, low + step - 1)
        return low
