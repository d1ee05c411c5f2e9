# SPDX-License-Identifier: Apache-2.0
"""How a real number is rounded: the table of modes that every engine indexes, and the options of stochastic rounding.

A new mode is one row of ``RULES`` and one name in ``Mode``.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from fmtsim.support.errors import FormatError, did_you_mean, shown
from fmtsim.support.records import lists_fields

Mode = Literal[
    "nearest_even", "nearest_away", "nearest_toward_zero", "nearest_to_odd", "toward_zero", "up", "down", "to_odd",
    "stochastic",
]  # fmt: skip
MODES: tuple[Mode, ...] = get_args(Mode)

Alias = Literal["nearest", "rne", "rn", "rna", "rtz", "rz", "rtp", "ru", "rd", "sr"]
RoundingName = Mode | Alias
ALIASES: dict[str, Mode] = {
    "nearest": "nearest_even", "rne": "nearest_even", "rn": "nearest_even", "rna": "nearest_away",
    "rtz": "toward_zero", "rz": "toward_zero", "rtp": "up", "ru": "up", "rd": "down", "sr": "stochastic",
}  # fmt: skip
"""Short names, of IEEE 754's literature and of PTX."""


class Rule(NamedTuple):
    """A rounding mode: whether a magnitude moves up from its candidate, the value next to it toward zero.

    Attributes:
        takes: What the mode prefers, in words: of a tie where it rounds to nearest, else of every inexact number.
        condition: True if the magnitude moves up, by four bits: the round bit (the discarded fraction is 1/2 or more
            of the last place), the sticky bit (something beside that half is discarded), whether the candidate's code
            is odd, and the sign. An exact number has neither of the first two and never moves.
        random: Whether a random word decides about what the condition lets move.
    """

    takes: str
    condition: Callable[[bool, bool, bool, bool], bool]
    random: bool = False

    @property
    def code(self) -> int:
        """The integer by which engines know the mode: the truth table of its condition.

        Bit ``8 * half + 4 * sticky + 2 * odd + negative`` is the condition's value, bit 16 is ``random``.
        """
        cases = itertools.product((False, True), repeat=4)  # in the order of their bits; an exact number never moves
        return sum(self.condition(*bits) << case for case, bits in enumerate(cases) if case >= 4) | self.random << 16

    def threshold(self, odd: bool, negative: bool) -> int:
        """Return from which discarded fraction d on a magnitude moves: 0 never, 1 d > 1/2, 2 d >= 1/2, 3 d > 0."""
        return sum(self.condition(half, sticky, odd, negative) for half, sticky in ((0, 1), (1, 0), (1, 1)))  # type: ignore[arg-type]

    @property
    def looks_at_parity(self) -> bool:
        """Whether the mode asks if the candidate's code is odd."""
        return any(self.threshold(False, negative) != self.threshold(True, negative) for negative in (False, True))

    @property
    def is_nearest(self) -> bool:
        """Whether only ties are the mode's to decide."""
        return all(self.threshold(odd, negative) in (1, 2) for odd in (False, True) for negative in (False, True))

    @property
    def ties_toward_zero(self) -> bool:
        """Whether no tie moves away from zero. Where no value lies toward zero, such a mode takes that of x's sign."""
        return all(self.threshold(odd, negative) < 2 for odd in (False, True) for negative in (False, True))

    def leaves_range(self, negative: bool) -> bool:
        """Return True if a finite number beyond the largest value may become infinite, by a code that is odd."""
        return self.condition(True, True, True, negative)


RULES: dict[Mode, Rule] = {
    "nearest_even": Rule("the even code", lambda half, sticky, odd, negative: half and (sticky or odd)),
    "nearest_away": Rule("the larger magnitude", lambda half, sticky, odd, negative: half),
    "nearest_toward_zero": Rule("the smaller magnitude", lambda half, sticky, odd, negative: half and sticky),
    "nearest_to_odd": Rule("the odd code", lambda half, sticky, odd, negative: half and (sticky or not odd)),
    "toward_zero": Rule("the neighbour nearer to zero", lambda half, sticky, odd, negative: False),
    "up": Rule("the neighbour above", lambda half, sticky, odd, negative: (half or sticky) and not negative),
    "down": Rule("the neighbour below", lambda half, sticky, odd, negative: (half or sticky) and negative),
    "to_odd": Rule("the neighbour with the odd code", lambda half, sticky, odd, negative: (half or sticky) and not odd),
    "stochastic": Rule("either", lambda half, sticky, odd, negative: half or sticky, random=True),
}
CODES: dict[Mode, int] = {mode: rule.code for mode, rule in RULES.items()}


