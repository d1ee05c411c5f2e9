# SPDX-License-Identifier: Apache-2.0
"""How a real number is rounded: the named modes and the options of stochastic rounding."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from fmtsim.support.errors import FormatError, did_you_mean, shown

Mode = Literal[
    "nearest_even", "nearest_away", "nearest_toward_zero", "toward_zero", "up", "down", "to_odd", "stochastic"
]
MODES: tuple[Mode, ...] = get_args(Mode)

Alias = Literal["nearest", "rne", "rn", "rna", "rtz", "rz", "rtp", "ru", "rd", "sr"]
RoundingName = Mode | Alias
ALIASES: dict[str, Mode] = {
    "nearest": "nearest_even", "rne": "nearest_even", "rn": "nearest_even", "rna": "nearest_away",
    "rtz": "toward_zero", "rz": "toward_zero", "rtp": "up", "ru": "up", "rd": "down", "sr": "stochastic",
}  # fmt: skip
"""Short names, of IEEE 754's literature and of PTX."""


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

    mode: Mode = "nearest_even"
    random_bits: int | None = None
    variant: Literal["a", "b", "c"] = "a"
    layout: Literal["word", "cvt_rs"] = "word"

    if TYPE_CHECKING:  # what is taken is more than what fields hold

        def __init__(
            self, *, mode: RoundingName = "nearest_even", random_bits: int | None = None,
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
