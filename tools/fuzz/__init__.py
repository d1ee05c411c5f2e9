# SPDX-License-Identifier: Apache-2.0
"""Inputs that nobody writes: each either gives a result or one of fmtsim's own errors (``python -m tools.fuzz``)."""
