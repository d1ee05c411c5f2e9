"""Learn what cuBLASLt chooses: decision trees from its answers to random questions, held to answers they never saw."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fmtsim.calibration.asking import asker, processes, shared
from fmtsim.calibration.book import KINDS, similar_kinds
from fmtsim.errors import ArgumentError
from fmtsim.gemm.models import FP8_STEP
from fmtsim.gemm.targets.ask import Asker
from fmtsim.gemm.targets.learned import FEATURES, LEAF, Group, Tree, write_learned
from fmtsim.gemm.targets.question import Choice, Kind, Question
from fmtsim.progress import Progress
from fmtsim.spec.call import LARGE_BLOCKS
from fmtsim.verify.workers import pool_of

HELD_OUT = 100_000  # answers of every group, at least
LEAVES = 25_000  # of a tree
PURE = 1_000  # answers alike that make a leaf certain
AT_ONCE = 5_000  # questions that a process is handed
_ELEMENTS = 1 << 33  # of an operand or a result
_STEPS: Final = ((64, 0.25), (128, 0.10), (16, 0.15), (8, 0.15))  # shares of sizes that are multiples
Numbers = NDArray[np.int64]


class Topic(NamedTuple):
    """What one tree is about: kinds of calls that differ little, as unbatched or as batched products."""

    kinds: tuple[Kind, ...]
    batched: bool = False


def _topics() -> tuple[Topic, ...]:
    pairs = [("bf16", "bf16_fp32"), ("fp16", "fp16_fp32"), ("bf16_bias",), ("fp16_bias",), ("tf32",), ("tf32_bias",),
             ("fp16_sums",), ("fp16_sums_bias",)]  # fmt: skip
    topics = [Topic(tuple(KINDS[name] for name in names)) for names in pairs]
    others = similar_kinds(KINDS.values())
    for scalings in (("tensor",), ("row",), LARGE_BLOCKS):
        own = [kind for kind in KINDS.values() if kind.scaling in scalings]
        topics.append(Topic((*own, *(other for other, kind in others.items() if kind in own))))
    batched = ("bf16", "fp16", "tf32", "fp16_sums", "bf16_fp32", "fp16_fp32")
    return (*topics, Topic(tuple(KINDS[name] for name in batched), True))


TOPICS: Final = _topics()


def check_learner() -> None:
    """Raise ArgumentError where what grows trees is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise ArgumentError("--learn grows trees by scikit-learn, which is not installed; pip install scikit-learn")


def learn(
    path: Path, open_library: Callable[[], Asker], *, count: int, topics: Sequence[Topic] = TOPICS,
    workers: int = 1, leaves: int = LEAVES, progress: Progress | None = None,
) -> list[Group]:  # fmt: skip
    """Ask random questions, grow a tree for each topic, and write them.

    Args:
        path: The file to write.
        open_library: Opens the library in a process.
        count: Questions about each topic; a tenth of them, ``HELD_OUT`` at least, is held out.
        topics: What the trees are about.
        workers: Processes.
        leaves: Leaves that a tree has at most.
        progress: Shows how it comes along.

    Raises:
        ArgumentError: There are too few questions to hold any out, or scikit-learn is not installed.
        DeviceError: The library cannot be asked.
    """
    check_learner()
    progress, growing = progress or Progress(), []
    if count < 20:
        raise ArgumentError(f"{count} questions are too few to learn from; ask a million or more")
    with processes(open_library, workers) as pool, pool_of(min(workers, len(topics)), _nothing) as growers:
        for number, topic in enumerate(topics):
            asked = draw(topic, count, number)
            progress.stage(f"answers, {number + 1} of {len(topics)}", count)
            tasks = [(i, topic.kinds, asked[:, i : i + AT_ONCE]) for i in range(0, count, AT_ONCE)]
            labels, choices = np.zeros(count, np.int64), dict[Choice | None, int]()
            for (begin, _, part), (known, numbers) in shared(pool, _answers, tasks, progress, AT_ONCE):
                own = np.array([choices.setdefault(choice, len(choices)) for choice in known])
                labels[begin : begin + part.shape[1]] = own[numbers]
            growing.append(growers.submit(grow, topic, asked, list(choices), labels, leaves))
        progress.stage("trees", len(growing))
        grown = []
        for future in growing:
            grown.append(future.result())
            progress.step(len(grown))
    write_learned(path, grown)
    return [group for group, _ in grown]


def _nothing() -> None:
    """Prepare nothing in a process."""


