# SPDX-License-Identifier: Apache-2.0
"""What a fuzzer makes of good inputs: JSON with one thing exchanged, bytes flipped and cut, and objects of any type."""

import enum
import json
import math
import random
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

TEXTS = (
    "", " ", "e4m3", "E4M3", "fp8", "nvfp4", "stochastic", "nearest_even", "\ud800", "a\0b", "\n", "𝟜", "x" * 300,
    "%s{}", "h200", "exact", "hopper.wgmma", "out", "tensor", "row", "../../x.json", ".json", "null",
    "1e999", "-1", "0x10",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 4, 7, 8, 16, 32, 64, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64,
    -(1 << 63), 10**30, 10**400, 10**4200, -(10**30), 0.0, -0.0, 0.5, 1.5, -2.5, 1e-320, 5e-324, 1e30, 1e300,
    1.7976931348623157e308,
)  # fmt: skip


class Hostile:
    """Fails whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    __str__ = __hash__ = __bool__ = __eq__ = __len__ = __iter__ = __repr__  # type: ignore[assignment]


class Number(enum.IntEnum):
    """An int subclass."""

    ONE = 1


def junk(rng: random.Random, depth: int = 2) -> Any:
    """Return any value of JSON."""
    kind = rng.randrange(10 if depth else 7)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind < 7:
        return rng.choice((None, True, False, math.nan, math.inf, -math.inf))
    if kind == 7:
        return {rng.choice(TEXTS): junk(rng, depth - 1) for _ in range(rng.randrange(3))}
    return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]


def anything(rng: random.Random) -> Any:
    """Return an object of any type, fresh."""
    makers = (
        lambda: junk(rng), lambda: junk(rng), lambda: junk(rng), lambda: b"e4m3", lambda: bytearray(b"x"),
        Hostile, object, lambda: Path("e4m3"), lambda: Path("a\0b.json"), lambda: Path("/"),
        lambda: Path("/dev/zero"), lambda: Path("/dev/full"), lambda: int,
        lambda: float, lambda: len, lambda: ..., lambda: NotImplemented,
        lambda: 1j, lambda: Fraction(1, 3), lambda: Number.ONE, lambda: {1, 2}, frozenset, lambda: range(3),
        lambda: (1, 32), lambda: (None, None), lambda: (x for x in "ab"), lambda: slice(1), lambda: Exception("x"),
        lambda: np.float64(math.nan), lambda: np.int64(4), lambda: np.zeros(3), lambda: np.dtype("f4"),
        lambda: np.str_("e4m3"), lambda: torch.zeros(2), lambda: torch.zeros(()), lambda: torch.float8_e4m3fn,
        lambda: torch.complex64, lambda: torch.int8, torch.Generator, lambda: torch.device("cpu"),
        lambda: torch.Size([2]), lambda: torch.zeros(2, device="meta"), lambda: {1: 2, None: 3}, _endless,
        lambda: type("Own", (str,), {})("e4m3"), lambda: 10**5000,
    )  # fmt: skip
    return rng.choice(makers)()


def _endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def mutated(rng: random.Random, tree: Any, junk: Any = junk) -> Any:
    """Return a copy of a tree of dicts and lists in which a few things are exchanged, left out, renamed or doubled."""
    tree = _copy(tree)
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return junk(rng)
        holder, key = rng.choice(places)
        action = rng.randrange(8)
        if action < 4:
            holder[key] = junk(rng)
        elif action == 4:
            del holder[key]
        elif action == 5:
            other, name = rng.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                holder[key] = _copy(other[name])
        elif isinstance(holder, dict):
            holder[rng.choice(TEXTS)] = holder.pop(key) if action == 6 else junk(rng)
        else:
            holder.insert(key, junk(rng))
    return tree


def _copy(tree: Any, room: int = 40) -> Any:
    if not room or not isinstance(tree, dict | list):
        return tree
    if isinstance(tree, dict):
        return {key: _copy(value, room - 1) for key, value in tree.items()}
    return [_copy(value, room - 1) for value in tree]


def _places(tree: Any, room: int = 40) -> Any:
    if room and isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key], room - 1)


def corrupted(rng: random.Random, content: bytes) -> bytes:
    """Return bytes with some flipped, left out, put in, doubled or cut off."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 8, 50)))
        action = rng.randrange(7)
        if action == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            del data[at:end]
        elif action == 2:
            data[at:at] = rng.choice((b"\xff", b"\0", b"{", b"[", b'"', b"}", b",", b"1e999", b"NaN", b"\xed\xa0\x80"))
        elif action == 3:
            data[at:at] = data[at:end] * rng.choice((1, 2, 9))
        elif action == 4 and rng.random() < 0.3:
            del data[at:]
        elif action == 5:
            data[at:end] = rng.randbytes(end - at)
        elif action == 6:
            data[at : at + 8] = rng.choice((0, 1, 1 << 31, 1 << 60, (1 << 64) - 1)).to_bytes(8, "little")
    return bytes(data)


def json_file(rng: random.Random, tree: Any) -> bytes:
    """Return a JSON file of a tree that was mutated, corrupted, or is nothing of the kind."""
    kind = rng.randrange(20)
    if kind == 0:
        return rng.choice(
            (b"[" * 100000, b'{"a":' * 100000, b"", b"\xff\xfe\0", b"null", b'"x"', b"1" * 9999, b"{}" * 2)
        )
    try:
        content = json.dumps(mutated(rng, tree)).encode("utf-8")
    except ValueError:  # an int of too many digits
        content = b'{"name": ' + b"9" * 5000 + b"}"
    return corrupted(rng, content) if kind < 6 else content


def safetensors_file(rng: random.Random, content: bytes, inner: str) -> bytes:
    """Return one of fmtsim's safetensors files that is corrupt, or whose header was changed and sealed again.

    Args:
        rng: Of the changes.
        content: A good file.
        inner: The item of its metadata that is JSON itself.
    """
    if rng.random() < 0.4:
        return corrupted(rng, content)
    size = int.from_bytes(content[:8], "little")
    header, payload = json.loads(content[8 : 8 + size]), content[8 + size :]
    metadata = header["__metadata__"]
    part = rng.randrange(4)
    try:
        if part == 0:
            metadata[inner] = json.dumps(mutated(rng, json.loads(metadata[inner])))
        elif part == 1:
            header["__metadata__"] = mutated(rng, metadata)
        elif part == 2:
            header = mutated(rng, header)
        else:
            payload = corrupted(rng, payload)
        metadata = header.get("__metadata__") if isinstance(header, dict) else None
        if isinstance(metadata, dict):
            metadata.pop("crc32", None)
            table = {name: entry for name, entry in header.items() if name != "__metadata__"}
            start = zlib.crc32(json.dumps([table, metadata], sort_keys=True).encode())
            metadata["crc32"] = f"{zlib.crc32(payload, start):08x}"
        text = json.dumps(header).encode()
    except (ValueError, TypeError):
        return corrupted(rng, content)
    return len(text).to_bytes(8, "little") + text + payload
