# SPDX-License-Identifier: Apache-2.0
"""Why a number or a product got its bits: neighbours, scales and rules told by the oracle; units and plans."""

from fmtsim.lab.explain.records import Element, Explanation, Scale
from fmtsim.lab.explain.verb import explain

__all__ = ["Element", "Explanation", "Scale", "explain"]
