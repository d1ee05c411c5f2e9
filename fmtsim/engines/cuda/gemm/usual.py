# SPDX-License-Identifier: Apache-2.0
"""Usual products: their kernels are compiled before the first call (fmtsim.cuda.warmup)."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fmtsim.engines.cuda.gemm.dispatch import FAST
from fmtsim.engines.cuda.gemm.job import TILE, Gpu, Job, accumulation_order
from fmtsim.engines.cuda.runtime import Program
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat, IntFormat
from fmtsim.spec.datapath import Datapath, sum_dtype
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.plan import GemmPlan

_unit: Any = Datapath  # names stand for formats and roundings; no kernel is specialised by min_exponent
_NEAREST = partial(_unit, block=16, fraction_bits=25, rounding="nearest_even")
_CHAIN = partial(_unit, fraction_bits=None, rounding="nearest_even")
_GROUPS = partial(_unit, block=64, fraction_bits=35, group=16)
_E8M13, _E8M10, _E6M9 = (
    FloatFormat(name=f"e{exponent}m{mantissa}", exponent_bits=exponent, mantissa_bits=mantissa)
    for exponent, mantissa in ((8, 13), (8, 10), (6, 9))
)
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = (
    (_unit(block=32, fraction_bits=13, accumulator=_E8M13), _FP8),
    (_unit(block=16, fraction_bits=13, accumulator=_E8M13), _FP8),
    (_unit(block=32, fraction_bits=25), _FP8),
    (_unit(block=32, fraction_bits=25, scale="e8m0", scale_block=32), _FP8),
    (_unit(block=16, fraction_bits=25), _HALVES),
    (_unit(block=8, fraction_bits=24), _HALVES),
    (_unit(block=4, fraction_bits=23), {"fp16": torch.float16}),
    (_unit(block=8, fraction_bits=25), {"tf32": torch.float32}),
    (_unit(block=4, fraction_bits=24), {"tf32": torch.float32}),
    (_GROUPS(scale="ue4m3", scale_block=16), {"e2m1": torch.float8_e4m3fn}),
    (_GROUPS(scale="e8m0", scale_block=32), {"e2m1": torch.float8_e4m3fn}),
    (_NEAREST(accumulator="fp16"), {"fp16": torch.float16}),
    (_NEAREST(accumulator="bf16"), {"bf16": torch.bfloat16}),
    (_NEAREST(accumulator="bf16", rounding="stochastic"), {"bf16": torch.bfloat16}),
    (_NEAREST(term_rounding="nearest_even"), {"bf16": torch.bfloat16}),
    (_unit(block=32, fraction_bits=13, accumulator="fp16", rounding="nearest_even"), _FP8),
    (_CHAIN(block=1), {"fp32": torch.float32, **_HALVES}),
    (_CHAIN(block=1, accumulator="fp64"), {"fp64": torch.float64}),
    (_CHAIN(block=1, accumulator="fp16"), {"fp16": torch.float16}),
    (_CHAIN(block=1, accumulator="bf16"), {"bf16": torch.bfloat16}),
    (_CHAIN(block=1, accumulator=_E6M9), _FP8),
    (_CHAIN(block=1, accumulator=_E8M10), _HALVES),
    (_CHAIN(block=4), {"fp16": torch.float16}),
    (_CHAIN(block=16), _FP8),
)
_PLANS = GemmPlan(), GemmPlan(promote_every=128), GemmPlan(promote_every=128, scaled_promotion=True)
_LESS_SHARED = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99, (12, 1): 99}  # KB of a block


def variants(capability: tuple[int, int]) -> Iterator[Program]:
    """Yield the kernels of the fast path that takes each product, if any."""
    gpu = Gpu(capability, _LESS_SHARED.get(capability, 227) << 10)
    for unit, operands in _UNITS:
        for name, dtype in operands.items():
            for plan in _PLANS if operands is _FP8 else _PLANS[:2]:
                job = _job(unit, name, dtype, plan, gpu)
                yield from next((found for path in FAST if (found := path.programs(job)) is not None), ())


def _job(unit: Datapath, name: str, dtype: torch.dtype, plan: GemmPlan, gpu: Gpu) -> Job:
    """Return a product of tiles without memory."""
    fmt, k, device = get_format(name), 16 * TILE, torch.device("meta")
    assert isinstance(fmt, FloatFormat | IntFormat)
    a, b = (torch.empty(TILE, k, dtype=dtype, device=device) for _ in range(2))
    spec = GemmSpec(datapath=unit, plan=plan, a=fmt, b=fmt)
    scale = None if unit.scale is None else torch.empty(TILE, k // unit.scale_block, device=device)
    return Job(
        a=a, b=b, c=None, scale_a=scale, scale_b=scale, spec=spec, random=None,
        out=torch.empty(TILE, TILE, dtype=sum_dtype(unit), device=device),
        order=accumulation_order(k, spec, device), gpu=gpu,
    )  # fmt: skip
