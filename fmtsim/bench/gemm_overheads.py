"""What a matrix product costs beside its kernel: the first call, and memory beyond operands and result."""

import statistics
import tempfile

from fmtsim.bench.overheads import Overhead, in_new_process, or_none

FIRST_CALLS = ("fp8 Hopper", "bf16 Hopper", "nvf4", "user-made: bf16 sums, stochastic", "fp32_fma", "int8")
MEMORY_CALLS = ("bf16 Hopper, bf16 out", "fp8 Hopper", "tf32 Hopper", "nvf4", "mxf8f6f4")

_FIRST = """
import time, torch, fmtsim
from fmtsim.bench.gemm import case_named, product_of
product = product_of(case_named({name!r}), (64, 64, 128))
start = time.perf_counter()
product()
print(time.perf_counter() - start)
"""
# The small product loads the kernels, malloc_trim gives back what making the operands left. VmHWM is the peak of
# resident memory, which writing 5 to clear_refs starts anew.
_MEMORY = """
import ctypes, torch, fmtsim
from fmtsim.bench.gemm import case_named, product_of
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
product_of(case_named({name!r}), (64, 64, 128))()
product = product_of(case_named({name!r}), ({side}, {side}, {side}))
getattr(ctypes.CDLL(None), "malloc_trim", lambda size: None)(0)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS:")
out = product()
print(max(status("VmHWM:") - before, 0) / 1024 - out.nbytes / 2**20)
"""


def first_calls(repeats: int = 3) -> list[Overhead]:
    """Measure the first call of some products: with an empty folder of compiled kernels, and in the next process."""
    found = []
    for name in FIRST_CALLS:
        with tempfile.TemporaryDirectory(prefix="fmtsim-bench-") as folder:
            code = _FIRST.format(name=name)
            cold = in_new_process(code, FMTSIM_CACHE_DIR=folder)
            warm = statistics.median(in_new_process(code, FMTSIM_CACHE_DIR=folder) for _ in range(repeats))
        found.append(Overhead(name=f"first product, new machine: {name}", value=cold, limit=3.0, unit="s"))
        found.append(Overhead(name=f"first product, new process: {name}", value=warm, limit=0.6, unit="s"))
    return found


def extra_memory(side: int = 4096) -> list[Overhead]:
    """Measure the peak of resident memory that a product of that side adds to its operands and its result (Linux)."""
    found = []
    for name in MEMORY_CALLS:
        code = _MEMORY.format(name=name, side=side)
        value = or_none(lambda code=code: in_new_process(code))  # type: ignore[misc]
        found.append(Overhead(name=f"extra memory, side {side}: {name}", value=value, limit=64.0, unit="MB"))
    return found
