# SPDX-License-Identifier: Apache-2.0
"""Search: a format for each layer of a trained model under a budget of bit operations, without training it."""

from fmtsim.search.result import Point, Policy, SearchResult
from fmtsim.search.verb import search

__all__ = ["Point", "Policy", "SearchResult", "search"]
