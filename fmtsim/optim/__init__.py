"""Optimizers whose states are really kept in few bits: AdamW, Adam, Lion, SGD and Madam under named schemes."""

from fmtsim.optim.base import QuantizedOptimizer as QuantizedOptimizer
from fmtsim.optim.catalogue import get_scheme as get_scheme
from fmtsim.optim.catalogue import list_schemes as list_schemes
from fmtsim.optim.memory import Memory as Memory
from fmtsim.optim.memory import memory as memory
from fmtsim.optim.optimizers import SGD as SGD
from fmtsim.optim.optimizers import Adam as Adam
from fmtsim.optim.optimizers import AdamW as AdamW
from fmtsim.optim.optimizers import Lion as Lion
from fmtsim.optim.optimizers import Madam as Madam
from fmtsim.spec.optimizer import Scheme as Scheme
from fmtsim.spec.optimizer import StateFormat as StateFormat

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "Madam",
    "Memory",
    "QuantizedOptimizer",
    "Scheme",
    "StateFormat",
    "get_scheme",
    "list_schemes",
    "memory",
]
