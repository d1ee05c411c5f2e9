# SPDX-License-Identifier: Apache-2.0
"""Claims about matrix units: narrow accumulators, promotion of partial sums, and the datapath of LNS-Madam."""

import math

import torch
from torch import Tensor, nn

from fmtsim.casts.quantize import quantize
from fmtsim.formats.element import LogFormat
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.matmul import mm
from fmtsim.nn.convert import convert
from fmtsim.optim.optimizers import Madam
from fmtsim.spec.datapath import LogDatapath
from fmtsim.spec.plan import GemmPlan
from studies.claims.claim import Claim, Expected, Measured, Tell, settings
from studies.claims.experiment import generator, normal, relative_error, told
from studies.claims.optimizers import regressed, start


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
    y = mm(a.bfloat16(), b.bfloat16().T, target=unit, plan=plan, formats=format, out_dtype=torch.float32)
    return y.double()


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="accumulation", recorded="shown in part", bounds="after", seeds=5,
        says="Hopper's FP8 sums of 4096 products err by nearly 2 %, and much less where they are promoted every 128",
        source="DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2; MMA-Sim c785138 (13 fraction bits)",
        measure=accumulation,
        settings=settings(
            unit="hopper.wgmma", format="e4m3", k=4096, rows=256, top=448.0, promote=(None, 1024, 512, 256, 128, 64),
            seed=0,
        ),
        expected=(
            Expected(name="normal, never promoted, %", low=1.5, high=2.0, published=2.0, origin="paper",
                     part=(0.2, 20.0)),
            Expected(name="normal, promoted every 128, %"),
            Expected(name="normal, never promoted over every 128", low=2.0),
            Expected(name="uniform, never promoted, %"),
            Expected(name="uniform, promoted every 128, %"),
            Expected(name="uniform, never promoted over every 128", low=2.0),
        ),
        notes="the report names neither the distribution of its random matrices nor what the error is relative to. "
        "That normal numbers and the sums' root mean square come near its figure was seen before the bounds were "
        "set; sums of uniform numbers only grow, and err four times as much",
    ),
)  # fmt: skip


_SOURCE = "Zhao et al., LNS-Madam, arXiv:2106.13914: conversion by a table and Mitchell's line, partial sums"


def products(
    tell: Tell, *, format: str, tables: tuple[int, ...], fraction_bits: int, shape: tuple[int, int], seed: int
) -> Measured:
    """Multiply two normal matrices as logarithms, by tables of several sizes."""
    fmt = get_format(format)
    assert isinstance(fmt, LogFormat)
    x, w = normal(*shape, seed), normal(*shape, seed + 1)
    scales = [t.abs().max() / fmt.max for t in (x, w)]
    a, b = (quantize(t / scale, fmt) for t, scale in zip((x, w), scales, strict=True))
    exact, plain = a.double() @ b.double().T, x.double() @ w.double().T
    error = 100 * math.sqrt(relative_error(plain, exact * (scales[0].double() * scales[1].double())))
    numbers = {"error of the format, %": error}
    for entries in told(tell, tables):
        path = LogDatapath(entries=entries, fraction_bits=fraction_bits)
        y = mm(a, b.T, target=path, formats=fmt)
        numbers[f"error of {entries} constants, %"] = 100 * math.sqrt(relative_error(exact, y))
    for entries in tables:
        numbers[f"error of {entries} constants over the format's"] = numbers[f"error of {entries} constants, %"] / error
    return Measured(numbers=numbers)


def learned(tell: Tell, *, recipe: str, tables: tuple[int, ...], lr: float, steps: int, seed: int) -> Measured:
    """Train a small network whose products, gradients' too, are summed by tables of several sizes, or in float32."""
    losses = {}
    for entries in told(tell, (0, *tables)):
        weights = start(seed)
        layers = [nn.Linear(weight.shape[1], weight.shape[0], bias=False) for weight in weights]
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = weight
        model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        convert(model, recipe=recipe, target=LogDatapath(entries=entries) if entries else None)
        losses[entries] = regressed(Madam(model.parameters(), lr=lr), model, steps, seed)
    numbers = {"loss, float32 sums": losses[0]}
    numbers |= {f"loss of {entries} constants over it": losses[entries] / losses[0] for entries in tables}
    return Measured(numbers=numbers)


CLAIMS += (
    Claim(
        name="lns_adder_tree", recorded="shown in part", bounds="after", seeds=3,
        says="products of 8-bit logarithms, summed as integers by a table of eight or four constants, lose less than "
        "the format does",
        source=_SOURCE,
        measure=products,
        settings=settings(format="lns8_g8", tables=(8, 4, 2, 1), fraction_bits=8, shape=(64, 512), seed=0),
        expected=(
            Expected(name="error of the format, %"),
            *(Expected(name=f"error of {entries} constants, %") for entries in (8, 4, 2, 1)),
            Expected(name="error of 8 constants over the format's", high=0.1),
            Expected(name="error of 4 constants over the format's", high=1.0),
        ),
        notes="errors of a product of normal matrices, of its norm; sums are integers of 24 bits. The paper gives "
        "accuracies of trained networks",
    ),
    Claim(
        name="lns_training", recorded="shown in part", bounds="before", seeds=5, slow=True,
        says="a network learns on LNS-Madam's datapath as with float32 sums, with a table of few constants too",
        source=_SOURCE,
        measure=learned, settings=settings(recipe="lns", tables=(8, 4, 2, 1), lr=1 / 64, steps=300, seed=1),
        expected=(
            Expected(name="loss, float32 sums"),
            *(Expected(name=f"loss of {entries} constants over it", high=1.1) for entries in (8, 4, 2, 1)),
        ),
        notes="a network of three layers learns another one, weights are 16-bit logarithms; the paper trains vision "
        "and language models",
    ),
)  # fmt: skip