def draw(topic: Topic, count: int, seed: int) -> Numbers:
    """Return random questions, int64 [6, count]: the number of the kind, layout, m, n, k, batch; the same everywhere.

    Sizes spread evenly over powers of two, and many are multiples of 8 to 128; a tenth are products with vectors.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    m, n, k = (_sizes(rng, count, top) for top in (14, 18, 18))
    layout = rng.permutation(np.arange(count) % 6)
    layout = np.where(layout > 3, 0, layout)
    kind = rng.integers(0, len(topic.kinds), count)
    batch = np.ones(count, np.int64)
    share = rng.integers(0, 100, count)
    m, n = np.where(share < 20, n, m), np.where(share < 20, m, n)
    m, k = np.where((share >= 20) & (share < 40), k, m), np.where((share >= 20) & (share < 40), m, k)
    m, n = np.where((share >= 40) & (share < 45), 1, m), np.where((share >= 45) & (share < 50), 1, n)
    if topic.batched:
        batch = 1 + _sizes(rng, count, 9)
        m, n, k = np.minimum(m, 8192), np.minimum(n, 8192), np.minimum(k, 16384)
    if topic.kinds[0].scaling != "none":
        step = 128 if topic.kinds[0].scaling in LARGE_BLOCKS else FP8_STEP
        layout, n, k = 0 * layout, -(-n // FP8_STEP) * FP8_STEP, -(-k // step) * step
        m = -(-m // 4) * 4 if step == 128 else m
    n = np.where(n * k * batch > _ELEMENTS, 16 * np.maximum(_ELEMENTS // (16 * k * batch), 1), n)
    widest = np.maximum(n, k) * batch
    m = np.where(m * widest > _ELEMENTS, 4 * np.maximum(_ELEMENTS // (4 * widest), 1), m)
    if not topic.batched:  # as torch names the layouts of vectors
        first = (layout <= 1) | (m == 1) | (k == 1)
        second = ((layout == 0) | (layout == 3)) & (n > 1) & (k > 1)
        layout = np.where(first, np.where(second, 0, 1), np.where(second, 3, 2))
    return np.stack([kind, layout, m, n, k, batch])


def _sizes(rng: np.random.Generator, count: int, top: int) -> Numbers:
    low = np.int64(1) << rng.integers(0, top, count)
    sizes, share, begin = low + rng.integers(0, 1 << 62, count) % low, rng.random(count), 0.0
    for step, part in _STEPS:
        chosen = (share >= begin) & (share < begin + part) & (sizes >= step)
        sizes, begin = np.where(chosen, sizes // step * step, sizes), begin + part
    return sizes


def _answers(task: tuple[int, tuple[Kind, ...], Numbers]) -> tuple[list[Choice | None], Numbers]:
    """Return the choices of some questions, each once, and which of them answers which question."""
    known: dict[Choice | None, int] = {}
    _, kinds, asked = task
    choice = asker().choice
    numbers = [known.setdefault(choice(Question(kinds[kind], *rest)), len(known)) for kind, *rest in asked.T.tolist()]
    return list(known), np.array(numbers)


def grow(
    topic: Topic, asked: Numbers, choices: Sequence[Choice | None], labels: Numbers, leaves: int
) -> tuple[Group, Tree]:
    """Return a tree of a topic's answers, and how often it is right about the last tenth of them.

    Args:
        topic: The topic.
        asked: Questions, as ``draw`` gives them.
        choices: All answers; None is a call that the library refuses, which is left out.
        labels: int64 [questions], an index of choices.
        leaves: Leaves at most.
    """
    from sklearn.tree import DecisionTreeClassifier  # type: ignore[import-not-found]

    order = sorted(range(len(choices)), key=lambda i: (choices[i] is None, choices[i] or ()))
    names = [choice for choice in (choices[i] for i in order) if choice is not None]
    labels = np.argsort(order)[labels]
    known = labels < len(names)
    asked, labels = asked[:, known], labels[known]
    columns = np.stack([feature(*asked) for feature in FEATURES], 1).astype(np.float32)
    learned = len(labels) - max(len(labels) // 10, min(HELD_OUT, len(labels) // 2))
    model = DecisionTreeClassifier(max_leaf_nodes=leaves, min_samples_leaf=2, random_state=0)
    model.fit(columns[:learned], labels[:learned])
    nodes = model.tree_
    classes = model.classes_[nodes.value[:, 0].argmax(1)]
    certain = (nodes.impurity < 1e-12) & (nodes.n_node_samples >= PURE)
    reached = nodes.apply(columns[learned:])
    right, sure = classes[reached] == labels[learned:], certain[reached]
    group = Group(topic.kinds, topic.batched, tuple(names), learned, len(right), int(right.sum()), int(sure.sum()),
                  int((right & sure).sum()))  # fmt: skip
    return group, _tree(nodes, classes, certain, columns[:learned])


def _tree(nodes: Any, classes: NDArray[Any], certain: NDArray[Any], columns: NDArray[np.float32]) -> Tree:
    """Return a learner's tree in the order in which it is walked, with the roundest thresholds that decide alike."""
    lows, highs = _gaps(nodes, columns)
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        if nodes.children_left[node] >= 0:
            waiting += [nodes.children_right[node], nodes.children_left[node]]
    walked = np.array(order)
    leaf = nodes.children_left[walked] < 0
    inner, ends = walked[~leaf], walked[leaf]
    return Tree(
        np.where(leaf, LEAF, nodes.feature[walked]).astype(np.uint8), _roundest(lows[inner], highs[inner]),
        classes[ends], certain[ends],
    )  # fmt: skip


def _gaps(nodes: Any, columns: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return for each node the largest feature that goes left and the smallest that goes right."""
    lows, highs = (np.full(nodes.node_count, end, np.float32) for end in (-np.inf, np.inf))
    at, rows = np.zeros(len(columns), np.int64), np.arange(len(columns))
    while len(rows):
        inner = nodes.children_left[at[rows]] >= 0
        rows = rows[inner]
        here = at[rows]
        values = columns[rows, nodes.feature[here]]
        left = values <= nodes.threshold[here]
        np.maximum.at(lows, here[left], values[left])
        np.minimum.at(highs, here[~left], values[~left])
        at[rows] = np.where(left, nodes.children_left[here], nodes.children_right[here])
    return lows, highs


def _roundest(low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return numbers from low on and below high with as few bits as will do."""
    found, left = low.copy(), np.ones(len(low), bool)
    for bits in range(24):
        step = np.exp2(np.floor(np.log2(np.maximum(np.abs(high), 1e-30))) - bits).astype(np.float32)
        tried = (np.ceil(low / step) * step).astype(np.float32)
        fits = left & (tried >= low) & (tried < high)
        found[fits], left = tried[fits], left & ~fits
    return found
