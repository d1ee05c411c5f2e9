# SPDX-License-Identifier: Apache-2.0
"""Trainings of a few steps of a tiny model, which several test files compare."""

from typing import Any

from fmtsim.lab.training.decoders import GPTConfig
from fmtsim.lab.training.schemes import Scheme, TrainConfig

FP32 = Scheme(format="fp32")


def tiny(width: int = 16, layers: int = 1) -> GPTConfig:
    """Return the sizes of a model with two heads on 16 tokens."""
    return GPTConfig(context=16, width=width, layers=layers, heads=2)


def training(simulated: Scheme, model: GPTConfig, **changes: Any) -> TrainConfig:
    """Return a comparison of three steps of a scheme with float32."""
    options = {"steps": 3, "batch_size": 2, "lr": 1e-2, "seed": 0, "baseline": FP32, **changes}
    return TrainConfig(simulated=simulated, model=model, **options)
