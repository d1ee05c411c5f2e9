# SPDX-License-Identifier: Apache-2.0
"""Plan files: what they hold of a GPU with its library, read from JSON, checked, and written as JSON."""

import bisect
import json
import lzma
import struct
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np

from fmtsim.gemm.targets.kernel import Kernel, Rule, Splits
from fmtsim.gemm.targets.learned import Learned
from fmtsim.gemm.targets.question import (
    CUTLASS,
    DEFAULT,
    LARGEST,
    Architecture,
    Choice,
    Kind,
    Question,
    Settings,
    decompress,
    find_settings,
    from_planes,
    kind_from_list,
)
from fmtsim.gemm.units.unit import PLANS, get_unit
from fmtsim.support.errors import ArgumentError, DataError, shown
from fmtsim.support.files import StrPath
from fmtsim.support.records import READERS, at, check_types, located, record_fields, record_of

Along = Literal["m", "k"]
Runs = tuple[tuple[int, Choice | None], ...]

MAGIC: Final = b"fmtsim plan book"
VERSION: Final = 2
HEAD: Final = struct.Struct("<16sHIII")  # magic, version, bytes of the header and of the body, crc32 of both
FIXED: dict[str, tuple[str, str]] = {"m": ("n", "k"), "k": ("m", "n")}
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, struct.error, zlib.error,
            lzma.LZMAError, MemoryError, RecursionError)  # fmt: skip

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

    @property
    def group(self) -> tuple[Any, ...]:
        """What families have in common that differ in their steps."""
        return self.kind, self.layout, self.batch, self.along, self.sizes


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
        # F.linear in bfloat16, N = 16, K = 4096: 2 parts for M = 777, 778, 780 and 783, 3 for 776, 784 and 785; with 3
        # parts 26 of 12,432 results differ at M = 777 (H200, 2026-11-24).
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


def file_beside(folder: Path, name: str) -> Path:
    """Return the path of a file that lies in a folder, or comes with fmtsim; one in the folder where there is none."""
    return next((file for file in (folder / name, PLANS / name) if file.is_file()), folder / name)


