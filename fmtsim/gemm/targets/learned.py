# SPDX-License-Identifier: Apache-2.0
"""What cuBLASLt most likely chooses for calls that it was not asked about: decision trees learned from its answers."""

import lzma
import struct
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fmtsim.gemm.targets.cublaslt import TILES
from fmtsim.gemm.targets.question import CUTLASS, LARGEST, Choice, Kind, Question, decompress, kind_from_list
from fmtsim.support.errors import DataError
from fmtsim.support.files import StrPath
from fmtsim.support.records import parse_json

MAGIC: Final = b"fmtsim learned 2"
HEAD: Final = struct.Struct("<16sII")  # magic, bytes of the header, crc32 of all that follows this
_DAMAGED = (ValueError, TypeError, LookupError, struct.error, zlib.error, lzma.LZMAError)
LEAF: Final = 255
Feature = Callable[[Any, Any, Any, Any, Any, Any], Any]


def _tiles(rows: int, columns: int) -> Feature:
    return lambda kind, layout, m, n, k, batch: -(-n // rows) * -(-m // columns) * batch


def _alignment(x: Any) -> Any:
    """Return the largest power of two that divides x, 64 at most."""
    return (x | 64) & -(x | 64)


def _smaller(x: Any, y: Any) -> Any:
    return (x + y - abs(x - y)) // 2  # works for numbers and for arrays, without rounding


def _a_alignment(layout: Any, m: Any, k: Any) -> Any:
    """Return the alignment of the rows of the first operand as they lie in memory."""
    return _alignment(k * (layout < 2) + m * (layout >= 2))


def _b_alignment(layout: Any, n: Any, k: Any) -> Any:
    """Return the same of the second operand."""
    return _alignment(k * (layout % 3 == 0) + n * (layout % 3 > 0))


def _waves(rows: int, columns: int, way: str) -> Feature:
    """Return a feature of the blocks of a kernel whose tile has these rows and columns."""
    tiles = _tiles(rows, columns)
    ways: dict[str, Feature] = {
        "tiles_of_k": lambda *call: tiles(*call) * -(-call[4] // 64),  # tiles of 64 products along K
        "last_wave": lambda *call: tiles(*call) % _HOPPER,
        "split": lambda *call: _smaller(_HOPPER // tiles(*call), call[4] // 64),
    }
    return ways[way]


def _parts(m: Any, n: Any, k: Any) -> Any:
    """Return the parts of 20 tiles of 128 products or more whose sums a workspace of one MiB holds."""
    wanted = -(-k // 2560) - 1
    room = -(-8192 // (m * -(-n // 32))) - 1
    most = _smaller(wanted, room)
    return most + (1 - most) * (most < 1)  # 1 at least


_TILES: Final = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
_NARROW_TILES: Final = ((32, 32), (32, 64), (64, 32), (32, 128), (128, 32))
_COUNTED_TILES: Final = ((32, 32), (64, 64), (128, 32), (32, 128), (128, 64), (64, 128), (128, 128))
_HOPPER: Final = 132  # multiprocessors
SMALL_BATCH: Final = 256  # products of a batch that trees of small sizes answer
FEATURES_BY_NAME: Final[dict[str, Feature]] = {
    "layout": lambda kind, layout, m, n, k, batch: layout,
    "m": lambda kind, layout, m, n, k, batch: m,
    "n": lambda kind, layout, m, n, k, batch: n,
    "k": lambda kind, layout, m, n, k, batch: k,
    "results": lambda kind, layout, m, n, k, batch: m * n * batch,
    "kilo_products": lambda kind, layout, m, n, k, batch: m * n * batch * k / 1024,
    "m_over_n": lambda kind, layout, m, n, k, batch: m / n,
    "a_alignment": lambda kind, layout, m, n, k, batch: _a_alignment(layout, m, k),
    "b_alignment": lambda kind, layout, m, n, k, batch: _b_alignment(layout, n, k),
    "n_alignment": lambda kind, layout, m, n, k, batch: _alignment(n),
    "m_alignment": lambda kind, layout, m, n, k, batch: _alignment(m),
    "k_alignment": lambda kind, layout, m, n, k, batch: _alignment(k),
    "a_elements": lambda kind, layout, m, n, k, batch: m * k,
    "b_elements": lambda kind, layout, m, n, k, batch: n * k,
    "k_tiles_64": lambda kind, layout, m, n, k, batch: -(-k // 64),
    "k_residue_64": lambda kind, layout, m, n, k, batch: k % 64,
    "batch": lambda kind, layout, m, n, k, batch: batch,
    "kind": lambda kind, layout, m, n, k, batch: kind,
    **{f"tiles_{rows}x{columns}": _tiles(rows, columns) for rows, columns in _TILES},
    "m_times_n": lambda kind, layout, m, n, k, batch: m * n,
    "larger_side": lambda kind, layout, m, n, k, batch: m + n - _smaller(m, n),
    "smaller_side": lambda kind, layout, m, n, k, batch: _smaller(m, n),
    "m_times_batch": lambda kind, layout, m, n, k, batch: m * batch,
    "n_times_batch": lambda kind, layout, m, n, k, batch: n * batch,
    "operand_alignment": lambda kind, layout, m, n, k, batch: _smaller(
        _a_alignment(layout, m, k), _b_alignment(layout, n, k)
    ),
    "call_alignment": lambda kind, layout, m, n, k, batch: _smaller(
        _smaller(_a_alignment(layout, m, k), _b_alignment(layout, n, k)), _alignment(n)
    ),
    **{f"tiles_{rows}x{columns}": _tiles(rows, columns) for rows, columns in _NARROW_TILES},
    "padded_results_32": lambda kind, layout, m, n, k, batch: m * -(-n // 32),
    "k_tiles_128": lambda kind, layout, m, n, k, batch: -(-k // 128),
    "parts": lambda kind, layout, m, n, k, batch: _parts(m, n, k),  # of split-K with one MiB of workspace
    "k_tiles_of_a_part": lambda kind, layout, m, n, k, batch: -(-k // (128 * _parts(m, n, k))),
    **{
        f"{way}_{rows}x{columns}": _waves(rows, columns, way)
        for way in ("tiles_of_k", "last_wave", "split")
        for rows, columns in _COUNTED_TILES
    },
    "m_residue_32": lambda kind, layout, m, n, k, batch: m % 32,
    "n_residue_32": lambda kind, layout, m, n, k, batch: n % 32,
    "k_residue_32": lambda kind, layout, m, n, k, batch: k % 32,
    "m_residue_64": lambda kind, layout, m, n, k, batch: m % 64,
    "n_residue_64": lambda kind, layout, m, n, k, batch: n % 64,
    "elements": lambda kind, layout, m, n, k, batch: m * n + m * k + n * k,
    "intensity": lambda kind, layout, m, n, k, batch: 64 * m * n * k // (m * n + m * k + n * k),
    "k_over_smaller": lambda kind, layout, m, n, k, batch: 64 * k // _smaller(m, n),
    "k_over_larger": lambda kind, layout, m, n, k, batch: 1024 * k // (m + n - _smaller(m, n)),
    "largest": lambda kind, layout, m, n, k, batch: m + n + k - _smaller(m + n - _smaller(m, n), k) - _smaller(m, n),
}
"""What a tree compares: functions of the kind's number in its group and of a question, for numbers and arrays alike."""
FEATURES: Final = tuple(FEATURES_BY_NAME.values())  # files of trees have their indices: further ones come last


class Tree(NamedTuple):
    """A decision tree in the order in which it is walked: a node, all that is below its left, all below its right.

    features: uint8 [nodes], an index of ``FEATURES``; LEAF ends a path.
    thresholds: float32 [nodes that are not leaves]: a feature up to it goes left.
    choices: int [leaves], an index of the choices of its group.
    certain: bool [leaves].
    """

    features: "np.ndarray[Any, Any]"
    thresholds: "np.ndarray[Any, Any]"
    choices: "np.ndarray[Any, Any]"
    certain: "np.ndarray[Any, Any]"


class Parts(NamedTuple):
    """A rule for the number of parts of K, by which the library names it: the fewer of two numbers, one at least.

    blocks, tile: As many parts as give all tiles of the result, of a TILE_ID, so many blocks at most; 0: no limit.
    width, extra: A part for every ``width`` of K's products and ``extra`` ones; a width of 0: no limit.
    """

    blocks: int
    tile: int
    width: int = 0
    extra: int = 0

    def of(self, m: Any, n: Any, k: Any, batch: Any) -> Any:
        """Return the parts, of numbers and of arrays alike."""
        rows, columns = TILES[self.tile]
        shares = self.blocks // (-(-n // rows) * -(-m // columns) * batch)
        widths = (k + self.extra) // self.width if self.width else shares
        fewer = _smaller(shares, widths) if self.blocks else widths
        return fewer + (1 - fewer) * (fewer < 1)


class Ruled(NamedTuple):
    """A choice whose split is a rule."""

    choice: Choice
    parts: Parts


def choice_for(name: Choice | Ruled, question: Question) -> Choice:
    """Return what a tree's choice means for a question."""
    if isinstance(name, Choice):
        return name
    split = name.parts.of(*question[2:])
    return name.choice._replace(split=split, reduction=name.choice.reduction if split > 1 else 0)


class Group(NamedTuple):
    """Kinds of calls with a tree, and how often it was right about answers that it was not learned from.

    An order that is the same counts as right, whatever the choice behind it is called.

    kinds: The kinds.
    batched: They are those of batched products.
    choices: What its leaves name.
    learned, held_out: Answers that it was learned from, and others that it was held to.
    right: How many of those held out it gave.
    certain, certain_right: How many of those held out fell on certain leaves, and how many of these it gave.
    most: The largest size that it answers about, in batches of up to ``SMALL_BATCH``; 0 where there is no such bound.
        The splits of such a tree are as certain as its other choices.
    """

    kinds: tuple[Kind, ...]
    batched: bool
    choices: tuple[Choice | Ruled, ...]
    learned: int
    held_out: int
    right: int
    certain: int
    certain_right: int
    most: int = 0


# The H200's leaves are certain about 8 % (batches with FP16 accumulation) to 100 % (FP8 with scales of rows) of the
# answers held out, and right about 99.95 to 100 % of these (cuBLASLt 13.1.0, 2026-11-23 and 2026-11-27). Half of all
# errors have the kernel right and the number of parts wrong. Tried for more certainty, bfloat16 with a bias on an H100,
# 53.5 % at 99.98 % (2026-11-27): 1,176,053 answers instead of 500,000 (49 to 52 %); agreement of five randomised trees
# (51 % at 99.98 %); agreement about twelve questions nearby (no more). Asking the library is what makes a call known.
# Sizes up to 1100 have trees of their own, whose splits are rules (H200, 2026-11-28). Of sizes held out of two draws,
# most above 2^21 multiplications: float32 57 % certain (21 of 201,161 wrong), bfloat16 72 % (7 of 175,164), with a bias
# 78 % (4 of 101,651), float16 68 % (5 of 92,592); float32 with a bias, learned from the first draw alone, 75 % (7 of
# 70,290). Certain or not, float32's tree is right about 98.5 % of what was held out; one of 600,000 answers was about
# 99.9 % of products with up to 2^21 multiplications, and about 96 % of larger ones.
class Guess(NamedTuple):
    """A choice that stands for the library's most likely order; certain where 999 of 1,000 held out were right."""

    choice: Choice
    certain: bool
    group: Group

    @property
    def known(self) -> bool:
        """Whether the order is known: of trees of all sizes a split of a CUTLASS kernel is not, whose parts jump."""
        jumps = self.choice.split > 1 and self.choice.algorithm in CUTLASS and not self.group.most
        return self.certain and not jumps

    def describe(self) -> str:
        """Return how often the tree was right."""
        group = self.group
        right, held = (group.certain_right, group.certain) if self.certain else (group.right, group.held_out)
        return f"right about {right / held:.1%} of {held:,} others{' like this one' * self.certain}"


class Learned:
    """A file of trees. Opening reads nothing; the first question of a group takes its tree apart.

    Example:
        >>> import numpy as np, torch
        >>> from fmtsim.gemm.targets.learned import Group, Learned, Tree
        >>> from fmtsim.gemm.targets.question import Choice, Kind, Question
        >>> from tools.calibrate.learned_writer import learned_bytes  # in a checkout
        >>> kind = Kind("bf16", "bf16", torch.bfloat16)
        >>> group = Group((kind,), False, (Choice(66), Choice(66, 3, 2)), 1000, 100, 99, 50, 50)
        >>> tree = Tree(np.uint8([3, 255, 255]), np.float32([4096]), np.array([0, 1]), np.array([True, False]))
        >>> rule = Learned(learned_bytes([(group, tree)]), "example")
        >>> rule.find(Question(kind, 0, 64, 64, 8192))[:2]
        (Choice(algorithm=66, split=3, reduction=2, custom=0, stages=0), False)
    """

    def __init__(self, content: bytes | Path, name: str) -> None:
        """Take a file's bytes, or where they are; ``name`` is what errors call the file."""
        self._content, self.name = content, name
        self._walks: dict[int, tuple[list[int], list[Any], list[int]]] = {}

    @classmethod
    def open(cls, path: StrPath) -> "Learned":
        """Return the trees in a file.

        Raises:
            DataError: There is no such file. A damaged one is found by the first question.
        """
        path = Path(path)
        if not path.is_file():
            raise DataError(f"{path}: No such file; python -m tools.calibrate --learn makes one")
        return cls(path, str(path))

    def groups(self) -> tuple[Group, ...]:
        """Return the groups of kinds."""
        return tuple(group for group, _, _ in self._contents[0])

    def find(self, question: Question) -> Guess | None:
        """Return what the library most likely chooses, None for kinds and sizes of calls without a tree.

        Raises:
            DataError: The file is damaged, or cannot be read.
        """
        # 1. the group of the kind, and the kind's number in it
        groups, numbers, body = self._contents
        kind, layout, m, n, k, batch = question
        place = numbers.get((kind, batch > 1))
        if place is None:
            return None
        index, number = place
        group, begin, size = groups[index]
        if group.most:
            # those of small sizes were not learned from vectors whose layouts torch names so in bmm alone
            vectors = batch == 1 and ((1 in (m, k) and layout > 1) or (1 in (n, k) and layout % 3 == 0))
            if vectors or max(m, n, k) > group.most or batch > SMALL_BATCH:
                return None
        # 2. its tree: of each node feature, threshold and right child; of a leaf whether it is certain, and its choice
        walk = self._walks.get(index)
        if walk is None:
            try:
                tree = _unpacked(body[begin : begin + size])
                features, remaining, leaves = tree.features.tolist(), iter(tree.thresholds.tolist()), 0
                values: list[Any] = []
                rights = [0] * len(features)
                waiting: list[int] = []  # nodes whose right child comes after the next leaf
                for node, feature in enumerate(features):
                    if feature != LEAF:
                        values.append(next(remaining))
                        waiting.append(node)
                        continue
                    values.append(bool(tree.certain[leaves]))
                    rights[node] = int(tree.choices[leaves])
                    leaves += 1
                    if waiting:
                        rights[waiting.pop()] = node + 1
                if (
                    len(features) != 2 * leaves - 1
                    or leaves != len(tree.choices)
                    or any(f != LEAF and f >= len(FEATURES) for f in features)
                ):
                    raise ValueError("a tree does not end")
                walk = self._walks[index] = (features, values, rights)
            except _DAMAGED as error:
                raise self._damaged(error) from None
        # 3. from the root to a leaf; a left child is the next node
        features, thresholds, rights = walk
        node, answers = 0, dict[int, Any]()
        while (feature := features[node]) != LEAF:
            value = answers.get(feature)
            if value is None:
                value = answers[feature] = FEATURES[feature](number, layout, m, n, k, batch)
            node = node + 1 if value <= thresholds[node] else rights[node]
        return Guess(choice_for(group.choices[rights[node]], question), bool(thresholds[node]), group)

    def _damaged(self, error: object) -> DataError:
        return DataError(
            f"{self.name} holds no trees that fmtsim reads ({error}); make it with python -m tools.calibrate --learn"
        )

    @cached_property
    def _contents(self) -> tuple[list[tuple[Group, int, int]], dict[tuple[Kind, bool], tuple[int, int]], bytes]:
        # 1. the header
        content = self._content
        try:
            content = content.read_bytes() if isinstance(content, Path) else content
            magic, header, checksum = HEAD.unpack_from(content)
            if magic != MAGIC or zlib.crc32(content[HEAD.size :]) != checksum:
                raise ValueError("its first bytes or its checksum are wrong")
            text = zlib.decompressobj().decompress(content[HEAD.size : HEAD.size + header], LARGEST)
            # 2. groups, each with the place of its tree behind the header
            groups = []
            for kinds, batched, choices, *counts, begin, size in parse_json(text.decode()):
                names = (Ruled(Choice(*c[0]), Parts(*c[1])) if isinstance(c[0], list) else Choice(*c) for c in choices)
                record = Group(tuple(map(kind_from_list, kinds)), batched, tuple(names), *counts)
                groups.append((record, begin, size))
        except OSError as error:
            raise DataError(f"cannot read {self.name}: {error.strerror}") from None
        except _DAMAGED as error:
            raise self._damaged(error) from None
        # 3. of each kind the index of its group and its number there
        numbers = {
            (kind, group.batched): (index, number)
            for index, (group, _, _) in enumerate(groups)
            for number, kind in enumerate(group.kinds)
        }
        return groups, numbers, content[HEAD.size + header :]


def _unpacked(packed: bytes) -> Tree:
    nodes, leaves, *sizes = struct.unpack_from("<II8I", packed)  # bytes of features, 4 planes, 2 planes, certain bits
    pieces, begin = [], 40
    for size in sizes:
        pieces.append(np.frombuffer(decompress(packed[begin : begin + size]), np.uint8))
        begin += size
    features = pieces[0]
    sorted_thresholds = np.stack(pieces[1:5], 1).reshape(-1).view("<f4")
    choices = np.stack(pieces[5:7], 1).reshape(-1).view("<u2")
    if len(features) != nodes or len(choices) != leaves or len(sorted_thresholds) != nodes - leaves:
        raise ValueError("a tree has another size than it says")
    thresholds = np.empty_like(sorted_thresholds)  # those of a feature lie together in the file, which compresses well
    thresholds[by_feature(features)] = sorted_thresholds
    return Tree(features, thresholds, choices, np.unpackbits(pieces[7], count=leaves).astype(bool))


def by_feature(features: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return the order of a tree's thresholds in which those of a feature are next to each other."""
    return np.argsort(features[features != LEAF], kind="stable")
