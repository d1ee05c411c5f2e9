# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose three products quantise their operands: quantize_operand, gemm, finish."""
