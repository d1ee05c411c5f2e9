# SPDX-License-Identifier: Apache-2.0
"""Casts and matrix products with torch operations alone: the same bits on every device that torch knows."""

from fmtsim.engines.torch_engine.compiled import compiles_casts
from fmtsim.engines.torch_engine.elementary import exp, ln
from fmtsim.engines.torch_engine.gemm import gemm
from fmtsim.engines.torch_engine.verbs import decode, encode, quantize

__all__ = ["compiles_casts", "decode", "encode", "exp", "gemm", "ln", "quantize"]
