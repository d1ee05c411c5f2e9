# SPDX-License-Identifier: Apache-2.0
"""Planted errors: see __main__.py."""
