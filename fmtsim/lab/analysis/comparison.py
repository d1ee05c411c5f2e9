# SPDX-License-Identifier: Apache-2.0
"""What ``compare`` returns: differences in bits and in units of the last place, as text, HTML, JSON and a picture."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmtsim.support import table
from fmtsim.support.errors import ArgumentError
from fmtsim.support.plotting import COLOURS, label_axes, new_figure, saved, set_title

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
        lines = table.aligned(self._facts())
        if self.equal or not self.ulp_histogram:
            return "\n".join(lines)
        bars = ["", *("#" * math.ceil(24 * row[2] / self.count) for row in self.ulp_histogram)]
        rows = [(*row, bar) for row, bar in zip(self._buckets(), bars, strict=True)]
        return "\n".join((*lines, "", *table.aligned(rows, left=(3,))))

    def _repr_html_(self) -> str:
        facts = table.facts_html(self._facts())
        return facts if self.equal or not self.ulp_histogram else facts + table.html(self._buckets(), left=())

    def plot(self, path: str | Path | None = None, *, title: str = "") -> "Figure":
        """Draw the ulp histogram and return the figure; save a PNG where a path is given."""
        return plot_ulps({self.dtype: self}, path, title=title)

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


def plot_ulps(comparisons: Mapping[str, Comparison], path: str | Path | None = None, *, title: str = "") -> "Figure":
    """Draw how many pairs lie how many units of the last place apart, as bars side by side, on a logarithmic scale.

    Args:
        comparisons: What ``fmtsim.compare`` found, by label.
        path: Where to save a PNG; None only returns the figure.
        title: Heading.

    Raises:
        ArgumentError: there is nothing to draw.
    """
    if not any(comparison.ulp_histogram for comparison in comparisons.values()):
        raise ArgumentError("plot_ulps got no pair of numbers; compare tensors that hold some")
    buckets = max((c.ulp_histogram for c in comparisons.values()), key=len)
    figure = new_figure(max(5.0, 1.6 + 0.62 * len(buckets)), 3.6)
    panel = figure.subplots()
    width = 0.85 / len(comparisons)
    for i, (label, c) in enumerate(comparisons.items()):
        centres = [place + (i - (len(comparisons) - 1) / 2) * width for place in range(len(c.ulp_histogram))]
        shares = [100.0 * pairs / c.count for _, _, pairs in c.ulp_histogram]
        panel.bar(centres, shares, width=width, color=COLOURS[i % 7], label=label)
    smallest = min(100.0 * pairs / c.count for c in comparisons.values() for _, _, pairs in c.ulp_histogram if pairs)
    panel.set_yscale("log")
    panel.set_ylim(smallest / 3, 150.0)
    panel.set_axisbelow(True)
    panel.set_xticks(range(len(buckets)), [bucket_name(low, high) for low, high, _ in buckets], rotation=35)
    label_axes(panel, "distance in units of the last place", "% of elements")
    if len(comparisons) > 1:
        panel.legend(frameon=False)
    set_title(figure, title)
    return saved(figure, path)
