# SPDX-License-Identifier: Apache-2.0
"""Trees that say what cuBLASLt most likely chooses: the file, walking it, and targets that follow it."""

import math
import struct
import zlib

import numpy as np
import pytest
import torch

from fmtsim.gemm.targets import learned
from fmtsim.gemm.targets.learned import FEATURES, MAGIC, Group, Learned, Parts, Ruled, Tree
from fmtsim.gemm.targets.question import Choice, Kind, Question, library_question
from fmtsim.gemm.targets.target import Target, get_target
from fmtsim.support.errors import ArgumentError, DataError
from tests.support.refusals import refused
from tests.support.targets import linear, mm
from tools.calibrate.learned_writer import learned_bytes, write_learned

BF16, FP16 = (Kind(name, name, dtype) for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)))
CHOICES = (Choice(66), Choice(66, 3, 2), Choice(24, 1, 0, 0, 13))
GROUP = Group((BF16, FP16), False, CHOICES, 900, 100, 90, 40, 40)
# K up to 2560: whole; else kinds after the first, or a K that is not a multiple of 8
TREE = Tree(np.uint8([3, 255, 17, 11, 255, 255, 255]), np.float32([2560.5, 0.5, 4]), np.array([0, 2, 1, 0]),
            np.array([True, False, False, False]))  # fmt: skip


def trees(tmp_path):
    path = tmp_path / "a.trees"
    write_learned(path, [(GROUP, TREE)])
    return path


def test_walks(tmp_path):
    rule = Learned.open(trees(tmp_path))
    found = [rule.find(Question(kind, 0, 64, 64, k)) for kind in (BF16, FP16) for k in (64, 2560, 2564, 2568)]
    assert [each.choice for each in found] == [CHOICES[i] for i in (0, 0, 2, 1, 0, 0, 0, 0)]
    assert [each.certain for each in found] == [True, True, False, False] * 2
    assert found[0].group == rule.groups()[0] == GROUP
    assert (
        rule.find(Question(BF16, 0, 64, 64, 64, 2)) is None
        and rule.find(Question(BF16._replace(bias=True), 0, 1, 1, 1)) is None
    )


def test_random_trees_are_walked_as_they_are_written():
    rng = np.random.default_rng(5)
    features, leaves, open_ends = [], 0, 1
    while open_ends:  # a random tree in the order of its walk
        leaf = len(features) > 200 or (len(features) > 3 and rng.random() < 0.5)
        features.append(255 if leaf else int(rng.integers(len(FEATURES))))
        open_ends += -1 if leaf else 1
        leaves += leaf
    inner = len(features) - leaves
    tree = Tree(
        np.uint8(features),
        rng.lognormal(6, 4, inner).astype(np.float32),
        rng.integers(0, 3, leaves),
        rng.random(leaves) < 0.5,
    )
    rule = Learned(learned_bytes([(GROUP, tree)]), "random")
    assert learned_bytes([(GROUP, tree)]) == learned_bytes([(GROUP, tree)])

    def walk(question):
        """Walk by counting: below a node's left child lies what ends one path more than it begins."""
        node = threshold = leaf = 0
        while features[node] != 255:
            value = FEATURES[features[node]](0, *question[1:])
            go_left = value <= float(tree.thresholds[threshold])
            node, threshold = node + 1, threshold + 1
            if not go_left:
                depth = 1
                while depth:
                    depth += -1 if features[node] == 255 else 1
                    leaf += features[node] == 255
                    threshold += features[node] != 255
                    node += 1
        return CHOICES[tree.choices[leaf]], bool(tree.certain[leaf])

    for sizes in rng.integers(1, 20000, (200, 3)).tolist():
        question = Question(BF16, int(rng.integers(4)), *sizes)
        assert rule.find(question)[:2] == walk(question)


def test_features_of_numbers_are_those_of_arrays():
    columns = np.random.default_rng(1).integers(1, 1 << 15, (6, 300))
    columns[1] %= 4
    columns[2:, ::3] >>= np.random.default_rng(2).integers(0, 14, (4, 100))
    columns[2:] = np.maximum(columns[2:], 1)
    for feature in FEATURES:
        whole = np.broadcast_to(feature(*columns), 300).tolist()
        assert [feature(*column) for column in columns.T.tolist()] == whole


