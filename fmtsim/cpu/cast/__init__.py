# SPDX-License-Identifier: Apache-2.0
"""Kernels that turn tensors into values or codes of a format."""
