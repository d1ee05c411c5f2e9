# SPDX-License-Identifier: Apache-2.0
"""Targets that read folders which fmtsim wrote: files edited, damaged, truncated, exchanged, renamed or missing.

Where what a folder says can be told from its files (a kernel, the codes of an export), a result has to say it, too.
"""

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import fmtsim
from fmtsim.cpu.runtime import kernel_cache
from fmtsim.cpu.runtime.jit import kernel
from fmtsim.formats.tensor_file import read_tensors, stored_tensor, tensor_content
from fmtsim.gemm.targets.learned import Group, Tree
from fmtsim.gemm.targets.question import Choice, Kind
from fmtsim.lab.analysis.audit import audit
from fmtsim.lab.analysis.trace import Trace
from fmtsim.lab.cli.main import main
from fmtsim.lab.training.artifacts import overlay
from fmtsim.lab.training.loading import load_weights
from fmtsim.lab.training.sweep import Point, SweepRun, read_runs
from fmtsim.support import folder as caches
from fmtsim.support.errors import ArgumentError, DataError, FmtsimError
from tools.calibrate.learned_writer import learned_bytes
from tools.fuzz.corrupt import corrupted, json_file, junk, mutated, safetensors_file
from tools.fuzz.files import BOOKS, CALLS, PLAN_FILES, make_book, use_plan
from tools.fuzz.target import ROOM, Target, file_target, installed, seeded

Files = dict[str, bytes]


def folder_target(
    name: str, read: Callable[[Path, Files], Any], make: Callable[[random.Random], Files], **more: Any
) -> Target:
    """Return a target that reads a folder of files, whose errors name something in it."""
    place = ROOM / name

    def call(files: Files) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for file, content in files.items():
            (place / file).write_bytes(content)
        try:
            read(place, files)
        except FmtsimError as error:
            assert str(place) in str(error), f"no file is named: {error}"
            raise

    return Target(name, seeded(make), call, **more)


def exchanged(rng: random.Random, goods: list[Files], edit: Callable[[random.Random, str, bytes], bytes]) -> Files:
    """Return the files of a folder, one of them edited, from another folder, under another's name, or missing."""
    files = dict(rng.choice(goods))
    file, kind = rng.choice(sorted(files)), rng.randrange(10)
    if kind < 6:
        files[file] = edit(rng, file, files[file])
    elif kind < 8:
        files[file] = rng.choice(goods).get(file, b"")
    elif kind == 8:
        files[file] = rng.choice(list(files.values()))
    else:
        del files[file]
    return files


# Exports.


def _exports(layout: str, names: tuple[str, ...]) -> list[Files]:
    torch.manual_seed(0)
    goods, data = [], [torch.randn(8, 64)]
    for name in names:
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        shutil.rmtree(ROOM / "export", ignore_errors=True)
        (ROOM / "export").mkdir()
        path = ROOM / "export" / {"compressed-tensors": "", "torchao": "x.safetensors", "gguf": "x.gguf"}[layout]
        fmtsim.export(fmtsim.ptq(model, name, data, progress=False), path, layout)  # type: ignore[arg-type]
        goods.append({file.name: file.read_bytes() for file in sorted((ROOM / "export").iterdir())})
    return goods


def _equal(values: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(values[name], x) for name, x in expected.items() if name in values)


def _tensors(path: Path) -> Any:
    return {name: (tag, shape, bytes(data)) for name, (tag, shape, data) in read_tensors(path)[0].items()}


