# SPDX-License-Identifier: Apache-2.0
"""Faults of the kernel cache: damaged files, full disks, processes that compile at once, and kills while they do."""

import json
import pickle
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fmtsim.cpu.runtime.jit import kernel
from fmtsim.cpu.runtime.kernel_cache import cache_folder
from fmtsim.support import folder
from tests.support import faults


def triple(x, y):
    for i in range(x.size):
        y[i] = x[i] * 3


def halve(x, y):
    for i in range(x.size):
        y[i] = x[i] / 2


def tripled(dtype=np.float32, function=triple, times=3.0):
    """Check what a new process would compute, which compiles the kernel or reads it."""
    x = np.arange(5).astype(dtype)
    y = np.empty_like(x)
    kernel(function)(x, y)
    assert np.array_equal(y, times * x)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Use an empty cache, and warn as a new process does."""
    monkeypatch.setenv("FMTSIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(folder, "_said", set())
    cache_folder.cache_clear()
    yield tmp_path / "cache" / "cpu"
    monkeypatch.undo()
    cache_folder.cache_clear()


def check_whole(place: Path) -> int:
    """Hold every kernel in a cache to its checksum, and return how many there are."""
    kernels = list(place.glob("*.bin"))
    with warnings.catch_warnings(action="error"):
        assert all(folder.load(path) for path in kernels)
    return len(kernels)


DAMAGES = {
    "empty": lambda content: b"",
    "short": lambda content: content[:20],
    "truncated": lambda content: content[: len(content) // 2],
    "last byte": lambda content: content[:-1],
    "one bit": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "longer": lambda content: content + b"x",
    "other": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_compiled_again_with_one_warning(cache, damage):
    tripled(), tripled(np.float64)
    kernels = sorted(cache.iterdir())
    assert len(kernels) == 2
    for path in kernels:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning) as said:
        tripled(), tripled(np.float64)
    assert len(said) == 1
    assert str(said[0].message) == (
        f"fmtsim found a damaged file in its kernel cache {cache}: {kernels[0].name} is truncated, was changed or is "
        "another kernel's; its kernel is compiled again. If this comes back, delete the folder."
    ) or kernels[1].name in str(said[0].message)
    assert sorted(cache.iterdir()) == kernels and check_whole(cache) == 2
    tripled()  # without a word


def swap(one, other):
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1]), other.write_bytes(contents[0])


MOVES = {
    "swapped": swap,
    "copied": lambda one, other: other.write_bytes(one.read_bytes()),
    "renamed": lambda one, other: one.rename(other),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["another kernel's", "another signature's"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_the_file_of_another_kernel_is_not_taken(cache, move, dtype):
    """Machine code of another kernel, or for other arguments, would compute something else without a word."""
    other = (np.float32, halve, 0.5) if dtype == np.float32 else (dtype,)
    tripled()
    (first,) = cache.iterdir()
    tripled(*other)
    (second,) = set(cache.iterdir()) - {first}
    move(first, second)
    with pytest.warns(UserWarning, match="is truncated, was changed or is another kernel's; its kernel is compiled"):
        tripled(), tripled(*other)
    assert set(cache.iterdir()) == {first, second} and check_whole(cache) == 2


def test_what_cannot_be_loaded_is_compiled_again(cache):
    """A whole file may name a module or a type that this version lacks."""
    tripled()
    (path,) = cache.iterdir()
    for content, error in (
        (b"cfmtsim.elsewhere\nkernel\n.", "ModuleNotFoundError: No module named 'fmtsim.elsewhere'"),
        (pickle.dumps((1, 2)), "TypeError: "),
    ):
        folder._said.clear()
        folder.save(path, content)
        with pytest.warns(UserWarning, match=f"cannot be loaded \\({error}.*; its kernel is compiled again"):
            tripled()
        assert check_whole(cache) == 1
        tripled()  # without a word


def test_a_file_that_cannot_be_read(cache):
    tripled()
    (path,) = cache.iterdir()
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning) as said:
        tripled()
    assert [str(each.message).split(f" its kernel cache {cache}")[1].split(";")[0] for each in said] == [
        f": {path.name} cannot be read (Is a directory)",
        " (Is a directory)",
    ]


def check_unwritable(place: Path, reason: str) -> None:
    with pytest.warns(UserWarning) as said:
        tripled(), tripled(np.float64)
    assert [str(each.message) for each in said] == [
        f"fmtsim cannot write its kernel cache {place} ({reason}); kernels are compiled anew in every process. Set "
        "FMTSIM_CACHE_DIR to a folder that can be written."
    ]


def test_a_file_past_a_limit(cache):
    with faults.largest_file(1000):
        check_unwritable(cache, "File too large")
    assert list(cache.iterdir()) == []
    tripled()
    assert check_whole(cache) == 1


def test_a_full_disk(cache):
    with faults.small_disk(cache.parent, 8192):
        check_unwritable(cache, "No space left on device")
        assert list(cache.iterdir()) == []


def test_a_read_only_disk(cache):
    with faults.small_disk(cache.parent, 1 << 20):
        subprocess.run(["mount", "-o", "remount,ro", str(cache.parent)], check=True)
        check_unwritable(cache, "Read-only file system")


def test_a_home_that_cannot_be_written(cache, monkeypatch):
    monkeypatch.setenv("FMTSIM_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/dev/null")
    check_unwritable(Path("/dev/null/.cache/fmtsim/cpu"), "Not a directory")


# Processes. They write to a slow disk: half a file, a pause, the other half, a pause before it takes its name.

PROCESSES = """
import io, json, multiprocessing, os, pathlib, random, signal, sys, time, warnings
import numpy as np
import fmtsim, fmtsim.support.files
from fmtsim.cpu.runtime.jit import kernel
from numba.core import event

