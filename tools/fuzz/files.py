# SPDX-License-Identifier: Apache-2.0
"""Targets that read strings, files and states: formats, recipes, plans, tensors on disk, names, optimizers."""

import contextlib
import io
import json
import math
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

import fmtsim
from fmtsim.casts.encoded import Encoded
from fmtsim.formats.registry import KINDS, format_from_json, format_to_dict, format_to_json, get_format, list_formats
from fmtsim.formats.scaling import History, Scaling, TensorScale
from fmtsim.gemm.targets.planfile import Book, Family
from fmtsim.gemm.targets.question import Choice, Kind, Question
from fmtsim.gemm.targets.target import PLANS, get_target
from fmtsim.gemm.targets.target import Target as Plan
from fmtsim.gemm.units.unit import get_unit
from fmtsim.lab.analysis.compare import compare
from fmtsim.lab.cli.result_commands import load_tensors
from fmtsim.lab.explain import explain
from fmtsim.optim import AdamW
from fmtsim.recipes.catalogue import RECIPES
from fmtsim.recipes.ptq_catalogue import RECIPES as PTQ_RECIPES
from fmtsim.recipes.recipe_registry import get_recipe
from fmtsim.recipes.serialization import load_recipe, recipe_from_dict, recipe_to_dict, save_recipe
from fmtsim.rounding.modes import Rounding, get_rounding
from fmtsim.spec.call import GemmCall
from fmtsim.support.errors import FmtsimError
from tools.calibrate.book_writer import book_bytes
from tools.fuzz.corrupt import (
    Hostile,
    anything,
    caller,
    corrupted,
    json_file,
    make_words,
    mutated,
    safetensors_file,
)  # fmt: skip
from tools.fuzz.target import ROOM, Target, file_target, installed, seeded

_SPELLED = r"(e\d+m\d+|u?int\d+(_(full|half))?(_f\d+)?|lns\d+_g\d+|logfmt\d+)"
NAMES = st.text() | st.from_regex(_SPELLED, fullmatch=True)
FORMATS = [format_to_dict(get_format(name)) for name in list_formats()]
PLAN_FILES = [json.loads((PLANS / f"{name}.json").read_text()) for name in ("chain", "a100", "h100")]
CALLS = [
    GemmCall(operation="mm", m=m, n=n, k=k, a=a, b=a, out=torch.float32, batch=1)
    for m, n, k, a in ((1, 1, 1, "bf16"), (64, 48, 4096, "fp16"), (128, 128, 512, "e4m3"), (3, 5, 7, "int8"))
]  # fmt: skip


def read_format_name(value: Any) -> None:
    fmt = get_format(value)
    assert format_from_json(format_to_json(fmt)) == fmt
    assert repr(fmt) and fmt._repr_html_() and fmt.facts() and hash(fmt) is not None


def read_format_json(content: bytes) -> None:
    fmt = format_from_json(content.decode("utf-8", "surrogateescape"))
    read_format_name(fmt)
    fmtsim.quantize(torch.tensor([0.3, -2.0, math.nan, 1e30]), fmt, pad=True)


def make_record(rng: random.Random) -> tuple[type, dict[str, Any]]:
    classes = [*KINDS.values(), Scaling, History, TensorScale, Rounding]
    good = get_format(rng.choice(list_formats()))
    cls = rng.choice([type(good), type(good), *classes])
    fields = {name: getattr(good, name) for name in cls.__dataclass_fields__ if name in type(good).__dataclass_fields__}
    fields = dict.fromkeys((name for name, f in cls.__dataclass_fields__.items() if f.default is MISSING), 8) | fields
    for _ in range(rng.choice((1, 1, 2))):
        fields[rng.choice(list(cls.__dataclass_fields__))] = anything(rng)
    return cls, fields


def read_recipe(path: Path) -> None:
    recipe = load_recipe(path)
    assert str(recipe) and recipe._repr_html_()
    hash(recipe)
    save_recipe(recipe, ROOM / "again.json")
    assert load_recipe(ROOM / "again.json") == recipe


def read_ptq(path: Path) -> None:
    recipe = load_recipe(path)
    assert str(recipe) and recipe.prescribed and recipe.inference
    assert recipe_from_dict(json.loads(json.dumps(recipe_to_dict(recipe)))) == recipe


def use_plan(target: Plan) -> None:
    assert repr(target) and Plan.from_dict(json.loads(json.dumps(target.to_dict())), folder=ROOM).to_dict()
    for call in CALLS:
        with contextlib.suppress(FmtsimError):  # of a call, not of the file
            target.resolve(call)


