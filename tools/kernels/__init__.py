# SPDX-License-Identifier: Apache-2.0
"""Kernels that a GPU runs once and a CPU repeats: what is run, with which operands, and what is recorded."""
