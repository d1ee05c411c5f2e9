"""The CUDA engine: kernels in CUDA C++, compiled when they are needed, the same bits as every other engine."""

from fmtsim.cuda.cast.casts import decode, encode, encode_packed, quantize, supports
from fmtsim.cuda.gemm.engine import gemm, supports_gemm
from fmtsim.cuda.runtime.program import available, serves, why_unavailable
from fmtsim.cuda.runtime.warm import warmup

__all__ = [
    "available",
    "decode",
    "encode",
    "encode_packed",
    "gemm",
    "quantize",
    "serves",
    "supports",
    "supports_gemm",
    "warmup",
    "why_unavailable",
]