def test_features_keep_their_places():
    """Trees that were written name features by number: one that changes, or moves, makes them say something else."""
    columns = np.array([[1, 3, 77, 1000, 5200, 3], [0, 1, 4096, 48, 64, 1], [2, 2, 8, 24, 20480, 1]]).T
    known = [np.broadcast_to(feature(*columns), 3).tolist() for feature in FEATURES]
    assert [zlib.crc32(repr(part).encode()) for part in (known[:40], known[40:])] == [2035395985, 3279826405]


@pytest.mark.parametrize("damage", [slice(0, 10), slice(0, 100), slice(1, None)])
def test_damaged_files(tmp_path, damage):
    path = trees(tmp_path)
    path.write_bytes(path.read_bytes()[damage])
    with pytest.raises(
        DataError, match="holds no trees that fmtsim reads .*; make it with python -m tools.calibrate --learn"
    ):
        Learned.open(path).find(Question(BF16, 0, 64, 64, 64))
    refused(
        "No such file; python -m tools.calibrate --learn makes one", Learned.open, tmp_path / "none", error=DataError
    )


def test_a_header_of_lists_without_end(tmp_path):
    header = zlib.compress(b"[" * 100_000)
    path = tmp_path / "a.trees"
    path.write_bytes(struct.pack("<16sII", MAGIC, len(header), zlib.crc32(header)) + header)
    with pytest.raises(
        DataError, match="holds no trees that fmtsim reads .more than 64 objects or lists inside each other"
    ):
        Learned.open(path).find(Question(BF16, 0, 64, 64, 64))


def test_a_tree_that_does_not_end(tmp_path):
    open_end = TREE._replace(choices=TREE.choices[:-1], certain=TREE.certain[:-1], features=TREE.features[:-1])
    with pytest.raises(DataError, match="a tree does not end"):
        Learned(learned_bytes([(GROUP, open_end)]), "open").find(Question(BF16, 0, 64, 64, 64))


def test_targets_follow_trees_between_rules_and_guesses(tmp_path):
    trees(tmp_path)
    h200 = get_target("h200")
    record = h200.to_dict() | {"book": None, "trees": "a.trees", "rules": [
        {"when": {"m": 1}, "kernel": "any", "split": 1, "basis": "rule", "reason": "One row."},
        {"when": {}, "kernel": "any", "split": 1, "basis": "guess", "reason": "Any."},
    ]}  # fmt: skip
    target = Target.from_dict(record, folder=tmp_path)
    assert target.to_dict()["trees"] == "a.trees"
    sizes = ((1, 64, 4096), (64, 64, 2048), (64, 64, 4096))
    calls = [*(mm(*each, out=torch.bfloat16) for each in sizes), linear(64, 64, 4096)]
    found = [target.find(call) for call in calls]
    assert [(each.basis, each.plan.split) for each in found] == [("rule", 1), ("rule", 1), ("guess", 3), ("guess", 1)]
    assert found[1].plan.source == (
        "a tree learned from 900 of cuBLASLt 13.1.0's answers, right about 100.0% of 40 others like this one: "
        "the order of algorithm 66"
    )
    assert "right about 90.0% of 100 others: the order of algorithm 66" in found[2].plan.source
    with pytest.raises(ArgumentError, match="trees='../a.trees' is not the name of a file beside the plan file"):
        Target.from_dict(record | {"trees": "../a.trees"}, folder=tmp_path)


def found_by(folder, choices, ks):
    """Return what h200 finds for sums of some lengths where it has a tree of certain choices and no rule."""
    write_learned(folder / "a.trees", [(GROUP._replace(choices=choices), TREE._replace(certain=np.ones(4, bool)))])
    record = get_target("h200").to_dict() | {"book": None, "trees": "a.trees", "rules": []}
    target = Target.from_dict(record, folder=folder)
    return [target.find(mm(64, 64, k, out=torch.bfloat16)) for k in ks]


def test_parts_of_cutlass_kernels_are_guesses(tmp_path):
    """However many of a leaf's held-out answers were right."""
    choices = Choice(66, 3, 2), Choice(24, 3, 2, 0, 13), Choice(24, 1, 0, 0, 13)
    found = found_by(tmp_path, choices, (2048, 2564, 4096))
    assert [(each.basis, each.plan.split) for each in found] == [("rule", 3), ("rule", 1), ("guess", 3)]


