# SPDX-License-Identifier: Apache-2.0
"""The GPU's own matrix unit, through the calls of torch that run it."""
