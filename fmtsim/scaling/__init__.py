# SPDX-License-Identifier: Apache-2.0
"""How a tensor becomes codes and scales: scale rules, blocks, zero points and logarithmic tiles."""
