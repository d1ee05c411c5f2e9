"""The CUDA engine: kernels in CUDA C++, compiled when they are needed, the same bits as every other engine."""

from fmtsim.cuda.casts import decode, encode, quantize, supports
from fmtsim.cuda.gemm import gemm, supports_gemm
from fmtsim.cuda.runtime import available, why_unavailable

__all__ = ["available", "decode", "encode", "gemm", "quantize", "supports", "supports_gemm", "why_unavailable"]
