# SPDX-License-Identifier: Apache-2.0
"""What a claim is: an experiment, its settings and expected numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fmtsim.support.errors import ArgumentError

Origin = Literal["paper", "code", "formula"]
Verdict = Literal["shown", "shown in part", "not shown", "not ours"]
Bounds = Literal["source", "before", "after"]
Tell = Callable[[float], None]
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Name one number of a claim, what its source says it is, and within which bounds it shows that.

    A number with ``published`` is a figure; one without it, but with bounds, a direction; one with neither is printed
    and not judged.
    """

    name: str  # key of the number in ``Measured.numbers``, as it is printed
    low: float = -math.inf  # least value that shows it
    high: float = math.inf  # largest value that shows it
    published: float | None = None  # the source's figure, None where it only states a direction
    # who gives the figure: the ``"paper"``, the source's own ``"code"`` (a constant in it, or what it prints), or a
    # ``"formula"``. None without a figure. Numbers of an emulation of our own belong into tests.
    origin: Origin | None = None
    # bounds within which a figure that is missed is shown in part; None where nothing less shows it
    part: tuple[float, float] | None = None
    native: bool = False  # the speed of a native kernel, which is not measured here
    standard_errors: float = 0.0  # of the mean over seeds, by which it must lie above ``low``

    def __post_init__(self) -> None:
        for low, high in ((self.low, self.high), self.part or (0.0, 0.0)):
            if not low <= high:
                raise ArgumentError(f"{self.name}: nothing lies between low={low} and high={high}; exchange them")
        if self.standard_errors and (self.low == -math.inf or self.high < math.inf):
            raise ArgumentError(f"{self.name}: standard_errors= belong to a lower bound; give low= alone")
        if self.origin not in (None, *get_args(Origin)):
            raise ArgumentError(f"{self.name}: origin={self.origin!r} is unknown; choose {', '.join(get_args(Origin))}")
        if (self.published is None) != (self.origin is None):
            pair = f"published={self.published} with origin={self.origin!r}"
            raise ArgumentError(f"{self.name}: {pair}; give both or neither: a published figure has a source")

    @property
    def bounded(self) -> bool:
        """Whether some value would fail; a number without bounds is shown and not judged."""
        return self.low > -math.inf or self.high < math.inf

    def verdict(self, value: float) -> Verdict:
        """Say what a value shows; NaN shows nothing."""
        if self.native:
            return "not ours"
        if self.low <= value <= self.high:
            return "shown"
        return "shown in part" if self.part and self.part[0] <= value <= self.part[1] else "not shown"


def near(
    name: str, published: float, tolerance: float, origin: Origin, part: tuple[float, float] | None = None
) -> Expected:
    """Expect a number that differs from the source's by no more than a fraction of it."""
    room = abs(published) * tolerance
    low, high = published - room, published + room
    return Expected(name=name, low=low, high=high, published=published, origin=origin, part=part)


def above(name: str) -> Expected:
    """Expect more than nothing, by two standard errors of the mean over seeds."""
    return Expected(name=name, low=0.0, standard_errors=2.0)


def exactly(name: str, value: float, origin: Origin = "formula") -> Expected:
    """Expect a number, with no room beside it."""
    return Expected(name=name, low=value, high=value, published=value, origin=origin)


def native(name: str, published: float) -> Expected:
    """Name a speed of the source's kernels, which is not ours to show."""
    return Expected(name=name, published=published, origin="paper", native=True)


def settings(**values: Any) -> tuple[tuple[str, Any], ...]:
    """Return the settings of an experiment as pairs of name and value."""
    return tuple(values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hold what an experiment gives."""

    numbers: Mapping[str, float]  # by name
    # points to draw, by label; empty where a table says it all
    curves: Mapping[str, Curve] = field(default_factory=dict)
    axes: tuple[str, str] = ("", "")  # what the curves' x and y are
    logarithmic: str = ""  # which axes are, of ``"x"`` and ``"y"``
    ticks: tuple[str, ...] = ()  # names of the places 0, 1, 2, ... on the x axis, where they are not numbers.
    steps: bool = False  # the curves stay where they are until the next point


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Describe a claim as an experiment."""

    name: str  # what it is called on the command line
    says: str  # the claim in one sentence
    source: str  # who makes it, and where
    # ``measure(tell, **settings)`` runs the experiment; it calls ``tell`` with the part that is done, 0 to 1. Equal
    # settings give equal numbers: every experiment seeds its own generators.
    measure: Callable[..., Measured]
    # sizes, seeds, formats and recipes, as pairs of name and value. An experiment with ``seed`` runs once for each
    # seed, and its numbers are means; one with ``seeds`` gets all of them.
    settings: tuple[tuple[str, Any], ...] = ()
    expected: tuple[Expected, ...]  # what has to come out
    recorded: Verdict  # the verdict that the authors of this table saw. A run that shows less fails.
    # where bounds come from: the ``"source"``, whose figures and spread they are; us, ``"before"`` a run; or us,
    # ``"after"`` numbers were seen
    bounds: Bounds
    seeds: int = 1  # how many seeds an experiment with ``seed`` runs by default: five where they matter
    notes: str = ""  # where the experiment differs from the source
    slow: bool = False  # one seed takes more than about ten seconds; ``--quick`` leaves it out
    # settings at the size of a GPU, in place of the miniature's; empty: it has none
    card: tuple[tuple[str, Any], ...] = ()
    recorded_on_card: Verdict | None = None  # the verdict seen with them, None where they were not run

    def __post_init__(self) -> None:
        names = [one.name for one in self.expected]
        if not names or len(set(names)) < len(names):
            raise ArgumentError(f"claim {self.name!r} expects {names}; name at least one number, and each once")

    def verdict(self, numbers: Mapping[str, float]) -> Verdict:
        """Say what numbers show of the claim.

        It is shown where every number is, and a figure of the source is among them; in part where a figure is shown in
        part, or directions alone are shown; not ours where nothing but native speed is claimed.
        """
        verdicts = {one.verdict(numbers.get(one.name, math.nan)) for one in self.expected} - {"not ours"}
        if not verdicts:
            return "not ours"
        if "not shown" in verdicts:
            return "not shown"
        figures = any(one.published is not None and not one.native for one in self.expected)
        return "shown" if figures and "shown in part" not in verdicts else "shown in part"
