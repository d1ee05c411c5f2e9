# SPDX-License-Identifier: Apache-2.0
"""Parameters and gradients of the tests: of many magnitudes, with zeros of both signs and subnormal numbers."""

import inspect

import numpy as np
import torch

import fmtsim

SHAPES = ((5000,), (33, 256), (4096,), (3, 4, 700), (50, 129), (17,))


def parameter(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(0.1)


def gradients(shape, count, seed=1):
    source = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        g = source.standard_normal(shape) * 10.0 ** source.uniform(-5, 0, shape)
        flat = g.astype(np.float32).reshape(-1)
        flat[:6] = [0.0, -0.0, 1e-40, -1e-40, 1e-20, 1.0]
        flat[300:700] = 0.0  # a whole block of zeros, and parts of its neighbours
        result.append(flat.reshape(shape))
    return result


def run(optimizer_class, p, grads, **options):
    """Return the parameter after each step, the optimizer and the parameter itself."""
    parameter = torch.nn.Parameter(torch.from_numpy(p.copy()))
    optimizer = optimizer_class([parameter], **options)
    out = []
    for g in grads:
        parameter.grad = torch.from_numpy(g.copy())
        optimizer.step()
        out.append(parameter.detach().numpy().copy().reshape(-1))
    return out, optimizer, parameter


def value_bits(x):
    """Return the bits of a tensor's float32 values, all NaN the same; integers as they are."""
    if x.is_floating_point():
        return torch.where(x.isnan(), torch.nan, x).to(torch.float32).view(torch.int32).clone()
    return x.clone()


HYPER = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-8}


def train(cls, scheme, steps=3, bad=False, dtype=torch.float32, device="cpu", **options):
    """Return the bits of parameters and states after some steps, and the count of gradients that are not finite."""
    parameters = [
        torch.nn.Parameter(torch.from_numpy(parameter(shape, i)).to(device, dtype)) for i, shape in enumerate(SHAPES)
    ]
    names = inspect.signature(cls).parameters.keys() - (
        {"weight_decay"} if getattr(cls, "func", cls) is fmtsim.optim.Madam else set()
    )
    hyper = {name: value for name, value in (HYPER | options).items() if value is not None and name in names}
    optimizer = cls(parameters, state=scheme, **hyper)
    grads = [gradients((8960,), steps, 50 + i) for i in range(len(SHAPES))]
    for step in range(steps):
        for p, g in zip(parameters, grads, strict=True):
            p.grad = torch.from_numpy(g[step][: p.numel()].reshape(p.shape).copy()).to(device, dtype)
            if bad:
                p.grad.view(-1)[step + 7 :: 999] = (torch.nan, torch.inf, -torch.inf)[step % 3]
        optimizer.step()
    tensors = [
        *parameters,
        *(t for p in parameters for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)),
    ]
    return [value_bits(t.detach().cpu()) for t in tensors], optimizer.nonfinite_gradients()
