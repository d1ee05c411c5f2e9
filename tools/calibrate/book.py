# SPDX-License-Identifier: Apache-2.0
"""Make a plan book: ask cuBLASLt, by many processes, what it takes for every number of rows of many layers."""

import itertools
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_args

import torch

from fmtsim.gemm.model_calls import FP8_STEP
from fmtsim.gemm.targets.ask import Asker
from fmtsim.gemm.targets.planfile import EVERY_K, ROWS, Along, Book, Family, Runs
from fmtsim.gemm.targets.question import Architecture, Choice, Kind, Question
from fmtsim.gemm.targets.target import Target, get_target, list_targets
from fmtsim.spec.call import LARGE_BLOCKS
from fmtsim.support.errors import ArgumentError
from fmtsim.support.executors import AnyExecutor, Tasks, open_tasks
from fmtsim.support.progress import Progress
from tools.calibrate.book_writer import write_book

T = TypeVar("T")


@lru_cache(maxsize=1)
def asker(open_library: Callable[[], Asker]) -> Asker:
    """Return what asks in this process."""
    return open_library()


MOST = 16384  # rows, or tokens of a weight's gradient
CHUNK = 8  # families, or thousands of held-out questions, that a process is handed at once
DIED: Final = (
    "a process that asks the library died; the file has what was asked, go on by the same command, or with fewer "
    "--workers"
)
_SAVED = 20  # times as long as it takes to write the file passes before it is written again
# Tokens that are asked are so far apart up to a number, as ROWS; changes between two of them are bisected.
_TOKENS: Final = ((EVERY_K, 1), (4096, 32), (MOST, 128))


def _kinds() -> dict[str, Kind]:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    kinds = {name: Kind(name, name, out) for name, out in half.items()}
    kinds |= {f"{name}_fp32": Kind(name, name, torch.float32) for name in half}
    kinds |= {
        "tf32": Kind("tf32", "tf32", torch.float32, "tf32"),
        "fp32": Kind("fp32", "fp32", torch.float32),
        "fp16_sums": Kind("fp16", "fp16", torch.float16, "16f"),
    }
    kinds |= {f"{name}_bias": kinds[name]._replace(bias=True) for name in ("bf16", "fp16", "tf32", "fp32", "fp16_sums")}
    fp8 = Kind("e4m3", "e4m3", torch.bfloat16, scaling="tensor", fast_accum=True)
    kinds["fp8"] = fp8
    outs = {**half, "fp32": torch.float32}
    kinds |= {f"fp8_{out}": fp8._replace(out=dtype) for out, dtype in {**outs, "e4m3": torch.float8_e4m3fn}.items()}
    for a, b in (("e5m2", "e4m3"), ("e4m3", "e5m2")):
        kinds |= {f"fp8_{a}_{b}_{out}": fp8._replace(a=a, b=b, out=dtype) for out, dtype in outs.items()}
    del kinds["fp8_bf16"]
    kinds["fp8_rows"] = fp8._replace(scaling="row")
    kinds["fp8_blocks"] = fp8._replace(scaling="block_128", fast_accum=False)
    kinds["fp8_row_blocks"] = fp8._replace(scaling="row_block_128", fast_accum=False)
    return kinds


KINDS: Final = _kinds()
"""Kinds of calls that a book has, by name."""


def choose_kinds(text: str | None) -> list[Kind]:
    """Read names of kinds, separated by commas; None is all of them.

    Raises:
        ArgumentError: There is no such kind.
    """
    if text is None:
        return list(KINDS.values())
    names = [word.strip() for word in text.split(",") if word.strip()]
    wrong = next((name for name in names if name not in KINDS), None)
    if wrong is not None or not names:
        raise ArgumentError(f"--kinds {wrong or text!r} is not possible; choose from {', '.join(KINDS)}")
    return [KINDS[name] for name in names]


def lattice(count: int, low: int = 64, high: int = 32768) -> list[tuple[int, int]]:
    """Return all pairs of so many sizes between two, multiples of 64 at about equal ratios."""
    if count < 2:
        return []
    sizes = sorted({64 * round(low / 64 * (high / low) ** (i / (count - 1))) for i in range(count)})
    return list(itertools.product(sizes, sizes))


