"""Why a number got its bits: exact neighbours, scales and rules, told by the oracle."""

from fmtsim.explain.records import Element, Explanation, Scale
from fmtsim.explain.verb import explain

__all__ = ["Element", "Explanation", "Scale", "explain"]