def encoded_files() -> list[bytes]:
    files = []
    for name in ("e4m3", "nvfp4", "mxfp6_e2m3", "int4_group128", "logfmt8", "nf4", "fp32", "mxfp4", "e8m0"):
        if name in list_formats():
            x = torch.linspace(-3.0, 3.0, 64).reshape(4, 16)
            fmtsim.encode(x, name, pad=True).save(ROOM / "good")
            files.append((ROOM / "good").read_bytes())
    return files


def read_encoded(path: Path) -> None:
    q = Encoded.load(path)
    assert repr(q) and q.nbytes >= 0 and q.bits_per_element >= 0
    values = q.decode()
    assert values.shape == q.shape
    q.save(ROOM / "again")
    same = Encoded.load(ROOM / "again").decode()
    assert torch.equal(same.isnan(), values.isnan()) and torch.equal(same.nan_to_num(), values.nan_to_num())


def tensor_files() -> dict[str, bytes]:
    """Return files that ``fmtsim compare`` reads, by suffix."""
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    one, many = io.BytesIO(), io.BytesIO()
    np.save(one, x)
    np.savez(many, a=x, b=x.astype(np.float16))
    files = {".npy": one.getvalue(), ".npz": many.getvalue()}
    if installed("safetensors", "tensors.safetensors"):
        from safetensors.torch import save

        files[".safetensors"] = save({"a": torch.tensor(x)})
    return files


def read_tensors(path: Path) -> None:
    for read in load_tensors(str(path)).values():
        try:
            compare(read(), read())
        except FmtsimError as error:
            raise type(error)(f"{path}: {error}") from None if str(path) not in str(error) else error


