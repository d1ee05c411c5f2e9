# SPDX-License-Identifier: Apache-2.0
"""Run claims: measure, compare with what is expected, and take the time."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fmtsim.errors import FmtsimError
from fmtsim.reproduce.claim import Claim, Expected, Measured, Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Set one number beside what it should be; ``ours`` is NaN where the experiment does not give it."""

    expected: Expected
    ours: float

    @property
    def passed(self) -> bool:
        """Whether the number lies within its bounds."""
        return self.expected.holds(self.ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Say how a claim came out.

    Args:
        claim: Which.
        measured: What was measured, None where the experiment broke off.
        seconds: How long it took.
        error: Why it broke off, empty where it did not.
    """

    claim: Claim
    measured: Measured | None
    seconds: float
    error: str = ""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The numbers, in the order of the claim."""
        numbers: Mapping[str, float] = {} if self.measured is None else self.measured.numbers
        return tuple(Row(expected=one, ours=numbers.get(one.name, math.nan)) for one in self.claim.expected)

    @property
    def passed(self) -> bool:
        """Whether every number lies within its bounds."""
        return not self.error and all(row.passed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON types (NaN and infinities as floats)."""
        rows = [
            {
                "number": row.expected.name,
                "published": row.expected.published,
                "origin": row.expected.origin,
                "ours": row.ours,
                "low": row.expected.low,
                "high": row.expected.high,
                "pass": row.passed,
            }
            for row in self.rows
        ]
        claim = self.claim
        about = {"claim": claim.name, "says": claim.says, "source": claim.source, "notes": claim.notes}
        return about | {"pass": self.passed, "seconds": self.seconds, "error": self.error, "numbers": rows}


def run_claim(claim: Claim, tell: Tell = lambda part: None) -> Result:
    """Run a claim's experiment.

    Args:
        claim: Which.
        tell: Called with the part that is done, 0 to 1.

    Returns:
        The result; an error of fmtsim in the experiment makes the claim fail and is quoted there. The caller's random
        generators are left as they were.
    """
    start = time.perf_counter()
    measured, error = None, ""
    with torch.random.fork_rng(devices=[]):
        try:
            measured = claim.measure(tell, **dict(claim.settings))
        except FmtsimError as problem:
            error = str(problem)
    return Result(claim=claim, measured=measured, seconds=time.perf_counter() - start, error=error)
