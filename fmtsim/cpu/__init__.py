"""The CPU engine: numba kernels on the threads of a pool of our own, the same bits as every other engine."""

from fmtsim.cpu.cast.engine import decode, encode, quantize, supports
from fmtsim.cpu.gemm.engine import gemm, supports_gemm

__all__ = ["decode", "encode", "gemm", "quantize", "supports", "supports_gemm"]