class Book:
    """A file of families. Opening reads nothing; the first lookup reads the file and checks it.

    A file may be the difference to that of another GPU, its base, which is asked for what the file lacks.

    Example:
        >>> import torch
        >>> from fmtsim.gemm.targets.planfile import Book, Family
        >>> from tools.calibrate.book_writer import book_bytes
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
            raise DataError(
                f"{path}: No such file; a plan book lies there, which python -m tools.calibrate --book makes"
            )
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

    @property
    def checksum(self) -> int:
        """Checksum of the file, by which differences to it know it."""
        return self._contents.checksum

    def __len__(self) -> int:
        """Return the number of families in the file, without those of a base."""
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
        silent: set[str] = set()  # sizes that were asked about without an answer
        for section in contents.sections.get((contents.aliases.get(kind, kind), layout, batch), ()):
            size, sizes = (m, (n, k)) if section.along == "m" else (k, (m, n))
            if section.along in silent or size % section.step or (rank := section.rank(*sizes)) is None:
                continue
            if (run := section.entry(size, self._runs(section, rank))) is not None:
                return run
            silent.add(section.along)  # finer steps were not asked about sizes of a coarser one
        return None if contents.base is None else contents.base.run(question)

    def families(self) -> Iterator[Family]:
        """Yield all families, in the order of the file, then those of a base that the file does not replace."""
        stored = list(self._stored())
        yield from stored
        if self._contents.base is not None:
            groups = {family.group for family in stored}
            yield from (family for family in self._contents.base.families() if family.group not in groups)

    def _stored(self) -> Iterator[Family]:
        for (kind, layout, batch), sections in self._contents.sections.items():
            for section in sections:
                for rank, key in enumerate(section.keys):
                    sizes = key >> 32, key & 0xFFFFFFFF  # a key is both fixed sizes, 32 bits each
                    yield Family(kind, layout, section.along, sizes, self._runs(section, rank), batch, section.step)

    def _runs(self, section: "_Section", rank: int) -> Runs:
        try:
            starts, numbers = section.unpacked(rank)
            return tuple(zip(starts, (self._contents.choices[number] for number in numbers), strict=True))
        except _DAMAGED as error:
            raise self._damaged(error) from None

    def _damaged(self, error: object) -> DataError:
        return DataError(
            f"{self.name} is damaged as a plan book ({error}); make it anew with python -m tools.calibrate --book"
        )

    @cached_property
    def _contents(self) -> "_Contents":
        # 1. the file, its length and its checksum
        content = self._content
        if isinstance(content, Path):
            try:
                content = content.read_bytes()
            except OSError as error:
                raise DataError(f"cannot read {self.name}: {error.strerror}") from None
        if not content.startswith(MAGIC[: max(len(content), 1)]):  # a file that ends early is damaged, no other file
            raise DataError(f"{self.name} is not a plan book; python -m tools.calibrate --book makes one")
        try:
            _, version, header, body, checksum = HEAD.unpack_from(content)
        except struct.error:
            raise self._damaged(f"it ends after {len(content)} bytes") from None
        if version != VERSION:
            raise DataError(f"{self.name} is a plan book of version {version}, and this fmtsim reads {VERSION}; "
                            "make it anew with python -m tools.calibrate --book")  # fmt: skip
        if len(content) != HEAD.size + header + body:
            raise self._damaged(f"it has {len(content)} bytes instead of {HEAD.size + header + body}")
        if zlib.crc32(content[HEAD.size :]) != checksum:
            raise self._damaged("its checksum is wrong")
        try:
            # 2. the header: choices by number (0 is none), and where the pieces of each section begin in the body
            record = json.loads(zlib.decompressobj().decompress(content[HEAD.size : HEAD.size + header], LARGEST))
            choices: list[Choice | None] = [None, *(Choice(*map(index, numbers)) for numbers in record["choices"])]
            sections: dict[tuple[Kind, int, int], list[_Section]] = defaultdict(list)
            data = memoryview(content)[HEAD.size + header :]  # sections keep views of it
            for kind, layout, batch, along, step, count, *pieces in record["sections"]:
                keys, *packed = (
                    data[begin : begin + size] for begin, size in zip(pieces[::2], pieces[1::2], strict=True)
                )
                # 3. a section: the fixed sizes of its families as one key of 64 bits, the first size as differences
                first, second = from_planes(decompress(keys), 4).reshape(2, count)
                packed_keys = array("Q", (np.cumsum(first) << np.uint64(32) | second).tobytes())
                if along not in FIXED or index(step) < 1 or len(packed) != 3:
                    raise ValueError("a section is not possible")
                sections[kind_from_list(kind), index(layout), index(batch)].append(
                    _Section(along, step, packed_keys, packed)
                )
            aliases = {kind_from_list(a): kind_from_list(b) for a, b in record["aliases"]}
            contents = _Contents(
                str(record["library"]), str(record["source"]), aliases, choices, dict(sections), checksum
            )
            # 4. the book that the file is the difference to, by its name and checksum
            if record.get("base") is None:
                return contents
            name, expected = record["base"]
            folder = self._content.parent if isinstance(self._content, Path) else PLANS
            base = Book.open(file_beside(folder, name))
            if base.checksum != expected:
                raise DataError(f"{self.name} is the difference to another {name} than {base.name}; make it anew with "
                                "python -m tools.calibrate --book")  # fmt: skip
            return contents._replace(base=base)
        except _DAMAGED as error:
            raise self._damaged(error) from None


class _Contents(NamedTuple):
    library: str
    source: str
    aliases: dict[Kind, Kind]
    choices: list[Choice | None]
    sections: dict[tuple[Kind, int, int], list["_Section"]]
    checksum: int
    base: Book | None = None


class _Section:
    """Families of one kind, layout, batch and varying size, in the order of their fixed sizes, ``keys``.

    ``packed``: compressed, how many runs each family has; words of the low 16 bits of a run's first size and of its
    choice's number; the high bits of the sizes.
    """

    def __init__(self, along: Along, step: int, keys: "array[int]", packed: list[memoryview]) -> None:
        self.along, self.step, self.keys, self._packed = along, step, keys, packed

    def rank(self, first: int, second: int) -> int | None:
        key = first << 32 | second
        rank = bisect.bisect_left(self.keys, key)
        return rank if rank < len(self.keys) and self.keys[rank] == key and second < 1 << 32 else None

    @cached_property
    def _columns(self) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
        """Where the runs of each family end, and of all runs the first sizes and the numbers of choices."""
        lengths, words, highs = map(decompress, self._packed)
        low, numbers = np.frombuffer(words, "<u2").reshape(-1, 2).T
        starts = low | np.frombuffer(highs, np.uint8).astype(np.uint32) << np.uint32(16)
        ends = np.cumsum(np.append(0, from_planes(lengths, 2).astype(np.int64)))
        if len(ends) != len(self.keys) + 1 or ends[-1] != len(starts):
            raise ValueError("a section has another size than its families")
        return ends, starts, numbers

    def unpacked(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the first sizes and the numbers of the choices of a family's runs."""
        ends, starts, numbers = self._columns
        runs = slice(*ends[rank : rank + 2])
        return starts[runs].tolist(), numbers[runs].tolist()

    def entry(self, size: int, runs: Runs) -> Run | None:
        place = bisect.bisect_right(runs, size, key=lambda run: run[0]) - 1
        first, choice = runs[place] if place >= 0 else (0, None)
        if choice is None:
            return None
        last = runs[place + 1][0] - 1 if place + 1 < len(runs) else None
        return Run(choice, self.along, first, last, self.step)


