# SPDX-License-Identifier: Apache-2.0
"""The verbs of matrix products, the resolver of a call, the operator, and the exact oracle."""
