# SPDX-License-Identifier: Apache-2.0
"""Search: a format for each layer under a budget of bit operations, of a trained model or while it is trained."""

from fmtsim.lab.search.find_formats import search
from fmtsim.lab.search.in_training import search_while_training
from fmtsim.lab.search.result import Point, Policy, SearchResult

__all__ = ["Point", "Policy", "SearchResult", "search", "search_while_training"]
