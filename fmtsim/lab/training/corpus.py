# SPDX-License-Identifier: Apache-2.0
"""Text to train on: any file or folder, the sources of Python's standard library, or questions with one answer."""

import hashlib
import os
import random
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from fmtsim.formats.packing import tensor_of_bytes
from fmtsim.support.errors import DataError

MAX_BYTES = 32 * 1024 * 1024  # a training run of minutes sees less; larger corpora are cut here and say so
VALIDATION_SHARE = 10  # the last tenth is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Hold a text as bytes."""

    name: str  # where it came from, for records and pictures
    train: Tensor  # uint8 [n], all but the last tenth
    validation: Tensor  # uint8, the last tenth
    files: int  # files that were read
    truncated: bool  # whether reading stopped at MAX_BYTES
    tasks: bool = False  # whether it is questions with answers (``training/tasks.py``)

    @property
    def bytes(self) -> int:
        """Length of the whole text."""
        return self.train.numel() + self.validation.numel()

    @property
    def sha256(self) -> str:
        """Digest of the whole text."""
        digest = hashlib.sha256(self.train.numpy().data)
        digest.update(self.validation.numpy().data)
        return digest.hexdigest()


def load_corpus(path: str | Path | None, context: int) -> Corpus:
    """Read a text file, all text files below a folder, or, for None, the standard library's modules.

    Files in a folder are read in the order of their names; hidden files and files with NUL bytes are passed over.

    Args:
        path: A file or a folder.
        context: Bytes that the model sees at once; the held-out tenth must be longer than that.

    Raises:
        DataError: the path is missing, unreadable, empty, binary or too short.
    """
    source = Path(sysconfig.get_paths()["stdlib"] if path is None else path).expanduser()
    if path is None and not (source / "os.py").is_file():
        raise DataError(f"the standard library's sources are not at {source}; pass --data with a text file or a folder")
    name = "Python standard library" if path is None else str(path)
    hint = "pass --data with a text file or a folder of text files"
    if not source.exists():
        raise DataError(f"--data {name}: no such file or folder; {hint}, or leave it out for Python's own sources")
    if source.is_file():
        text, whole = _read(source, MAX_BYTES)
        if not text:
            raise DataError(f"--data {source}: the file is empty; {hint}")
        if b"\0" in text:
            raise DataError(f"--data {source}: the file holds NUL bytes and is not text; {hint}")
        files, truncated = 1, not whole
    elif source.is_dir():
        parts, total, seen, truncated = [], 0, 0, False
        for file in sorted(source.glob("*.py")) if path is None else _files(source):
            seen += 1
            text, whole = _read(file, MAX_BYTES - total)
            truncated |= not whole
            if text and b"\0" not in text:
                parts.append(text)
                total += len(text)
            if total >= MAX_BYTES:
                truncated = True
                break
        if not parts:
            why = f"{seen} files, all empty or binary" if seen else "no files"
            raise DataError(f"--data {name}: the folder holds {why}; {hint}")
        text, files = b"\n".join(parts), len(parts)
    else:
        raise DataError(f"--data {name}: neither a file nor a folder; {hint}")
    needed = VALIDATION_SHARE * (context + 2)
    if len(text) < needed:
        raise DataError(
            f"--data {name}: {len(text)} bytes of text, at least {needed} are needed for context {context}; "
            "pass more text or a smaller --context"
        )
    data = tensor_of_bytes(text)
    split = len(text) - len(text) // VALIDATION_SHARE
    return Corpus(name=name, train=data[:split], validation=data[split:], files=files, truncated=truncated)


def sample(
    data: Tensor, batch: int, context: int, generator: torch.Generator, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Draw windows of a text: inputs and the bytes that follow them, int64 [batch, context] both, on a device."""
    starts = torch.randint(data.numel() - context, (batch, 1), generator=generator)
    windows = data[starts + torch.arange(context + 1)].long().to(device)
    return windows[:, :-1], windows[:, 1:]


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(place, name) for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _read(path: Path, limit: int) -> tuple[bytes, bool]:
    """Return at most limit bytes of a file, and whether that was all."""
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1)
    except OSError as error:
        raise DataError(
            f"--data {path}: {error.strerror or error}; check its permissions, or pass another path"
        ) from None
    return text[:limit], len(text) <= limit


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
    train, validation = (tensor_of_bytes("".join(part).encode()) for part in parts)
    return Corpus(name=f"tasks, seed {seed}", train=train, validation=validation, files=1, truncated=False, tasks=True)


def score(batches: Iterable[tuple[Tensor, Tensor]], context: int) -> dict[str, tuple[int, int]]:
    """Return how many answers are right, and how many there are, by task.

    An answer is right where every byte of it, and the end of the line, is what the model finds most likely after those
    before it: what it would write by itself. Lines that a window cuts do not count.

    Args:
        batches: Predicted and true bytes, int64 ``[windows * context]`` both.
        context: Bytes of a window.
    """
    scores = dict.fromkeys(TASKS, (0, 0))
    for predicted, targets in batches:
        for row, guess in zip(targets.view(-1, context).tolist(), predicted.view(-1, context).tolist(), strict=True):
            text = bytes(row)
            start = text.find(b"\n") + 1
            while start and (end := text.find(b"\n", start)) >= 0:
                answer = text.index(b"=", start) + 1
                first = chr(row[start])
                name = "brackets" if first in _CLOSES else "sums" if first.isdigit() else "copies"
                right, asked = scores[name]
                scores[name] = right + (row[answer : end + 1] == guess[answer : end + 1]), asked + 1
                start = end + 1
    return scores
