# SPDX-License-Identifier: Apache-2.0
"""A stand-in for cuBLASLt, compiled from ``cublaslt.cpp``: it keeps what it was told, and has a rule of its own."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from fmtsim.gemm.targets.ask import Asker
from fmtsim.gemm.targets.question import Choice, Question
from tests.cuda.emulator.kernels import COMPILER, EmulatorError


@cache
def library_file() -> str:
    """Return the compiled stand-in, which lies among the emulator's kernels, by its source and compiler."""
    if COMPILER is None:
        raise EmulatorError("no C++ compiler: install g++ to ask a stand-in for cuBLASLt")
    source = Path(__file__).with_suffix(".cpp")
    key = hashlib.sha256(COMPILER.encode() + source.read_bytes()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"fmtsim-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", f"{work}/made.so", source], check=True)
            os.replace(f"{work}/made.so", path)
    return str(path)


def library() -> ctypes.CDLL:
    """Return the stand-in."""
    handle = ctypes.CDLL(library_file())
    handle.told.restype, handle.asked.restype = ctypes.c_int64, ctypes.c_long
    return handle


def open_stand_in(path: str) -> Asker:
    """Return what asks the stand-in in a file; for processes."""
    return Asker(ctypes.CDLL(path))


def chosen(question: Question) -> Choice | None:
    """Return what the stand-in chooses: its rule once more."""
    _, layout, m, n, k, _ = question
    if n == 13:
        return None
    aligned = (k if layout in (0, 3) else n) % 8 == 0 and (m if layout in (2, 3) else k) % 8 == 0
    split = max(min(k // 256 // -(-m // 64), 8), 1)
    return Choice(66 if aligned else 24, split, 2 if split > 1 else 0, 0, 0 if aligned else 14)
