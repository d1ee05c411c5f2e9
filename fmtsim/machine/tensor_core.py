# SPDX-License-Identifier: Apache-2.0
"""Products on a matrix unit alone: the chains of instructions that kernels of attention and convolution are made of."""

from dataclasses import replace
from functools import partial

import torch

from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.operator import run_gemm
from fmtsim.gemm.products.resolver import resolve_call
from fmtsim.spec.gemm_spec import GemmSpec


def chain_of(unit: str, fmt: str | torch.dtype, instruction_k: int | None = None) -> GemmSpec:
    """Return the chain of a unit's instructions, with sums in float32, for operands of a format; or of shorter ones."""
    record = get_format(fmt)
    spec = resolve_call("mm", record, record, (0, 0, 0), torch.float32, target=unit, accumulate="fp32")  # type: ignore[arg-type]
    return spec if instruction_k is None else replace(spec, plan=replace(spec.plan, instruction_k=instruction_k))


product = partial(run_gemm, validated=True, bare=True)
"""``run_gemm`` for operands that lie in the spec's formats, below torch's dispatcher: ``product(a, b, spec, c=c)``."""
