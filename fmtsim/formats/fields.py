"""What the records of formats have in common: the names of their rules, and how a field is refused."""

from typing import Literal

from fmtsim.errors import FormatError

Overflow = Literal["saturate", "ieee"]
NanPolicy = Literal["max", "error"]

OVERFLOWS: tuple[Overflow, ...] = ("saturate", "ieee")
NAN_POLICIES: tuple[NanPolicy, ...] = ("max", "error")


def require(name: str, condition: bool, given: str, allowed: str) -> None:
    """Raise FormatError unless the condition holds."""
    if not condition:
        raise FormatError(f"format {name!r}: {given} is not allowed; choose {allowed}")


def require_code(name: str, bits: int, code: int) -> None:
    """Raise FormatError unless a code of so many bits is one."""
    if not 0 <= code < 1 << bits:
        raise FormatError(f"code {code} is outside {name} (0 to {(1 << bits) - 1})")
