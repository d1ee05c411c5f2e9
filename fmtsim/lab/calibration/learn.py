# SPDX-License-Identifier: Apache-2.0
"""Learn what cuBLASLt chooses: ask it random questions, grow decision trees, test them on unseen answers."""

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fmtsim.gemm.model_calls import FP8_STEP
from fmtsim.gemm.targets.ask import Asker
from fmtsim.gemm.targets.cublaslt import Architecture, plainest, same_order
from fmtsim.gemm.targets.learned import FEATURES, LEAF, Group, Tree, write_learned
from fmtsim.gemm.targets.question import Choice, Kind, Question
from fmtsim.lab.calibration.book import KINDS, asker, processes, shared, similar_kinds
from fmtsim.lab.verify.workers import pool_that_ends
from fmtsim.spec.call import LARGE_BLOCKS
from fmtsim.support.errors import ArgumentError
from fmtsim.support.interrupts import unheard
from fmtsim.support.progress import Progress

BRANCHED: Final = 2_500_000  # answers at most that decide where a tree branches; the others count on its leaves
HELD_OUT: Final = 100_000  # answers at least that choose how many make a leaf certain, and as many that are held out
DOUBTS: Final = tuple(0.02 * 0.8**step for step in range(40))  # estimates of how often a certain leaf may be wrong
SURE: Final = 0.9998  # of the answers on certain leaves are right, by those that choose
Numbers = NDArray[np.int64]


class Topic(NamedTuple):
    """What one tree is about: kinds of calls that differ little, as unbatched or as batched products.

    kinds: The kinds.
    batched: They are batched.
    leaves: Leaves that the tree has at most.
    share: Of the questions that are asked about a topic, so many about this one.
    """

    kinds: tuple[Kind, ...]
    batched: bool = False
    leaves: int = 25_000
    share: float = 1.0


class Nodes(NamedTuple):
    """A tree as a learner has it: by node, a feature, its threshold, the children, -1 on leaves, and a leaf's label."""

    features: Numbers
    thresholds: NDArray[np.float32]
    lefts: Numbers
    rights: Numbers
    labels: Numbers


