# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: numba kernels on the threads of a pool of our own, the same bits as every other engine."""

import sys
from typing import TYPE_CHECKING

from fmtsim.support.lazy import LazyEngine

if TYPE_CHECKING:
    from fmtsim.cpu.runtime.pool import get_num_threads as get_num_threads
    from fmtsim.cpu.runtime.pool import set_num_threads as set_num_threads

MODULES = {
    "cast.blockwise": ("finish_", "round_blocks", "times_blocks", "widened"),
    "cast.codes": ("look_up",),
    "cast.engine": ("decode", "encode", "quantize", "supports"),
    "cast.hadamard_kernels": ("hadamard",),
    "cast.logarithmic": ("exp", "ln"),
    "cast.scaled_blocks": ("block_amax", "block_means"),
    "counting": ("count_cast", "weighted_sums"),
    "gemm.engine": ("gemm", "gemm_batch", "supports_gemm"),
    "optim.optimizer_steps": ("optimizer_steps", "supports_optimizer"),
    "runtime.kernel_cache": ("cache_folder",),
    "runtime.pool": ("get_num_threads", "memory", "set_num_threads"),
}
__all__ = sorted(name for names in MODULES.values() for name in names)  # noqa: PLE0605  # a list, of the table
sys.modules[__name__].__class__ = LazyEngine
