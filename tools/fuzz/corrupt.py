# SPDX-License-Identifier: Apache-2.0
"""What a fuzzer makes of good inputs: JSON and bytes with changes, objects of any type, command lines."""

import contextlib
import enum
import io
import json
import math
import random
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from fmtsim.lab.cli.main import COMMANDS, build_parser, main
from fmtsim.support.errors import ArgumentError

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
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    __str__ = __hash__ = __bool__ = __eq__ = __len__ = __iter__ = __repr__  # type: ignore[assignment]


class Number(enum.IntEnum):
    ONE = 1


def junk(rng: random.Random, depth: int = 2) -> Any:
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
        deep = (b"[" * 100000, b'{"a":' * 100000)
        return rng.choice((*deep, b"", b"\xff\xfe\0", b"null", b'"x"', b"1" * 9999, b"{}" * 2))
    try:
        content = json.dumps(mutated(rng, tree)).encode("utf-8")
    except ValueError:  # an int of too many digits
        content = b'{"name": ' + b"9" * 5000 + b"}"
    return corrupted(rng, content) if kind < 6 else content


def safetensors_file(rng: random.Random, content: bytes, inner: str) -> bytes:
    """Return a corrupt safetensors file, or one whose header (its ``inner`` is JSON) was changed and sealed."""
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


LONG = (  # what takes minutes, or starts processes: reached, it is a result
    "fmtsim.lab.cli.training_commands.compare_schemes", "fmtsim.lab.cli.training_commands.check_native",
    "fmtsim.lab.verify.workers.run",
    "fmtsim.lab.training.sweep.run_sweep", "fmtsim.lab.cli.products.exact_sums", "fmtsim.lab.cli.machine._on_cpu",
)  # fmt: skip
PLAIN = """e4m3 bf16 nvfp4 mxfp8_e4m3 int8 int24 fp64 logfmt8 nf4 1 2 3 -1 0 16 33 1.5 inf nan 1e-320 0x1p3 = , a=b --
    - * block=32,fraction_bits=10 block=0 block=x rounding=stochastic promote_every=128 split=2 h100 chain exact
    hopper.wgmma te_nvfp4 list cuda:99 cpu meta good.npy bad.npy bad.npz bad.safetensors bad.json bad.json:a absent.npy
    folder casts gemm gpu layers gpt2 1,2,512 9..1 --json --help -V nearest_even stochastic all ieee saturate amax
    e4m3* ["""
WORDS = [
    *(text for text in TEXTS if "/" not in text), "9" * 30, "9" * 5000, str(1 << 63), str(1 << 40), *PLAIN.split(),
]  # fmt: skip
FILES = ("bad.npy", "bad.npz", "bad.safetensors", "bad.json")
OPTIONS = {
    command: [action.option_strings for action in build_parser(command)._actions[-1].choices[command]._actions]  # type: ignore[index]
    for command in COMMANDS
}


class LongJob(BaseException):
    """Say that the words were accepted and a long job would begin."""


def make_words(rng: random.Random) -> list[str]:
    command = rng.choice(list(COMMANDS))
    words = [command]
    options = [names[-1] for names in OPTIONS[command] if names]
    for _ in range(rng.randrange(6)):
        word = rng.choice(WORDS)
        words += [rng.choice(options), word] if rng.random() < 0.6 else [word]
    if rng.random() < 0.5:  # words that are complete, with one exchanged
        words = [*rng.choice(GOOD)]
        words[rng.randrange(len(words))] = rng.choice(WORDS)
        words += [rng.choice(options), rng.choice(WORDS)] if rng.random() < 0.4 else []
    return [word for word in words if word != "--plant-error"]


GOOD = [line.split() for line in Path(__file__).with_name("commands.txt").read_text().splitlines()]


def caller(room: Path, good: dict[str, bytes]) -> Any:
    """Return what runs words in a folder, with the files that they name, some of them corrupt."""
    (room / "folder").mkdir(exist_ok=True)
    (room / "text").write_text("some words to train on, again and again\n" * 50)
    for suffix, content in good.items():
        (room / f"good{suffix}").write_bytes(content)

    def call(words: list[str]) -> None:
        rng = random.Random(str(words))
        for name in FILES:
            (room / name).write_bytes(corrupted(rng, good[Path(name).suffix]))
        err = io.StringIO()
        try:
            with contextlib.ExitStack() as stack:
                for place in LONG:
                    stack.enter_context(mock.patch(place, side_effect=LongJob))
                stack.enter_context(contextlib.chdir(room))
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                stack.enter_context(contextlib.redirect_stderr(err))
                status = main(words)
        except LongJob:
            return
        except SystemExit as stop:  # --help and --version
            assert not stop.code, f"status {stop.code}"
            return
        said = err.getvalue()
        assert status in (0, 1, 2), f"status {status}"
        if status == 2:
            assert said.count("\n") == 1 and said.startswith("fmtsim: error: "), f"not one line: {said!r}"
            raise ArgumentError(said)

    return call
