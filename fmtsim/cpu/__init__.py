"""The CPU engine: numba kernels on the threads of a pool of our own, the same bits as every other engine."""

from fmtsim.cpu.cast.engine import decode, encode, quantize, supports
from fmtsim.cpu.gemm.engine import gemm, supports_gemm
from fmtsim.cpu.optim.elementary import exp, ln
from fmtsim.cpu.optim.steps import optimizer_steps, supports_optimizer

__all__ = [
    "decode",
    "encode",
    "exp",
    "gemm",
    "ln",
    "optimizer_steps",
    "quantize",
    "supports",
    "supports_gemm",
    "supports_optimizer",
]
