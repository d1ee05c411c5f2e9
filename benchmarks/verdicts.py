# SPDX-License-Identifier: Apache-2.0
"""Plant a cause in a training and see whether the verdict names it: ``python -m benchmarks.verdicts --out DIR``.

24 schemes, each trained with three seeds: an operand of one layer, the unit of a run or of one product, states of the
optimizer, or nothing that hurts. The verdict over the seeds has to begin with what was planted, or to name nothing.
Records of runs that DIR has are read; the rest is trained.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fmtsim.gemm.layers.config import linear_config
from fmtsim.lab.training.artifacts import LOOK, make_record, verdict, verdict_of_seeds
from fmtsim.lab.training.corpus import load_corpus
from fmtsim.lab.training.decoders import GPTConfig
from fmtsim.lab.training.run import compare_schemes
from fmtsim.lab.training.schemes import Scheme, TrainConfig
from fmtsim.recipes import OptimizerConfig, Rule
from fmtsim.spec.datapath import Datapath
from fmtsim.support.progress import Progress

BF16 = {"x": "bf16", "w": "bf16", "g": "bf16", "scaling": "none"}
NARROW = Datapath(block=32, fraction_bits=2, accumulator="e8m1", rounding="toward_zero")
FEW_EXPONENTS = Datapath(block=32, fraction_bits=16, accumulator="e3m4", rounding="toward_zero")
Told = Callable[[str], bool]


def operand(layer: str, like: str = "bf16", **formats: str) -> tuple[Scheme, Told]:
    """Return a scheme whose operand of one layer has another format, without a scale, and what names it."""
    names = tuple(f"{tensor}_{product}" for tensor in formats for product in "fdw")
    rule = Rule(name=f"^{layer}$", use=linear_config(**{**BF16, **formats}))  # type: ignore[arg-type]
    return Scheme(format=like, rules=(rule,)), lambda said: said.startswith(tuple(f"1. {layer}, {n} (" for n in names))


def run_unit(like: str = "bf16", **fields: Any) -> tuple[Scheme, Told]:
    """Return a scheme whose products all run on a unit."""
    target = Datapath(**{"block": 32, "rounding": "toward_zero", **fields})
    return Scheme(format=like, target=target), lambda said: said.startswith("1. arithmetic: ")


def product_unit(layer: str, product: str, target: Datapath = NARROW) -> tuple[Scheme, Told]:
    """Return a scheme of which one product of one layer runs on a unit."""
    config = linear_config(**BF16)  # type: ignore[arg-type]
    config = replace(config, **{product: replace(getattr(config, product), target=target)})
    scheme = Scheme(format="bf16", rules=(Rule(name=f"^{layer}$", use=config),))
    name = f"{layer}, {product} ("
    return scheme, lambda said: said.startswith((f"1. {name}", "1. arithmetic: ")) and f". {name}" in said


def states(name: str, like: str = "bf16") -> tuple[Scheme, Told]:
    """Return a scheme whose optimizer keeps its states in few bits."""
    return Scheme(format=like, optimizer=OptimizerConfig(state=name)), lambda said: said.startswith("1. optimizer: ")


def nothing(scheme: Scheme) -> tuple[Scheme, Told]:
    """Return a scheme in which nothing hurts."""
    return scheme, lambda said: said.startswith("nothing: ")


PLANTS: dict[str, tuple[Scheme, Told]] = {
    "w e2m1 in 0.up": operand("blocks.0.up", w="e2m1"),
    "g e4m3 in 0.up": operand("blocks.0.up", g="e4m3"),
    "g e4m3 in 1.down": operand("blocks.1.down", g="e4m3"),
    "g e4m3 in 0.down, else e4m3": operand("blocks.0.down", "e4m3", g="e4m3"),
    "g e4m3 in 0.attention.out": operand("blocks.0.attention.out", g="e4m3"),
    "w int2 in 0.down": operand("blocks.0.down", w="int2"),
    "w int4 in 0.up, else e4m3": operand("blocks.0.up", "e4m3", w="int4"),
    "x int2 in 0.up": operand("blocks.0.up", x="int2"),
    "run F=2 e8m1": run_unit(fraction_bits=2, accumulator="e8m1"),
    "run F=1, operands e4m3": run_unit("e4m3", fraction_bits=1),
    "run e8m1": run_unit(fraction_bits=16, accumulator="e8m1"),
    "run e8m2, operands e4m3": run_unit("e4m3", fraction_bits=16, accumulator="e8m2"),
    "fprop of 0.up": product_unit("blocks.0.up", "fprop"),
    "fprop of 0.down": product_unit("blocks.0.down", "fprop"),
    "wgrad of 0.up in e3m4": product_unit("blocks.0.up", "wgrad", FEW_EXPONENTS),
    "dgrad of 0.attention.out in e3m4": product_unit("blocks.0.attention.out", "dgrad", FEW_EXPONENTS),
    "states fp8lm_w8": states("fp8lm_w8"),
    "states fp8lm_v8": states("fp8lm_v8"),
    "states lns_madam": states("lns_madam"),
    "states fp8lm_w8, operands e4m3": states("fp8lm_w8", "e4m3"),
    "nothing, bf16": nothing(Scheme(format="bf16")),
    "nothing, e4m3": nothing(Scheme(format="e4m3")),
    "nothing, a wide unit": nothing(Scheme(format="bf16", target=Datapath(block=16, fraction_bits=25))),
    "nothing, bf16 states": nothing(Scheme(format="bf16", optimizer=OptimizerConfig(state="bf16_sr"))),
}


def main() -> None:
    """Print a line for each plant, and how many verdicts were right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("verdicts"))
    parser.add_argument("--plants", nargs="+", choices=list(PLANTS), default=list(PLANTS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    corpus, model = load_corpus(None, 32), GPTConfig(context=32, width=32, layers=2, heads=2)
    right = alone = 0
    for name in given.plants:
        scheme, told = PLANTS[name]
        records = []
        for seed in given.seeds:
            path = given.out / f"{name.replace(' ', '_')}.{seed}.json"
            if not path.exists():
                config = TrainConfig(
                    simulated=scheme, baseline=Scheme(format="fp32"), model=model, steps=given.steps, batch_size=8,
                    lr=2e-3, seed=seed,
                )  # fmt: skip
                record: dict[str, Any] = make_record(config, corpus, *compare_schemes(config, corpus, Progress()))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(record))
            records.append(json.loads(path.read_text()))
        singles = [told(dict(verdict(record)).get(LOOK, "")) for record in records]
        words = dict(verdict_of_seeds(records))
        right, alone = right + told(words.get(LOOK, "")), alone + sum(singles)
        mark = "right" if told(words.get(LOOK, "")) else "WRONG"
        print(f"{mark}  {name}: {words['Gap']}; alone {sum(singles)} of {len(singles)}", flush=True)
        print(f"    {words.get('What it is made of')}\n    {words.get(LOOK)}", flush=True)
    every = len(given.seeds) * len(given.plants)
    print(f"{right} of {len(given.plants)} verdicts over seeds, {alone} of {every} of one seed")


if __name__ == "__main__":
    main()
