# SPDX-License-Identifier: Apache-2.0
"""Learn what cuBLASLt chooses: ask it random questions, and grow decision trees from its answers."""

import importlib.util
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fmtsim.gemm.model_calls import FP8_STEP
from fmtsim.gemm.targets.ask import Asker
from fmtsim.gemm.targets.learned import Group
from fmtsim.gemm.targets.planfile import Book
from fmtsim.gemm.targets.question import Architecture, Choice, Kind, Question
from fmtsim.spec.call import LARGE_BLOCKS
from fmtsim.support.errors import ArgumentError
from fmtsim.support.executors import AnyExecutor, open_tasks
from fmtsim.support.progress import Progress
from tools.calibrate.book import KINDS, asker, similar_kinds, sizes_of
from tools.calibrate.grow import Numbers, Topic, grow
from tools.calibrate.learned_writer import write_learned

FEWEST: Final = 20  # questions about a topic
OF_A_FAMILY: Final = 24  # sizes
AT_ONCE: Final = 5_000  # questions that a process is handed
DIED: Final = (
    "a process that asks the library or grows a tree died, from lack of memory perhaps; nothing was written, and what "
    "was asked is lost: use fewer --workers, or fewer --questions"
)
_ELEMENTS: Final = 1 << 33  # of an operand or a result
_STEPS: Final = ((64, 0.25), (128, 0.10), (16, 0.15), (8, 0.15))  # shares of sizes that are multiples
_HEADS: Final = (32, 64, 64, 64, 80, 96, 128, 128, 128, 192, 256)


def _topics() -> tuple[Topic, ...]:
    """Return all topics; those whose trees take longest come first, to grow while others are asked."""
    others = similar_kinds(KINDS.values())

    def fp8(scalings: Sequence[str], leaves: int, share: float) -> Topic:
        kinds = [kind for kind in KINDS.values() if kind.scaling in scalings]
        alike = ([kind, *(other for other, same in others.items() if same == kind)] for kind in kinds)
        return Topic(tuple(itertools.chain(*alike)), False, leaves, share)  # next to each other, for trees to part

    def half(names: str, leaves: int, batched: bool = False, share: float = 1.0) -> Topic:
        return Topic(tuple(KINDS[name] for name in names.split()), batched, leaves, share)

    return (
        fp8(("tensor",), 30_000, 4.0),
        half("bf16 bf16_fp32 fp16 fp16_fp32", 60_000, True, 1.5), half("tf32", 30_000, True),
        half("bf16 bf16_fp32", 35_000), half("fp16 fp16_fp32", 35_000), half("tf32", 30_000), half("fp16_sums", 30_000),
        half("fp32", 50_000), half("fp32_bias", 20_000), half("fp32", 10_000, True),
        half("bf16_bias", 25_000), half("fp16_bias", 25_000),
        fp8(LARGE_BLOCKS, 15_000, 2.5),
        half("tf32_bias", 15_000), half("fp16_sums_bias", 15_000), half("fp16_sums", 10_000, True, 0.5),
        fp8(("row",), 1_000, 0.25),
    )  # fmt: skip


TOPICS: Final = _topics()
SMALL: Final = tuple(
    Topic((KINDS[name],), batched, 60_000, share, 600 if batched else 1100)
    for name, batched, share in (
        ("fp32", False, 1.0), ("bf16", False, 1.0), ("fp16", False, 1.0), ("fp32_bias", False, 0.6),
        ("bf16_bias", False, 0.6), ("fp16_bias", False, 0.6), ("fp32", True, 0.4), ("bf16", True, 0.4),
        ("fp16", True, 0.4),
    )
)  # fmt: skip
"""Topics of sizes of small models, which have trees of their own."""
_FEATURES: Final = (8, 10, 12, 16, 20, 24, 32, 40, 48, 50, 56, 64, 72, 80, 96, 100, 112, 120, 128, 144, 160, 176, 192,
                    200, 208, 224, 240, 256, 257, 288, 300, 320, 336, 352, 384, 400, 416, 448, 480, 500, 512, 544, 576,
                    600, 640, 672, 688, 704, 768, 800, 832, 896, 960, 1000, 1001, 1024)  # fmt: skip
_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 100, 128, 200, 256, 512, 1024)
_SMALL_HEADS: Final = (4, 8, 12, 16, 19, 20, 24, 32, 40, 48, 64, 80, 96, 128)


