# SPDX-License-Identifier: Apache-2.0
"""Claims about matrix units: what a narrow accumulator costs, and what promotion of its sums saves."""

import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.gemm.products.matmul import mm
from fmtsim.lab.reproduce.claim import Claim, Expected, Measured, Tell, settings
from fmtsim.lab.reproduce.samples import generator, told
from fmtsim.spec.plan import GemmPlan


def accumulation(
    tell: Tell, *, unit: str, format: str, k: int, rows: int, top: float, promote: tuple[int | None, ...], seed: int
) -> Measured:
    """Measure sums of products of a unit against exact ones, by the products after which they are promoted.

    ``top`` is what the numbers' largest magnitude is scaled to. An error is the largest of all sums' relative to their
    root mean square, in percent: normal numbers give sums near 0, whose own relative errors have no bound.
    """
    source, numbers = generator(seed), {}
    points: dict[str, list[tuple[float, float]]] = {}
    for kind, drawn in (("normal", torch.randn), ("uniform", torch.rand)):
        a, b = (quantize(t * (top / t.abs().max()), format) for t in (drawn(rows, k, generator=source) for _ in "ab"))
        exact = a.double() @ b.double().T
        for every in told(tell, promote):
            error = (_product(a, b, unit, format, GemmPlan(promote_every=every)) - exact).abs().max()
            how = "never promoted" if every is None else f"promoted every {every}"
            numbers[f"{kind}, {how}, %"] = value = 100 * float(error / exact.square().mean().sqrt())
            points.setdefault(kind, []).append((float(every or k), value))
        first, second = numbers[f"{kind}, never promoted, %"], numbers[f"{kind}, promoted every 128, %"]
        numbers[f"{kind}, never promoted over every 128"] = first / second
    curves = {name: sorted(curve) for name, curve in points.items()}
    axes = (f"products between promotions ({k}: never)", "largest error over rms of the sums, %")
    return Measured(numbers=numbers, curves=curves, axes=axes, logarithmic="xy")


def _product(a: Tensor, b: Tensor, unit: str, format: str, plan: GemmPlan) -> Tensor:
    y = mm(
        a.bfloat16(), b.bfloat16().T, unit=unit, plan=plan, a_format=format, b_format=format, out_dtype=torch.float32
    )
    return y.double()


CLAIMS = (
    Claim(
        name="accumulation",
        says="Hopper's FP8 sums of 4096 products err by nearly 2 %, and much less where they are promoted every 128",
        source="DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2; MMA-Sim c785138 (13 fraction bits)",
        measure=accumulation,
        settings=settings(
            unit="hopper.wgmma",
            format="e4m3",
            k=4096,
            rows=256,
            top=448.0,
            promote=(None, 1024, 512, 256, 128, 64),
            seed=0,
        ),
        expected=(
            Expected(
                name="normal, never promoted, %", low=1.5, high=2.0, published=2.0, origin="paper", part=(0.2, 20.0)
            ),
            Expected(name="normal, promoted every 128, %"),
            Expected(name="normal, never promoted over every 128", low=2.0),
            Expected(name="uniform, never promoted, %"),
            Expected(name="uniform, promoted every 128, %"),
            Expected(name="uniform, never promoted over every 128", low=2.0),
        ),
        recorded="shown in part",
        bounds="after",
        seeds=5,
        notes="the report names neither the distribution of its random matrices nor what the error is relative to. "
        "That normal numbers and the sums' root mean square come near its figure was seen before the bounds were "
        "set; sums of uniform numbers only grow, and err four times as much",
    ),
)