def _export_target(layout: str, names: tuple[str, ...], inner: str, **more: Any) -> Target:
    goods = _exports(layout, names)
    main = sorted(goods[0])[-1]  # of tensors; config.json lies before
    stored: list[Any] = []  # what the tensors of a good file stand for, whatever else its folder says
    for files in goods:
        for file, content in files.items():
            (ROOM / "export" / file).write_bytes(content)
        path = ROOM / "export" / main
        if main.endswith("safetensors"):
            stored.append((_tensors(path), fmtsim.read_export(path if len(files) == 1 else path.parent)))

    def read(place: Path, files: Files) -> None:
        path = place if "config.json" in goods[0] else place / main
        values = fmtsim.read_export(path)
        assert all(isinstance(x, Tensor) for x in values.values())
        for tensors, expected in stored:
            if _tensors(place / main) == tensors:
                assert _equal(values, expected), "other values than the codes and scales stand for"
                assert "config.json" not in files or set(values) == set(expected), f"other names: {set(values)}"

    def edit(rng: random.Random, file: str, content: bytes) -> bytes:
        if file == "config.json":
            return json_file(rng, json.loads(content))
        return safetensors_file(rng, content, inner) if file.endswith("safetensors") else corrupted(rng, content)

    return folder_target(f"export.{layout}", read, lambda rng: exchanged(rng, goods, edit), **more)


# Checkpoints of other programs.


