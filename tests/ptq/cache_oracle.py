# SPDX-License-Identifier: Apache-2.0
"""The named caches, row by row in numpy: what vLLM's kernels do."""

import numpy as np
import torch

from fmtsim.ptq.cache import lloyd_max


def rotated(x):
    """Return a Sylvester transform of float32 rows, butterfly by butterfly."""
    y, h = x.astype(np.float32).copy(), 1
    while h < y.shape[-1]:
        for i in range(y.shape[-1]):
            if not i & h:
                a, b = y[..., i].copy(), y[..., i + h].copy()
                y[..., i], y[..., i + h] = a + b, a - b
        h *= 2
    return y * np.float32(1 / np.sqrt(y.shape[-1]))


def oracle(name, side, x):
    """Return tokens as a named cache keeps them, row by row."""
    rows = x.float().reshape(-1, x.shape[-1])
    out = torch.stack([_row(name, side, row) for row in rows])
    return out.reshape(x.shape).to(x.dtype)


def _row(name, side, row):
    if name.endswith("per_token_head"):
        top = np.float32(127 if name.startswith("int8") else 448)
        s = max(np.float32(row.abs().max()) / top, np.float32(1e-6))
        y = row.numpy() * (np.float32(1) / s)
        if top == 127:
            codes = (y + np.where(y >= 0, np.float32(0.5), np.float32(-0.5))).astype(np.int8)  # truncates, without -0
            return torch.from_numpy(codes * s)
        return torch.from_numpy(y).to(torch.float8_e4m3fn).float() * torch.tensor(s)
    key_bits, value_bits = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}[
        name.removeprefix("turboquant_")
    ]
    if side:
        low = row.min()
        s = torch.clamp((row.max() - low) / (2**value_bits - 1), min=1e-8)
        codes = ((row - low) / s + 0.5).int().clamp(0, 2**value_bits - 1)
        return codes * s.half().float() + low.half().float()
    if key_bits == 8:
        return row.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    norm, c = row[None].norm(dim=1), np.float32(lloyd_max(len(row), key_bits).values)
    y = rotated((row / (norm + 1e-8)).numpy())
    middles = (c[:-1] + c[1:]) / np.float32(2)
    codes = [sum(number >= middle for middle in middles) for number in y]
    picked = torch.from_numpy(c[codes])
    root = torch.from_numpy(np.sqrt(((picked * picked)[None].sum(-1) + 1e-16).numpy()))  # rounded to nearest
    unit = picked * (1 / root)
    return torch.from_numpy(rotated((norm.half().float() * unit).numpy()))