def books() -> list[bytes]:
    kind = Kind("bf16", "bf16", torch.bfloat16)
    runs = tuple((1 + i * i, Choice(66, i % 5 or -1, i % 3)) for i in range(60))
    many = [Family(kind, 2, "k", (n, n // 3 + 1), runs[n % 7 : n % 60 + 8], 1, n % 2 + 1) for n in range(1, 300)]
    return [book_bytes(many[:2], library="a GPU", aliases={kind._replace(bias=True): kind}),
            book_bytes(many, library="a GPU")]  # fmt: skip


def make_book(rng: random.Random) -> bytes:
    """Return a corrupt book, or one that was changed and sealed again."""
    content = rng.choice(BOOKS)
    if rng.random() < 0.3:
        return corrupted(rng, content)
    head = struct.Struct("<16sHIII")
    magic, version, size, _, _ = head.unpack_from(content)
    header, body = content[head.size : head.size + size], content[head.size + size :]
    if rng.random() < 0.6:
        header = zlib.compress(json_file(rng, json.loads(zlib.decompress(header))))
    else:
        body = corrupted(rng, body)
    return head.pack(magic, version, len(header), len(body), zlib.crc32(header + body)) + header + body


def read_book(path: Path) -> None:
    book = Book.open(path)
    for n, _ in zip(range(1, 60), book.families(), strict=False):
        book.find(Question(Kind("bf16", "bf16", torch.bfloat16), 2, n, n // 3 + 1, 40))


def make_number(rng: random.Random) -> tuple[Any, Any, dict[str, Any]]:
    largest = 1.7976931348623157e308
    ends = (5e-324, -5e-324, 1e-310, 1e308, -largest, math.nan, math.inf, -0.0, 2.0**-149, 3.4028235e38, 0.1)
    x: Any = rng.choice(ends) if rng.random() < 0.4 else [rng.choice(ends) for _ in range(rng.randrange(40))]
    x = x if rng.random() < 0.8 else anything(rng)
    unlisted = ("int11_half", "int3_half_f5", "uint4_f32", "int24_half", "lns8_g8", "e1m0", "e8m10")
    fmt = rng.choice([*list_formats(), *unlisted])
    names = ("rounding", "overflow", "generator", "random_bits", "block_size", "scale_rule")
    options = {} if rng.random() < 0.7 else {rng.choice(names): anything(rng)}
    return x, fmt if rng.random() < 0.95 else anything(rng), {"rounding": rng.choice(MODES_OF_EXPLAIN)} | options


def tell(arguments: tuple[Any, Any, dict[str, Any]]) -> None:
    x, fmt, options = arguments
    explanation = explain(x, fmt, **options)
    assert explanation.engine_agrees and str(explanation) and explanation.to_dict()


def look_up(value: Any) -> None:
    """Hand a value to everything that takes a name, a record or a path; each refuses it or knows it."""
    refused = []
    for take in LOOK_UPS:
        try:
            take(value)
        except FmtsimError as error:
            refused.append(error)
    if len(refused) == len(LOOK_UPS):
        raise refused[0]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def _stepped(scheme: str) -> AdamW:
    net = _net()
    optimizer = AdamW(net.parameters(), state=scheme)
    net(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    return optimizer


def quantised() -> tuple[dict[str, Any], Callable[[Any], object]]:
    """Return what a quantised model is, and what loads it into a fresh one."""
    good = fmtsim.state(fmtsim.ptq(_net(), "int8_static", [torch.linspace(-1, 1, 64).reshape(4, 16)]))
    return good, lambda state: fmtsim.load_state(_net(), state)(torch.ones(2, 16))


def delayed() -> tuple[dict[str, Any], Callable[[Any], object]]:
    """Return what delayed scaling remembers, and what loads it."""
    model = fmtsim.convert(_net(), recipe="te_delayed", filter_fn=lambda module, name: True)
    return fmtsim.state(model), lambda state: fmtsim.load_state(model, state)


def optimizer() -> tuple[dict[str, Any], Callable[[Any], object]]:
    """Return the state of an optimizer, and what loads it."""
    stepped = _stepped("coat")
    return stepped.state_dict(), lambda state: stepped.load_state_dict(state)


MODES_OF_EXPLAIN = ("nearest_even", "up", "to_odd", "stochastic", "nearest_away", "toward_zero")
ENCODED = encoded_files()
BOOKS = books()
TENSORS = tensor_files()
LOOK_UPS: list[Callable[[Any], Any]] = [
    get_format, list_formats, fmtsim.register_format, get_recipe, get_target, get_unit, get_rounding,
    recipe_from_dict, Plan.from_dict, load_recipe, Encoded.load,
    format_from_json,
]  # fmt: skip

TARGETS: list[Target] = [
    Target("format.name", NAMES | seeded(anything), read_format_name, count=100),
    Target("format.json", seeded(lambda rng: json_file(rng, rng.choice(FORMATS))), read_format_json),
    Target("format.record", seeded(make_record), lambda made: read_format_name(made[0](**made[1]))
           if made[0] in KINDS.values() else made[0](**made[1])),
    file_target("recipe.file", "recipe.file.json", read_recipe,
                lambda rng: json_file(rng, {"name": "x"} | recipe_to_dict(rng.choice(RECIPES))),
                failed=(b"[" * 100000, b"\xff", b'{"name": {}}', b'{"name": "x", "rules": [{"kind": {}}]}')),
    Target("recipe.dict", seeded(lambda rng: mutated(rng, recipe_to_dict(rng.choice(RECIPES)), anything)),
           lambda record: str(recipe_from_dict(record))),
    file_target("ptq.file", "ptq.file.json", read_ptq,
                lambda rng: json_file(rng, recipe_to_dict(rng.choice(PTQ_RECIPES)))),
    file_target("plan.file", "plan.file.json", lambda path: use_plan(get_target(path)),
                lambda rng: json_file(rng, rng.choice(PLAN_FILES)), failed=(b"[" * 100000, b"\xff", b"[]", b"{}")),
    Target("plan.dict", seeded(lambda rng: mutated(rng, rng.choice(PLAN_FILES), anything)),
           lambda record: use_plan(Plan.from_dict(record))),
    file_target("book.file", "book.file.book", read_book, make_book, failed=(b"", BOOKS[0][:30], BOOKS[1][:-1])),
    file_target("encoded.file", "encoded.file.safetensors", read_encoded,
                lambda rng: safetensors_file(rng, rng.choice(ENCODED), "format")),
    *(file_target(name, name, read_tensors, lambda rng, good=good: corrupted(rng, good), failed=(
        b"", good[:40], good[:8], good.replace(b"rtran", b""), good.replace(b"(4, 6)", b"(4, -6)"),
        good.replace(b"(4, 6)", b"(4 6) "), good.replace(b"<f4", b"|O8"), good.replace(b"<f4", b"<U4"),
    )) for suffix, good in TENSORS.items() for name in [f"tensors{suffix}"]),
    Target("explain", seeded(make_number), tell, count=100, failed=(
        (5e-324, "int11_half", {}), (10**400, "e4m3", {}), (1.7976931348623157e308, "logfmt8", {"rounding": "up"}),
        (1e308, "e4m3", {"block_size": torch.tensor(0.0)}), (torch.zeros(2, device="meta"), "e4m3", {}),
    )),
    Target("names", seeded(anything), look_up, failed=(
        1, 8, True, [], {}, 10**5000, Path("a\0b.json"), Path("/dev/zero"), "\ud800", Hostile(), np.zeros(3), "e٣m٤",
    )),
    *(Target(f"state.{kind.__name__}", seeded(lambda rng, good=good: mutated(rng, good, anything)), load, count=60)
      for kind in (quantised, delayed, optimizer) for good, load in [kind()]),
    Target("command", seeded(make_words), caller(ROOM, TENSORS | {".json": json.dumps(PLAN_FILES[0]).encode()}),
           count=80),
]  # fmt: skip