def _checkpoints() -> list[Files]:
    """Return small files of each layout: names and tensors of a weight, and what the JSON beside them says."""
    f8, bytes_, words = torch.float8_e4m3fn, torch.uint8, torch.int32
    four = {"dtype": "uint4"}
    layouts: list[tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], Any]] = [
        ({"w_blocks": (bytes_, (2, 4, 2, 16)), "w_scales": (bytes_, (2, 4, 2))}, {"quant_method": "mxfp4"}),
        ({"l.weight": (f8, (130, 140)), "l.weight_scale_inv": (torch.float32, (2, 2))},
         {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ({"l.weight": (torch.int8, (4, 32)), "l.scale": (torch.float8_e8m0fnu, (4, 2))}, {"quant_method": "fp8"}),
        ({"l.weight": (bytes_, (4, 32)), "l.weight_scale": (f8, (4, 4)), "l.weight_scale_2": (torch.float32, ())},
         {"quant_method": "modelopt", "group_size": 16}),
        ({"l.qweight": (words, (8, 8)), "l.qzeros": (words, (2, 1)), "l.scales": (torch.float16, (2, 8)),
          "l.g_idx": (words, (64,))}, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
        ({"l.qweight": (words, (64, 2)), "l.qzeros": (words, (2, 2)), "l.scales": (torch.float16, (2, 16))},
         {"quant_method": "awq", "bits": 4, "group_size": 32}),
        ({"l.weight": (words, (64, 2)), "l.weight_scale": (torch.float32, (2, 16)),
          "l.weight_zero_point": (words, (2, 2))},
         {"quant_method": "quark", "global_quant_config": {"weight": four}, "export": {"pack_method": "reorder"}}),
    ]  # fmt: skip
    goods = []
    for tensors, config in layouts:
        made = {name: torch.zeros(shape, dtype=bytes_).to(dtype) for name, (dtype, shape) in tensors.items()}
        if "l.g_idx" in made:
            made["l.g_idx"] = torch.arange(64, dtype=words) % 2
        stored = {name: stored_tensor(t) for name, t in made.items()}
        index = {"weight_map": dict.fromkeys(made, "model.safetensors")}
        files = {"config.json": {"quantization_config": config}, "model.safetensors.index.json": index}
        goods.append({name: json.dumps(value).encode() for name, value in files.items()})
        goods[-1]["model.safetensors"] = tensor_content(stored, {"about": "{}"})
    return goods


def _edit_checkpoint(rng: random.Random, file: str, content: bytes) -> bytes:
    if file.endswith("json"):
        return json_file(rng, json.loads(content))
    return safetensors_file(rng, content, "about")


def _open(place: Path, files: Files) -> None:
    try:
        checkpoint = fmtsim.open_checkpoint(place)
        for name in checkpoint:
            assert isinstance(checkpoint.decode(name), Tensor) and repr(checkpoint)
    except FmtsimError as error:
        assert isinstance(error, DataError), f"{type(error).__name__} in place of DataError: {error}"
        raise


# Plan files with their books and trees.


def _trees() -> list[bytes]:
    kind = Kind("bf16", "bf16", torch.bfloat16)
    tree = Tree(
        np.array([1, 255, 2, 255, 255]), np.array([64.0, 128.0]), np.array([0, 1, 0]), np.array([1, 0, 1], bool)
    )
    groups = [(Group((kind,), False, (Choice(66, 1, 1), Choice(24, 2, 0)), 10, 9, 8, 7, 6), tree)]
    return [learned_bytes(groups), learned_bytes([(groups[0][0]._replace(kinds=(kind._replace(bias=True),)), tree)])]


def _plans() -> list[Files]:
    goods = []
    for number, book in enumerate(BOOKS):
        plan = PLAN_FILES[2] | {"book": "x.book", "trees": ["x.trees"], "name": f"gpu {number}"}
        goods.append({"plan.json": json.dumps(plan).encode(), "x.book": book, "x.trees": _trees()[number]})
    for name in ("h100", "x.json"):
        record = {"base": name, "settings": {"reductions": "fp32"}}
        goods.append({"plan.json": json.dumps(record).encode()})
    return goods


def _edit_plan(rng: random.Random, file: str, content: bytes) -> bytes:
    if file == "plan.json":
        return json_file(rng, json.loads(content))
    return make_book(rng) if file == "x.book" else corrupted(rng, content)


def _read_plan(place: Path, files: Files) -> None:
    target = fmtsim.get_target(place / "plan.json")
    assert repr(target) and fmtsim.get_target(target).to_dict()
    for call in CALLS:
        with contextlib.suppress(ArgumentError):  # of a call, not of the files
            target.resolve(call)


def make_settings(rng: random.Random) -> Any:
    """Return keywords of ``with_settings``, some of them wrong."""
    good = {"settings": "batch_invariant", "reductions": "fp32", "workspace": 131072, "lt_workspace": 1024,
            "library": "cublaslt"}  # fmt: skip
    options = {name: value for name, value in good.items() if rng.random() < 0.4}
    for name in (*good, "other"):
        if rng.random() < 0.2:
            options[name] = rng.choice((junk(rng), good, {"reductions": "fp32"}))
    return mutated(rng, options)


def _use_settings(options: Any) -> None:
    target = fmtsim.get_target("h100")
    if isinstance(options, dict):
        use_plan(target.with_settings(**{str(name): value for name, value in options.items()}))
    use_plan(target.with_settings(options))


# What runs leave: sweeps, records of trainings, traces, weights.


def _runs() -> list[Files]:
    points = [Point(scheme="e4m3", lr=1e-2, width=16, steps=3, seed=seed) for seed in range(3)]
    lines = [
        SweepRun(point=point, parameters=9, tokens=7, losses=(1.0, 0.5), validation=0.7).to_line() for point in points
    ]
    return [{"runs.jsonl": "".join(lines[:count]).encode()} for count in (1, 3)]


def _edit_lines(rng: random.Random, file: str, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = json_file(rng, json.loads(lines[at])) + rng.choice((b"\n", b"", b"\r\n"))
    return b"".join(lines)


def _records() -> list[Files]:
    """Return the files of two short trainings."""
    (ROOM / "text").write_text("some words to train on, again and again\n" * 50)
    size = ["--batch-size", "2", "--context", "16", "--width", "16", "--layers", "1", "--heads", "2", "--steps", "4",
            "--quiet"]  # fmt: skip
    for seed in "12":
        out = ["--seed", seed, "--out", str(ROOM / f"run{seed}"), "--data", str(ROOM / "text"), "--format", "e4m3"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["train", *size, *out]) == 0
    return [{"record.json": (ROOM / f"run{seed}" / "record.json").read_bytes()} for seed in "12"]


def _lay_over(place: Path, files: Files) -> None:
    assert "<html" in overlay([place, ROOM / "run1"])


def _trace() -> bytes:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.LayerNorm(8))
    with fmtsim.simulate(target="h200"), fmtsim.trace(model, level="aten", tensors=True) as traced:
        model(torch.randn(4, 16)).sum().backward()
    traced.trace.save(ROOM / "good.trace")
    return (ROOM / "good.trace").read_bytes()


def _audit(path: Path) -> None:
    trace = Trace.load(path)
    trace.first_nonfinite()
    try:
        assert str(audit(trace, target="h200"))
    except FmtsimError as error:
        raise type(error)(f"{path}: {error}") from error


_NET = nn.Linear(3, 2)


def _weights() -> Files:
    suffixes = [".pt"]
    torch.save(_NET.state_dict(), ROOM / "x.pt")
    if installed("safetensors", "weights.safetensors"):
        from safetensors.torch import save_file

        save_file(_NET.state_dict(), ROOM / "x.safetensors")
        suffixes += [".safetensors"]
    return {suffix: (ROOM / f"x{suffix}").read_bytes() for suffix in suffixes}


# The cache of compiled kernels.


def _triple(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        y[i] = x[i] * 3


def _halve(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        y[i] = x[i] / 2


def _run_kernels(place: Path) -> None:
    with mock.patch.object(kernel_cache, "cache_folder", lambda: place):
        for function, factor in ((_triple, 3.0), (_halve, 0.5)):
            x = np.arange(5, dtype=np.float32)
            y = np.empty_like(x)
            kernel(function)(x, y)
            assert np.array_equal(y, factor * x), f"{function.__name__} gave {y}"


def _cached() -> list[Files]:
    (place := ROOM / "kernels").mkdir(exist_ok=True)
    goods = []
    for key in (None, "0" * 32):
        shutil.rmtree(place)
        place.mkdir()
        key_of = kernel_cache.key_of if key is None else (lambda *of: key)  # noqa: B023, called inside
        with mock.patch.object(kernel_cache, "key_of", key_of):
            _run_kernels(place)
        goods.append({path.name: path.read_bytes() for path in sorted(place.iterdir())})
    return goods


def _make_cache(rng: random.Random) -> Files:
    files = exchanged(rng, CACHED, lambda rng, file, content: corrupted(rng, content))
    if rng.random() < 0.3:  # another machine's file under the name that this one would give it
        mine, other = rng.choice(list(CACHED[0])), rng.choice(list(CACHED[1].values()))
        files[mine] = other
    return files


def _read_cache(place: Path, files: Files) -> None:
    caches._said.clear()
    _run_kernels(place)


CACHED = _cached()
CHECKPOINTS = _checkpoints()
PLAN_FOLDERS, RUNS, RECORDS = _plans(), _runs(), _records()
TRACE = _trace()
WEIGHTS = _weights()
TARGETS = [
    _export_target("compressed-tensors", (
        "int4_g32", "int4_channel", "int8_static", "int8_token", "e4m3_static", "mxfp4_dynamic", "mxfp6_dynamic",
        "mxfp8_dynamic", "nvfp4_weights",
    ), "format", count=120),
    _export_target("torchao", ("int4_g32", "int8_token", "e4m3_token", "mxfp4_weights", "nvfp4_weights"), "0.weight",
                   count=120),
    *([_export_target("gguf", ("q8_0", "q4_0", "mxfp4_weights"), "", count=60)]
      if installed("gguf", "export.gguf") else []),
    folder_target("deployed", _open, lambda rng: exchanged(rng, CHECKPOINTS, _edit_checkpoint), count=200),
    folder_target("plan.folder", _read_plan,
                  lambda rng: exchanged(rng, PLAN_FOLDERS, _edit_plan), count=100),
    Target("settings", seeded(make_settings), _use_settings, count=60),
    folder_target("runs.folder", lambda place, files: [run.final_loss for run in read_runs(place)],
                  lambda rng: exchanged(rng, RUNS, _edit_lines)),
    folder_target("record.folder", _lay_over,
                  lambda rng: exchanged(rng, RECORDS, lambda rng, _, content: json_file(rng, json.loads(content)))),
    file_target("trace", "x.trace", _audit, lambda rng: safetensors_file(rng, TRACE, "fmtsim_trace"), count=60),
    *(file_target(f"weights{suffix}", f"weights{suffix}", lambda path: load_weights(nn.Linear(3, 2), path),
                  lambda rng, good=good: corrupted(rng, good)) for suffix, good in WEIGHTS.items()),
    folder_target("cache", _read_cache, _make_cache, count=40),
]  # fmt: skip
