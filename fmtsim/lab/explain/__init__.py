# SPDX-License-Identifier: Apache-2.0
"""Why a number or a product got its bits: neighbours, scales and rules told by the oracle; units and plans."""

from fmtsim.lab.explain.explain_cast import explain
from fmtsim.lab.explain.explanations import Element, Explanation, Scale

__all__ = ["Element", "Explanation", "Scale", "explain"]
