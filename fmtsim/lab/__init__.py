# SPDX-License-Identifier: Apache-2.0
"""The laboratory: what looks at results, and the jobs behind the command line. Nothing outside imports it.

Verbs that fewer people need than those of ``fmtsim`` are names of this package; each is imported when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmtsim.lab.analysis.compare_native import compare_native as compare_native
    from fmtsim.lab.analysis.mismatch import explain_mismatch as explain_mismatch
    from fmtsim.lab.analysis.perplexity import perplexity as perplexity
    from fmtsim.lab.analysis.recode import check_recode as check_recode
    from fmtsim.lab.memory.serving import serving_memory as serving_memory
    from fmtsim.lab.memory.training import training_memory as training_memory

_HOMES = {
    "check_recode": "analysis.recode", "compare_native": "analysis.compare_native",
    "explain_mismatch": "analysis.mismatch",
    "perplexity": "analysis.perplexity", "serving_memory": "memory.serving", "training_memory": "memory.training",
}  # fmt: skip
__all__ = sorted(_HOMES)  # noqa: PLE0605  # a list, of the table


def __getattr__(name: str) -> Any:
    """Import a verb when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fmtsim.lab' has no attribute {name!r}", name=name)
    return getattr(importlib.import_module(f"fmtsim.lab.{_HOMES[name]}"), name)
