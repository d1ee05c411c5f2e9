# SPDX-License-Identifier: Apache-2.0
"""Small models and data of the tests of quantisation."""

import dataclasses

import torch
from torch import nn

from fmtsim.ptq import Smooth
from fmtsim.recipes.recipe_registry import get_recipe
from tests.support.operands import normal


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).requires_grad_(False)


ANYWHERE = dataclasses.replace(get_recipe("int8_smooth"), smooth=Smooth(after="any"), name="anywhere")
DATA = [normal(20, 16, seed=s) for s in (1, 2)]
