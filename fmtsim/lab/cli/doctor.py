# SPDX-License-Identifier: Apache-2.0
"""``fmtsim doctor``: what may go wrong here: missing engines, and with --gemm products that a library drops."""

import argparse
from typing import Any

from fmtsim.gemm.models import PASSES, parse_tokens
from fmtsim.lab.analysis.gemm_scan import scan_gemm
from fmtsim.lab.cli.info import collect
from fmtsim.lab.cli.layers import chosen_dtypes, chosen_model
from fmtsim.lab.cli.output import MISMATCH, answer
from fmtsim.support.errors import ArgumentError

_WITH_GEMM: dict[str, Any] = {"models": [], "shapes": None, "target": None, "no_gradients": False}


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; with ``--gemm`` 1 where products are left out."""
    if not arguments.gemm:
        given = next((name for name, value in _WITH_GEMM.items() if getattr(arguments, name) != value), None)
        if given is not None:
            raise ArgumentError(f"--{given.replace('_', '-').replace('models', 'model')} goes with --gemm; add it")
        record = collect()
        answer(arguments, record, lambda: _summary(record))
        return 0
    passes = PASSES[:1] if arguments.no_gradients else PASSES
    found = scan_gemm(
        chosen_model(arguments), arguments.target, parse_tokens(arguments.tokens), dtypes=chosen_dtypes(arguments),
        passes=passes,
    )  # fmt: skip
    answer(arguments, found.to_dict(), lambda: str(found))
    return MISMATCH if found.left_out else 0


def _summary(record: dict[str, Any]) -> str:
    """Return the few lines of ``fmtsim info`` that say whether something is missing."""
    versions = record["versions"]
    lines = [", ".join(f"{name} {versions[name]}" for name in ("fmtsim", "torch", "python"))]
    lines += [f"{device['name']}: {device['description']}, by {device['engine']}" for device in record["devices"]]
    lines += [f"no engine {x['name']}: {x['reason']}" for x in record["engines"] if not x["available"]]
    return "\n".join([*lines, "fmtsim info says more; fmtsim doctor --gemm looks through a model's products"])
