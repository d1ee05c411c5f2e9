# SPDX-License-Identifier: Apache-2.0
"""Quantised collectives: reductions on processes and in simulation, gathered weights, layers that ranks share out."""

from fmtsim.distributed.arithmetic import Counts
from fmtsim.distributed.collective import Reduced, all_reduce, reduce_scatter
from fmtsim.distributed.fsdp import ReductionState, fp8_hook, hook_fsdp
from fmtsim.distributed.gather import all_gather, dispatch, whole_tensors
from fmtsim.distributed.parallel import TensorParallel, parallelize
from fmtsim.distributed.reduction import REDUCTIONS, AutoFactor, Reduction, get_reduction
from fmtsim.distributed.simulated_reduce import Simulated, simulate

__all__ = [
    "REDUCTIONS", "AutoFactor", "Counts", "Reduced", "Reduction", "ReductionState", "Simulated", "TensorParallel",
    "all_gather", "all_reduce", "dispatch", "fp8_hook", "get_reduction", "hook_fsdp", "parallelize",
    "reduce_scatter", "simulate", "whole_tensors",
]  # fmt: skip
