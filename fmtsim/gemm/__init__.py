# SPDX-License-Identifier: Apache-2.0
"""How matrices are multiplied: which operand is quantised how, and the product itself."""
