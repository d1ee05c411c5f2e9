# SPDX-License-Identifier: Apache-2.0
"""What ``fmtsim mm`` found, as a record and as text."""

import argparse
from typing import Any

import torch

from fmtsim.gemm.products.explanation import MmExplanation
from fmtsim.lab.analysis.comparison import Comparison
from fmtsim.lab.analysis.ulp import read_codes

SHOWN = 4


def check_text(check: Comparison) -> str:
    """Return whether a GPU and its emulation agree, and where they do not."""
    said = "native and emulated: all bits agree" if check.equal else "native against emulated (expected):"
    return f"\n{said}" if check.equal else "\n".join(["", said, *(f"  {line}" for line in str(check).splitlines())])


def record_of(
    arguments: argparse.Namespace, explanation: MmExplanation, comparison: Comparison, relative: torch.Tensor,
    y: torch.Tensor, seconds: tuple[float, float],
) -> dict[str, Any]:  # fmt: skip
    """Return what was found as JSON types."""
    products = arguments.m * arguments.n * arguments.k
    count = relative.numel()
    return {
        "explanation": dict(explanation.rows),
        "verified": explanation.verified,
        "data": "uniform" if y.dtype == torch.int32 else arguments.data,
        "seed": arguments.seed,
        "rows_checked": comparison.shape[0],
        "relative_error": {
            "max": relative.max().item() if count else 0.0,
            "median": relative.median().item() if count else 0.0,
            "rms": relative.square().mean().sqrt().item() if count else 0.0,
        },
        "against_exact": comparison.to_dict(),
        "first_outputs": _hex(y[0, :SHOWN]),
        "seconds": seconds[1],
        "seconds_of_first_call": seconds[0],
        "products_per_second": products / seconds[1],
    }


def _hex(values: torch.Tensor) -> list[str]:
    raw, kind = read_codes(values, "y")
    mask, digits = (1 << kind.bits) - 1, kind.bits // 4
    return [f"0x{code & mask:0{digits}X}" for code in raw.tolist()]


def text_of(
    record: dict[str, Any], explanation: MmExplanation, comparison: Comparison, y: torch.Tensor,
    exact: torch.Tensor,
) -> str:  # fmt: skip
    """Return the record and the explanation for a reader."""
    error = record["relative_error"]
    rows = "all outputs" if exact.shape[0] == y.shape[0] else f"the first {exact.shape[0]} of {y.shape[0]} rows"
    shown = [
        f"  {code} = {value!r}  (exact {sum_!r})"
        for code, value, sum_ in zip(
            record["first_outputs"], y[0, :SHOWN].double().tolist(), exact[0, :SHOWN].tolist(), strict=True
        )
    ]
    width = max(len(heading) for heading, _ in explanation.rows)
    speed = f"{record['seconds']:.3g} s, {record['products_per_second']:.3g} products/s"
    first = record["seconds_of_first_call"]
    return "\n".join(
        [
            str(explanation),
            f"{'data':<{width}}  {record['data']}, seed {record['seed']}",
            "",
            f"relative error of {rows} against the exact sums:",
            f"  largest {error['max']:.3g}, median {error['median']:.3g}, root mean square {error['rms']:.3g}",
            "",
            f"bits against the exact sums rounded to {comparison.dtype}:",
            *(f"  {line}".rstrip() for line in str(comparison).splitlines()),
            "",
            "first outputs:",
            *shown,
            "",
            f"{speed} (first call {first:.3g} s)",
        ]
    )
