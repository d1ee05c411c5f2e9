# SPDX-License-Identifier: Apache-2.0
"""Grow a decision tree from cuBLASLt's answers, and hold it to answers that it never saw."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fmtsim.gemm.targets.cublaslt import STAGES, TILES, same_order
from fmtsim.gemm.targets.learned import FEATURES, LEAF, Group, Parts, Ruled, Tree, choice_for
from fmtsim.gemm.targets.question import CUTLASS, Architecture, Choice, Kind, Question

BRANCHED: Final = 2_500_000  # answers at most that decide where a tree branches; the others count on its leaves
HELD_OUT: Final = 100_000  # answers at least that choose how many make a leaf certain, and as many that are held out
DOUBTS: Final = tuple(0.02 * 0.9**step for step in range(80))  # estimates of how often a certain leaf may be wrong
SURE: Final = 0.9998  # of the answers on certain leaves are right, by those that choose
SURE_SMALL: Final = 0.99995  # the same of small sizes: of layers, less regular than what is drawn, 0.9998 are right
BLOCKS: Final = (0, 36, 66, 132, 264, 396, 528)  # of tiles of a result that splits fill, on 132 multiprocessors
WIDTHS: Final = ((0, 0), (32, 0), (56, 0), (64, 0), (72, 0), (128, 0), (64, 63), (72, 71), (64, 32))  # and extras
FEWEST_ALIKE: Final = 20  # answers of a tile that a rule is named for
Numbers = NDArray[np.int64]


def plainest(choice: Choice, question: Question) -> Choice:
    """Return one representative choice of those with the same order, by CUTLASS's tiles; of single chains the first.

    Where N is 1, a bias tells chains on tensor cores apart.
    """
    algorithm, whole, kind = choice.algorithm, choice.split == 1, question.kind
    if kind.a == "fp32" and (question.k > 1 or not whole):
        # without a bias, reductions in place are like others
        if choice.split == 1 and choice.algorithm in (10, 12, 20, 55, 56):
            return Choice(12)
        if choice.algorithm == 20:
            return choice._replace(stages=0, reduction=choice.reduction if kind.bias else 2)
        if choice.algorithm == 55:
            return choice._replace(stages=0, custom=choice.custom % 2)
        return choice._replace(split=1, reduction=0) if choice.algorithm == 11 else choice
    if algorithm in (21, 23, 24) and choice.stages in STAGES:
        tile = STAGES[choice.stages]
        return choice._replace(algorithm=24, stages=next(stages for stages in STAGES if STAGES[stages] == tile))
    if whole and algorithm in (12, 20, 55, 56) and kind.compute != "16f":
        return Choice(12 if question.k > 1 else algorithm)  # of single products 12 keeps the sign of zeros
    if whole and algorithm in (39, 43, 63) and question.n > 1:
        return Choice(66 if kind.a in ("bf16", "fp16") and kind.compute == "32f" else 43)
    return choice


class Topic(NamedTuple):
    """What one tree is about: kinds of calls that differ little, as unbatched or as batched products.

    kinds: The kinds.
    batched: They are batched.
    leaves: Leaves that the tree has at most.
    share: Of the questions that are asked about a topic, so many about this one.
    most: The largest size that is asked about; 0 where all are. Splits of small sizes are named by rules.
    """

    kinds: tuple[Kind, ...]
    batched: bool = False
    leaves: int = 25_000
    share: float = 1.0
    most: int = 0


class Nodes(NamedTuple):
    """A tree as a learner has it: by node, a feature, its threshold, the children, -1 on leaves, and a leaf's label."""

    features: Numbers
    thresholds: NDArray[np.float32]
    lefts: Numbers
    rights: Numbers
    labels: Numbers