def check_learner() -> None:
    """Raise ArgumentError where what grows trees is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise ArgumentError("--learn grows trees by scikit-learn, which is not installed; pip install scikit-learn")


def learn(
    path: Path, open_library: Callable[[], Asker], *, count: int, architecture: Architecture | None = None,
    topics: Sequence[Topic] = TOPICS, workers: int = 1, progress: Progress | None = None,
    executor: AnyExecutor = None, answers: Path | None = None, books: Sequence[Book] = (),
) -> list[Group]:  # fmt: skip
    """Ask random questions, grow a tree for each topic that the library has answers about, and write them.

    Args:
        path: The file to write.
        open_library: Opens the library in a process.
        count: Questions about each topic at most, times its share; a twentieth, 100,000 at least, is held out.
        architecture: Of the GPU; None where the orders behind the library's choices are not known.
        topics: What the trees are about.
        workers: Processes.
        progress: Shows how it comes along.
        executor: Asks and grows instead of processes, as in ``make_book``.
        answers: A folder that keeps the answers, each topic's in ``answers_file``; what it has is not asked again.
        books: Of the same library; trees of small sizes learn from them, too.

    Raises:
        ArgumentError: There are too few questions to hold any out, or scikit-learn is not installed.
        DeviceError: The library cannot be asked, or a process died. Nothing is written then.
    """
    check_learner()
    progress, growing = progress or Progress(), []
    counts = [int(count * topic.share) for topic in topics]
    if min(counts) < FEWEST:
        raise ArgumentError(f"{count} questions are too few to learn from; ask a million or more")
    with open_tasks(open_library, executor, workers=workers, threads=1, died=DIED) as tasks:
        for number, (topic, most) in enumerate(zip(topics, counts, strict=True)):
            file = None if answers is None else answers_file(answers, topic)
            if file is not None and file.is_file():
                recorded = np.load(file)
                asked, labels = recorded["asked"].astype(np.int64), recorded["labels"].astype(np.int64)
                chosen = [(Choice(*row[:5]), row[5]) if row[0] >= 0 else None for row in recorded["answers"].tolist()]
            else:
                asked = draw(topic, most, number)
                width = asked.shape[1]
                progress.stage(f"answers, {number + 1} of {len(topics)}", width)
                parts = [(i, topic.kinds, asked[:, i : i + AT_ONCE]) for i in range(0, width, AT_ONCE)]
                labels, index_of = np.zeros(width, np.int64), dict[tuple[Choice, int] | None, int]()
                for (begin, _, part), (some, numbers) in tasks.each_done(_answers, parts, progress, AT_ONCE):
                    places = np.array([index_of.setdefault(answer, len(index_of)) for answer in some])
                    labels[begin : begin + part.shape[1]] = places[numbers]
                chosen = list(index_of)
                if file is not None:
                    rows = [(-1,) * 6 if answer is None else (*answer[0], answer[1]) for answer in chosen]
                    np.savez_compressed(file, asked=asked.astype(np.int32), answers=np.array(rows, np.int32),
                                        labels=labels.astype(np.uint16), architecture=architecture or "")  # fmt: skip
            choices, tiles = zip(*(answer or (None, 0) for answer in chosen), strict=True)
            if sum((labels == label).sum() for label, choice in enumerate(choices) if choice is not None) < FEWEST:
                continue  # the library refuses such calls
            more = book_answers(books, topic) if topic.most and books else None
            growing.append(tasks.submit(_grow, (topic, asked, choices, labels, architecture, tiles, more)))
        progress.stage("trees", len(growing))
        grown = []
        for tree in growing:
            grown.append(tasks.result(tree))
            progress.step(len(grown))
    write_learned(path, grown)
    return [group for group, _ in grown]


def _grow(library: Callable[[], Asker], part: Any) -> Any:
    return grow(*part)


def answers_file(folder: Path, topic: Topic) -> Path:
    """Return where a folder keeps the answers about a topic."""
    name = next(name for name, kind in KINDS.items() if kind == topic.kinds[0])
    return folder / f"{name}{'_batched' if topic.batched else ''}{'_small' if topic.most else ''}.npz"


def book_answers(books: Sequence[Book], topic: Topic) -> tuple[Numbers, list[Choice]]:
    """Return questions of a topic of small sizes, as ``draw`` does, and their answers: some of each family of books."""
    rng, rows, choices = random.Random(0), [], []
    for book in books:
        for family in book.families():
            alike = family.kind in topic.kinds and (family.batch > 1) == topic.batched
            if not alike or max(*family.sizes, family.batch) > topic.most:
                continue
            sizes = [size for size in sizes_of(family)[0] if size <= topic.most]
            for size in rng.sample(sizes, min(OF_A_FAMILY, len(sizes))):
                m, n, k = (size, *family.sizes) if family.along == "m" else (*family.sizes, size)
                run = book.run(Question(family.kind, family.layout, m, n, k, family.batch))
                if 1 not in (m, n, k) and run is not None:
                    rows.append((topic.kinds.index(family.kind), family.layout, m, n, k, family.batch))
                    choices.append(run.choice)
    return np.array(rows, np.int64).reshape(-1, 6).T, choices


def draw(topic: Topic, count: int, seed: int) -> Numbers:
    """Return different random questions, int64 [6, up to count]: the kind's number, layout, m, n, k, batch.

    Sizes spread evenly over powers of two, and many are multiples of 8 to 128; a tenth are products with vectors. Half
    of the questions has up to 8192 rows, and N and K up to 16384; a fourth the sizes of layers, N and K from 256 to
    32768. Of batches, three fourths are products of attention. FP8's choices differ for small results of long sums:
    half of its questions are about those. What is drawn twice is asked once, so that answers held out are new. A seed
    gives the same questions everywhere.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    usual = rng.integers(0, 4, count)
    layout, m, n, k = _small_products(rng, topic, count) if topic.most else _products(rng, usual)
    kind, batch = rng.integers(0, len(topic.kinds), count), np.ones(count, np.int64)
    if topic.batched:
        any_batch = 1 + _sizes(rng, count, 8 if topic.most else 9)
        attention = _small_attention(rng, topic.most, count) if topic.most else _attention(rng, count)
        either = zip(
            attention, (layout, np.minimum(m, 8192), np.minimum(n, 8192), np.minimum(k, 16384), any_batch),
            strict=True,
        )  # fmt: skip
        layout, m, n, k, batch = (np.where(usual > 0, *pair) for pair in either)
    elif topic.kinds[0].bias:  # torch adds it itself where N or K is 1
        n, k = np.maximum(n, 2), np.maximum(k, 2)
    if topic.kinds[0].scaling != "none":
        hard = rng.random(count) < 0.5
        m, k = np.where(hard, np.minimum(m, np.maximum(131072 // n, 1)), m), k + 5120 * hard
        step = 128 if topic.kinds[0].scaling in LARGE_BLOCKS else FP8_STEP
        layout, n, k = 0 * layout, -(-n // FP8_STEP) * FP8_STEP, -(-k // step) * step
        m = -(-m // 4) * 4 if step == 128 else m
    n = np.where(n * k * batch > _ELEMENTS, 16 * np.maximum(_ELEMENTS // (16 * k * batch), 1), n)
    widest = np.maximum(n, k) * batch
    m = np.where(m * widest > _ELEMENTS, 4 * np.maximum(_ELEMENTS // (4 * widest), 1), m)
    if not topic.batched:  # as torch names the layouts of vectors, but those of a batch of one
        first = (layout <= 1) | (m == 1) | (k == 1)
        second = ((layout == 0) | (layout == 3)) & (n > 1) & (k > 1)
        named = np.where(first, np.where(second, 0, 1), np.where(second, 3, 2))
        layout = np.where(rng.random(count) < (0.0 if topic.kinds[0].bias else 0.1), layout, named)
    asked = np.stack([kind, layout, m, n, k, batch])
    codes = (asked * rng.integers(1 << 62, size=(6, 1))).sum(0)  # of a question; they overflow
    return asked[:, np.sort(np.unique(codes, return_index=True)[1])]


def _products(rng: np.random.Generator, usual: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return layout, m, n and k: of all sizes where ``usual`` is 0, of layers where it is 3, else of common ones."""
    count = len(usual)
    m = _sizes(rng, count, np.where(usual == 0, 14, 13))
    n, k = (_sizes(rng, count, np.array((18, 14, 14, 15))[usual], 8 * (usual == 3)) for _ in range(2))
    layout, share = rng.permutation(np.arange(count) % 6), rng.integers(0, 100, count)
    m, n = np.where(share < 20, n, m), np.where(share < 20, m, n)
    m, k = np.where((share >= 20) & (share < 40), k, m), np.where((share >= 20) & (share < 40), m, k)
    m, n = np.where((share >= 40) & (share < 45), 1, m), np.where((share >= 45) & (share < 50), 1, n)
    return np.where(layout > 3, 0, layout), m, n, k


def _small_products(rng: np.random.Generator, topic: Topic, count: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return layout, m, n and k of products forward (0.3), of both gradients (0.2 and 0.3), and others."""
    features = [_mixed(rng, topic.most, count, _FEATURES) for _ in range(2)]
    tokens, (a, b, c) = _mixed(rng, topic.most, count, _TOKENS), (_any_size(rng, topic.most, count) for _ in range(3))
    role = rng.integers(0, 10, count)
    passes = [role < 3, role < 5, role < 8]
    m = np.select(passes, [tokens, tokens, features[0]], a)
    n = np.select(passes, [features[0], features[0], features[1]], b)
    k = np.select(passes, [features[1], features[1], tokens], c)
    return np.select(passes, [0, 1, 2], rng.integers(0, 4, count)), m, n, k


def _small_attention(
    rng: np.random.Generator, most: int, count: int
) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Return layout, m, n, k and batch of scores, values and gradients, in any layout."""
    tokens, others = (_mixed(rng, most, count, _TOKENS) for _ in range(2))
    others, head = np.where(rng.random(count) < 0.6, tokens, others), rng.choice(_SMALL_HEADS, count)
    form = rng.integers(0, 4, count)
    m = np.where(form == 3, head, tokens)
    n = np.select([form == 0, form == 3], [others, others], head)
    k = np.select([form == 0, form == 3], [head, tokens], others)
    batch = np.minimum(np.array((2, 3, 5, 1))[rng.integers(0, 4, count)] << rng.integers(0, 8, count), 256)
    return rng.integers(0, 4, count), m, n, k, np.maximum(batch, 2)


def _mixed(rng: np.random.Generator, most: int, count: int, common: Sequence[int]) -> Numbers:
    """Return sizes: half of them common ones, a fourth multiples of 8, others any."""
    share = rng.random(count)
    multiples = 8 * rng.integers(1, most // 8 + 1, count)
    usual = np.minimum(rng.choice(common, count), most)
    return np.select([share < 0.5, share < 0.75], [usual, multiples], _any_size(rng, most, count))


def _any_size(rng: np.random.Generator, most: int, count: int) -> Numbers:
    """Return sizes that spread evenly over powers of two, many of them multiples of 4 to 64."""
    sizes = np.exp(rng.uniform(0, np.log(most + 1), count)).astype(np.int64)
    step = rng.choice((1, 4, 8, 16, 64), count, p=(0.4, 0.1, 0.25, 0.15, 0.1))
    return np.clip(np.where(sizes >= step, sizes // step * step, sizes), 1, most)


def _attention(rng: np.random.Generator, count: int) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Return layout, m, n, k and batch of scores, values and gradients, a fourth of them in other layouts or sizes."""
    tokens, others, any_head = (_sizes(rng, count, top) for top in (12, 12, 10))
    heads = np.array(_HEADS)[rng.integers(0, len(_HEADS), count)]
    share = rng.integers(0, 100, count)
    head = np.where(share < 70, heads, np.where(share < 85, 8 * rng.integers(1, 33, count), any_head))
    others = np.where(rng.random(count) < 0.5, tokens, others)
    form = rng.integers(0, 4, count)
    m = np.where(form == 2, others, tokens)
    n = np.where((form == 0) | (form == 3), others, head)
    k = np.select([form == 0, form == 1, form == 2], [head, others, tokens], _sizes(rng, count, 12))
    layout = np.where((form == 3) | (rng.random(count) < 0.25), rng.integers(0, 4, count), form)
    batch = np.array((1, 1, 3, 3, 5, 7))[rng.integers(0, 6, count)] << rng.integers(0, 9, count)
    return layout, m, n, k, np.where(batch < 2, 2, batch)


def _sizes(rng: np.random.Generator, count: int, top: int | Numbers, least: int | Numbers = 0) -> Numbers:
    low = np.int64(1) << rng.integers(least, top, count)
    sizes, share, begin = low + rng.integers(0, 1 << 62, count) % low, rng.random(count), 0.0
    for step, part in _STEPS:
        chosen = (share >= begin) & (share < begin + part) & (sizes >= step)
        sizes, begin = np.where(chosen, sizes // step * step, sizes), begin + part
    return sizes


def _answers(
    library: Callable[[], Asker], part: tuple[int, tuple[Kind, ...], Numbers]
) -> tuple[list[tuple[Choice, int] | None], Numbers]:
    """Return the answers to some questions, each once, and which of them answers which question."""
    index_of: dict[tuple[Choice, int] | None, int] = {}
    _, kinds, asked = part
    answer = asker(library).answer
    numbers = [
        index_of.setdefault(answer(Question(kinds[kind], *rest)), len(index_of)) for kind, *rest in asked.T.tolist()
    ]
    return list(index_of), np.array(numbers)
