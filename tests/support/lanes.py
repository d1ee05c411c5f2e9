# SPDX-License-Identifier: Apache-2.0
"""Random products whose plans have lanes and folded parts."""

import random

import torch

from fmtsim import GemmPlan, get_format, get_unit
from fmtsim.spec.gemm_spec import GemmSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
NAN, INF = float("nan"), float("inf")
ONE_SUM = (
    GemmPlan(),
    GemmPlan(k_tile=2, lanes=2),
    GemmPlan(k_tile=2, lanes=2, lane_reduce="tree"),
    GemmPlan(reduce="folded"),
)
"""Plans with one sum of one product, to which all but the first add +0."""


def spec_of(plan: GemmPlan, fmt: str, unit: str = "fp32_fma") -> GemmSpec:
    return GemmSpec(datapath=get_unit(unit).mode(fmt, fmt), plan=plan, a=get_format(fmt), b=get_format(fmt))


def operands(fmt: str, m: int, n: int, k: int, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers that cancel, among them zeros of both signs, tiny ones, NaN and Inf."""
    generator = torch.Generator().manual_seed(draw.getrandbits(30))
    a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    a[:, ::3] *= -(2.0**12)
    if draw.random() < 0.5:
        a[0, torch.randint(0, k, (1,), generator=generator)] = draw.choice([NAN, INF, -INF])
        b[-1, torch.randint(0, k, (2,), generator=generator)] = draw.choice([NAN, INF, -INF])
    a[m // 2] = -(2.0**-80) if fmt == "bf16" else -0.0
    b[n // 2] = 2.0**-80 if fmt == "bf16" else 0.0
    return a.to(DTYPES[fmt]), b.to(DTYPES[fmt])


def random_plan(draw: random.Random) -> tuple[GemmPlan, int]:
    """Return a plan with lanes or folded parts, and a K."""
    lanes = draw.choice([1, 2, 3, 4, 8, 16])
    tile = lanes * draw.choice([1, 2, 3]) - draw.choice([0, 0, 1])
    k, by_slices = draw.randint(1, 90), draw.random() < 0.4
    part_k = draw.randint(1, k) if by_slices else None
    ways = ["serial"] if lanes == 3 or lanes == 1 else ["serial", "tree", "pair_tree"]
    return GemmPlan(
        k_tile=max(tile, 1),
        part_k=part_k,
        split=-(-k // part_k) if part_k else draw.choice([1, 1, 2, 5, 40]),
        owner="contiguous" if part_k else draw.choice(["contiguous", "interleaved"]),
        lanes=lanes,
        lane_reduce=draw.choice(ways),
        promote_every=draw.choice([None, None, 1, 2, 5]),
        reduce="folded" if lanes == 1 else draw.choice(["serial", "pairwise", "folded"]),
        k_end=draw.choice([None, None, 7, 30]),
    ), k
