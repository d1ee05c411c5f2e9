# SPDX-License-Identifier: Apache-2.0
"""How numba kernels are compiled, kept on disk and spread over threads."""
