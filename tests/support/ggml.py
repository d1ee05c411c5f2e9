# SPDX-License-Identifier: Apache-2.0
"""Blocks to try packed formats on, and HiF4's encoder and decoder, number by number in float32.

Slow and independent of fmtsim: the layout is written as the bits of single elements.
"""

import math

import numpy as np

F = np.float32
LEAST = F(1e-15)


def some_blocks(elements, count=3):
    """Return float32 [blocks, elements] of many kinds: normal, far scales, ties, sparse, constant, any bits."""
    rng = np.random.default_rng(elements)
    x = rng.integers(-(1 << 23), 1 << 23, (count, 8, elements)).astype(F) / F(1 << 21)
    x[:, 1] = np.ldexp(x[:, 1], rng.integers(-147, 110, (count, 1)))
    x[:, 2] = np.ldexp(x[:, 2], rng.integers(-30, 22, (count, 1)))
    x[:, 3] = rng.integers(-32, 33, (count, elements)) / F(8)
    x[:, 4, rng.random(elements) < 0.9] = 0
    x[::2, 4, :32] *= F(0)
    x[0, 4] *= F(0)
    x[:, 5] = np.repeat(x[:, 5, ::16], 16, 1)
    x[:, 6] = np.abs(x[:, 6]) + F(1)
    bits = rng.integers(0, 1 << 32, (count, elements), dtype=np.uint64).astype(np.uint32).view(F)
    x[:, 7] = np.where(np.isfinite(bits), bits, F(0))
    return x.reshape(-1, elements)


def some_bytes(size, count=256):
    """Return uint8 [blocks, size]: random, some with special float16 numbers at both ends."""
    rng = np.random.default_rng(size)
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    special = np.array([0, 0x8000, 1, 0x3FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0xFD01, 0x8001], np.uint16)
    for place in (0, 2, size - 4, size - 2):
        chosen = special[rng.integers(0, len(special), count // 2)]
        blocks[: count // 2, place : place + 2] = chosen.view(np.uint8).reshape(-1, 2)
    return blocks


# HiF4: global-computing-consortium/HiFloat4 6d937b6, hif4_gpu/quant_cy/base/QFuncs/hifx.py.


def short(x):
    """Round a positive float32 to bfloat16, to nearest even."""
    bits = int(np.array(x, F).view(np.uint32))
    return np.array((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16, np.uint32).view(F)[()]


def encode_hif4(x, block):
    magnitudes = [abs(v) for v in x]
    share = min(max(short(max(magnitudes) * short(F(1) / F(7))), F(2.0**-48)), F(49152))
    quarters, exponent = math.frexp(share)
    quarters, exponent = round(quarters * 8), exponent - 1  # to even
    exponent, quarters = (exponent + 1, 4) if quarters == 8 else (exponent, quarters)
    block[0] = exponent + 48 << 2 | quarters - 4
    inverse = short(F(1) / F(math.ldexp(quarters / 4, exponent)))
    for i, v in enumerate(magnitudes):
        eight, four = (max(magnitudes[i // n * n : i // n * n + n]) for n in (8, 4))
        first = eight * inverse >= 4
        second = four * inverse / F(1 + first) >= 2
        block[1 + i // 64] |= int(first) << i // 8
        block[2 + i // 32] |= int(second) << i // 4 % 8
        code = int(min(F(7), np.floor(v / F(1 + first) / F(1 + second) * inverse * F(4) + F(0.5))))
        block[4 + i // 2] |= (code | 8 * bool(x[i] < 0)) << 4 * (i % 2)


def decode_hif4(block):
    """Return the values of a block, float32 [64]."""
    scale = math.nan if block[0] == 255 else math.ldexp(4 + (block[0] & 3), int(block[0] >> 2) - 50)
    values = np.empty(64, F)
    for i in range(64):
        code = int(block[4 + i // 2]) >> 4 * (i % 2)
        doublings = (int(block[1]) >> i // 8 & 1) + (int(block[2 + i // 32]) >> i // 4 % 8 & 1)
        values[i] = scale * math.ldexp((code & 7) * (-1.0 if code & 8 else 1.0), doublings - 2)
    return values


def encode(x):
    """Return the bytes [blocks, 36] of float32 blocks in HiF4."""
    out = np.zeros((len(x), 36), np.int64)
    with np.errstate(all="ignore"):
        for row, block in zip(x, out, strict=True):
            encode_hif4(list(row), block)
    return out.astype(np.uint8)
