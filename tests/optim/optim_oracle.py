# SPDX-License-Identifier: Apache-2.0
"""One step of each scheme in numpy and plain Python: shares no code with fmtsim.optim, and no constants.

Formats are ml_dtypes' or built here; random words and the logarithm are the references of fmtsim.rounding.
"""

import math

import ml_dtypes
import numpy as np
import torch

from fmtsim.rounding.elementary import exp, ln
from fmtsim.rounding.philox import random_word

f32 = np.float32


def dynamic_map(signed, decades=7, extra_bits=0):
    """Cells of the dynamic map, whose edges are those of torch.linspace with a fused multiply-add.

    torch fuses it where ATen's AVX2 or AVX-512 code runs; float64 holds the product and the sum exactly.
    """
    values = []
    for i in range(decades):
        cells = 2 ** (i + (0 if signed else 1) + extra_bits)
        low, k = f32(0.1), np.arange(cells + 1)
        step = f32((f32(1) - low) / f32(cells)).astype(np.float64)
        below, above = low.astype(np.float64) + step * k, 1 - step * (cells - k)
        edges = torch.from_numpy(np.where(k < (cells + 1) // 2, below, above).astype(np.float32))
        centres = (10.0 ** (i - decades + 1)) * ((edges[:-1] + edges[1:]) / 2)
        values += centres.tolist() + ((-centres).tolist() if signed else [])
    return np.array(sorted([*values, 0.0, 1.0]), f32)


MAPS = {
    "signed8": dynamic_map(True),
    "unsigned8": dynamic_map(False),
    "signed4": dynamic_map(True, 3),
    "unsigned4": torch.linspace(0, 1, 17)[1:].numpy(),
}


def search_bnb(table, x, low):
    """Walk from the middle by halves, then compare with one midpoint."""
    pivot, upper_pivot, lower_pivot, lower, upper = 127, 255, 0, f32(low), f32(1)
    jump = 64
    while jump:
        if x > table[pivot]:
            lower_pivot, lower = pivot, table[pivot]
            pivot += jump
        else:
            upper_pivot, upper = pivot, table[pivot]
            pivot -= jump
        jump //= 2
    if x > table[pivot]:
        return upper_pivot if x > f32(f32(upper + table[pivot]) * f32(0.5)) else pivot
    return lower_pivot if x < f32(f32(lower + table[pivot]) * f32(0.5)) else pivot


def search_ao(table, x):
    """Find the last value that is not above, then compare the distance with half a step."""
    code, jump = 0, len(table) // 2
    while jump:
        code += jump if x >= table[code + jump] else 0
        jump //= 2
    above = min(code + 1, len(table) - 1)
    return above if f32(x - table[code]) >= f32(f32(table[above] - table[code]) * f32(0.5)) else code


def blocks(x, size):
    return [x[i : i + size] for i in range(0, len(x), size)]


class Codebook:
    def __init__(self, name, size, style):
        self.table, self.size, self.style, self.signed = MAPS[name], size, style, name.startswith("signed")

    def encode(self, x):
        return [self._block(b) for b in blocks(x, self.size)]

    def _block(self, x):
        amax = np.abs(x).max()
        if self.style == "ao":
            amax = max(amax, f32(1e-12))
            return [search_ao(self.table, y) for y in x / amax], amax
        codes = []
        for value in x:
            code = search_bnb(self.table, value / amax if amax else value, -1 if self.signed else 0)
            if self.signed and np.signbit(self.table[code]) != np.signbit(value):
                code += 1 if value > 0 else -1
            codes.append(code)
        return codes, amax

    def decode(self, stored):
        return np.concatenate([self.table[np.array(codes)] * amax for codes, amax in stored])


def to_float(x, dtype, top):
    """Saturate and round to nearest even."""
    return np.clip(x, -f32(top), f32(top)).astype(dtype).astype(f32)


class PowerOfTwo:
    def __init__(self, dtype, top):
        self.dtype, self.top, self.kept = dtype, top, 0

    def encode(self, x):
        amax = float(np.abs(x).max())
        if 0 < amax < math.inf:
            power = math.floor(math.log2(self.top / amax)) + 1
            while amax * 2.0**power > self.top:
                power -= 1
            self.kept = power
        return to_float(x * f32(2.0**self.kept), self.dtype, self.top), self.kept

    def decode(self, stored):
        return stored[0] * f32(2.0 ** -stored[1])


class Reciprocal:
    def __init__(self, dtype, top):
        self.dtype, self.top = dtype, f32(top)

    def encode(self, x):
        amax = np.abs(x).max()
        scale = self.top / amax if amax else f32(1)
        return to_float(x * scale, self.dtype, self.top), scale

    def decode(self, stored):
        return stored[0] / stored[1]


class Amax:
    def __init__(self, size, least):
        self.size, self.least = size, f32(least)

    def encode(self, x):
        stored = []
        for b in blocks(x, self.size):
            scale = max(np.abs(b).max(), self.least) / f32(448)
            stored.append((to_float(b / (scale if scale else f32(1)), ml_dtypes.float8_e4m3fn, 448), scale))
        return stored

    def decode(self, stored):
        return np.concatenate([q * scale for q, scale in stored])


def smallest_by_lanes(magnitudes):
    """COAT's kernel: threads pass their least magnitude down by shuffles, first in warps, then over warps."""

    def shuffled(lanes):
        for offset in (16, 8, 4, 2, 1):
            passed = [lanes[i + offset] if i + offset < 32 else lanes[i] for i in range(32)]
            lanes = [min(a, b) if b > 0 else a for a, b in zip(lanes, passed, strict=True)]
        return lanes[0]

    threads = [*map(float, magnitudes), *[3.4028234663852886e38] * (128 - len(magnitudes))]
    warps = [shuffled(threads[32 * i : 32 * i + 32]) for i in range(4)]
    return f32(shuffled(warps + [1e9] * 28))


class Expanded:
    """COAT's groups of 128."""

    def __init__(self, lanes=True):
        self.lanes = lanes

    def encode(self, x):
        return [self._group(b) for b in blocks(x, 128)]

    def _group(self, x):
        magnitudes = np.abs(x)
        present = magnitudes[magnitudes > 0]
        top = f32(magnitudes.max() + f32(1e-30))
        least = present.min() if present.size else f32(0)
        low = f32((smallest_by_lanes(magnitudes) if self.lanes else least) + f32(1e-30))
        centre = f32(np.sqrt(top) * np.sqrt(low))
        distance = ln(float(top)) - ln(float(low))
        power = f32(math.floor(16 * (ln(100352.0) / distance)) / 16) if distance else f32(1)
        scale = f32(self._raise(top, power, centre) / f32(448))
        z = np.array([self._raise(m, power, centre) / scale if m else f32(0) for m in magnitudes], f32)
        return to_float(np.copysign(z, x), ml_dtypes.float8_e4m3fn, 448), scale, power, centre

    @staticmethod
    def _raise(m, power, centre):
        return f32(exp(float(power) * (ln(float(m)) - ln(float(centre)))))

    def decode(self, stored):
        out = []
        for q, scale, power, centre in stored:
            for value in q:
                z = f32(abs(value) * scale)
                size = f32(f32(exp(ln(float(z)) / float(power))) * centre) if z else f32(0)
                out.append(np.copysign(size, value))
        return np.array(out, f32)


class Plain:
    def __init__(self, dtype=f32):
        self.dtype = dtype

    def encode(self, x):
        return x.astype(self.dtype).astype(f32)

    def decode(self, stored):
        return stored


def offset(step, index, kind):
    return ((step << 20 | index) << 2) | kind


class Stochastic16:
    """bfloat16 by adding 16 random bits below its last place."""

    def encode(self, x, seed=0, step=0, index=0):
        words = np.array([random_word((seed, offset(step, index, 2)), i) >> 16 for i in range(len(x))], np.uint32)
        return ((x.view(np.uint32) + words) & np.uint32(0xFFFF0000)).view(f32)

    def decode(self, stored):
        return stored


class IntegerRows:
    def __init__(self, width):
        self.width = width

    def encode(self, x, seed=0, step=0, index=0):
        rows = []
        for r, row in enumerate(blocks(x, self.width)):
            scale = np.abs(row).max() / f32(127)
            y = row * (f32(1) / (f32(1e-12) if scale < f32(1e-12) else scale))
            codes = []
            for c, value in enumerate(y):
                word = random_word((seed, offset(step, index, 2)), r * self.width + c)
                magnitude = abs(float(value))  # away from zero where the fraction and the word reach 1
                whole = math.floor(magnitude)
                size = whole + (math.floor((magnitude - whole) * 2**32) + word >= 2**32)
                codes.append(min(size, 127) if value > 0 else -min(size, 128))
            rows.append((np.array(codes, f32), scale))
        return rows

    def decode(self, stored):
        return np.concatenate([codes * scale for codes, scale in stored])


def scheme(name, shape):
    """Return first moment, second moment and weights (None: as they are), and what belongs to the rule."""
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    plain = {"folded": False, "after": False, "zero": False}
    return {
        "fp32": lambda: (Plain(), Plain(), None, plain),
        "bnb8": lambda: (Codebook("signed8", 256, "bnb"), Codebook("unsigned8", 256, "bnb"), None,
                         {"folded": True, "after": True, "zero": True}),
        "bnb8_2048": lambda: (Codebook("signed8", 2048, "bnb"), Codebook("unsigned8", 2048, "bnb"), None,
                              {"folded": True, "after": True, "zero": True}),
        "fp8lm": lambda: (PowerOfTwo(e4m3, 448), PowerOfTwo(np.float16, 65504), PowerOfTwo(np.float16, 65504), plain),
        "fp8lm_o1": lambda: (Plain(), Plain(), PowerOfTwo(np.float16, 65504), plain),
        "fp8lm_v8": lambda: (PowerOfTwo(e4m3, 448), PowerOfTwo(e4m3, 448), PowerOfTwo(np.float16, 65504), plain),
        "fp8lm_w8": lambda: (PowerOfTwo(e4m3, 448), PowerOfTwo(np.float16, 65504), PowerOfTwo(e4m3, 448), plain),
        "intel_2t": lambda: (Reciprocal(ml_dtypes.float8_e4m3, 240), Reciprocal(e5m2, 57344),
                             Reciprocal(np.float16, 65504), plain),
        "coat": lambda: (Expanded(), Expanded(), None, plain),
        "coat_fixed": lambda: (Expanded(lanes=False), Expanded(lanes=False), None, plain),
        "coat_plain": lambda: (Amax(128, 0), Amax(128, 0), None, plain),
        "ao_8bit": lambda: (Codebook("signed8", 256, "ao"), Codebook("unsigned8", 256, "ao"), None, plain),
        "ao_4bit": lambda: (Codebook("signed4", 128, "ao"), Codebook("unsigned4", 128, "ao"), None, plain),
        "ao_fp8": lambda: (Amax(256, 1e-12), Amax(256, 1e-12), None, plain),
        "deepseek_v3": lambda: (Plain(ml_dtypes.bfloat16), Plain(ml_dtypes.bfloat16), None, plain),
        "bf16_sr": lambda: (Plain(), Plain(), Stochastic16(), plain),
        "int8_weights": lambda: (Plain(), Plain(), IntegerRows(shape[-1]), plain),
    }[name]()  # fmt: skip


def adamw(name, p, gradients, *, lr, betas, eps, decay, seed=0, index=0):
    """Return the parameter after each gradient, float32, flat; p and gradients are float32 arrays of one shape."""
    first, second, weights, rule = scheme(name, p.shape)
    beta1, beta2 = betas
    b1, r1, b2, r2 = f32(beta1), f32(1 - beta1), f32(beta2), f32(1 - beta2)
    factor = f32(1 - lr * decay)
    m_kept = v_kept = None
    p, out = p.reshape(-1), []
    random = isinstance(weights, Stochastic16 | IntegerRows)
    if weights is not None:
        held = weights.encode(p, seed, 0, index) if random else weights.encode(p)
    for t, g in enumerate(gradients, 1):
        g = g.reshape(-1)
        if weights is not None:
            p = weights.decode(held)
        m = np.zeros_like(g) if m_kept is None else first.decode(m_kept)
        v = np.zeros_like(g) if v_kept is None else second.decode(v_kept)
        with np.errstate(all="ignore"):
            m, v = m * b1 + g * r1, v * b2 + (g * r2) * g
            c1, c2 = 1 - beta1**t, math.sqrt(1 - beta2**t)
            if rule["folded"]:
                new = p - m / (np.sqrt(v) + f32(eps * c2)) * f32(lr * c2 / c1)
            else:
                new = p * factor - m / (np.sqrt(v) / f32(c2) + f32(eps)) * f32(lr / c1)
            if rule["after"]:
                new = new * factor
        if rule["zero"]:
            bad = ~np.isfinite(g)
            new, m, v = np.where(bad, p, new), np.where(bad, f32(0), m), np.where(bad, f32(0), v)
        p = new.astype(f32)
        m_kept, v_kept = first.encode(m.astype(f32)), second.encode(v.astype(f32))
        if weights is not None:
            held = weights.encode(p, seed, t, index) if random else weights.encode(p)
            p = weights.decode(held)
        out.append(p)
    return out
