# SPDX-License-Identifier: Apache-2.0
"""A report in the browser of a run that never was, whose names are as unkind as names can be."""

import json
import math
import re
from types import SimpleNamespace

import torch

import fmtsim
from fmtsim.lab.analysis.observation import Observation
from fmtsim.lab.analysis.page import write_page
from fmtsim.lab.analysis.stats import Counts, OperandStats
from fmtsim.nn.coverage import Coverage, RawWeight

UNKIND = "</script><img src=x onerror=\"document.title='taken'\"><!--{{data}}"
OPERANDS = {
    "x_f": "e4m3", "w_f": "e4m3", "g_d": "e5m2", "w_d": "e4m3", "g_w": "e5m2", "x_w": "e4m3", "q": "e2m1",
    "k": "int8",
}  # fmt: skip


def made_observation(layers=6, steps=12, every=10, elements=500):
    """Return an observation of made-up tensors, each layer's gradients smaller than those of the layer before."""
    generator = torch.Generator().manual_seed(0)
    names = [UNKIND, *(f"model.layers.{i // 4}.{('qkv', 'out', 'up', 'down')[i % 4]}" for i in range(1, layers))]
    observation = Observation()
    observation.steps, observation.every = steps * every, every
    for layer, name in enumerate(names):
        for operand, format in OPERANDS.items():
            x = torch.randn(elements, generator=generator).exp() * torch.randn(elements, generator=generator)
            x *= 2.0 ** (-layer if operand[0] == "g" else 6)
            total = OperandStats().add(x, fmtsim.quantize(x, format), fmtsim.get_format(format))
            observation.layers.setdefault(name, {})[operand] = total
            for step in range(steps):
                noise = total.noise * float(torch.rand((), generator=generator, dtype=torch.float64))
                counts = Counts(elements=elements, nonzero=elements, signal=total.signal, noise=noise)
                counts.underflowed = int(torch.randint(elements, (), generator=generator))
                counts.amax = total.amax * float(torch.rand((), generator=generator, dtype=torch.float64))
                counts.saturated = total.saturated
                observation.counts.setdefault(step * every, {}).setdefault(name, {})[operand] = counts
    return observation


def made_report(observation=None, **parts):
    """Return a report with every section."""
    observation = observation or made_observation()
    coverage = Coverage(
        total=10**9, simulated=8 * 10**8, backward=16 * 10**8, raw=(
            RawWeight(layer=UNKIND, parameter="weight", multiply_adds=2 * 10**8, share=0.2, reason=UNKIND),
        ),
    )  # fmt: skip
    rows = [
        {"layer": layer, "operand": operand, "loss": s.underflow_percent - 1.0, "kl": s.underflow_percent / 3.0}
        for layer, operands in observation.layers.items() for operand, s in operands.items()
    ]  # fmt: skip
    attribution = SimpleNamespace(rows=rows, to_dict=lambda: {"method": "estimate", "rows": rows})
    steps = [4.0 * math.exp(-i / 90) + 1.2 for i in range(600)]
    options = {
        "title": UNKIND, "curves": {"bf16": steps, UNKIND: [*steps[:400], math.nan]}, "loss_unit": "nats per byte",
        "observation": observation, "coverage": coverage, "attribution": attribution,
        "configuration": {f"part{i}": {"a": i, UNKIND: [UNKIND]} for i in range(30)}, "notes": [UNKIND],
    }  # fmt: skip
    return write_page(None, **{**options, **parts})


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
