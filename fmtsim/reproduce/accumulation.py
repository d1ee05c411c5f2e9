# SPDX-License-Identifier: Apache-2.0
"""Claims about matrix units: what a narrow accumulator costs, and what promotion of its sums saves."""

import torch
from torch import Tensor

from fmtsim.gemm.products.matmul import mm
from fmtsim.quantize import quantize
from fmtsim.reproduce.claim import Claim, Measured, Tell, near, settings
from fmtsim.reproduce.samples import generator, told
from fmtsim.spec.plan import GemmPlan


def accumulation(
    tell: Tell, *, unit: str, format: str, k: int, rows: int, top: float, promote: tuple[int | None, ...], seed: int
) -> Measured:
    """Measure sums of products of a unit against exact ones, by the products after which they are promoted.

    ``top`` is what the numbers' largest magnitude is scaled to. Uniform numbers in [0, 1) give the median relative
    error, normal ones the error's root mean square relative to that of the sums.
    """
    source = generator(seed)
    uniform = [torch.rand(rows, k, generator=source) for _ in range(2)]
    normal = [torch.randn(rows, k, generator=source) for _ in range(2)]
    a, b, c, d = (quantize(t * (top / t.abs().max()), format) for t in (*uniform, *normal))
    numbers: dict[str, float] = {}
    points: dict[str, list[tuple[float, float]]] = {"uniform, median": [], "normal, rms": []}
    for every in told(tell, promote):
        plan = GemmPlan(promote_every=every)
        found, exact = _product(a, b, unit, format, plan), a.double() @ b.double().T
        median = float(((found - exact) / exact).abs().median())
        found, exact = _product(c, d, unit, format, plan), c.double() @ d.double().T
        rms = float(((found - exact).square().mean() / exact.square().mean()).sqrt())
        how = "never promoted" if every is None else f"promoted every {every}"
        numbers |= {f"uniform, {how}": median, f"normal, {how}": rms}
        points["uniform, median"].append((float(every or k), median))
        points["normal, rms"].append((float(every or k), rms))
    curves = {name: sorted(curve) for name, curve in points.items()}
    axes = (f"products between promotions ({k}: never)", "relative error")
    return Measured(numbers=numbers, curves=curves, axes=axes, logarithmic="xy")


def _product(a: Tensor, b: Tensor, unit: str, format: str, plan: GemmPlan) -> Tensor:
    y = mm(
        a.bfloat16(), b.bfloat16().T, unit=unit, plan=plan, a_format=format, b_format=format, out_dtype=torch.float32
    )
    return y.double()


CLAIMS = (
    Claim(
        name="accumulation",
        says="Hopper's FP8 sums of 4096 products err by percents; promotion every 128 brings them below 0.1 %",
        source="DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2; MMA-Sim c785138 (13 fraction bits)",
        measure=accumulation,
        settings=settings(
            unit="hopper.wgmma",
            format="e4m3",
            k=4096,
            rows=64,
            top=448.0,
            promote=(None, 1024, 512, 256, 128, 64),
            seed=0,
        ),
        expected=(
            near("uniform, never promoted", 0.075, 0.05),
            near("uniform, promoted every 512", 5.8e-3, 0.05),
            near("uniform, promoted every 128", 5.5e-4, 0.05),
            near("normal, never promoted", 1.3e-3, 0.05),
            near("normal, promoted every 512", 3.4e-4, 0.05),
            near("normal, promoted every 128", 1.3e-4, 0.05),
        ),
        notes="the report says 'nearly 2 %' for random matrices without naming their distribution",
    ),
)
