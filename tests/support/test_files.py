# SPDX-License-Identifier: Apache-2.0
"""Writing files: whole or not at all, every writer by the one way, and errors that name the file."""

import ast
import errno
import json
import os
import re
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch

import fmtsim
from fmtsim.gemm.targets.target import get_target
from fmtsim.lab.analysis.page import write_page
from fmtsim.lab.cli import products
from fmtsim.lab.cli.main import BAD_INPUT, main
from fmtsim.lab.cli.output import write_json
from fmtsim.lab.training.artifacts import write_check
from fmtsim.recipes import get_recipe, save_recipe
from fmtsim.support import files
from fmtsim.support.errors import ArgumentError, DataError
from fmtsim.support.files import check_file, check_folder, write_file, write_files, write_folder
from fmtsim.support.folder import kernel_folder
from tests.support.faults import largest_file, small_disk
from tests.support.refusals import refused
from tools.calibrate.planfile import write_plan

ROOT = Path(files.__file__).parents[1]
NEXT = "name a file in a folder that exists, can be written to and has room"
WRITERS = {
    "y.npy": lambda path: products.save(torch.ones(64, 64), path),
    "y.safetensors": lambda path: products.save(torch.ones(64, 64), path),
    "encoded": lambda path: fmtsim.encode(torch.ones(64, 64), "mxfp4").save(path),
    "recipe.json": lambda path: save_recipe(get_recipe("te_nvfp4"), path),
    "ptq.json": lambda path: save_recipe(get_recipe("w4a4"), path),
    "plan.json": lambda path: write_plan(get_target("h200"), path),
    "ulps.png": lambda path: fmtsim.compare(torch.ones(4), torch.ones(4)).plot(path),
    "report.html": lambda path: write_page(path, title="t"),
    "record.json": lambda path: write_json(path, {"x": ["word"] * 100}),
    "check.json": lambda path: write_check(path.parent, {"x": ["word"] * 100}, "text", json.dumps),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_without_room_leaves_the_old_file_and_is_named(name, tmp_path):
    path = tmp_path / name
    WRITERS[name](path)
    before = path.read_bytes(), os.listdir(tmp_path)
    with (
        pytest.raises(DataError, match=rf"^cannot write {re.escape(str(path))}: File too large; {NEXT}$"),
        largest_file(100),
    ):
        WRITERS[name](path)
    assert (path.read_bytes(), os.listdir(tmp_path)) == before


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_in_the_way_is_named(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=rf"^cannot write {re.escape(str(tmp_path / name))}: Is a directory; {NEXT}$"):
        WRITERS[name](tmp_path / name)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("record.json", "check.json")])
def test_a_folder_that_is_missing_is_named(name, tmp_path):
    path = tmp_path / "nowhere" / name
    with pytest.raises(DataError, match=rf"^cannot write {re.escape(str(path))}: No such file or directory; {NEXT}$"):
        WRITERS[name](path)
    assert os.listdir(tmp_path) == []


def test_a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        (disk / "y.npy").write_text("old")
        refused("y.npy: No space left on device", products.save, torch.ones(256, 256), disk / "y.npy", error=DataError)
        assert (disk / "y.npy").read_text() == "old" and os.listdir(disk) == ["y.npy"]


def test_a_disk_that_is_read_only(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        (disk / "x").write_text("old")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(DataError, match="^cannot write .*disk/x: Read-only file system; name a file"):
            write_file(disk / "x", "new")
        with pytest.raises(DataError, match="^cannot make the folder .*disk/new: Read-only file system; choose"):
            write_folder(disk / "new", {"x": "1"})
        with pytest.raises(ArgumentError, match="^--out .*disk/x.npy: .*disk is not a folder one can write to; choose"):
            check_file("--out", disk / "x.npy")
        assert (disk / "x").read_text() == "old" and os.listdir(disk) == ["x"]


def test_files_are_replaced_together_or_not_at_all(tmp_path, monkeypatch):
    one, two, gone = (tmp_path / name for name in ("one", "two", "gone"))
    for path in (one, gone):
        path.write_text("old")
    contents = {one: "né", two: b"\0\xff", gone: None}
    real = os.fsync
    calls = []

    def full(file):
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(files.os, "fsync", full)
    refused(f"^cannot write {two}: No space left on device; {NEXT}$", write_files, contents, error=DataError)
    assert sorted(os.listdir(tmp_path)) == ["gone", "one"] and one.read_text() == gone.read_text() == "old"
    write_files(contents)
    assert (one.read_bytes(), two.read_bytes(), gone.exists()) == (b"n\xc3\xa9", b"\0\xff", False)
    write_files({gone: None})
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "new" / "folder", {"x": b"1"})
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed_a_day_later(tmp_path, monkeypatch):
    for name, age in ((".fmtsim-old", 90000), (".fmtsim-new", 80000), ("old", 90000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    (tmp_path / ".fmtsim-folder").mkdir()
    os.utime(tmp_path / ".fmtsim-folder", (0, 0))
    write_folder(tmp_path, {"x": "1"})
    assert sorted(os.listdir(tmp_path)) == [".fmtsim-folder", ".fmtsim-new", "old", "x"]
    (tmp_path / "cpu").mkdir()
    (tmp_path / ".fmtsim-new").rename(tmp_path / "cpu" / ".fmtsim-old")
    os.utime(tmp_path / "cpu" / ".fmtsim-old", (0, 0))
    monkeypatch.setenv("FMTSIM_CACHE_DIR", str(tmp_path))
    assert kernel_folder("cpu") == tmp_path / "cpu" and not os.listdir(tmp_path / "cpu")


def test_folders_are_made_and_vanish_where_a_file_fails(tmp_path):
    folder = tmp_path / "a" / "b"
    refused("cannot write .*a/b/x: 'utf-8' codec can't encode", write_folder, folder, {"x": "\ud800"}, error=DataError)
    assert os.listdir(tmp_path) == []
    assert write_folder(folder, {"y": "2", "x": "1", "z": None}) == [folder / "x", folder / "y"]
    with pytest.raises(DataError, match=f"^cannot make the folder {folder}/x/c: Not a directory; choose another$"):
        write_folder(folder / "x" / "c", {"x": "1"})
    assert sorted(os.listdir(folder)) == ["x", "y"]


def test_links_stay_links_and_modes_are_ordinary(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "x")
    write_file(tmp_path / "link", "1")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "x").read_text() == "1"
    mask = os.umask(0o022)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "real" / "x").stat().st_mode) == 0o666 & ~mask


