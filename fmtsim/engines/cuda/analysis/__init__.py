# SPDX-License-Identifier: Apache-2.0
"""What is asked of tensors while a model runs: fingerprints of their bits, and what casts did to them."""
