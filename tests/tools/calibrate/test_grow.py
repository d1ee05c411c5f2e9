# SPDX-License-Identifier: Apache-2.0
"""Trees from answers: which leaves are certain, what counts as right, and that the file says what was measured."""

import numpy as np
import pytest
import torch

from fmtsim.gemm.targets.cublaslt import choice_order, unsigned
from fmtsim.gemm.targets.learned import FEATURES, Learned, Parts, Ruled, choice_for
from fmtsim.gemm.targets.question import Choice, Question, question_call
from tools.calibrate import grow as module
from tools.calibrate.book import KINDS
from tools.calibrate.grow import Nodes, Topic, grow
from tools.calibrate.learn import draw
from tools.calibrate.learned_writer import learned_bytes

TOPIC = Topic((KINDS["bf16"], KINDS["bf16_bias"]), leaves=40)
K = 3  # a feature
# CUTLASS of two names and one tile, nvjet, a whole chain of another name, an unknown order, a refusal
CHOICES = (Choice(21, 4, 2, 0, 7), Choice(66, 3, 2), Choice(39), Choice(24, 4, 2, 0, 12), Choice(99), None, Choice(66))


def random_branches(columns, labels, leaves):
    """Grow a tree at random: a stand-in for scikit-learn's."""
    rng, tree, rows = np.random.default_rng(3), [], [np.arange(len(labels))]
    for _ in range(2 * leaves - 1):
        tree.append([0, 0.0, -1, -1])
    grown, at = 1, 0
    while at < grown:
        here, feature = rows[at], int(rng.choice([1, 2, K, 14, 19, 25]))
        values = columns[here, feature]
        if grown + 2 <= 2 * leaves - 1 and len(here) > 200 and values.min() < values.max():
            threshold = float(np.quantile(values, rng.choice([0.3, 0.5, 0.7])))
            if threshold < values.max():
                tree[at] = [feature, threshold, grown, grown + 1]
                rows += [here[values <= threshold], here[values > threshold]]
                grown += 2
        at += 1
    says = [np.bincount(labels[each]).argmax() for each in rows]
    features, thresholds, lefts, rights = (np.array(each) for each in zip(*tree[:grown], strict=True))
    return Nodes(features, thresholds.astype(np.float32), lefts, rights, np.array(says))


def answered(count):
    """Return questions, and answers with a rule and some chance."""
    asked = draw(TOPIC, count, 0)
    _, _, m, n, k, _ = asked
    labels = np.select([k < 700, m * n > 1 << 20], [6 - 4 * (m % 3 == 0), 1 + m % 2], 3 * (n % 2))
    chance = np.random.default_rng(1).random(len(labels))
    return asked, np.where(chance < 0.02, 5, np.where((chance < 0.03) & (m > n), 4, labels))


def calls_of(question):
    """Return the calls that a question is about: of one column a product with torch's own bias, too."""
    calls = [question_call(question)]
    if question.n == 1 and not question.kind.bias and calls[0].operation == "mm":
        calls.append(question_call(question._replace(kind=question.kind._replace(bias=True))))
    return calls


def same(choice, other, question):
    """Say it once more: one name stands for both, or they have the same orders, which are known."""
    orders = [[choice_order(each, call, "sm_90") for call in calls_of(question)] for each in (choice, other)]
    return choice == module.plainest(other, question) or (None not in orders[0] and orders[0] == orders[1])


def test_the_file_says_what_was_measured(monkeypatch):
    """What a file answers about the questions held out is right as often as its group says, and as often certain."""
    monkeypatch.setattr(module, "branches", random_branches)
    monkeypatch.setattr(module, "BRANCHED", 3000)
    monkeypatch.setattr(module, "HELD_OUT", 1500)
    asked, labels = answered(12000)
    group, tree = grow(TOPIC, asked, CHOICES, labels, "sm_90")
    refused = labels == 5
    asked, labels = asked[:, ~refused], labels[~refused]
    assert group.held_out == 1500 and group.learned == len(labels) - 3000 and not group.batched
    assert Choice(21, 4, 2, 0, 7) not in group.choices and Choice(24, 4, 2, 0, 7) in group.choices
    file = Learned(learned_bytes([(group, tree)]), "grown")
    right = certain = both = 0
    for (kind, *rest), label in zip(asked[:, -1500:].T.tolist(), labels[-1500:].tolist(), strict=True):
        question = Question(TOPIC.kinds[kind], *rest)
        guess = file.find(question)
        good = same(guess.choice, CHOICES[label], question)
        right, certain, both = right + good, certain + guess.certain, both + (good and guess.certain)
    assert (group.right, group.certain, group.certain_right) == (right, certain, both)
    assert 0 < certain < 1500 and right < 1500
    alone, _ = grow(TOPIC, asked, CHOICES, labels, None)
    assert Choice(21, 4, 2, 0, 7) in alone.choices and alone.right < group.right