def test_devices_and_pipes_are_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        write_file(tmp_path / "pipe", "text")
        assert read.result() == "text"
    write_file("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and os.listdir(tmp_path) == ["pipe"]
    refused("^cannot write /dev/full: No space left on device", write_file, "/dev/full", "x", error=DataError)


@pytest.mark.parametrize(("path", "error", "message"), [
    ({}, ArgumentError, "^{} is not a path"),
    (7, ArgumentError, "^7 is not a path to write to; pass a str or a pathlib.Path$"),
    (None, ArgumentError, "^None is not a path"),
    ("a\0b", DataError, "embedded null byte"),
    ("x" * 300, DataError, "^cannot write x+: File name too long"),
    ("", DataError, "cannot write "),
])  # fmt: skip
def test_paths_that_are_none(path, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(message, write_file, path, "x", error=error)
    assert os.listdir(tmp_path) == []


def test_a_file_that_could_not_be_written_fails_before_the_work(tmp_path, capsys, monkeypatch):
    refused("is a folder; name a file in it", check_file, "--out", tmp_path)
    with pytest.raises(ArgumentError, match="there is no folder .*missing; create it, or choose another"):
        check_file("--out", tmp_path / "missing" / "y.npy")
    check_file("--out", Path("/dev/null"))
    numpy.save(tmp_path / "a.npy", numpy.zeros(3, numpy.float32))
    a, out = str(tmp_path / "a.npy"), str(tmp_path / "missing" / "y")
    for words in (["compare", a, a, "--plot", out], ["mm", "4", "4", "4", "--target", "exact", "--out", f"{out}.npy"]):
        assert main(words) == BAD_INPUT
        printed = capsys.readouterr()
        assert "there is no folder" in printed.err and printed.out == ""
    assert main(["verify", "--format", "int4", "--record", f"{a}/record.json"]) == BAD_INPUT
    printed = capsys.readouterr()
    assert "--record" in printed.err and printed.out == ""


def test_a_folder_is_tried(tmp_path, monkeypatch):
    """Permissions do not tell if a folder can be written to: /proc has all of them."""
    check_folder(tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []

    def refuse(**options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files.tempfile, "mkdtemp", refuse)
    refused("^--out .*new: .* is not a folder one can write to; choose another$", check_folder, tmp_path / "new")
    refused("^--plot .* is not a folder one can write to", check_file, "--plot", tmp_path / "x.png")
    assert main(["sweep", "--out", str(tmp_path)]) == BAD_INPUT


def writes(source: str) -> list[str]:
    """Return the calls of a source that write to files by their names."""
    calls = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        words = [arg.value for arg in [*call.args, *(k.value for k in call.keywords)] if isinstance(arg, ast.Constant)]
        modes = [word for word in words if isinstance(word, str) and re.fullmatch("[rwxab+t]+", word)]
        if name in ("write_text", "write_bytes", "save_file", "savetxt", "tofile") or (
            name == "open" and any(set(mode) & set("wxa+") for mode in modes)
        ):
            calls.append(ast.unparse(call))
    return calls


def test_there_is_one_writer():
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
    writers = {name: writes(text) for name, text in texts.items() if re.search("open|write_|save|tofile", text)}
    engines = ("cpu/", "cuda/", "torch_engine/")
    assert {name: calls for name, calls in writers.items() if calls and not name.startswith(engines)} == {
        "support/files.py": ["Path(path).write_bytes(data)", "open(temporary, 'xb')"],
        "lab/cli/main.py": ["open(os.devnull, 'w', encoding='utf-8')"],
    }  # fmt: skip


def test_a_planted_writer_is_seen():
    assert len(writes("open(p, 'wb'); p.open('a'); p.open(mode='r+'); Path(p).write_text(x); save_file(x, p)")) == 5
    assert writes("open(p); open(p, 'rb'); path.open(encoding='utf-8')") == []
