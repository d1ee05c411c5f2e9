# SPDX-License-Identifier: Apache-2.0
"""Measurements that users can repeat: kernels as a ratio to a plain copy, start-up times, extra memory."""
