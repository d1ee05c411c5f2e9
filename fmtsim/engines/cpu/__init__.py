# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: numba kernels on the threads of a pool of our own, the same bits as every other engine."""

from fmtsim.engines.cpu.cast.blockwise import finish_, round_blocks, times_blocks, widened
from fmtsim.engines.cpu.cast.decoding import look_up
from fmtsim.engines.cpu.cast.engine import decode, encode, quantize, supports
from fmtsim.engines.cpu.cast.rotation import hadamard
from fmtsim.engines.cpu.cast.statistics import block_amax, block_means
from fmtsim.engines.cpu.counting import count_cast
from fmtsim.engines.cpu.gemm.engine import gemm, gemm_batch, supports_gemm
from fmtsim.engines.cpu.optim.elementary import exp, ln
from fmtsim.engines.cpu.optim.steps import optimizer_steps, supports_optimizer
from fmtsim.engines.cpu.runtime.kernel_cache import cache_folder
from fmtsim.engines.cpu.runtime.pool import get_num_threads, set_num_threads
from fmtsim.engines.cpu.weighted_sums import weighted_sums

__all__ = [
    "block_amax", "block_means", "cache_folder", "count_cast", "decode", "encode", "exp", "finish_", "gemm",
    "gemm_batch", "get_num_threads", "hadamard", "ln", "look_up", "optimizer_steps", "quantize", "round_blocks",
    "set_num_threads", "supports", "supports_gemm", "supports_optimizer", "times_blocks", "weighted_sums",
    "widened",
]  # fmt: skip
