# SPDX-License-Identifier: Apache-2.0
"""Write files of decision trees, which ``fmtsim.gemm.targets.learned`` reads."""

import json
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from fmtsim.gemm.targets.learned import HEAD, MAGIC, Group, Tree, by_feature
from fmtsim.support.files import StrPath, write_file
from tools.calibrate.book_writer import compress, kind_to_list


def learned_bytes(groups: Sequence[tuple[Group, Tree]]) -> bytes:
    """Return a file of trees: the same groups give the same bytes."""
    body, records = b"", []
    for group, tree in groups:
        packed = _packed(tree)
        records.append([[kind_to_list(kind) for kind in group.kinds], *group[1:], len(body), len(packed)])
        body += packed
    header = zlib.compress(json.dumps(records, separators=(",", ":")).encode(), 9)
    return HEAD.pack(MAGIC, len(header), zlib.crc32(header + body)) + header + body


def write_learned(path: StrPath, groups: Sequence[tuple[Group, Tree]]) -> int:
    """Write a file of trees, whole or not at all, and return its size."""
    content = learned_bytes(groups)
    write_file(path, content)
    return len(content)


def _packed(tree: Tree) -> bytes:
    """Return a tree in few bytes: columns, thresholds by their features, and choices as planes of bytes."""
    thresholds = tree.thresholds[by_feature(tree.features)].astype("<f4").view(np.uint8).reshape(-1, 4).T
    choices = tree.choices.astype("<u2").view(np.uint8).reshape(-1, 2).T
    pieces = [tree.features.astype(np.uint8), *thresholds, *choices, np.packbits(tree.certain)]
    packed = [compress(piece.tobytes()) for piece in pieces]
    return struct.pack(f"<II{len(packed)}I", len(tree.features), len(tree.choices), *map(len, packed)) + b"".join(
        packed
    )