@lists_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Describe a rounding.

    Args:
        mode: One of ``MODES``, or a short name of one (``ALIASES``), which becomes it; letter case does not matter.
        random_bits: Bits of the random word that stochastic rounding uses, 1 to 32. None means 32, which covers all
            discarded bits of every float32 value down to 2**-32 of the last place.
        variant: How those r bits decide (IEEE P3109 draft, StochasticA/B/C). With d the discarded fraction of the
            last place and w the random integer of r bits, the result moves away from zero when
            ``"a"``: ``floor(d * 2**r) + w >= 2**r``;
            ``"b"``: ``floor(d * 2**(r+1)) + 2w + 1 >= 2**(r+1)``;
            ``"c"``: ``rne(d * 2**r) + w >= 2**r``.
        layout: Where the bits come from: ``"word"``, the top bits of a word of its own for each element, or
            ``"cvt_rs"``, the way Blackwell's ``cvt.rs`` shares one word among 4 elements (8 bits) or 2 (13, 16 bits).
    """

    mode: Mode = field(default="nearest_even", kw_only=False)
    random_bits: int | None = None
    variant: Literal["a", "b", "c"] = "a"
    layout: Literal["word", "cvt_rs"] = "word"

    if TYPE_CHECKING:  # what is taken is more than what fields hold

        def __init__(
            self, mode: RoundingName = "nearest_even", *, random_bits: int | None = None,
            variant: Literal["a", "b", "c"] = "a", layout: Literal["word", "cvt_rs"] = "word",
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in MODES:
            object.__setattr__(self, "mode", _mode_named(self.mode))
        if self.random_bits is not None and (type(self.random_bits) is not int or not 1 <= self.random_bits <= 32):
            raise FormatError(f"random_bits={shown(self.random_bits)} is not allowed; choose 1 to 32, or None for all")
        if not isinstance(self.variant, str) or self.variant not in ("a", "b", "c"):
            raise FormatError(f"stochastic variant {shown(self.variant)} is unknown; choose 'a', 'b' or 'c'")
        if not isinstance(self.layout, str) or self.layout not in ("word", "cvt_rs"):
            raise FormatError(f"random bit layout {shown(self.layout)} is unknown; choose 'word' or 'cvt_rs'")
        if self.layout == "cvt_rs" and (self.random_bits not in (8, 13, 16) or self.variant != "a"):
            raise FormatError(
                f"layout='cvt_rs' with random_bits={self.random_bits}, variant={shown(self.variant)} does not exist; "
                "choose random_bits 8, 13 or 16 and variant 'a'"
            )
        if self.mode != "stochastic" and (self.random_bits is not None or self.layout != "word"):
            raise FormatError(
                f"random_bits and layout belong to rounding='stochastic', not {shown(self.mode)}; leave them out"
            )

    @property
    def bits(self) -> int:
        """Random bits in use."""
        return 32 if self.random_bits is None else self.random_bits

    @property
    def rule(self) -> Rule:
        """The mode's row of the table."""
        return RULES[self.mode]


def _mode_named(name: object) -> Mode:
    """Return the mode of a short name or of another letter case; raise FormatError for anything else."""
    word = name.strip().lower() if isinstance(name, str) else ""
    mode = ALIASES.get(word) or next((mode for mode in MODES if mode == word), None)
    if mode is not None:
        return mode
    if word == "rtn":
        hint = ": toward negative is 'down', round to nearest 'nearest_even'"
    else:
        hint = did_you_mean(name, MODES)
    raise FormatError(f"unknown rounding {shown(name)}{hint} (choose one of {', '.join(MODES)})")


def get_rounding(rounding: str | Rounding, random_bits: int | None = None) -> Rounding:
    """Return the Rounding of a name, or the record itself; raise FormatError for anything else."""
    if isinstance(rounding, str):
        return Rounding(mode=rounding, random_bits=random_bits)  # type: ignore[arg-type]  # the record validates it
    if not isinstance(rounding, Rounding):
        raise FormatError(f"rounding={shown(rounding)} is not a name or a Rounding; choose one of {', '.join(MODES)}")
    if random_bits is not None:
        raise FormatError("random_bits is given twice: in the Rounding record and as an argument; pass one of them")
    return rounding
