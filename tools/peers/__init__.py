# SPDX-License-Identifier: Apache-2.0
"""Profiles of other libraries' casts held to the libraries themselves: inputs, environments, runners, a table."""
