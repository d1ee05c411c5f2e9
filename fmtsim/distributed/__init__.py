"""Quantised collectives: reductions in few bits on processes and in simulation, gathered weights, dispatched tokens."""

from fmtsim.distributed.arithmetic import Counts as Counts
from fmtsim.distributed.collective import Reduced as Reduced
from fmtsim.distributed.collective import all_reduce as all_reduce
from fmtsim.distributed.collective import reduce_scatter as reduce_scatter
from fmtsim.distributed.fsdp import hook_fsdp as hook_fsdp
from fmtsim.distributed.gather import all_gather as all_gather
from fmtsim.distributed.gather import dispatch as dispatch
from fmtsim.distributed.gather import whole_tensors as whole_tensors
from fmtsim.distributed.hook import fp8_hook as fp8_hook
from fmtsim.distributed.reduction import REDUCTIONS as REDUCTIONS
from fmtsim.distributed.reduction import AutoFactor as AutoFactor
from fmtsim.distributed.reduction import Reduction as Reduction
from fmtsim.distributed.reduction import get_reduction as get_reduction
from fmtsim.distributed.simulate import Simulated as Simulated
from fmtsim.distributed.simulate import simulate as simulate
from fmtsim.distributed.state import ReductionState as ReductionState

__all__ = [
    "REDUCTIONS",
    "AutoFactor",
    "Counts",
    "Reduced",
    "Reduction",
    "ReductionState",
    "Simulated",
    "all_gather",
    "all_reduce",
    "dispatch",
    "fp8_hook",
    "get_reduction",
    "hook_fsdp",
    "reduce_scatter",
    "simulate",
    "whole_tensors",
]
