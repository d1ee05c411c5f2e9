# SPDX-License-Identifier: Apache-2.0
"""The plan book: what cuBLASLt chooses for runs of sizes, in one file of which a lookup reads some hundred bytes."""

import bisect
import json
import struct
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from operator import index
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from fmtsim.gemm.targets.question import (
    CUTLASS,
    LARGEST,
    WINDOW,
    Choice,
    Kind,
    Question,
    deflate,
    from_planes,
    inflate,
    kind_from_list,
    kind_to_list,
    pack,
    planes,
    unpack,
)
from fmtsim.support.errors import ArgumentError, DataError, shown
from fmtsim.support.files import StrPath, write_file

Along = Literal["m", "k"]
Runs = tuple[tuple[int, Choice | None], ...]

MAGIC: Final = b"fmtsim plan book"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<16sHIII")  # magic, version, bytes of the header and of the body, crc32 of both
_BLOCK = 64  # families that are decompressed for a lookup
_FIXED: dict[str, tuple[str, str]] = {"m": ("n", "k"), "k": ("m", "n")}
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, struct.error, zlib.error, MemoryError,
            RecursionError)  # fmt: skip

EVERY_K: Final = 512  # along K all sizes up to this one are asked, larger ones lie apart
ROWS: Final = ((64, 1), (512, 4), (2048, 16), (16384, 64))
"""Numbers of rows that are asked, so far apart up to a number, and each number's successor with them."""


class Family(NamedTuple):
    """The library's choices for calls that differ in one size.

    kind, layout, batch: As in ``Question``.
    along: The size that varies.
    sizes: The other two, in the order m, n, k.
    runs: ``(first size, choice)``, sizes ascending; a choice holds up to the next run. None: no choice is known, as
        beyond the last size that was asked.
    step: Choices are those of multiples of it alone. A family of a smaller step has the sizes between.
    """

    kind: Kind
    layout: int
    along: Along
    sizes: tuple[int, int]
    runs: Runs
    batch: int = 1
    step: int = 1


class Run(NamedTuple):
    """An entry of a book: a choice, and from which size to which it holds; no last one where it holds from there on."""

    choice: Choice
    along: Along
    first: int
    last: int | None
    step: int = 1

    def certain(self, question: Question) -> bool:
        """Return whether the sizes around a question were asked densely enough for what was chosen.

        Between values of K that lie apart, CUTLASS kernels' splits change: 29 of 20,000 such choices were others, and
        in float32 43 of 4,776 splits of any kernel.
        Between numbers of rows that lie apart, a choice is certain where both of them have it; where it changes in
        between, it may change more than once (777x16x4096 in bfloat16, which an H200 did not add as the book says).
        """
        if self.along == "k":
            changes = self.choice.algorithm in CUTLASS or (question.kind.a == "fp32" and self.choice.split > 1)
            return question.k <= EVERY_K or not changes
        m, apart = question.m, _apart(question.m)
        low = m // apart * apart
        last_asked = low + self.step * (_apart(low) > self.step)
        return m in (low, last_asked) or (self.first <= last_asked and (self.last or m + apart) >= low + apart)

    def describe(self, question: Question) -> str:
        """Return the sizes that the entry of a question is about, in words."""
        kind, m, n, k = question.kind, question.m, question.n, question.k
        sizes = f"[*, {k}] x [{k}, {n}]" if self.along == "m" else f"[{m}, *] x [*, {n}]"
        last = "" if self.last is None else f" <= {self.last}"
        return f"{kind.a} {sizes}, {self.first} <= {self.along.upper()}{last}"


def _apart(m: int) -> int:
    return next((apart for most, apart in ROWS if m <= most), 1)


