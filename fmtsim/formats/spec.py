# SPDX-License-Identifier: Apache-2.0
"""What an element format is: frozen records from which every derived quantity follows, a module for each kind."""

from fmtsim.formats.codebook import CodebookFormat
from fmtsim.formats.fields import OVERFLOWS, NanPolicy, Overflow
from fmtsim.formats.floating import FloatFormat
from fmtsim.formats.integer import IntFormat
from fmtsim.formats.logarithmic import LogFormat

__all__ = [
    "OVERFLOWS", "CodebookFormat", "ElementFormat", "FloatFormat", "IntFormat", "LogFormat", "NanPolicy",
    "Overflow",
]  # fmt: skip

ElementFormat = FloatFormat | IntFormat | CodebookFormat | LogFormat
