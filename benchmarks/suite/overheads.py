# SPDX-License-Identifier: Apache-2.0
"""What a new process pays: import time, first calls, memory beside its tensors."""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fmtsim.support.table import Record

Work = Literal["casts", "products"]

FIRST_CASTS = {
    "e4m3": "fmtsim.quantize(x, 'e4m3')",
    "e4m3 stochastic": "fmtsim.quantize(x, 'e4m3', rounding='stochastic', generator=0)",
    "mxfp4": "fmtsim.quantize(x, 'mxfp4')",
    "nvfp4": "fmtsim.quantize(x, 'nvfp4')",
    "int8 per channel": "fmtsim.quantize(x, 'int8_channel')",
}
FIRST_PRODUCTS = ("fp8 Hopper", "bf16 Hopper", "nvf4", "user-made: bf16 sums, stochastic", "fp32_fma", "int8")
MEMORY_CASTS = {
    "e4m3": "'e4m3'", "e4m3 stochastic": "'e4m3', rounding='stochastic', generator=0", "mxfp8": "'mxfp8_e4m3'",
    "nvfp4": "'nvfp4'", "int8 per channel": "'int8_channel'", "int4 group 128": "'int4_g128'",
}  # fmt: skip
MEMORY_PRODUCTS = ("bf16 Hopper, bf16 out", "fp8 Hopper", "tf32 Hopper", "nvf4", "mxf8f6f4")

# Seconds of the processor, which other work on the machine does not lengthen.
_IMPORT = "import time, torch; t = time.process_time(); import fmtsim; print(time.process_time() - t)"
_CAST = "x = torch.ones(256, 256)"
_PRODUCT = """
from benchmarks.suite.gemm import case_named, product_of
product = product_of(case_named({name!r}), (64, 64, 128))
"""
_FIRST = """
import time, torch, fmtsim
{made}
start = time.process_time()
{call}
print(time.process_time() - start)
"""
# Linux counts the peak of resident memory in VmHWM, and writing 5 to clear_refs starts it anew.
_STATUS = """
import ctypes, torch, fmtsim
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
def begin():
    open("/proc/self/clear_refs", "w").write("5")
    return status("VmRSS:")
"""
_CAST_MEMORY = """
x, out = torch.randn({side}, {side}), torch.zeros({side}, {side})
fmtsim.quantize(x[:64], {call}, out=out[:64])
fmtsim.quantize(x, {call}, out=out)
before = begin()
fmtsim.quantize(x, {call}, out=out)
print(max(status("VmHWM:") - before, 0) / 1024)
"""
# The small product loads the kernels, malloc_trim gives back what making the operands left.
_PRODUCT_MEMORY = """
from benchmarks.suite.gemm import case_named, product_of
product_of(case_named({name!r}), (64, 64, 128))()
product = product_of(case_named({name!r}), ({side}, {side}, {side}))
getattr(ctypes.CDLL(None), "malloc_trim", lambda size: None)(0)
before = begin()
out = product()
print(max(status("VmHWM:") - before, 0) / 1024 - out.nbytes / 2**20)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead(Record):
    """Hold one figure with its limit; ``value`` is None where it cannot be measured on this machine."""

    name: str
    value: float | None
    limit: float
    unit: str
    _derived = ("met",)

    @property
    def met(self) -> bool | None:
        """Whether the figure keeps its limit."""
        return None if self.value is None else self.value <= self.limit


def import_time(repeats: int = 5) -> Overhead:
    """Measure what ``import fmtsim`` adds to ``import torch``, in seconds."""
    value = statistics.median(in_new_process(_IMPORT) for _ in range(repeats))
    return Overhead(name="import fmtsim after torch", value=value, limit=0.15, unit="s")


def first_calls(work: Work, repeats: int = 3) -> list[Overhead]:
    """Measure first calls: with an empty folder of compiled kernels, and in the next process."""
    if work == "casts":
        codes = {name: _FIRST.format(made=_CAST, call=call) for name, call in FIRST_CASTS.items()}
    else:
        codes = {name: _FIRST.format(made=_PRODUCT.format(name=name), call="product()") for name in FIRST_PRODUCTS}
    rows, what = [], "first call" if work == "casts" else "first product"
    for name, code in codes.items():
        with tempfile.TemporaryDirectory(prefix="fmtsim-bench-") as folder:
            cold = in_new_process(code, FMTSIM_CACHE_DIR=folder)
            warm = statistics.median(in_new_process(code, FMTSIM_CACHE_DIR=folder) for _ in range(repeats))
        rows.append(Overhead(name=f"{what}, new machine: {name}", value=cold, limit=3.0, unit="s"))
        rows.append(Overhead(name=f"{what}, new process: {name}", value=warm, limit=0.6, unit="s"))
    return rows


def extra_memory(work: Work, side: int = 4096) -> list[Overhead]:
    """Measure the peak of resident memory beside the tensors (Linux).

    Casts are ``quantize`` with ``out=`` of ``[side, side]``, products have M = N = K = ``side``.
    """
    if work == "casts":
        what, limit = "with out=", 1.0
        codes = {name: _CAST_MEMORY.format(side=side, call=call) for name, call in MEMORY_CASTS.items()}
    else:
        what, limit = f", side {side}", 64.0
        codes = {name: _PRODUCT_MEMORY.format(side=side, name=name) for name in MEMORY_PRODUCTS}
    rows = []
    for name, code in codes.items():
        value = or_none(lambda code=code: in_new_process(_STATUS + code))  # type: ignore[misc]
        label = f"extra memory {what}: {name}".replace(" ,", ",")
        rows.append(Overhead(name=label, value=value, limit=limit, unit="MB"))
    return rows


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
