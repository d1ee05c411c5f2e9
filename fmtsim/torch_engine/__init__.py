# SPDX-License-Identifier: Apache-2.0
"""Casts and matrix products with torch operations alone: the same bits on every device that torch knows."""

import sys
from typing import TYPE_CHECKING, Any

from fmtsim.support.lazy import LazyEngine

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


MODULES = {
    "gemm": ("gemm",),
    "reals": ("exp", "ln"),
    "verbs": ("decode", "encode", "quantize"),
}
__all__ = sorted(name for names in MODULES.values() for name in names)  # noqa: PLE0605  # a list, of the table
sys.modules[__name__].__class__ = LazyEngine