class Book:
    """A file of families. Opening reads nothing; the first lookup reads the file and checks it.

    Example:
        >>> import torch
        >>> from fmtsim.gemm.targets.book import Book, Family, book_bytes
        >>> from fmtsim.gemm.targets.question import Choice, Kind, Question
        >>> kind = Kind("bf16", "bf16", torch.bfloat16)
        >>> runs = ((1, Choice(66, 3, 2)), (65, Choice(66)), (16385, None))
        >>> book = Book(book_bytes([Family(kind, 0, "m", (4096, 14336), runs)], library="NVIDIA H200"), "example")
        >>> book.find(Question(kind, 0, 64, 4096, 14336))
        Choice(algorithm=66, split=3, reduction=2, custom=0, stages=0)
        >>> book.run(Question(kind, 0, 70, 4096, 14336)).last, book.find(Question(kind, 0, 70, 4096, 4096))
        (16384, None)
    """

    def __init__(self, content: bytes | Path, name: str) -> None:
        """Take a file's bytes, or where they are; ``name`` is what errors call the file."""
        self._content, self.name = content, name

    @classmethod
    def open(cls, path: StrPath) -> "Book":
        """Return the book in a file.

        Raises:
            DataError: There is no such file. A damaged one is found by the first lookup.
        """
        path = Path(path)
        if not path.is_file():
            raise DataError(f"{path}: No such file; a plan book lies there, which fmtsim calibrate --book makes")
        return cls(path, str(path))

    @property
    def library(self) -> str:
        """GPU, library and versions that were asked, as in ``Target.library``."""
        return self._contents.library

    @property
    def source(self) -> str:
        """Where the answers come from."""
        return self._contents.source

    @property
    def aliases(self) -> dict[Kind, Kind]:
        """Kinds whose calls are answered as those of another kind."""
        return dict(self._contents.aliases)

    def __len__(self) -> int:
        """Return the number of families."""
        return sum(len(section.keys) for sections in self._contents.sections.values() for section in sections)

    def find(self, question: Question) -> Choice | None:
        """Return what the library chooses, None where the book does not say.

        Raises:
            DataError: The file is not a book, is damaged, or cannot be read.
        """
        run = self.run(question)
        return None if run is None else run.choice

    def run(self, question: Question) -> Run | None:
        """Return the entry that a question falls under, None where there is none."""
        contents = self._contents
        kind, layout, m, n, k, batch = question
        silent: set[str] = set()
        for section in contents.sections.get((contents.aliases.get(kind, kind), layout, batch), ()):
            size, sizes = (m, (n, k)) if section.along == "m" else (k, (m, n))
            if section.along in silent or size % section.step or (rank := section.rank(*sizes)) is None:
                continue
            if (run := section.entry(size, self._runs(section, rank))) is not None:
                return run
            silent.add(section.along)  # finer steps were not asked about sizes of a coarser one
        return None

    def families(self) -> Iterator[Family]:
        """Yield all families, in the order of the file."""
        for (kind, layout, batch), sections in self._contents.sections.items():
            for section in sections:
                for rank, key in enumerate(section.keys):
                    sizes = key >> 32, key & 0xFFFFFFFF
                    yield Family(kind, layout, section.along, sizes, self._runs(section, rank), batch, section.step)

    def _runs(self, section: "_Section", rank: int) -> Runs:
        try:
            starts, numbers = section.unpacked(rank)
            return tuple(zip(starts, (self._contents.choices[number] for number in numbers), strict=True))
        except _DAMAGED as error:
            raise self._damaged(error) from None

    def _damaged(self, error: object) -> DataError:
        return DataError(f"{self.name} is damaged as a plan book ({error}); make it anew with fmtsim calibrate --book")

    @cached_property
    def _contents(self) -> "_Contents":
        content = self._content
        if isinstance(content, Path):
            try:
                content = content.read_bytes()
            except OSError as error:
                raise DataError(f"cannot read {self.name}: {error.strerror}") from None
        if not content.startswith(MAGIC[: max(len(content), 1)]):
            raise DataError(f"{self.name} is not a plan book; fmtsim calibrate --book makes one")
        try:
            _, version, header, body, checksum = _HEAD.unpack_from(content)
        except struct.error:
            raise self._damaged(f"it ends after {len(content)} bytes") from None
        if version != VERSION:
            raise DataError(f"{self.name} is a plan book of version {version}, and this fmtsim reads {VERSION}; "
                            "make it anew with fmtsim calibrate --book")  # fmt: skip
        if len(content) != _HEAD.size + header + body:
            raise self._damaged(f"it has {len(content)} bytes instead of {_HEAD.size + header + body}")
        if zlib.crc32(content[_HEAD.size :]) != checksum:
            raise self._damaged("its checksum is wrong")
        try:
            return _read(content[_HEAD.size : _HEAD.size + header], content[_HEAD.size + header :])
        except _DAMAGED as error:
            raise self._damaged(error) from None


class _Contents(NamedTuple):
    library: str
    source: str
    aliases: dict[Kind, Kind]
    choices: list[Choice | None]
    sections: dict[tuple[Kind, int, int], list["_Section"]]