def stump(*says):
    """Return what grows a tree of leaves for M up to 1, 2, 3 ..., which say so."""
    inner = len(says) - 1
    features, lefts = np.array([1] * inner + [0] * len(says)), np.full(2 * inner + 1, -1)
    lefts[:inner] = inner + np.arange(inner)
    rights = np.full(2 * inner + 1, -1)
    rights[:inner] = [*range(1, inner), 2 * inner]
    thresholds = np.float32([*np.arange(1, inner + 1) + 0.5, *[0] * len(says)])
    return Nodes(features, thresholds, lefts, rights, np.array([0] * inner + list(says)))


def test_leaves_are_certain_by_answers_that_no_branch_was_made_for():
    reached = np.repeat([2, 3, 4], [150, 400, 6000])
    right = np.ones(6550, bool)
    certain = lambda there, good: module._certain(  # noqa: E731
        np.concatenate([reached, there]), np.concatenate([right, good]), len(reached), len(reached) + len(there),
        np.zeros(6, bool),
    ).nonzero()[0].tolist()  # fmt: skip
    all_right, many = np.ones(1000, bool), np.repeat([2, 4], 500)
    assert certain(many, all_right) == [2, 3, 4]
    assert certain(many, np.arange(1000) != 3) == [3, 4]  # one wrong where 150 were alike
    assert certain(np.repeat([3, 4], 500), np.arange(1000) != 3) == [4]
    assert certain(many, np.arange(1000) != 900) == []
    right[1000] = False  # one of 6,000
    assert certain(np.repeat([3, 4], 500), np.arange(1000) != 3) == [4]
    right[200:210] = False
    assert certain(many, all_right) == [2, 4]


def test_branches_whose_leaves_say_the_same_are_left_out():
    nodes = stump(1, 1, 0, 0, 0)
    certain = np.zeros(9, bool)
    tree = module._tree(nodes, certain)
    assert tree.features.tolist() == [1, 255, 1, 255, 255] and tree.thresholds.tolist() == [1.5, 2.5]
    assert tree.choices.tolist() == [1, 1, 0]
    certain[8] = True
    assert module._tree(nodes, certain).certain.tolist() == [False, False, False, False, True]


def test_thresholds_are_rounded_between_the_answers():
    columns = np.float32(np.random.default_rng(2).lognormal(8, 3, (500, len(FEATURES)))).round()
    columns[:, ::2] %= 17  # where the next number is the roundest of all, and too large
    nodes = random_branches(columns, np.arange(500) % 3, 12)
    assert len(nodes.lefts) > 3
    rounded = module._rounded(nodes, columns)
    assert np.array_equal(module._reached(rounded, columns), module._reached(nodes, columns))
    bits = lambda each: np.unpackbits(each.thresholds[each.lefts >= 0].view(np.uint8)).sum()  # noqa: E731
    assert bits(rounded) < bits(nodes)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "bf16_fp32", "bf16_bias", "tf32", "fp16_sums", "fp8"])
