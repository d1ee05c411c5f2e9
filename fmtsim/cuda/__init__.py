# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine: kernels in CUDA C++, compiled when they are needed, the same bits as every other engine."""

from fmtsim.cuda.analysis.count_cast_kernel import count_cast
from fmtsim.cuda.analysis.fingerprint_kernel import fingerprint
from fmtsim.cuda.cast.casts import decode, encode, encode_packed, quantize, quantize_contiguous, supports
from fmtsim.cuda.cast.reduction_stages import ReductionStages, covers_reduction
from fmtsim.cuda.cast.warp_hadamard import covers_hadamard, hadamard
from fmtsim.cuda.gemm.engine import gemm, supports_gemm
from fmtsim.cuda.gemm.scaled_product import covers_groups, multiply_groups
from fmtsim.cuda.gemm.scaled_product import finish_sums as finish
from fmtsim.cuda.layer_operands import counts_keys, has_both, narrows, quantize_both, quantize_operand, unrotate
from fmtsim.cuda.optim.fused_steps import OptimizerBatch, optimizer_steps, supports_optimizer
from fmtsim.cuda.runtime import available, serves, warmup, why_unavailable
from fmtsim.cuda.torch_calls import (
    NativeCall,
    NativeScales,
    cublaslt,
    cublaslt_version,
    other_gpu,
    other_settings,
    other_versions,
)
from fmtsim.cuda.torch_calls import run as run_native

__all__ = [
    "NativeCall", "NativeScales", "OptimizerBatch", "ReductionStages", "available", "count_cast", "counts_keys",
    "covers_groups", "covers_hadamard", "covers_reduction", "cublaslt", "cublaslt_version", "decode", "encode",
    "encode_packed", "fingerprint", "finish", "gemm", "hadamard", "has_both", "multiply_groups", "narrows",
    "optimizer_steps", "other_gpu", "other_settings", "other_versions", "quantize", "quantize_both",
    "quantize_contiguous", "quantize_operand", "run_native", "serves", "supports", "supports_gemm",
    "supports_optimizer", "unrotate", "warmup", "why_unavailable",
]  # fmt: skip
