# SPDX-License-Identifier: Apache-2.0
"""Kernels that do a step of an optimizer."""