def grow(
    topic: Topic, asked: Numbers, choices: Sequence[Choice | None], labels: Numbers, architecture: Architecture | None
) -> tuple[Group, Tree]:
    """Return a tree of a topic's answers, and how often it is right about the last of them.

    An answer counts as right where its order is the tree's, whatever the choice behind it.

    Args:
        topic: The topic.
        asked: Questions, as ``draw`` gives them.
        choices: All answers; None is a call that the library refuses, which is left out.
        labels: int64 [questions], an index of choices.
        architecture: Of the GPU; None where the orders behind choices are not known, and choices alone are compared.
    """
    asked, names, labels = _named(topic, asked, choices, labels, architecture)
    held = max(len(labels) // 20, min(HELD_OUT, len(labels) // 4))
    learned = len(labels) - 2 * held
    columns = columns_of(asked)
    branched = min(learned, BRANCHED)
    nodes = _rounded(branches(columns[:branched], labels[:branched], topic.leaves), columns[:branched])
    reached = _reached(nodes, columns)
    right = _right(topic, asked, names, labels, nodes.labels[reached], architecture)
    certain = _certain(reached, right, learned, learned + held, len(nodes.labels))
    last, sure = right[-held:], certain[reached[-held:]]
    group = Group(topic.kinds, topic.batched, tuple(names), learned, held, int(last.sum()), int(sure.sum()),
                  int((last & sure).sum()))  # fmt: skip
    return group, _tree(nodes, certain)


def branches(columns: NDArray[np.float32], labels: Numbers, leaves: int) -> Nodes:
    """Return a tree of scikit-learn's that tells labels apart by columns."""
    from sklearn.tree import DecisionTreeClassifier  # type: ignore[import-not-found]

    model = DecisionTreeClassifier(max_leaf_nodes=leaves, min_samples_leaf=2, random_state=0).fit(columns, labels)
    tree = model.tree_
    likeliest = model.classes_[tree.value[:, 0].argmax(1)]
    thresholds = tree.threshold.astype(np.float32)
    return Nodes(tree.feature, thresholds, tree.children_left, tree.children_right, likeliest)


def columns_of(asked: Numbers) -> NDArray[np.float32]:
    """Return the features of questions."""
    columns = np.empty((asked.shape[1], len(FEATURES)), np.float32)
    for number, feature in enumerate(FEATURES):
        columns[:, number] = feature(*asked)
    return columns


def _named(
    topic: Topic, asked: Numbers, choices: Sequence[Choice | None], labels: Numbers, architecture: Architecture | None
) -> tuple[Numbers, list[Choice], Numbers]:
    """Return the questions that have answers, the names of all, in order, and each answer's; one name for an order."""
    known = np.array([choice is not None for choice in choices])[labels]
    asked, labels = asked[:, known], labels[known]
    named = dict[tuple[int, int, bool], Choice]()
    codes = (asked[0] * len(choices) + labels) * 2 + (asked[3] == 1)
    cases, where = np.unique(codes, return_inverse=True)
    for code in cases.tolist():
        kind, label, column = code // 2 // len(choices), code // 2 % len(choices), bool(code % 2)
        choice = choices[label]
        assert choice is not None
        question = Question(topic.kinds[kind], 0, 2, 1 if column else 2, 2)
        named[kind, label, column] = choice if architecture is None else plainest(choice, question)
    names = sorted(set(named.values()))
    return asked, names, np.array([names.index(name) for name in named.values()], np.int64)[where]


def _right(
    topic: Topic, asked: Numbers, names: Sequence[Choice], labels: Numbers, said: Numbers,
    architecture: Architecture | None,
) -> NDArray[np.bool_]:  # fmt: skip
    """Return for each answer whether what a tree said of it has its order."""
    right = labels == said
    for row in np.flatnonzero(~right).tolist() if architecture is not None else ():
        kind, *rest = asked[:, row].tolist()
        question = Question(topic.kinds[kind], *rest)
        right[row] = same_order(names[labels[row]], names[said[row]], question, architecture)  # type: ignore[arg-type]
    return right


def _certain(reached: Numbers, right: NDArray[np.bool_], learned: int, chosen: int, nodes: int) -> NDArray[np.bool_]:
    """Return the leaves that are wrong seldom enough: as often as keeps the answers after those learned right, none
    where nothing does. How often a leaf is wrong is estimated by Laplace's rule of succession.

    Args:
        reached: Each answer's leaf.
        right: Whether it is right there.
        learned: So many come first.
        chosen: Those from there to this place choose how seldom is enough.
        nodes: Of the tree.
    """
    wrong = np.bincount(reached[:learned][~right[:learned]], minlength=nodes)
    doubts = (wrong + 1) / (np.bincount(reached[:learned], minlength=nodes) + 2)
    there, good = doubts[reached[learned:chosen]], right[learned:chosen]
    enough = (most for most in DOUBTS if good[there <= most].sum() >= SURE * (there <= most).sum() > 0)
    return doubts <= next(enough, -1.0)


def _tree(nodes: Nodes, certain: NDArray[np.bool_]) -> Tree:
    """Return a tree in the order in which it is walked, without branches whose two leaves say the same."""
    lefts, rights, labels, certain = nodes.lefts.copy(), nodes.rights, nodes.labels.copy(), certain.copy()
    for node in range(len(lefts) - 1, -1, -1):  # children come behind their parents
        left, right = lefts[node], rights[node]
        if left < 0 or lefts[left] >= 0 or lefts[right] >= 0:
            continue
        if labels[left] == labels[right] and certain[left] == certain[right]:
            lefts[node], labels[node], certain[node] = -1, labels[left], certain[left]
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        if lefts[node] >= 0:
            waiting += [rights[node], lefts[node]]
    walked = np.array(order)
    leaf = lefts[walked] < 0
    ends = walked[leaf]
    features = np.where(leaf, LEAF, nodes.features[walked]).astype(np.uint8)
    return Tree(features, nodes.thresholds[walked[~leaf]], labels[ends], certain[ends])


def _steps(nodes: Nodes, columns: NDArray[np.float32], at: Numbers) -> Iterator[tuple[Numbers, NDArray[np.float32]]]:
    """Walk from the root, where ``at`` has all rows, to leaves, where it has them in the end.

    Yields:
        On each level the nodes of the rows that are at no leaf, and what these nodes compare.
    """
    rows = np.arange(len(columns))
    while len(rows := rows[nodes.lefts[at[rows]] >= 0]):
        here = at[rows]
        values = columns[rows, nodes.features[here]]
        yield here, values
        at[rows] = np.where(values <= nodes.thresholds[here], nodes.lefts[here], nodes.rights[here])


def _reached(nodes: Nodes, columns: NDArray[np.float32]) -> Numbers:
    """Return the leaf of each row."""
    at = np.zeros(len(columns), np.int64)
    for _ in _steps(nodes, columns, at):
        pass
    return at


def _rounded(nodes: Nodes, columns: NDArray[np.float32]) -> Nodes:
    """Return a tree with the roundest thresholds that decide alike about all rows."""
    lows, highs = (np.full(len(nodes.labels), end, np.float32) for end in (-np.inf, np.inf))
    for here, values in _steps(nodes, columns, np.zeros(len(columns), np.int64)):
        left = values <= nodes.thresholds[here]
        np.maximum.at(lows, here[left], values[left])
        np.minimum.at(highs, here[~left], values[~left])
    inner = nodes.lefts >= 0
    thresholds = nodes.thresholds.copy()
    thresholds[inner] = _roundest(lows[inner], highs[inner])
    return nodes._replace(thresholds=thresholds)


def _roundest(low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return numbers from low on and below high with as few bits as will do."""
    found, left = low.copy(), np.ones(len(low), bool)
    for bits in range(24):
        step = np.exp2(np.floor(np.log2(np.maximum(np.abs(high), 1e-30))) - bits).astype(np.float32)
        tried = (np.ceil(low / step) * step).astype(np.float32)
        fits = left & (tried >= low) & (tried < high)
        found[fits], left = tried[fits], left & ~fits
    return found


FEWEST: Final = 20  # questions about a topic
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
        own = [kind for kind in KINDS.values() if kind.scaling in scalings]
        alike = ([kind, *(other for other, same in others.items() if same == kind)] for kind in own)
        return Topic(tuple(itertools.chain(*alike)), False, leaves, share)  # next to each other, for trees to part

    def half(names: str, leaves: int, batched: bool = False, share: float = 1.0) -> Topic:
        return Topic(tuple(KINDS[name] for name in names.split()), batched, leaves, share)

    return (
        fp8(("tensor",), 30_000, 4.0),
        half("bf16 bf16_fp32 fp16 fp16_fp32", 60_000, True, 1.5), half("tf32", 30_000, True),
        half("bf16 bf16_fp32", 35_000), half("fp16 fp16_fp32", 35_000), half("tf32", 30_000), half("fp16_sums", 30_000),
        half("bf16_bias", 25_000), half("fp16_bias", 25_000),
        fp8(LARGE_BLOCKS, 15_000, 2.5),
        half("tf32_bias", 15_000), half("fp16_sums_bias", 15_000), half("fp16_sums", 10_000, True, 0.5),
        fp8(("row",), 1_000, 0.25),
    )  # fmt: skip


TOPICS: Final = _topics()


def check_learner() -> None:
    """Raise ArgumentError where what grows trees is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise ArgumentError("--learn grows trees by scikit-learn, which is not installed; pip install scikit-learn")


def learn(
    path: Path, open_library: Callable[[], Asker], *, count: int, architecture: Architecture | None = None,
    topics: Sequence[Topic] = TOPICS, workers: int = 1, progress: Progress | None = None,
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

    Raises:
        ArgumentError: There are too few questions to hold any out, or scikit-learn is not installed.
        DeviceError: The library cannot be asked, or a process died. Nothing is written then.
    """
    check_learner()
    progress, growing = progress or Progress(), []
    counts = [int(count * topic.share) for topic in topics]
    if min(counts) < FEWEST:
        raise ArgumentError(f"{count} questions are too few to learn from; ask a million or more")
    growers = nullcontext() if workers == 1 else pool_that_ends(min(workers, len(topics)), _nothing, died=DIED)
    with processes(open_library, workers, DIED) as pool, growers as grower:
        for number, (topic, most) in enumerate(zip(topics, counts, strict=True)):
            asked = draw(topic, most, number)
            each = asked.shape[1]
            progress.stage(f"answers, {number + 1} of {len(topics)}", each)
            tasks = [(i, topic.kinds, asked[:, i : i + AT_ONCE]) for i in range(0, each, AT_ONCE)]
            labels, choices = np.zeros(each, np.int64), dict[Choice | None, int]()
            for (begin, _, part), (known, numbers) in shared(pool, _answers, tasks, progress, AT_ONCE):
                own = np.array([choices.setdefault(choice, len(choices)) for choice in known])
                labels[begin : begin + part.shape[1]] = own[numbers]
            if (labels != choices.get(None, -1)).sum() < FEWEST:
                continue  # the library refuses such calls
            job = partial(grow, topic, asked, list(choices), labels, architecture)
            with unheard():
                growing.append(job if grower is None else grower.submit(job).result)
        progress.stage("trees", len(growing))
        grown = []
        for tree in growing:
            grown.append(tree())
            progress.step(len(grown))
    write_learned(path, grown)
    return [group for group, _ in grown]


def _nothing() -> None:
    """Prepare nothing in a process."""


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
    layout, m, n, k = _products(rng, usual)
    kind, batch = rng.integers(0, len(topic.kinds), count), np.ones(count, np.int64)
    if topic.batched:
        any_batch = 1 + _sizes(rng, count, 9)
        either = zip(
            _attention(rng, count), (layout, np.minimum(m, 8192), np.minimum(n, 8192), np.minimum(k, 16384), any_batch),
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


def _answers(task: tuple[int, tuple[Kind, ...], Numbers]) -> tuple[list[Choice | None], Numbers]:
    """Return the choices of some questions, each once, and which of them answers which question."""
    known: dict[Choice | None, int] = {}
    _, kinds, asked = task
    choice = asker().choice
    numbers = [known.setdefault(choice(Question(kinds[kind], *rest)), len(known)) for kind, *rest in asked.T.tolist()]
    return list(known), np.array(numbers)
