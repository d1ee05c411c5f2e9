# SPDX-License-Identifier: Apache-2.0
"""What a GPU computes between matrix products: special functions, CUDA's library functions, operators."""
