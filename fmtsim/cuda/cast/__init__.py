# SPDX-License-Identifier: Apache-2.0
"""Casts: kernels that round tensors to values or codes of a format."""