def small_layers() -> list[tuple[int, int]]:
    """Return outputs and inputs of layers of small models: usual widths, vocabularies and numbers of classes."""
    widths = [*range(16, 256, 16), *range(256, 449, 32), 512]
    others = [8, 24, 40, 200, 216, 300, 336, 344, 400, 480, 576, 600, 640, 650, 672, 688, 704, 720, 768,
              800, 832, 896, 960, 1024]  # fmt: skip
    outputs = [*range(1, 8), 9, 10, 12, 20, 50, 97, 100, 101, 127, 200, 250, 257, 300, 400, 500, 1000, 1001, 1003,
               1024, 2000, 2048]  # fmt: skip
    layers = [(width, wide) for width in range(36, 257, 4)
              for wide in (width // 2, width, *range(2 * width, 5 * width, width), width // 3 * 8)]  # fmt: skip
    pairs = itertools.chain(
        itertools.product(widths, widths), itertools.product(others, widths), itertools.product(widths, others),
        itertools.product(outputs, widths), layers, ((wide, width) for width, wide in layers),
        itertools.product((100, 128, 256, 500, 512, 1000, 1024), range(36, 257, 4)),
    )  # fmt: skip
    return list(dict.fromkeys(pairs))


def families_of(shapes: Iterable[tuple[int, int]], kinds: Iterable[Kind]) -> list[Family]:
    """Return the families of linear layers, without runs: forward, and the gradients of input and weight.

    Args:
        shapes: Outputs and inputs of layers.
        kinds: Kinds of calls; with a bias forward alone, FP8 where torch takes outputs and inputs.
    """
    families: dict[Family, None] = {}
    for (n, k), kind in itertools.product(dict.fromkeys(shapes), list(kinds)):
        narrow = kind.scaling != "none"
        if narrow and (n % FP8_STEP or k % FP8_STEP):
            continue
        rows = 4 if kind.scaling in LARGE_BLOCKS else 1  # the library refuses others
        passes: list[tuple[int, Along, tuple[int, int], int]] = [(0, "m", (n, k), rows)]
        if not kind.bias:
            passes.append((0 if narrow else 1, "m", (k, n), rows))
            steps = (FP8_STEP,) if narrow else (8, 4, 2, 1)  # tokens of every residue, whose rows begin anywhere
            passes += [(0 if narrow else 2, "k", (n, k), step) for step in steps]
        families |= dict.fromkeys(
            Family(kind, layout, along, sizes, (), 1, step) for layout, along, sizes, step in passes
        )
    return list(families)


def question(family: Family, size: int) -> Question:
    """Return the question of a family about one size."""
    m, n, k = (size, *family.sizes) if family.along == "m" else (*family.sizes, size)
    return Question(family.kind, family.layout, m, n, k, family.batch)


def sizes_of(family: Family, most: int = MOST) -> tuple[list[int], int]:
    """Return the sizes that are asked first, ``most`` at most, and what lies between two sizes of the family.

    Rows that lie apart are asked in pairs: choices change at multiples of a tile's rows and just beyond; one of each
    pair alone would leave ten times as many wrong choices. Of a family of a step below 8 along K, only sizes are asked
    that no family of twice the step has.
    """
    stride = 2 * family.step if family.along == "k" and family.step < 8 else family.step
    begin = family.step
    result = [begin]
    for last, apart in ROWS if family.along == "m" else _TOKENS:
        apart = -(-apart // stride) * stride
        pair = (0, stride) if family.along == "m" and apart > stride else (0,)
        sizes = range(begin + apart, last + 1, apart)
        result += [size + beyond for size in sizes for beyond in pair if size + beyond <= most]
        begin = sizes[-1]
    end = most - (most - family.step) % stride
    return result if result[-1] == end else [*result, end], stride


def runs_of(ask: Callable[[int], Choice | None], sizes: Sequence[int], stride: int) -> Runs:
    """Return where a choice changes: sizes that are asked, and changes between two of them by bisection."""
    runs: list[tuple[int, Choice | None]] = [(sizes[0], ask(sizes[0]))]
    for before, size in itertools.pairwise(sizes):
        waiting = [(before, runs[-1][1], size, ask(size))]
        while waiting:
            low, first, high, last = waiting.pop()
            if first == last:
                continue
            if high - low <= stride:
                runs.append((high, last))
                continue
            middle = low + (high - low) // stride // 2 * stride
            choice = ask(middle)
            waiting += [(middle, choice, high, last), (low, first, middle, choice)]
    return (*runs, (sizes[-1] + 1, None)) if runs[-1][1] is not None else tuple(runs)


@dataclass(slots=True)
class Made:
    """Tell what came of making a book."""

    families: int = 0  # families in the book
    asked: int = 0  # those that were asked now
    size: int = 0  # bytes of the file
    checked: int = 0  # questions that were asked again, at random, by family
    different: list[Question] = field(default_factory=list)  # questions among them that the book answers otherwise


def make_book(
    path: Path, families: Sequence[Family], open_library: Callable[[], Asker], *, library: str, source: str = "",
    similar: Mapping[Kind, Kind] | None = None, workers: int | None = None, check: int = 20000,
    base: Book | None = None, progress: Progress | None = None, executor: AnyExecutor = None, most: int = MOST,
) -> Made:  # fmt: skip
    """Ask for all families that a file lacks, and write it: as it grows, at the end, and when interrupted.

    Args:
        path: The book, which may exist.
        families: Families, without runs.
        open_library: Opens the library in a process; what makes it has to be importable.
        library: GPU, library and versions.
        source: Where the answers come from.
        similar: Other kinds, and those of families that may be answered alike: so many questions are asked of both as
            of the whole book in the end, and where no answer differs the book has them as aliases.
        workers: Processes, None for as many as there are cores.
        check: Questions about other sizes that are asked at the end and compared with the book.
        base: Book of another GPU, to which the file is the difference in the end; all its families have to be asked.
        progress: Shows how it comes along.
        executor: Asks instead of processes; its workers open the library, which refuses where it is another one.
        most: Rows, or tokens of a weight's gradient, that are asked about.

    Raises:
        ArgumentError: The file is of another GPU or library, or ``base`` has families that neither the file nor
            ``families`` has; nothing is asked then.
        DeviceError: The library cannot be asked, or a process died.
        DataError: The file is not a book, or cannot be written.
    """
    progress, book = progress or Progress(), _Growing(path, library, source)
    if base is not None:
        available = book.known.keys() | set(families)
        if unasked := sum(family._replace(runs=()) not in available for family in base.families()):
            raise ArgumentError(
                f"--base: {base.name} has {unasked:,} families of sizes that would not be asked here; ask for the same "
                "models, shapes and --lattice, or leave --base out"
            )
    missing = [family for family in families if family not in book.known]
    similar = {other: kind for other, kind in (similar or {}).items() if other not in book.aliases}
    work = len(missing) + check * len(similar) // 500
    workers = max(1, min(workers or len(os.sched_getaffinity(0)), 32, work // CHUNK))
    with open_tasks(open_library, executor, workers=workers, threads=1, died=DIED) as tasks:
        try:
            progress.stage("families", len(missing))
            for chunk, runs in tasks.each_done(
                partial(_runs_of_chunk, most=most), _chunks(missing, CHUNK), progress, 0
            ):
                book.add(chunk, runs)
            progress.stage("kinds that are answered alike", len(similar) * check)
            book.aliases |= _alike(tasks, families, similar, check, progress)
        finally:
            size = book.write()
        if base is not None:
            size = book.write(base)
        result = Made(len(book.known), len(missing), size)
        drawn = _drawn(families, check, book.aliases, most)
        progress.stage("held-out questions", len(drawn))
        for asked, answers in tasks.each_done(_answers, _chunks(drawn, 500), progress, 0):
            result.checked += len(asked)
            result.different += [x for x, choice in zip(asked, answers, strict=True) if book.read.find(x) != choice]
    return result


class _Growing:
    """A book that is being made: what it has, and when it was written."""

    def __init__(self, path: Path, library: str, source: str) -> None:
        self.path, self.known, self.aliases = path, dict[Family, Runs](), dict[Kind, Kind]()
        self._facts: dict[str, Any] = {"library": library, "source": source}
        self._written, self._took = time.monotonic(), 1.0
        if not path.exists():
            return
        book = Book.open(path)
        if book.library != library:
            raise ArgumentError(f"--book {path} is of {book.library}, and this is {library}; name another file")
        self.known, self.aliases = {family._replace(runs=()): family.runs for family in book.families()}, book.aliases

    @cached_property
    def read(self) -> Book:
        return Book.open(self.path)

    def add(self, families: Sequence[Family], runs: Sequence[Runs]) -> None:
        """Add families, and write the file where that was long ago."""
        self.known |= zip(families, runs, strict=True)
        if time.monotonic() - self._written > max(_SAVED * self._took, 30.0):
            self.write()

    def write(self, base: Book | None = None) -> int:
        """Write the file, and return its size; nothing where there is nothing to write."""
        self._written = time.monotonic()
        families = (family._replace(runs=runs) for family, runs in self.known.items())
        size = write_book(self.path, families, aliases=self.aliases, base=base, **self._facts) if self.known else 0
        self._took = time.monotonic() - self._written
        return size


def similar_kinds(kinds: Iterable[Kind]) -> dict[Kind, Kind]:
    """Return FP8 kinds that may be answered as others are, each with the other: of a bias, of use_fast_accum=False, and
    with scales that are not one for each tensor of other operands and results, too.
    """
    kinds, fp8 = list(kinds), ("e4m3", "e5m2")
    outs = (torch.bfloat16, torch.float16, torch.float32)
    similar = {}
    for kind in kinds:
        alike = [kind] if kind.scaling == "tensor" else []
        if kind.scaling not in ("none", "tensor"):
            alike = [kind._replace(a=a, b=b, out=out) for a, b, out in itertools.product(fp8, fp8, outs)]
        for candidate, bias, fast in itertools.product(alike, (False, True), {kind.fast_accum, False}):
            other = candidate._replace(bias=bias, fast_accum=fast)
            if (
                other not in kinds
                and not (bias and candidate.out == torch.float32)
                and (candidate.a, candidate.b) != ("e5m2", "e5m2")
            ):
                similar[other] = kind
    return similar


def book_target(path: Path, gpu: str, architecture: str, family: str) -> Target | None:
    """Return a target that follows a book; None where orders behind the library's choices are not known on such a GPU.

    Units, and rules for calls that the book lacks, are those of the target that comes with fmtsim for this GPU, or for
    another of its family; rules of another GPU are guesses, and its trees are left out.

    Args:
        path: The book; the target is named like it, and its plan file belongs beside it.
        gpu: Name of the GPU.
        architecture: ``"sm_90"``.
        family: Family of GPUs, by which units are named.
    """
    targets = [target for target in map(get_target, list_targets()) if family in target.families]
    if architecture not in get_args(Architecture) or not targets:
        return None
    same = [target for target in targets if target.library.partition(" (")[0].partition(",")[0] == gpu]
    base = (same or targets)[0]
    alike = lambda rule: bool(same) or rule.when == {"a": "int8"}  # noqa: E731, whose sums are alike everywhere
    rules = [rule if alike(rule) else replace(rule, basis="guess") for rule in base.rules]
    book = Book.open(path)
    source = (
        f"{len(book):,} families of sizes asked by python -m tools.calibrate --book; rules for other calls: {base.name}"
    )
    return replace(base, name=path.stem, library=book.library, source=source, rules=tuple(rules), books=(book,),
                   trees=base.trees if same else (), architecture=cast(Architecture, architecture))  # fmt: skip


def _chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _drawn(
    families: Sequence[Family], count: int, aliases: Mapping[Kind, Kind], most: int = MOST
) -> list[Question]:  # fmt: skip
    """Return questions about sizes drawn at random, half of them of an alias where there is one."""
    rng, drawn = random.Random(len(families)), []
    others: dict[Kind, list[Kind]] = defaultdict(list)
    for other, kind in aliases.items():
        others[kind].append(other)
    for _ in range(count if families else 0):
        family = rng.choice(families)
        step = family.step if family.kind.scaling != "none" else 1  # a family of another step may have the size
        asked = question(family, rng.randrange(step, most + 1, step))
        alias = rng.random() < 0.5 and others[family.kind]
        drawn.append(asked._replace(kind=rng.choice(alias)) if alias else asked)
    return drawn


def _alike(
    tasks: Tasks, families: Sequence[Family], similar: Mapping[Kind, Kind], count: int, progress: Progress
) -> dict[Kind, Kind]:  # fmt: skip
    """Return which kinds are answered as similar ones are, in every one of so many questions."""
    parts, different = [], Counter[Kind]()
    drawn = {kind: _drawn([x for x in families if x.kind == kind], count, {}) for kind in set(similar.values())}
    for other, kind in similar.items():
        parts += [(chunk, other) for chunk in _chunks(drawn[kind], 500)]
    for (_, other), number in tasks.each_done(_differences, parts, progress, 500):
        different[other] += number
    asked = {other for _, other in parts}
    return {other: kind for other, kind in similar.items() if other in asked and not different[other]}


def _runs_of_chunk(library: Callable[[], Asker], families: Sequence[Family], most: int = MOST) -> list[Runs]:
    runs = []
    for family in families:
        ask = lambda size, family=family: asker(library).choice(question(family, size))  # noqa: E731
        runs.append(runs_of(ask, *sizes_of(family, most)))
    return runs


def _answers(library: Callable[[], Asker], questions: Sequence[Question]) -> list[Choice | None]:
    return [asker(library).choice(question) for question in questions]


def _differences(library: Callable[[], Asker], part: tuple[Sequence[Question], Kind]) -> int:
    questions, other = part
    choice = asker(library).choice
    return sum(choice(question) != choice(question._replace(kind=other)) for question in questions)
