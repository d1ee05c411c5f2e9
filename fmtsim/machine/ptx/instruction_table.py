# SPDX-License-Identifier: Apache-2.0
"""The table of instructions: rows by spelled opcode, and patterns that spell them."""

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fmtsim.machine.ptx.values import bits

Opcode = tuple[str, ...]


class Row(NamedTuple):
    """The semantics of one spelled opcode."""

    semantics: Callable[..., Any]  # of the operands' vectors
    results: tuple[str, ...]  # kinds
    operands: tuple[str, ...]
    section: str  # of the PTX ISA


TABLE: dict[str, Row] = {}
_KINDS = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32", "tf32": "b32", "u16x2": "b32", "s16x2": "b32"}


def spelled(pattern: str) -> list[str]:
    """Return the opcodes of a pattern: ``add{|.sat}.{s32|u32}`` is four."""
    parts = [part.split("|") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def row(pattern: str, results: str, operands: str, section: str) -> Callable[[Callable], Callable]:
    """Add the rows of a pattern.

    Kinds are names, or ``t`` for the opcode's last type, ``w`` for one of twice its width, ``d`` for the last but one,
    ``p`` for a predicate where the opcode joins one (``setp.lt.and.s32``).

    The semantics takes the opcode, then the operands.
    """

    def add(semantics: Callable) -> Callable:
        for name in spelled(pattern):
            opcode = tuple(name.split("."))
            last = _KINDS.get(opcode[-1], opcode[-1])
            wide = f"{last[0]}{2 * bits(last)}" if "w" in results.split() else ""
            named = {"t": last, "w": wide, "d": _KINDS.get(opcode[-2], opcode[-2])}
            named |= {"p": "pred"} if {"and", "or", "xor"} & set(opcode[1:]) else {"p": ""}
            kinds = [tuple(k for kind in text.split() if (k := named.get(kind, kind))) for text in (results, operands)]
            assert name not in TABLE, name
            TABLE[name] = Row(partial(semantics, opcode), kinds[0], kinds[1], section)
        return semantics

    return add


ANY_INT = "{u16|s16|u32|s32|u64|s64}"
BITS = "{b16|b32|b64}"
FTZ = "{|.ftz}"
