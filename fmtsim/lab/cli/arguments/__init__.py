# SPDX-License-Identifier: Apache-2.0
"""The arguments of each command, a module for each: they import no torch, so that ``--help`` is there at once."""
