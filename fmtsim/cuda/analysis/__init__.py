# SPDX-License-Identifier: Apache-2.0
"""Measurements of tensors while a model runs: fingerprints of their bits, and effects of casts."""
