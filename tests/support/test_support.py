# SPDX-License-Identifier: Apache-2.0
"""What tests share: no test module imports another, and the comparison of bits sees what it should."""

import ast
import signal
from pathlib import Path

import pytest
import torch

from tests.support import faults
from tests.support.bits import assert_same_bits, bits, differing, same_bits, stored

ROOT = Path(__file__).parents[1]
NAMES = {path.stem for path in ROOT.rglob("test_*.py")}


def imported(source: str) -> set[str]:
    """Return the test modules that a source imports, inside functions too."""
    parts: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            parts |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "tests"):
            parts |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return parts & NAMES


def test_no_test_module_is_imported():
    paths = [path for path in ROOT.rglob("*.py") if imported(path.read_text(encoding="utf-8"))]
    assert paths == []


@pytest.mark.parametrize(
    "source", ["from tests.cpu.test_gemm import check", "from tests.cpu import test_gemm",
               "import tests.cpu.test_gemm",
               "def f():\n    from . import test_gemm"],
)  # fmt: skip
def test_an_import_of_a_test_module_is_seen(source):
    assert imported(source) == {"test_gemm"}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_wrong_bit_is_seen(dtype):
    good = torch.tensor([1.5, 0.0, torch.nan]).to(dtype)
    assert_same_bits(good.clone(), good)
    for i, wrong in enumerate((1.75, -0.0, 1.0)):
        bad = good.clone()
        bad[i] = wrong
        assert differing(bad, good) == [i] and not same_bits(bad, good)
        with pytest.raises(AssertionError, match=rf"(?s)here: 1 of 3 differ.*\[{i}\] .* = 0x[0-9a-f]+ and 0x[0-9a-f]+"):
            assert_same_bits(bad, good, what="here")


def test_nan_of_other_bits_shapes_dtypes_and_none_differ():
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert differing(nan, torch.full((2,), torch.nan)) == [1]
    x = torch.zeros(2, 3)
    for other in (x.double(), x.mT, x.int(), None):
        assert not same_bits(x, other)
        with pytest.raises(AssertionError):
            assert_same_bits(other, x)
    assert same_bits(None, None) and same_bits(x, x.numpy())
    assert bits(stored(torch.full((64,), torch.nan, dtype=torch.float64), torch.bfloat16)).unique().tolist() == [0x7FC0]


# Faults.


def test_a_child_is_ended_at_a_moment_or_an_event(tmp_path):
    sleep = "import time; time.sleep(60)"
    assert faults.run("print(1)", kill=60).stdout == "1\n"
    assert faults.run(sleep, kill=0.1).status == -signal.SIGKILL
    new_file = tmp_path / "made"
    assert faults.run(f"open({str(new_file)!r}, 'w'); {sleep}", kill=new_file.exists).status == -signal.SIGKILL
    assert new_file.exists()


def test_a_child_of_a_runner_that_ignores_interrupts_does_not():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ended = faults.run("import time; time.sleep(60)", kill=0.5, number=signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.stderr.endswith("KeyboardInterrupt\n")


def test_files_past_a_limit_fail_writers(tmp_path):
    file = tmp_path / "file"
    write = f"import pathlib; pathlib.Path({str(file)!r}).write_text(100 * 'a')"
    assert faults.run(write, file_limit=100).status == 0
    assert "File too large" in faults.run(write, file_limit=99).stderr
    with faults.largest_file(99), pytest.raises(OSError, match="File too large"):
        file.write_text(100 * "a")
    file.write_text(100 * "a")


def test_a_small_disk_is_soon_full(tmp_path):
    with faults.small_disk(tmp_path / "disk", 4096) as disk, pytest.raises(OSError, match="No space left"):
        (disk / "file").write_text(10000 * "a")
