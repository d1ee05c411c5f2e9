# SPDX-License-Identifier: Apache-2.0
"""Run pytest in forked children of a process that has loaded what the tests import besides the package.

``python server.py`` reads requests, a line each: ``{"tests": [...], "limit": seconds, "output": file}``. It answers
each by a line with pytest's exit status; 124 says that the time was over. Each child imports the package anew.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import warnings

LOADED = (
    "torch", "torch._dynamo", "torch.distributed", "torch.testing", "numpy", "numba", "llvmlite", "pytest",
    "xdist.plugin", "hypothesis.strategies", "ml_dtypes", "gfloat", "mpmath", "safetensors.torch",
    "rich.progress", "cuda.core", "cuda.bindings.nvrtc", "cuda.bindings.runtime",
)  # fmt: skip
OPTIONS = (
    "-x", "-q", "--no-header", "--tb=no", "-n0", "-p", "no:cacheprovider", "-W",
    "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
)  # fmt: skip
_children: list[int] = []  # the one that runs


def main() -> None:
    with warnings.catch_warnings(action="ignore"):
        for name in LOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    signal.signal(signal.SIGTERM, _ended)
    for line in sys.stdin:
        request = json.loads(line)
        _children[:] = [os.fork()]
        if not _children[0]:
            _run(request["tests"], request["output"])
        print(_status(_children[0], request["limit"]), flush=True)


def _run(tests: list[str], output: str) -> None:
    """Run the tests in a process group of their own, and end the process."""
    import pytest

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 3
    try:
        status = int(pytest.main([*OPTIONS, *tests]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(child: int, limit: float) -> int:
    """Wait for a child; end its group when the time is over."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    _kill(child)
    os.waitpid(child, 0)
    return 124


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _ended(number: int, _: object) -> None:
    for child in _children:
        _kill(child)
    os._exit(128 + number)


if __name__ == "__main__":
    main()