def test_one_name_for_an_order(kind):
    """Whatever the call, a choice and the one that stands for it have the same order, where one has any."""
    rng, seen = np.random.default_rng(4), 0
    for _ in range(400):
        algorithm = int(rng.choice([21, 23, 24, 12, 20, 55, 56, 39, 43, 63, 66, 13, 41]))
        split = int(rng.choice([1, 1, 2, 7, -1]))
        choice = Choice(algorithm, split, 2 * (split > 1), 0, int(rng.choice([0, 5, 7, 12, 20, 25, 27, 30])))
        m, n, k = (int(x) for x in rng.choice([1, 2, 16, 72, 500, 4096], 3))
        question = Question(KINDS[kind], int(rng.integers(4)), m, max(n, 2) if KINDS[kind].bias else n, k)
        plain = module.plainest(choice, question)
        calls = calls_of(question)
        for each in calls:
            orders = [unsigned(choice_order(one, each, "sm_90"), each) for one in (plain, choice)]
            assert orders[0] == orders[1], (choice, plain, each)
        seen += plain != choice
        known = None not in [choice_order(choice, each, "sm_90") for each in calls]
        assert module.same_order(plain, choice, question, "sm_90") == known
    assert seen > 20


def test_chains_are_told_apart_where_a_bias_would():
    """One column: torch's own bias comes after nvjet's rounding; the others are unknown."""
    question = Question(KINDS["bf16"], 1, 64, 1, 512)
    assert not module.same_order(Choice(66), Choice(39), question, "sm_90")
    assert module.same_order(Choice(66), Choice(39), question._replace(n=2), "sm_90")
    assert torch.bfloat16 == question.kind.out


SMALL = Topic((KINDS["fp32"],), leaves=40, most=1100)


def small_answers(count):
    """Return questions of small sizes, and answers that share 132 blocks, have 64 products a part, or five parts."""
    asked = draw(SMALL, count, 0)
    _, _, m, n, k, batch = asked
    by_rule = (Parts(132, 15).of(m, n, k, batch), Parts(0, 15, 64).of(m, n, k, batch), np.full(len(m), 5))
    splits = np.select([k < 200, m < 300], by_rule[:2], by_rule[2])
    numbers = np.unique(splits)
    choices = [Choice(20, split, 2 * (split > 1), 0, 28) for split in numbers.tolist()]
    return asked, choices, np.searchsorted(numbers, splits)


def test_splits_are_named_by_rules():
    asked, choices, labels = small_answers(4000)
    names, plain = module._named(SMALL, asked, choices, labels, "sm_90")
    ruled, numbers = module._ruled(asked, names, plain, np.full(len(labels), 15))
    rules = {(name.parts[0], *name.parts[2:]) for name in ruled if isinstance(name, Ruled)}
    assert {(132, 0, 0), (0, 64, 0)} <= rules and len(ruled) < 12 < len(choices)
    for row, (number, label) in enumerate(zip(numbers.tolist(), labels.tolist(), strict=True)):
        question = Question(SMALL.kinds[0], *asked[1:, row].tolist())
        assert choice_for(ruled[number], question) == module.plainest(choices[label], question)
    unknown, _ = module._ruled(asked, names, plain, np.full(len(labels), 99))  # of a tile without known sides
    assert unknown == names


def test_trees_of_small_sizes(monkeypatch):
    """Sizes held out are no others'; what books say counts against leaves; the file says what was measured."""
    monkeypatch.setattr(module, "branches", random_branches)
    monkeypatch.setattr(module, "HELD_OUT", 1500)
    monkeypatch.setattr(module, "SURE_SMALL", 0.5)
    asked, choices, labels = small_answers(9000)
    args = SMALL, asked, choices, labels, "sm_90", [15] * len(choices)
    group, tree = grow(*args)
    assert group.most == 1100 and group.held_out == 1500 and 0 < group.certain_right <= group.certain
    others = asked[:, ::9], [choices[label] for label in labels[::9]]
    alike, _ = grow(*args, others)
    wrong, _ = grow(*args, (others[0], [Choice(99, 7, 2)] * len(others[1])))
    assert alike.certain >= group.certain > wrong.certain
    file = Learned(learned_bytes([(group, tree)]), "grown")
    said = [file.find(Question(SMALL.kinds[0], *row[1:])) for row in asked.T.tolist()]
    good = [same(guess.choice, choices[label], Question(SMALL.kinds[0], *row[1:]))
            for guess, label, row in zip(said, labels.tolist(), asked.T.tolist(), strict=True) if guess]  # fmt: skip
    assert abs(np.mean(good) - group.right / 1500) < 0.05
