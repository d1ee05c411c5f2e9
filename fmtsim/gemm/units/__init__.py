# SPDX-License-Identifier: Apache-2.0
"""The catalogue of matrix units: what each adds, in which order, and the evidence."""

from fmtsim.gemm.units.catalogue import units
from fmtsim.gemm.units.unit import register_unit

for _unit in units():
    register_unit(_unit)
