# SPDX-License-Identifier: Apache-2.0
"""What the records of element formats have in common: the names of their rules, and how a field is refused."""

import math
from abc import abstractmethod
from typing import Literal

from fmtsim.formats.display import Displayed
from fmtsim.support.errors import FormatError, shown

Overflow = Literal["saturate", "ieee"]
NanPolicy = Literal["max", "error"]

OVERFLOWS: tuple[Overflow, ...] = ("saturate", "ieee")


class Element(Displayed):
    """An element format: a grid of values that saturates and has no NaN, unless the record says otherwise."""

    __slots__ = ()

    @property
    def default_overflow(self) -> Overflow:
        """The overflow rule that holds unless a verb names another."""
        return "saturate"

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return False

    @property
    @abstractmethod
    def max(self) -> float:
        """Largest finite value."""

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value: ``floor(log2(max))``."""
        return math.frexp(self.max)[1] - 1


def require(name: str, condition: bool, given: str, allowed: str) -> None:
    """Raise FormatError unless the condition holds."""
    if not condition:
        raise FormatError(f"format {shown(name)}: {given} is not allowed; choose {allowed}")


def require_code(name: str, bits: int, code: int) -> None:
    """Raise FormatError unless a code of so many bits is one."""
    if not 0 <= code < 1 << bits:
        raise FormatError(f"code {code} is outside {name} (0 to {(1 << bits) - 1})")