def grow(
    topic: Topic, asked: Numbers, choices: Sequence[Choice | None], labels: Numbers, architecture: Architecture | None,
    tiles: Sequence[int] = (), more: tuple[Numbers, Sequence[Choice]] | None = None,
) -> tuple[Group, Tree]:  # fmt: skip
    """Return a tree of a topic's answers, and how often it is right about the last of them.

    An answer counts as right where its order is the tree's, whatever the choice behind it.

    Args:
        asked: Questions, as ``draw`` gives them.
        choices: All answers; None is a call that the library refuses, which is left out.
        labels: int64 [questions], an index of choices.
        architecture: Of the GPU; None where the orders behind choices are not known, and choices alone are compared.
        tiles: The TILE_ID of each choice, of a topic of small sizes.
        more: Other questions and their choices, without tiles: none of them is held out.
    """
    # 1. answers with one name for an order; of small sizes, those held out are about sizes that no other answer has
    is_known = np.array([choice is not None for choice in choices])[labels]
    asked, answers = asked[:, is_known], labels[is_known]
    if topic.most:
        sizes = np.sort(asked[2:5], axis=0) * np.random.default_rng(0).integers(1 << 62, size=(3, 1))
        apart = np.argsort(sizes.sum(0), kind="stable")
        asked, answers = asked[:, apart], answers[apart]
    names: Sequence[Choice | Ruled]
    plain, labels = names, labels = _named(topic, asked, choices, answers, architecture)
    if topic.most:
        names, labels = _ruled(asked, plain, labels, np.array(tiles)[answers])
    # 2. a tree from a part of them, and how often its leaves are right about all that are learned from
    held = max(len(labels) // 20, min(HELD_OUT, len(labels) // 4))
    learned = len(labels) - 2 * held
    columns = columns_of(asked)
    branched = min(learned * 3 // 4 if topic.most else learned, BRANCHED)
    taught, taught_labels = columns[:branched], labels[:branched]
    if more is not None and more[1]:
        # of other answers those without a split have names; the rule of a split is not known without its tile
        others, other_labels = _named(topic, more[0], more[1], np.arange(len(more[1])), architecture)
        places = np.array([names.index(name) if name in names and name.split == 1 else -1 for name in others], np.int64)
        whole = places[other_labels] >= 0
        other_columns = columns_of(more[0])
        taught = np.concatenate([taught, other_columns[whole]])
        taught_labels = np.append(taught_labels, places[other_labels][whole])
    nodes = _rounded(branches(taught, taught_labels, topic.leaves), taught)
    reached = _reached(nodes, columns)
    right = _right(topic, asked, names, labels, nodes.labels[reached], architecture)
    # 3. the certain leaves; of small sizes, splits of CUTLASS kernels have to be right as often as others
    kernels = (name.choice if isinstance(name, Ruled) else name for name in names)
    jumps = np.array([topic.most > 0 and kernel.algorithm in CUTLASS and kernel.split != 1 for kernel in kernels])
    sure = SURE_SMALL if topic.most else SURE
    if more is not None and more[1]:
        counted = _reached(nodes, other_columns)
        agrees = [_same(topic, names[nodes.labels[leaf]], choice, row, architecture)
                  for leaf, choice, row in zip(counted, more[1], more[0].T.tolist(), strict=True)]  # fmt: skip
        reached, right = np.append(counted, reached), np.append(np.array(agrees, bool), right)
    certain = _certain(reached, right, len(right) - 2 * held, len(right) - held, jumps[nodes.labels], sure)
    last, there = right[-held:], certain[reached[-held:]]
    group = Group(topic.kinds, topic.batched, tuple(names), learned, held, int(last.sum()), int(there.sum()),
                  int((last & there).sum()), topic.most)  # fmt: skip
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
) -> tuple[list[Choice], Numbers]:
    """Return the names of all answers, in order, and each answer's; one name for an order."""
    named = []
    codes = ((asked[0] * len(choices) + labels) * 2 + (asked[3] == 1)) * 2 + (asked[4] == 1)
    cases, where = np.unique(codes, return_inverse=True)
    for code in cases.tolist():
        kind, label = divmod(code // 4, len(choices))
        choice = choices[label]
        assert choice is not None
        question = Question(topic.kinds[kind], 0, 2, 1 if code // 2 % 2 else 2, 1 if code % 2 else 2)
        named.append(choice if architecture is None else plainest(choice, question))
    names = sorted(set(named))
    return names, np.array([names.index(name) for name in named], np.int64)[where]


def _ruled(
    asked: Numbers, names: Sequence[Choice], labels: Numbers, tiles: Numbers
) -> tuple[list[Choice | Ruled], Numbers]:
    """Return names whose splits are rules, in order, and each answer's: for each kernel and tile the rule that says
    most of its splits, then that which says most of the others.
    """
    rules = [(blocks, width, extra) for blocks in BLOCKS for width, extra in WIDTHS if blocks or width]
    splits = np.array([name.split for name in names])[labels]
    kernels = np.array([names.index(min(n for n in names if n._replace(split=0) == name._replace(split=0)))
                        for name in names])[labels]  # fmt: skip
    numbers: dict[Choice | Ruled, int] = {name: number for number, name in enumerate(names)}
    labels = labels.copy()
    for kernel, tile in np.unique(np.stack([kernels, tiles])[:, splits > 1], axis=1).T.tolist():
        rows = np.flatnonzero((kernels == kernel) & (tiles == tile) & (splits > 1))
        if tile not in TILES:
            continue
        said: dict[Parts | int, NDArray[np.bool_]]
        parts = [Parts(blocks, tile, width, extra) for blocks, width, extra in rules]
        said = {rule: rule.of(*asked[2:, rows]) == splits[rows] for rule in parts}
        said |= {split: splits[rows] == split for split in np.unique(splits[rows]).tolist()}
        remaining = np.ones(len(rows), bool)
        while remaining.any():
            rule = max(said, key=lambda rule: (said[rule] & remaining).sum())
            hit = said[rule] & remaining
            if hit.sum() < FEWEST_ALIKE:
                break
            if isinstance(rule, Parts):
                name = Ruled(names[kernel]._replace(split=0), rule)
                labels[rows[hit]] = numbers.setdefault(name, len(numbers))
            remaining &= ~hit
    used = np.unique(labels)
    ruled = list(numbers)
    order = sorted(used.tolist(), key=lambda number: (isinstance(ruled[number], Ruled), ruled[number]))
    places = np.zeros(len(ruled), np.int64)
    places[order] = np.arange(len(order))
    return [ruled[number] for number in order], places[labels]


def _right(
    topic: Topic, asked: Numbers, names: Sequence[Choice | Ruled], labels: Numbers, said: Numbers,
    architecture: Architecture | None,
) -> NDArray[np.bool_]:  # fmt: skip
    """Return for each answer whether what a tree said of it has its order."""
    right = labels == said
    for row in np.flatnonzero(~right).tolist() if architecture is not None else ():
        answer = choice_for(names[labels[row]], _question(topic, asked[:, row].tolist()))
        right[row] = _same(topic, names[said[row]], answer, asked[:, row].tolist(), architecture)
    return right


def _question(topic: Topic, row: Sequence[int]) -> Question:
    return Question(topic.kinds[row[0]], *row[1:])  # type: ignore[arg-type]


def _same(
    topic: Topic, name: Choice | Ruled, answer: Choice, row: Sequence[int], architecture: Architecture | None
) -> bool:
    """Return True if what a tree says of a question, a row of ``draw``'s, has the order of an answer."""
    question = _question(topic, row)
    guess = choice_for(name, question)
    if architecture is None:
        return guess == answer
    return guess == plainest(answer, question) or same_order(answer, guess, question, architecture)


def _certain(
    reached: Numbers, right: NDArray[np.bool_], learned: int, chosen: int, apart: NDArray[np.bool_], sure: float = SURE
) -> NDArray[np.bool_]:
    """Return the leaves that are wrong seldom enough: as often as keeps the answers after those learned right, none
    where nothing does. How often a leaf is wrong is estimated by Laplace's rule of succession.

    Args:
        reached: Each answer's leaf.
        right: Whether it is right there.
        learned: So many come first.
        chosen: Those from there to this place choose how seldom is enough.
        apart: Of each node of the tree, whether it is among those that are chosen apart from the others.
        sure: So many of those that choose have to be right on certain leaves.
    """
    wrong = np.bincount(reached[:learned][~right[:learned]], minlength=len(apart))
    doubts = (wrong + 1) / (np.bincount(reached[:learned], minlength=len(apart)) + 2)
    certain = np.zeros(len(apart), bool)
    for leaves in (apart, ~apart):
        answers = leaves[reached[learned:chosen]]
        there, good = doubts[reached[learned:chosen]][answers], right[learned:chosen][answers]
        enough = (most for most in DOUBTS if good[there <= most].sum() >= sure * (there <= most).sum() > 0)
        certain |= leaves & (doubts <= next(enough, -1.0))
    return certain


def _tree(nodes: Nodes, certain: NDArray[np.bool_]) -> Tree:
    """Return a tree in the order in which it is walked, without branches whose two leaves say the same."""
    lefts, rights, labels, certain = nodes.lefts.copy(), nodes.rights, nodes.labels.copy(), certain.copy()
    for node in range(len(lefts) - 1, -1, -1):  # children come behind their parents
        lower, upper = lefts[node], rights[node]
        if lower < 0 or lefts[lower] >= 0 or lefts[upper] >= 0:
            continue
        if labels[lower] == labels[upper] and certain[lower] == certain[upper]:
            lefts[node], labels[node], certain[node] = -1, labels[lower], certain[lower]
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
    at = np.zeros(len(columns), np.int64)
    for _ in _steps(nodes, columns, at):
        pass
    return at


def _rounded(nodes: Nodes, columns: NDArray[np.float32]) -> Nodes:
    """Return a tree with the roundest thresholds that decide alike about all rows."""
    lows, highs = (np.full(len(nodes.labels), end, np.float32) for end in (-np.inf, np.inf))
    for here, values in _steps(nodes, columns, np.zeros(len(columns), np.int64)):
        goes_left = values <= nodes.thresholds[here]
        np.maximum.at(lows, here[goes_left], values[goes_left])
        np.minimum.at(highs, here[~goes_left], values[~goes_left])
    inner = nodes.lefts >= 0
    thresholds = nodes.thresholds.copy()
    thresholds[inner] = _roundest(lows[inner], highs[inner])
    return nodes._replace(thresholds=thresholds)


def _roundest(low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return numbers from low on and below high with as few bits as will do."""
    result, remaining = low.copy(), np.ones(len(low), bool)
    for bits in range(24):
        step = np.exp2(np.floor(np.log2(np.maximum(np.abs(high), 1e-30))) - bits).astype(np.float32)
        tried = (np.ceil(low / step) * step).astype(np.float32)
        fits = remaining & (tried >= low) & (tried < high)
        result[fits], remaining = tried[fits], remaining & ~fits
    return result
