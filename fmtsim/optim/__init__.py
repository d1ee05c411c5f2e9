# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose states are stored in low precision: AdamW, Adam, Lion, SGD and Madam under named schemes."""

from fmtsim.optim.base import QuantizedOptimizer
from fmtsim.optim.catalogue import get_scheme, list_schemes
from fmtsim.optim.memory import Memory, memory
from fmtsim.optim.optimizers import SGD, Adam, AdamW, Lion, Madam
from fmtsim.spec.optimizer import Scheme, StateFormat

__all__ = [
    "SGD", "Adam", "AdamW", "Lion", "Madam", "Memory", "QuantizedOptimizer", "Scheme", "StateFormat", "get_scheme",
    "list_schemes", "memory",
]  # fmt: skip
