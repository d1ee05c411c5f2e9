# SPDX-License-Identifier: Apache-2.0
"""Malformed inputs: each either gives a result or one of fmtsim's own errors (``python -m tools.fuzz``)."""
