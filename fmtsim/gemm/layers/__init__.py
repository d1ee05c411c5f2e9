"""Linear layers whose three products quantise their operands: quantize_operand, gemm, finish."""