class _Section(NamedTuple):
    """Families of one kind, layout, batch and varying size, in the order of their fixed sizes.

    Every ``stride``-th lies in ``samples``, which are the dictionary of the blocks that hold the others.
    """

    along: Along
    step: int
    stride: int
    keys: "array[int]"
    samples: bytes
    ends: list[int]
    blocks: memoryview

    def rank(self, first: int, second: int) -> int | None:
        key = first << 32 | second
        rank = bisect.bisect_left(self.keys, key)
        return rank if rank < len(self.keys) and self.keys[rank] == key and second < 1 << 32 else None

    def unpacked(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the first sizes and the numbers of the choices of a family's runs."""
        sampled, place = divmod(rank, self.stride)
        if not place:
            return unpack(self.samples, -(-len(self.keys) // self.stride), sampled)
        others = len(self.keys) - -(-len(self.keys) // self.stride)
        block, place = divmod(rank - sampled - 1, _BLOCK)
        packed = self.blocks[self.ends[block] : self.ends[block + 1]]
        return unpack(inflate(packed, self.samples), min(_BLOCK, others - block * _BLOCK), place)

    def entry(self, size: int, runs: Runs) -> Run | None:
        place = bisect.bisect_right(runs, size, key=lambda run: run[0]) - 1
        first, choice = runs[place] if place >= 0 else (0, None)
        if choice is None:
            return None
        last = runs[place + 1][0] - 1 if place + 1 < len(runs) else None
        return Run(choice, self.along, first, last, self.step)


def book_bytes(
    families: Iterable[Family], *, library: str, source: str = "", aliases: Mapping[Kind, Kind] | None = None
) -> bytes:
    """Return the file of a book: the same families in any order give the same bytes.

    Args:
        families: Families, each once.
        library: GPU, library and versions that were asked.
        source: Where the answers come from.
        aliases: Kinds whose calls the library answers as those of another kind.

    Raises:
        ArgumentError: A family is there twice, or one is not possible; the message has it.
    """
    sections: dict[Any, dict[tuple[int, int], Runs]] = defaultdict(dict)
    for family in families:
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
        "aliases": sorted([kind_to_list(a), kind_to_list(b)] for a, b in (aliases or {}).items()),
        "choices": choices,
        "sections": [
            [kind_to_list(head[0]), *head[1:], *writer.section(sections[head], numbers)]
            for head in sorted(sections, key=_section_order)
        ],
    }
    header = zlib.compress(json.dumps(record, separators=(",", ":")).encode(), 9)
    checksum = zlib.crc32(writer.body, zlib.crc32(header))
    return _HEAD.pack(MAGIC, VERSION, len(header), len(writer.body), checksum) + header + writer.body


def write_book(path: StrPath, families: Iterable[Family], **facts: Any) -> int:
    """Write a book, whole or not at all, and return its size; arguments and errors as for ``book_bytes``."""
    content = book_bytes(families, **facts)
    write_file(path, content)
    return len(content)


def _section_order(head: tuple[Kind, int, int, str, int]) -> tuple[Any, ...]:
    kind, layout, batch, along, step = head
    return kind_to_list(kind), layout, batch, along, -step  # coarse steps are looked at first


def _named(family: Family) -> str:
    fixed = ", ".join(f"{name}={size}" for name, size in zip(_FIXED[family.along], family.sizes, strict=True))
    return f"the family {tuple(family.kind)} layout={family.layout} batch={family.batch} {fixed}"


def _checked(family: Family) -> Runs:
    """Return the runs of a family, equal neighbours as one."""
    if family.along not in _FIXED:
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
        """Add a section; return count, stride, and begin and size of its keys, samples, ends of blocks and blocks."""
        keys = sorted(group)
        runs = [[(start, numbers[choice]) for start, choice in group[key]] for key in keys]
        stride = -(-len(pack(runs)) // WINDOW)
        samples = pack(runs[::stride])
        others = [key_runs for rank, key_runs in enumerate(runs) if rank % stride]
        blocks = [deflate(pack(others[i : i + _BLOCK]), samples) for i in range(0, len(others), _BLOCK)]
        firsts = np.diff([first for first, _ in keys], prepend=0)
        sizes, lengths = planes([*firsts, *(second for _, second in keys)], 4), planes([*map(len, blocks)], 3)
        pieces = (deflate(sizes), deflate(samples), deflate(lengths), b"".join(blocks))
        return [len(keys), stride, *(number for piece in pieces for number in (self._add(piece), len(piece)))]

    def _add(self, piece: bytes) -> int:
        if piece not in self._offsets:
            self._offsets[piece] = len(self.body)
            self.body += piece
        return self._offsets[piece]


def _read(header: bytes, body: bytes) -> _Contents:
    record = json.loads(zlib.decompressobj().decompress(header, LARGEST))
    choices: list[Choice | None] = [None, *(Choice(*map(index, numbers)) for numbers in record["choices"])]
    sections: dict[tuple[Kind, int, int], list[_Section]] = defaultdict(list)
    for kind, layout, batch, along, step, count, stride, *pieces in record["sections"]:
        keys, samples, lengths, blocks = (
            memoryview(body)[begin : begin + size] for begin, size in zip(pieces[::2], pieces[1::2], strict=True)
        )
        first, second = from_planes(inflate(keys), 4).reshape(2, count)
        ends = [0, *np.cumsum(from_planes(inflate(lengths), 3)).tolist()]
        packed_keys = array("Q", (np.cumsum(first) << np.uint64(32) | second).tobytes())
        if along not in _FIXED or index(step) < 1 or index(stride) < 1:
            raise ValueError("a section is not possible")
        sections[kind_from_list(kind), index(layout), index(batch)].append(
            _Section(along, step, stride, packed_keys, inflate(samples), ends, blocks)
        )
    aliases = {kind_from_list(a): kind_from_list(b) for a, b in record["aliases"]}
    return _Contents(str(record["library"]), str(record["source"]), aliases, choices, dict(sections))
