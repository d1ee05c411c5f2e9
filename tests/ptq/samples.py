"""Small models and data of the tests of quantisation."""

import dataclasses

import torch
from torch import nn

from fmtsim.ptq import Smooth, get_ptq_recipe


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).requires_grad_(False)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


ANYWHERE = dataclasses.replace(get_ptq_recipe("int8_smooth"), smooth=Smooth(after="any"), name="anywhere")
DATA = [normal(20, 16, seed=s) for s in (1, 2)]