READERS[Kernel] = Kernel.from_dict
_CHANGES = ("library", "architecture", "source", "kernels", "rules")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFile:
    """Describe a GPU and its library: units by operand formats, kernels, and rules that say which one runs.

    Args:
        name: Name of the target.
        library: GPU, library and versions.
        source: Where the rules come from.
        units: ``(inputs, accumulate, unit)``: the first that fits is the unit of a call.
        kernels: By name, how each orders its sums.
        splits: By name, rules for the number of parts of K.
        rules: Which kernel runs for which calls; the first rule that fits counts.
        architecture: Of the GPU, which cuBLASLt's orders depend on; None where its algorithms are not named.
        books: The library's recorded choices: files beside the plan file, or that come with fmtsim. Of those that have
            a call the first that is certain counts.
        trees: Decision trees for calls that the books lack: files likewise, of which the first that has a kind of calls
            counts. A plan file names one of either, or lists them: ``"book": ["h200.book", "h200_small.book"]``.
        settings: Settings of the process.
        overrides: How many rules, from the first, are about calls that another library than cuBLASLt computes: they
            come before the books.
    """

    name: str
    library: str
    source: str
    units: tuple[tuple[tuple[str, ...], str, str], ...]
    kernels: dict[str, Kernel]
    splits: dict[str, Splits]
    rules: tuple[Rule, ...]
    architecture: Architecture | None = None
    books: tuple[Book, ...] = ()
    trees: tuple[Learned, ...] = ()
    settings: Settings = DEFAULT
    overrides: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        # 1. the fields by themselves
        if not 0 <= self.overrides <= len(self.rules):
            raise ArgumentError(f"overrides={self.overrides} is not possible; choose from 0 to {len(self.rules)} rules")
        if self.architecture is None and (self.books or self.trees):
            raise ArgumentError(
                "a book and trees name algorithms, whose orders depend on the GPU; give the architecture, 'sm_90'"
            )
        # 2. units take what the file says of them
        for inputs, accumulate, unit in self.units:
            for name in inputs:
                get_unit(unit).find(name, name, accumulate)
        # 3. rules name kernels and splits of the file
        for number, rule in enumerate(self.rules):
            with located(f"rules[{number}]"):
                if rule.kernel not in self.kernels:
                    raise ArgumentError(f"kernel={rule.kernel!r} is not listed; kernels are {', '.join(self.kernels)}")
                if isinstance(rule.split, str) and rule.split not in self.splits:
                    raise ArgumentError(f"split={rule.split!r} is not listed; splits are {', '.join(self.splits)}")

    @classmethod
    def from_dict(cls, record: dict[str, Any], path: str = "", folder: Path = PLANS) -> Self:
        """Build a plan file from what ``to_dict`` returns; raise ArgumentError or FormatError where it is not one.

        Args:
            record: The record.
            path: What errors call it.
            folder: Where its book and trees lie, unless they come with fmtsim.
        """
        fields = record_fields(record, path, "a Target")

        def file(what: str, name: Any) -> Path:
            if not isinstance(name, str) or Path(name).name != name or len(name) > 200:  # of 255 that file systems take
                raise at(path, ArgumentError, f"{what}={shown(name)} is not the name of a file beside the plan file")
            return file_beside(folder, name)

        with located(path):
            for what, field, open_file in (("book", "books", Book.open), ("trees", "trees", Learned.open)):
                names = fields.pop(what, None)
                names = names if isinstance(names, list) else [] if names is None else [names]
                fields[field] = tuple(open_file(file(what, name)) for name in names)  # opening reads nothing
            if "settings" in fields:
                fields["settings"] = find_settings(fields["settings"])
        return record_of(cls, fields, path)  # type: ignore[no-any-return]

    def changed(self, name: str, record: dict[str, Any]) -> Self:
        """Return the plan file whose base this one is: another GPU or source, and rules that come before this one's.

        Raises:
            ArgumentError: The record has other fields, or a kernel by the name of one of the base.
        """
        if (other := next((key for key in record if key not in _CHANGES), None)) is not None:
            raise ArgumentError(f"{other!r} does not go with 'base', which settings, {', '.join(_CHANGES)} change")
        if not record:
            return self
        same = {"library": self.library, "source": self.source, "architecture": self.architecture}
        own = PlanFile.from_dict(
            {"name": name, "units": [], "kernels": {}, "splits": {}, "rules": [], **same, **record}
        )
        if both := own.kernels.keys() & self.kernels.keys():
            raise ArgumentError(f"kernel {min(both)!r} is one of {self.name}'s, whose rules name it; rename it")
        return replace(
            self, name=name, library=own.library, architecture=own.architecture, source=own.source,
            kernels=self.kernels | own.kernels, rules=own.rules + self.rules,  # the first rule that fits counts
            overrides=len(own.rules) + self.overrides,  # its own kernels come before the book's
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the plan file as plain JSON types."""
        books, trees = ([Path(file.name).name for file in files] for files in (self.books, self.trees))
        usual = DEFAULT._asdict()
        settings = {name: value for name, value in self.settings._asdict().items() if value != usual[name]}
        library = {
            "architecture": self.architecture,
            "book": books[0] if len(books) == 1 else books or None,
            "trees": trees[0] if len(trees) == 1 else trees or None,
            "settings": settings or None,
            "overrides": self.overrides or None,
        }
        return {
            "name": self.name,
            "library": self.library,
            "source": self.source,
            **{name: value for name, value in library.items() if value is not None},
            "units": [[list(inputs), accumulate, unit] for inputs, accumulate, unit in self.units],
            "kernels": {name: kernel.to_dict() for name, kernel in self.kernels.items()},
            "splits": {name: split.to_dict() for name, split in self.splits.items()},
            "rules": [
                {name: getattr(rule, name) for name in Rule.__dataclass_fields__ if getattr(rule, name) is not None}
                for rule in self.rules
            ],
        }
