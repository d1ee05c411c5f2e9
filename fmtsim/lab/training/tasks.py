# SPDX-License-Identifier: Apache-2.0
"""Questions with one right answer each, as a text to learn from: sums, copies, and brackets to close."""

import random
import zlib
from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from fmtsim.lab.training.corpus import Corpus

LINES = 100_000  # of the text
HELD_OUT = 10  # one question in so many, by its checksum, is in the held-out text alone
_CLOSES = {"(": ")", "[": "]", "{": "}", "<": ">"}


def _sum(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randrange(100), draw.randrange(100)
    return f"{a}+{b}", str(a + b)


def _copy(draw: random.Random) -> tuple[str, str]:
    word = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 6)))
    return word, word


def _brackets(draw: random.Random) -> tuple[str, str]:
    opened = "".join(draw.choices("([{<", k=draw.randint(3, 6)))
    return opened, "".join(_CLOSES[one] for one in reversed(opened))


TASKS: Final = MappingProxyType({"sums": _sum, "copies": _copy, "brackets": _brackets})


def task_corpus(seed: int = 0, lines: int = LINES) -> Corpus:
    """Return a text of questions and answers, a line each, ``12+30=42``, ``wxyz=wxyz`` or ``([=])``.

    A question is either in the training text or in the held-out one, never in both.
    """
    draw = random.Random(seed)
    parts: tuple[list[str], list[str]] = ([], [])
    for _ in range(lines):
        question, answer = draw.choice(list(TASKS.values()))(draw)
        parts[zlib.crc32(question.encode()) % HELD_OUT == 0].append(f"{question}={answer}\n")
    train, validation = (torch.frombuffer(bytearray("".join(part).encode()), dtype=torch.uint8) for part in parts)
    return Corpus(name=f"tasks, seed {seed}", train=train, validation=validation, files=1, truncated=False, tasks=True)


def score(batches: Iterable[tuple[Tensor, Tensor]], context: int) -> dict[str, tuple[int, int]]:
    """Return how many answers are right, and how many there are, by task.

    An answer is right where every byte of it, and the end of the line, is what the model finds most likely after those
    before it: what it would write by itself. Lines that a window cuts do not count.

    Args:
        batches: Predicted and true bytes, int64 ``[windows * context]`` both.
        context: Bytes of a window.
    """
    found = dict.fromkeys(TASKS, (0, 0))
    for predicted, targets in batches:
        for row, guess in zip(targets.view(-1, context).tolist(), predicted.view(-1, context).tolist(), strict=True):
            text = bytes(row)
            start = text.find(b"\n") + 1
            while start and (end := text.find(b"\n", start)) >= 0:
                answer = text.index(b"=", start) + 1
                first = chr(row[start])
                name = "brackets" if first in _CLOSES else "sums" if first.isdigit() else "copies"
                right, asked = found[name]
                found[name] = right + (row[answer : end + 1] == guess[answer : end + 1]), asked + 1
                start = end + 1
    return found