def test_splits_by_a_rule():
    """As many blocks as share the tiles, or a part for every so many products: the fewer, one at least."""
    for m, n, k, batch in np.random.default_rng(6).integers(1, 1200, (300, 4)).tolist():
        tiles = math.ceil(n / 64) * math.ceil(m / 128) * batch
        shares, widths = math.floor(264 / tiles), math.floor((k + 63) / 64)
        rules = Parts(264, 17, 64, 63), Parts(264, 17), Parts(0, 17, 64, 63)
        assert [rule.of(m, n, k, batch) for rule in rules] == [max(min(shares, widths), 1), max(shares, 1), widths]


def test_trees_of_small_sizes(tmp_path):
    """Their splits follow the sizes and are known, CUTLASS's as well; what they do not know is asked of the next."""
    ruled = Ruled(Choice(24, 0, 2, 0, 13), Parts(132, 15, 64))
    small = GROUP._replace(choices=(ruled, ruled, Choice(66)), most=4096)
    write_learned(tmp_path / "small.trees", [(small, TREE)])
    rule = Learned.open(tmp_path / "small.trees")
    assert rule.groups() == (small,)
    asked = [Question(BF16, 0, 64, n, k) for n, k in ((64, 640), (64, 32), (704, 2560), (4097, 64), (64, 2564))]
    found = [rule.find(each) for each in asked]
    assert [each and (each.choice, each.known) for each in found] == [
        (Choice(24, 10, 2, 0, 13), True), (Choice(24, 1, 0, 0, 13), True), (Choice(24, 12, 2, 0, 13), True),
        None, (Choice(66), False),
    ]  # fmt: skip
    for layout, m, n, batch in ((2, 1, 64, 1), (0, 64, 1, 1), (3, 64, 1, 1), (0, 64, 64, 257)):
        assert rule.find(Question(BF16, layout, m, n, 64, batch)) is None  # as bmm alone asks, and large batches
    assert rule.find(Question(BF16, 1, 1, 1, 64)) is not None
    write_learned(tmp_path / "all.trees", [(GROUP, TREE._replace(certain=np.ones(4, bool)))])
    record = get_target("h200").to_dict() | {"book": None, "trees": ["small.trees", "all.trees"], "rules": []}
    target = Target.from_dict(record, folder=tmp_path)
    plans = [target.find(mm(64, 64, k, out=torch.bfloat16)) for k in (640, 2568)]
    assert [(each.basis, each.plan.split, each.plan.k_tile) for each in plans] == [("rule", 10, 64), ("rule", 3, 64)]


def test_single_products_without_tensor_cores_are_guesses(tmp_path):
    """The signs of their zeros are not those of a chain on an H200."""
    found = found_by(tmp_path, (Choice(12), Choice(20), Choice(12)), (1, 2))
    assert [(each.basis, each.unit) for each in found] == [("guess", "fp32_fma"), ("rule", "fp32_fma")]


def test_trees_that_come_with_fmtsim():
    small, rule, *_ = get_target("h200").trees
    assert all(group.held_out >= 100_000 for group in rule.groups())
    assert all(0 < group.most <= 1100 and group.certain_right / group.certain > 0.9998 for group in small.groups())
    for trees in {each.name: each for name in ("h100", "h200") for each in get_target(name).trees}.values():
        for group in trees.groups():
            assert group.held_out >= 8_000 and group.right / group.held_out > 0.87
            assert group.certain_right / group.certain > 0.999
    calls = [mm(m, 776, k) for m in (1, 7, 64, 1000) for k in (8, 100, 4096)]
    assert all(rule.find(library_question(call)) is not None for call in calls)


def test_parts_are_bounded_by_k_and_by_the_workspace():
    # 20 tiles of 128 products a part, and float32 sums of all parts but one in one MiB: 8,192 rows of 32 columns
    assert learned._parts(16, 32, 25600) == 9 and learned._parts(16, 32, 25601) == 10
    assert learned._parts(1024, 32, 51200) == 7 and learned._parts(1024, 33, 51200) == 3
    assert learned._parts(8192, 32, 51200) == 1 and learned._parts(16, 32, 128) == 1
