"""What a new process pays: import time, the first kernel call, and the memory that a cast needs beside its tensors."""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FIRST_CALLS = {
    "e4m3": "fmtsim.quantize(x, 'e4m3')",
    "e4m3 stochastic": "fmtsim.quantize(x, 'e4m3', rounding='stochastic', generator=0)",
    "mxfp4": "fmtsim.quantize(x, 'mxfp4')",
    "nvfp4": "fmtsim.quantize(x, 'nvfp4')",
    "int8 per channel": "fmtsim.quantize(x, 'int8_channel')",
}
MEMORY_CALLS = {
    "e4m3": "'e4m3'",
    "e4m3 stochastic": "'e4m3', rounding='stochastic', generator=0",
    "mxfp8": "'mxfp8_e4m3'",
    "nvfp4": "'nvfp4'",
    "int8 per channel": "'int8_channel'",
    "int4 group 128": "'int4_g128'",
}

_IMPORT = "import time, torch; t = time.perf_counter(); import fmtsim; print(time.perf_counter() - t)"
_FIRST = """
import time, torch, fmtsim
x = torch.ones(256, 256)
start = time.perf_counter()
{call}
print(time.perf_counter() - start)
"""
# Linux counts the peak of resident memory in VmHWM, and writing 5 to clear_refs starts it anew.
_MEMORY = """
import torch, fmtsim
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
x, out = torch.randn({side}, {side}), torch.zeros({side}, {side})
fmtsim.quantize(x[:64], {call}, out=out[:64])
fmtsim.quantize(x, {call}, out=out)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS:")
fmtsim.quantize(x, {call}, out=out)
print(max(status("VmHWM:") - before, 0) / 1024)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Hold one figure with its limit; ``value`` is None where it cannot be measured on this machine."""

    name: str
    value: float | None
    limit: float
    unit: str

    @property
    def met(self) -> bool | None:
        """Whether the figure keeps its limit."""
        return None if self.value is None else self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"name": self.name, "value": self.value, "limit": self.limit, "unit": self.unit, "met": self.met}


def import_time(repeats: int = 5) -> Overhead:
    """Measure what ``import fmtsim`` adds to ``import torch``, in seconds."""
    value = statistics.median(in_new_process(_IMPORT) for _ in range(repeats))
    return Overhead(name="import fmtsim after torch", value=value, limit=0.15, unit="s")


def first_calls(repeats: int = 3) -> list[Overhead]:
    """Measure the first call of some casts: with an empty folder of compiled kernels, and in the next process."""
    found = []
    for name, call in FIRST_CALLS.items():
        with tempfile.TemporaryDirectory(prefix="fmtsim-bench-") as folder:
            code = _FIRST.format(call=call)
            cold = in_new_process(code, FMTSIM_CACHE_DIR=folder)
            warm = statistics.median(in_new_process(code, FMTSIM_CACHE_DIR=folder) for _ in range(repeats))
        found.append(Overhead(name=f"first call, new machine: {name}", value=cold, limit=3.0, unit="s"))
        found.append(Overhead(name=f"first call, new process: {name}", value=warm, limit=0.6, unit="s"))
    return found


def extra_memory(side: int = 4096) -> list[Overhead]:
    """Measure the peak of resident memory that ``quantize`` with ``out=`` adds to its input and output (Linux)."""
    found = []
    for name, call in MEMORY_CALLS.items():
        value = or_none(lambda call=call: in_new_process(_MEMORY.format(side=side, call=call)))  # type: ignore[misc]
        found.append(Overhead(name=f"extra memory with out=: {name}", value=value, limit=1.0, unit="MB"))
    return found


def in_new_process(code: str, **environment: str) -> float:
    """Run a program in a new Python process and return the number that it prints."""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return float(run.stdout)


def or_none(measurement: Callable[[], float]) -> float | None:
    """Return None where the system lacks /proc, or forbids to reset the peak."""
    try:
        return measurement()
    except subprocess.CalledProcessError as error:
        if "/proc/self" in error.stderr:
            return None
        raise