warnings.simplefilter("error")
recorder = event.RecordingListener()
event.register("numba:compile", recorder)

def first(x, y): y[0] = x[1] + 1
def second(x, y): y[0] = x[1] - 3

SMALL = [kernel(function) for function in (first, second)]

def small(kernels=SMALL):
    found = []
    for function in kernels:
        for dtype in (np.float32, np.float64):
            y = np.empty(1, dtype)
            function(np.arange(3).astype(dtype), y)
            found.append(float(y[0]))
    return found

def casts():
    import torch
    x = torch.tensor([0.1, 500.0, -3.3])
    return fmtsim.quantize(x, "e4m3").tolist(), fmtsim.quantize(x.repeat(11), "mxfp4", pad=True).tolist()[:3]

def compiled():
    return sum(entry.is_start for _, entry in recorder.buffer)

class SlowDisk(io.FileIO):
    def write(self, content):
        super().write(content[: len(content) // 2])
        time.sleep(0.05)
        super().write(content[len(content) // 2 :])
        time.sleep(0.05)

fmtsim.support.files.open = SlowDisk
"""
SMALL = [2.0, 2.0, -2.0, -2.0]
CASTS = ([0.1015625, 448.0, -3.25], [0.0, 384.0, -0.0])

AT_ONCE = """
fork = multiprocessing.get_context("fork")
barrier = fork.Barrier(4)

def at_once():
    barrier.wait()
    os._exit(small() != EXPECTED)

children = [fork.Process(target=at_once) for _ in range(4)]
for child in children: child.start()
for child in children: child.join()
print([child.exitcode for child in children], small(), compiled())
"""


def test_processes_compile_the_same_kernels_at_once(tmp_path):
    ended = faults.run(PROCESSES + AT_ONCE.replace("EXPECTED", str(SMALL)), FMTSIM_CACHE_DIR=str(tmp_path))
    assert (ended.stdout, ended.stderr) == (f"{[0] * 4} {SMALL} 0\n", "")
    assert check_whole(tmp_path / "cpu") == len(list((tmp_path / "cpu").iterdir())) == 4


CHILDREN = """
def child():
    os._exit(small() != EXPECTED)

def status(method):
    process = multiprocessing.get_context(method).Process(target=child)
    process.start()
    process.join()
    return process.exitcode

if __name__ == "__main__":
    before = [status("fork"), small(SMALL[:1]) == EXPECTED[:2]]
    print(before, status("fork"), status("spawn"), small(), compiled())
"""


def test_children_of_either_kind_use_kernels_loaded_before_and_after(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROCESSES + CHILDREN.replace("EXPECTED", str(SMALL)))
    ended = faults.run([sys.executable, str(script)], FMTSIM_CACHE_DIR=str(tmp_path))
    assert (ended.stdout, ended.stderr) == (f"[0, True] 0 0 {SMALL} 0\n", "")


KILLS = """
if WORK is casts:
    import torch  # once for all children

def in_child(function):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = function() != EXPECTED
        finally:
            os._exit(status)
    return pid

def once(number, moment):
    os.environ["FMTSIM_CACHE_DIR"] = folder = f"{sys.argv[1]}/{number}"
    pid, began = in_child(WORK), time.monotonic()
    while moment is not None and time.monotonic() - began < moment:
        time.sleep(0.001)
    if moment is not None:
        os.kill(pid, signal.SIGKILL)
    killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
    seconds = time.monotonic() - began
    names = os.listdir(f"{folder}/cpu") if os.path.isdir(f"{folder}/cpu") else []
    half = sum(name.startswith(fmtsim.support.files.TEMPORARY) for name in names)
    right = os.waitpid(in_child(WORK), 0)[1] == 0
    return {"killed": killed, "half": half, "whole": len(names) - half, "right": right, "seconds": seconds}

longest = once(0, None)["seconds"]
draw = random.Random(int(sys.argv[3]))
print(json.dumps([once(number, draw.uniform(0, longest)) for number in range(1, int(sys.argv[2]) + 1)]))
"""


@pytest.mark.parametrize(
    ("work", "count"),
    [
        ("small", 2),
        pytest.param("small", 50, marks=pytest.mark.faults),
        pytest.param("casts", 50, marks=pytest.mark.faults),
    ],
)
def test_kills_while_kernels_are_compiled(tmp_path, work, count):
    """The next process reads whole files and no other, without a word, and has the same results."""
    expected = {"small": SMALL, "casts": CASTS}[work]
    script = PROCESSES + KILLS.replace("EXPECTED", repr(expected)).replace("WORK", work)
    ended = faults.run([sys.executable, "-c", script, str(tmp_path), str(count), "1"], timeout=3000)
    assert ended.status == 0, ended.stderr
    kills = json.loads(ended.stdout)
    assert len(kills) == count and all(kill["right"] for kill in kills) and ended.stderr == ""
    assert sum(kill["killed"] for kill in kills) >= count / 2
    assert sum(check_whole(place / "cpu") for place in tmp_path.iterdir()) == len(list(tmp_path.iterdir())) * (
        4 if work == "small" else 2
    )
    print({key: sum(kill[key] for kill in kills) for key in kills[0]})


PRODUCT = [sys.executable, "-m", "fmtsim", "mm", "4", "4", "4", "--target", "hopper.wgmma"]
STATUS = {signal.SIGINT: (130, "\nfmtsim: interrupted\n"), signal.SIGTERM: (143, "\nfmtsim: terminated\n")}


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_while_kernels_are_compiled_ends_with_one_line(tmp_path, number):
    ended = faults.run(PRODUCT, kill=(tmp_path / "cpu").exists, number=number, FMTSIM_CACHE_DIR=str(tmp_path))
    assert (ended.status, ended.stderr) == STATUS[number]
    assert list((tmp_path / "cpu").iterdir()) == []


@pytest.mark.faults
@pytest.mark.parametrize("number", STATUS)
def test_signals_at_any_moment_end_with_one_line(tmp_path, number):
    """The command is through, or says its line; in its last moments Python leaves signals to the system."""
    longest = faults.run(PRODUCT, FMTSIM_CACHE_DIR=str(tmp_path / "whole")).seconds
    answers = Counter()
    for index, moment in enumerate(faults.moments(25, longest, seed=number)):
        ended = faults.run(PRODUCT, kill=moment, number=number, FMTSIM_CACHE_DIR=str(tmp_path / str(index)))
        answers[ended.status, ended.stderr] += 1
        check_whole(tmp_path / str(index) / "cpu")
    print(answers)
    assert answers.keys() <= {STATUS[number], (0, ""), (-number, "")}
    assert answers[STATUS[number]] > 12
