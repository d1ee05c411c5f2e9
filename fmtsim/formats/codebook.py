# SPDX-License-Identifier: Apache-2.0
"""Formats that are lists of values."""

import math
from dataclasses import dataclass
from functools import partial

from fmtsim.formats.fields import Element, NanPolicy, require
from fmtsim.support.errors import FormatError
from fmtsim.support.records import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class CodebookFormat(Element):
    """Describe a format by the list of its values; the code of a value is its place in the list.

    Args:
        name: The name under which the format is listed.
        values: One finite float32 value a code, in any order; repeated values encode to the first code.
        nan_policy: What NaN becomes: the largest value, or an error.
        aliases: Other names.
        source: The document that defines the values.
    """

    name: str
    values: tuple[float, ...]
    nan_policy: NanPolicy = "max"
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        check_types(self, FormatError)
        check = partial(require, self.name)
        check(2 <= len(self.values) <= 1 << 16, f"{len(self.values)} values", "2 to 65536 values")
        check(all(math.isfinite(v) for v in self.values), "values with NaN or Inf", "finite values")
        check(len(set(self.values)) >= 2, "a single distinct value", "at least two")

    @property
    def bits(self) -> int:
        """Width of a code."""
        return (len(self.values) - 1).bit_length()

    @property
    def max(self) -> float:
        """Largest magnitude, the target of a block's scale."""
        return max(abs(v) for v in self.values)

    @property
    def min(self) -> float:
        """Lowest value."""
        return min(self.values)

    def value(self, code: int) -> float:
        """Return the value of one code."""
        if not 0 <= code < len(self.values):
            raise FormatError(f"code {code} is outside {self.name} (0 to {len(self.values) - 1})")
        return self.values[code]

    def facts(self) -> list[tuple[str, str]]:
        """Return what there is to say about the format as pairs of a heading and a text."""
        extent = f"{self.min:g} to {max(self.values):g}"
        return [("bits", str(self.bits)), ("values", str(len(set(self.values)))), ("range", extent)]

    def __repr__(self) -> str:
        return (
            f"CodebookFormat({self.name!r}: {self.bits} bits, {len(set(self.values))} values "
            f"from {self.min:g} to {max(self.values):g})"
        )
