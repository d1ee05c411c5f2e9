# SPDX-License-Identifier: Apache-2.0
"""Machines: a GPU with its library, as units, accumulation orders and rules that choose among them."""
