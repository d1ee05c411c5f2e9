# SPDX-License-Identifier: Apache-2.0
"""The engines, each with casts, products and optimizer steps: torch operations, numba on CPUs, CUDA kernels."""
