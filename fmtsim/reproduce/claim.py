# SPDX-License-Identifier: Apache-2.0
"""What a claim is: an experiment with its settings, and the numbers that it has to give."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fmtsim.errors import ArgumentError

Origin = Literal["paper", "code", "emulation", "formula"]
Tell = Callable[[float], None]
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Name one number of a claim, what it is elsewhere, and what it has to be here.

    Args:
        name: Key of the number in ``Measured.numbers``, as it is printed.
        low: Least value that passes.
        high: Largest value that passes.
        published: The number of the source, None where it only states an order.
        origin: Who gives it: the ``"paper"``, its ``"code"``, an independent ``"emulation"`` of the scheme, or a
            ``"formula"``.
    """

    name: str
    low: float = -math.inf
    high: float = math.inf
    published: float | None = None
    origin: Origin = "paper"

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ArgumentError(f"{self.name}: nothing lies between low={self.low} and high={self.high}; exchange them")
        if self.origin not in get_args(Origin):
            raise ArgumentError(f"{self.name}: origin={self.origin!r} is unknown; choose {', '.join(get_args(Origin))}")

    @property
    def bounded(self) -> bool:
        """Whether some value would fail; a number without bounds is shown and not judged."""
        return self.low > -math.inf or self.high < math.inf

    def holds(self, value: float) -> bool:
        """Say whether a value passes; NaN never does."""
        return self.low <= value <= self.high


def near(name: str, published: float, tolerance: float, origin: Origin = "emulation") -> Expected:
    """Expect a number that differs from the published one by no more than a fraction of it."""
    room = abs(published) * tolerance
    return Expected(name=name, low=published - room, high=published + room, published=published, origin=origin)


def exactly(name: str, value: float, origin: Origin = "formula") -> Expected:
    """Expect a number, with no room beside it."""
    return Expected(name=name, low=value, high=value, published=value, origin=origin)


def settings(**values: Any) -> tuple[tuple[str, Any], ...]:
    """Return the settings of an experiment as pairs of name and value."""
    return tuple(values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hold what an experiment gives.

    Args:
        numbers: By name.
        curves: Points to draw, by label; empty where a table says it all.
        axes: What the curves' x and y are.
        logarithmic: Which axes are, of ``"x"`` and ``"y"``.
        ticks: Names of the places 0, 1, 2, ... on the x axis, where they are not numbers.
        steps: The curves stay where they are until the next point.
    """

    numbers: Mapping[str, float]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    axes: tuple[str, str] = ("", "")
    logarithmic: str = ""
    ticks: tuple[str, ...] = ()
    steps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Describe a claim as an experiment.

    Args:
        name: What it is called on the command line.
        says: The claim in one sentence.
        source: Who makes it, and where.
        measure: ``measure(tell, **settings)`` runs the experiment; it calls ``tell`` with the part that is done, 0 to
            1. Equal settings give equal numbers: every experiment seeds its own generators.
        settings: Sizes, seeds, formats and recipes, as pairs of name and value.
        expected: What has to come out.
        notes: Where the miniature differs from the source.
        slow: It takes more than about ten seconds.
    """

    name: str
    says: str
    source: str
    measure: Callable[..., Measured]
    settings: tuple[tuple[str, Any], ...] = ()
    expected: tuple[Expected, ...]
    notes: str = ""
    slow: bool = False

    def __post_init__(self) -> None:
        names = [one.name for one in self.expected]
        if not names or len(set(names)) < len(names):
            raise ArgumentError(f"claim {self.name!r} expects {names}; name at least one number, and each once")
