# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: numba kernels on the threads of a pool of our own, the same bits as every other engine."""

from fmtsim.cpu.cast.engine import decode, encode, quantize, supports
from fmtsim.cpu.counting import block_amax, count_cast
from fmtsim.cpu.gemm.engine import gemm, supports_gemm
from fmtsim.cpu.optim.elementary import exp, ln
from fmtsim.cpu.optim.steps import optimizer_steps, supports_optimizer
from fmtsim.cpu.runtime.kernel_cache import cache_folder
from fmtsim.cpu.runtime.pool import get_num_threads, set_num_threads
from fmtsim.cpu.weighted_sums import weighted_sums

__all__ = [
    "block_amax",
    "cache_folder",
    "count_cast",
    "decode",
    "encode",
    "exp",
    "gemm",
    "get_num_threads",
    "ln",
    "optimizer_steps",
    "quantize",
    "set_num_threads",
    "supports",
    "supports_gemm",
    "supports_optimizer",
    "weighted_sums",
]
