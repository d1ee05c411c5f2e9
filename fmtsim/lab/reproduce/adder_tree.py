# SPDX-License-Identifier: Apache-2.0
"""Claims about LNS-Madam's datapath: sums of logarithmic products need a table of few constants, trainings too."""

import math

from torch import nn

from fmtsim.casts.quantize import quantize
from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import LogFormat
from fmtsim.gemm.products.matmul import mm
from fmtsim.lab.reproduce.claim import Claim, Expected, Measured, Tell, settings
from fmtsim.lab.reproduce.optimizers import regressed, start
from fmtsim.lab.reproduce.samples import normal, relative_error, told
from fmtsim.nn.convert import convert
from fmtsim.optim.optimizers import Madam
from fmtsim.spec.datapath import LogDatapath

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
        found = mm(a, b.T, datapath=path, a_format=fmt, b_format=fmt)
        numbers[f"error of {entries} constants, %"] = 100 * math.sqrt(relative_error(exact, found))
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
        convert(model, recipe=recipe, unit=LogDatapath(entries=entries) if entries else None)
        losses[entries] = regressed(Madam(model.parameters(), lr=lr), model, steps, seed)
    numbers = {"loss, float32 sums": losses[0]}
    numbers |= {f"loss of {entries} constants over it": losses[entries] / losses[0] for entries in tables}
    return Measured(numbers=numbers)


CLAIMS = (
    Claim(
        name="lns_adder_tree",
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
        recorded="shown in part",
        bounds="after",
        seeds=3,
        notes="errors of a product of normal matrices, of its norm; sums are integers of 24 bits. The paper gives "
        "accuracies of trained networks",
    ),
    Claim(
        name="lns_training",
        says="a network learns on LNS-Madam's datapath as with float32 sums, with a table of few constants too",
        source=_SOURCE,
        measure=learned,
        settings=settings(recipe="lns", tables=(8, 4, 2, 1), lr=1 / 64, steps=300, seed=1),
        expected=(
            Expected(name="loss, float32 sums"),
            *(Expected(name=f"loss of {entries} constants over it", high=1.1) for entries in (8, 4, 2, 1)),
        ),
        recorded="shown in part",
        bounds="before",
        seeds=5,
        notes="a network of three layers learns another one, weights are 16-bit logarithms; the paper trains vision "
        "and language models",
        slow=True,
    ),
)
