# SPDX-License-Identifier: Apache-2.0
"""Write plan books: the bytes of a file, whose equal pieces are stored once."""

import json
import lzma
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from fmtsim.formats.interop import dtype_name
from fmtsim.gemm.targets.planfile import FIXED, HEAD, MAGIC, VERSION, Book, Family, Runs
from fmtsim.gemm.targets.question import FILTERS, LARGEST, Choice, Kind
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.files import StrPath, write_file

WORDS: Final = ({**FILTERS[0], "lc": 0, "lp": 2, "pb": 2},)  # of words of 4 bytes


def kind_to_list(kind: Kind) -> list[Any]:
    """Return a kind of calls as plain JSON types, without settings where they are the usual ones."""
    fields = kind if kind.room or kind.reductions != "any" else kind[:-2]
    return [dtype_name(value) if isinstance(value, torch.dtype) else value for value in fields]


def planes(numbers: Sequence[int] | np.ndarray[Any, Any], width: int) -> bytes:
    """Return the lowest bytes of all numbers, then the next ones, which compresses well."""
    return np.asarray(numbers, dtype="<u4").view(np.uint8).reshape(-1, 4).T[:width].tobytes()


def compress(content: bytes, filters: Any = FILTERS) -> bytes:
    """Return bytes compressed."""
    return lzma.compress(content, lzma.FORMAT_RAW, filters=filters)


def book_bytes(
    families: Iterable[Family], *, library: str, source: str = "", aliases: Mapping[Kind, Kind] | None = None,
    base: Book | None = None,
) -> bytes:  # fmt: skip
    """Return the file of a book: the same families in any order give the same bytes.

    Args:
        families: Families, each once.
        library: GPU, library and versions that were asked.
        source: Where the answers come from.
        aliases: Kinds whose calls the library answers as those of another kind.
        base: A book that lies in the same folder, or comes with fmtsim, to which the file is the difference: of the
            sizes that both fix, families of all steps, where the choices of one are others.

    Raises:
        ArgumentError: A family is there twice, or one is not possible; the message has it.
    """
    sections: dict[Any, dict[tuple[int, int], Runs]] = defaultdict(dict)
    for family in families if base is None else _differing(families, base):
        runs = _checked(family)
        head = (family.kind, family.layout, family.batch, family.along, family.step)
        if family.sizes in sections[head]:
            raise ArgumentError(f"{_named(family)} is in the book twice; pass each family once")
        sections[head][family.sizes] = runs
    counted = Counter(choice for group in sections.values() for runs in group.values() for _, choice in runs)
    counted.pop(None, None)
    choices = sorted(counted, key=lambda choice: (-counted[choice], choice))
    numbers = {choice: i for i, choice in enumerate([None, *choices])}
    writer = _Writer()
    record = {
        "library": library,
        "source": source,
        **({} if base is None else {"base": [Path(base.name).name, base.checksum]}),
        "aliases": sorted([kind_to_list(a), kind_to_list(b)] for a, b in (aliases or {}).items()),
        "choices": choices,
        "sections": [
            [kind_to_list(head[0]), *head[1:], *writer.section(sections[head], numbers)]
            for head in sorted(sections, key=_section_order)
        ],
    }
    header = zlib.compress(json.dumps(record, separators=(",", ":")).encode(), 9)
    checksum = zlib.crc32(writer.body, zlib.crc32(header))
    return HEAD.pack(MAGIC, VERSION, len(header), len(writer.body), checksum) + header + writer.body


def write_book(path: StrPath, families: Iterable[Family], **facts: Any) -> int:
    """Write a book, whole or not at all, and return its size; arguments and errors as for ``book_bytes``."""
    content = book_bytes(families, **facts)
    write_file(path, content)
    return len(content)


def _differing(families: Iterable[Family], base: Book) -> list[Family]:
    """Return the families of groups that a base has otherwise; a group is answered by one of the two books alone."""
    base_runs = {family._replace(runs=()): family.runs for family in base.families()}
    families = list(families)
    groups = {family.group for family in families if base_runs.get(family._replace(runs=())) != _checked(family)}
    return [family for family in families if family.group in groups]


def _section_order(head: tuple[Kind, int, int, str, int]) -> tuple[Any, ...]:
    kind, layout, batch, along, step = head
    return kind_to_list(kind), layout, batch, along, -step  # coarse steps are looked at first


def _named(family: Family) -> str:
    fixed = ", ".join(f"{name}={size}" for name, size in zip(FIXED[family.along], family.sizes, strict=True))
    return f"the family {tuple(family.kind)} layout={family.layout} batch={family.batch} {fixed}"


def _checked(family: Family) -> Runs:
    """Return the runs of a family, equal neighbours as one."""
    if family.along not in FIXED:
        raise ArgumentError(f"along={shown(family.along)} is not possible; choose 'm' or 'k'")
    starts = [start for start, _ in family.runs]
    ascending = all(a < b for a, b in zip(starts, starts[1:], strict=False))
    if not starts or not ascending or not 0 < starts[0] <= starts[-1] < LARGEST:
        raise ArgumentError(f"{_named(family)} has runs that begin at {shown(starts)}; sizes ascend from 1")
    if not all(0 < size < 1 << 32 for size in (*family.sizes, family.batch, family.step)):
        raise ArgumentError(f"{_named(family)} has sizes that no product has; sizes, batch and step are 1 or more")
    return tuple(next(alike) for _, alike in groupby(family.runs, lambda run: run[1]))


class _Writer:
    """Collect the body of a file, in which equal pieces are stored once."""

    def __init__(self) -> None:
        self.body = b""
        self._offsets: dict[bytes, int] = {}

    def section(self, group: dict[tuple[int, int], Runs], numbers: dict[Choice | None, int]) -> list[int]:
        """Add a section; return its count, and begin and size of its keys and of what ``_Section`` calls packed."""
        keys = sorted(group)
        starts, choices = np.array([(start, numbers[choice]) for key in keys for start, choice in group[key]]).T
        firsts = np.diff([first for first, _ in keys], prepend=0)
        pieces = (
            compress(planes([*firsts, *(second for _, second in keys)], 4)),
            compress(planes([len(group[key]) for key in keys], 2)),
            compress(np.stack([starts & 0xFFFF, choices], 1).astype("<u2").tobytes(), WORDS),
            compress((starts >> 16).astype(np.uint8).tobytes()),
        )
        return [len(keys), *(number for piece in pieces for number in (self._add(piece), len(piece)))]

    def _add(self, piece: bytes) -> int:
        if piece not in self._offsets:
            self._offsets[piece] = len(self.body)
            self.body += piece
        return self._offsets[piece]
