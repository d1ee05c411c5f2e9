# SPDX-License-Identifier: Apache-2.0
"""Kernels that multiply matrices as emulated units do."""
