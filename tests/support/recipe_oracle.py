# SPDX-License-Identifier: Apache-2.0
"""The quantisers of published schemes, written out as spec'd by their sources: plain float32 steps, block by block.

Nothing of fmtsim is used but casts of numbers to a scalar format. Every function takes a float32 matrix whose blocks
lie along the last axis and returns ``(elements, scales, values)``: what was rounded, one number a block [outer, inner],
and element times scales.
"""

import math

import torch

from fmtsim.casts.quantize import quantize

FLT_MAX = torch.finfo(torch.float32).max
MASK23 = (1 << 23) - 1
TE_SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def f32(x):
    """A float32 tensor of no dimensions."""
    return torch.tensor(x, dtype=torch.float64).float() if not isinstance(x, torch.Tensor) else x.float()


def rounded(y, name, mode="nearest_even", key=None):
    return quantize(y, name, rounding=mode, overflow="saturate", generator=key, out_dtype=torch.float32)


def floor2(x):
    """The power of two below: the 23 mantissa bits cleared."""
    return (x.view(torch.int32) & ~MASK23).view(torch.float32)


def ceil2(x):
    """The power of two above: the exponent plus one where any mantissa bit is set."""
    bits = x.view(torch.int32)
    return ((bits & ~MASK23) + ((bits & MASK23) != 0).int() * (1 << 23)).view(torch.float32)


def each_block(x, block, cast):
    """Cast block by block; short blocks at the edges are what is there."""
    rows, columns = (extent if size is None else size for size, extent in zip(block, x.shape, strict=True))
    elements, scales = torch.zeros_like(x), torch.zeros(-(-x.shape[0] // rows), -(-x.shape[1] // columns))
    values = torch.zeros_like(x)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            q, s = cast(x[part])
            elements[part], scales[i, j], values[part] = q, s, q * s
    return elements, scales, values


def te_scale(amax, top):
    """Transformer Engine, recipe_common.cuh: true division; 1 for 0; the largest float32 for infinity."""
    if amax == 0:
        return f32(1.0)
    scale = torch.div(f32(top), amax)
    return f32(FLT_MAX) if torch.isinf(scale) else scale


def te_current(x, name, top, block=(None, None), power=False):
    def cast(part):
        scale = te_scale(part.abs().max(), top)
        scale = floor2(scale) if power else scale
        return rounded((part * scale).clamp(-top, top), name), torch.div(f32(1.0), scale)

    return each_block(x, block, cast)


def te_mxfp8(x):
    def cast(part):
        bits = int((part.abs().max() * f32(1 / 448)).view(torch.int32))
        exponent, mantissa = bits >> 23, bits & MASK23
        if mantissa > 0 and exponent != 0xFE and not (exponent == 0 and mantissa <= 0x400000):
            exponent += 1
        return rounded(part * f32(2.0 ** (127 - exponent)), "e4m3"), f32(2.0 ** (exponent - 127))

    return each_block(x, (1, 32), cast)


def te_nvfp4(x, block, mode="nearest_even", key=None):
    """Two levels; the elements of a block meet ``min(1 / (s8 * S_dec), FLT_MAX)``."""
    whole = x.abs().max()
    encode = torch.div(f32(448.0 * 6.0), whole).clamp(max=FLT_MAX)
    encode = f32(1.0) if whole == 0 or encode == 0 else encode
    decode = torch.div(f32(1.0), encode)
    scaled = torch.zeros_like(x)

    def cast(part):
        s8 = rounded((part.abs().max() * (encode * f32(1 / 6))).clamp(max=FLT_MAX), "e4m3")
        return part * torch.div(f32(1.0), s8 * decode).clamp(max=FLT_MAX), s8

    scaled, s8, _ = each_block(x, block, cast)
    q = rounded(scaled, "e2m1", mode, key)
    wide = spread(s8, block, x)
    return q, s8, (q.double() * wide.double() * decode.double()).float()


def te_nvfp4_rows(x):
    """A tensor's scale for each row."""
    return torch.cat([te_nvfp4(row[None], (1, 16))[2] for row in x])


def te_four_six(x, block, metric="mae"):
    """Four over six by mean absolute or squared error, block scales to 256; of equal errors that of 6."""
    whole = x.abs().max()
    encode = torch.div(f32(256.0 * 6.0), whole)
    decode = torch.div(f32(1.0), encode)

    def cast(part):
        base, chosen = torch.div(part.abs().max(), f32(6.0)) * encode, []
        for times in (1.0, 1.5):
            s8 = rounded((base * f32(times)).clamp(max=448.0), "e4m3")
            q = rounded(part * torch.div(f32(1.0), s8 * decode).clamp(max=FLT_MAX), "e2m1")
            off, rows = torch.div(q * s8 * whole, f32(256.0 * 6.0)) - part, torch.zeros(part.shape[0])
            for column in off.unbind(1):
                rows = rows + (column.abs() if metric == "mae" else column * column)
            while len(rows) > 1:
                rows = rows[: len(rows) // 2] + rows[len(rows) // 2 :]
            chosen.append((rows[0], q, s8))
        return chosen[int(chosen[1][0] < chosen[0][0])][1:]

    q, s8, _ = each_block(x, block, cast)
    return q, s8, (q.double() * spread(s8, block, x).double() * decode.double()).float()


def fouroversix(x, name, top, mode="nearest_even", key=None, unbiased=False):
    """NVFP4's two levels in fouroversix's order, the tops of an unbiased gradient 16/17 as large."""
    top = top * 16 / 17 if unbiased else top
    encode = torch.div(f32(448 * f32(top).double()), x.abs().max())
    decode = torch.div(f32(1.0), encode)

    def cast(part):
        s8 = rounded(torch.div(part.abs().max(), f32(top)) * encode, "e4m3")
        return part * torch.div(f32(1.0), s8 * decode).clamp(max=FLT_MAX), s8

    scaled, s8, _ = each_block(x, (1, 16), cast)
    q = rounded(scaled, name, mode, key)
    return q, s8, (q.double() * spread(s8, (1, 16), x).double() * decode.double()).float()


def spread(s, block, x):
    rows, columns = (extent if size is None else size for size, extent in zip(block, x.shape, strict=True))
    return s.repeat_interleave(rows, 0)[: x.shape[0]].repeat_interleave(columns, 1)[:, : x.shape[1]]


def sylvester(size):
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def te_rht(x):
    """``x @ (diag(s) H16 / 4)`` in float32, rounded to bfloat16; exact before the rounding where exponents are near."""
    matrix = torch.tensor(TE_SIGNS, dtype=torch.float64)[:, None] * sylvester(16) / 4
    y = x.double().unflatten(-1, (-1, 16)) @ matrix
    return y.flatten(-2).float().bfloat16().float()


def rotate(x, size, signs=None, inverse=False):
    """Butterflies in float32, the orthonormal factor last; signs first, or last for the inverse."""
    y = x.clone().unflatten(-1, (-1, size))
    y = y if signs is None or inverse else y * signs
    step = 1
    while step < size:
        out = y.clone()
        for i in range(size):
            if not i & step:
                out[..., i], out[..., i + step] = y[..., i] + y[..., i + step], y[..., i] - y[..., i + step]
        y, step = out, 2 * step
    y = y * f32(1 / math.sqrt(size))
    return (y * signs if inverse and signs is not None else y).flatten(-2)


def quest(x):
    """Quartet forward, behind the rotation: clip of least error over 6, a power of two below; ties toward zero."""
    y = torch.zeros_like(x)

    def cast(part):
        numbers = part.double().flatten()
        mean = math.fsum(numbers.tolist()) / numbers.numel()
        std = f32(math.sqrt(math.fsum(((numbers - mean) ** 2).tolist()) / numbers.numel()))
        scale = floor2(f32(2.92247856 / 6) * std + f32(1e-8))
        return torch.div(part, scale), scale

    y, scales, _ = each_block(x, (1, 32), cast)
    q = rounded(y, "e2m1", "nearest_toward_zero")
    return q, scales, q * spread(scales, (1, 32), x), (y.abs() < 6).float()


def quartet_backward(x, key):
    """``2^(floor(log2 amax) - 2) * 4/3``: at most 6 after division, so that stochastic rounding never clips."""

    def cast(part):
        amax = part.abs().max()
        scale = f32(1.0) if amax == 0 else floor2(amax) * f32(0.25) * f32(4 / 3)
        return torch.div(part, scale), scale

    y, scales, _ = each_block(x, (1, 32), cast)
    q = rounded(y, "e2m1", "stochastic", key)
    return q, scales, q * spread(scales, (1, 32), x), y


def quartet2_forward(x, over=False):
    """Quartet II: divisions; with ``over`` a block may be mapped to 4, where that has the lower squared error."""
    whole = x.abs().max()
    tensor = torch.div(torch.div(whole, f32(256.0 if over else 448.0)), f32(6.0))
    tensor = f32(1.0) if tensor == 0 else tensor

    def cast(part):
        best = None
        for times in (1.0, 1.5) if over else (1.0,):
            s8 = rounded(torch.div(torch.div(part.abs().max(), f32(6.0)) * f32(times), tensor), "e4m3")
            s8 = f32(1.0) if s8 == 0 else s8
            q = rounded(torch.div(part, s8 * tensor), "e2m1")
            values = (q.double() * s8.double() * tensor.double()).float()
            error = math.fsum(((values.double() - part.double()) ** 2).flatten().tolist())
            best = (error, q, s8) if best is None or error < best[0] else best
        return best[1:]

    q, s8, _ = each_block(x, (1, 16), cast)
    return q, s8, (q.double() * spread(s8, (1, 16), x).double() * tensor.double()).float()


def eden(x, key, group=128):
    """Quartet II backward: range override, ties away, and scales corrected by ``<y, y> / <y, q>`` a group."""
    override = 17 / 16 * 0.93
    top = f32(6 / override)
    tensor = torch.div(torch.div(x.abs().max(), f32(255.99)), top)

    def cast(part):
        s8 = rounded(torch.div(torch.div(part.abs().max(), top), tensor), "e4m3")
        s8 = f32(1.0) if s8 == 0 else s8
        return torch.div(part, s8 * tensor), s8

    y, s8, _ = each_block(x, (1, 16), cast)
    q = rounded(y, "e2m1", "nearest_away")
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], group):
            ys, qs = y[i, j : j + group].double(), q[i, j : j + group].double()
            over = math.fsum((ys * qs).tolist())
            c = f32(1.0) if over == 0 else f32(math.fsum((ys * ys).tolist()) / over)
            s8[i, j // 16 : (j + group) // 16] *= c
    s8 = rounded(s8, "e4m3", "stochastic", key)
    return q, s8, (q.double() * spread(s8, (1, 16), x).double() * tensor.double()).float()


def fp8lm(x, name, top):
    """``exp = floor(log2(max / amax))``; the factor is 2^exp."""
    return te_current(x, name, top, power=True)


def fp4_ms(x, block):
    """E2M1 by rows, as in the paper, then E4M3 under MS-AMP's power-of-two scale of the tensor."""

    def cast(part):
        scale = te_scale(part.abs().max(), 6.0)
        return rounded(part * scale, "e2m1"), torch.div(f32(1.0), scale)

    return fp8lm(each_block(x, block, cast)[2], "e4m3", 448.0)


def msamp_factor(amax, top):
    """``2^floor(log2(top / amax))`` by torch's operations in the dtype of amax, which round quotient and logarithm."""
    exponent = torch.floor(torch.log2(top / amax)).float()
    return torch.where(amax > 0, torch.exp2(exponent), 1.0)


def fp4_msamp(x, dim):
    """MS-AMP's code: factors of rows (dim 1) or columns (dim 0) in the dtype of x, ties of E2M1 away from zero."""
    factor = msamp_factor(x.abs().amax(dim, keepdim=True), 6.0)
    values = rounded(x.float() * factor, "e2m1", "nearest_away") / factor
    return fp8lm(values, "e4m3", 448.0)


def occ(x, level, per_row):
    """Clamp to the elements at places ``int((1 - a) n)`` and ``int(a n)`` of the sorted tensor, or row."""
    rows = x if per_row else x.reshape(1, -1)
    out = []
    for row in rows:
        ordered, n = sorted(row.tolist()), row.numel()
        out.append(row.clamp(ordered[int((1 - level) * n)], ordered[int(level * n)]))
    return torch.stack(out).reshape(x.shape)


def dge(y, k=5.0, cap=3.0):
    """The slope in the E2M1 interval that holds the scaled weight."""
    grid = [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    slopes = torch.zeros(y.numel(), dtype=torch.float64)
    for at, number in enumerate(y.flatten().tolist()):
        for low, high in zip(grid, grid[1:], strict=False):
            if low <= number <= high:
                u = abs(2 * (number - low) / (high - low) - 1)
                slopes[at] = min(u ** (1 / k - 1) / k, cap) if u else cap
                break
    return slopes.reshape(y.shape)


def coat(x, name, top, dtype=torch.bfloat16):
    """The largest magnitude of each 16 neighbours becomes a scale in ``dtype``; the largest of these counts."""
    scales = torch.div(x.float().unflatten(-1, (-1, 16)).abs().amax(-1) + f32(1e-10), f32(top)).to(dtype)
    scale = scales.max().float()
    q = rounded(torch.div(x.float(), scale), name)
    return q, scale.reshape(1, 1), q * scale


def deepseek(x, block, power=False, name="e4m3", top=448.0):
    def cast(part):
        scale = torch.div(part.abs().max().clamp(min=1e-4), f32(top))
        scale = ceil2(scale) if power else scale
        return rounded(part * torch.div(f32(1.0), scale), name), scale

    return each_block(x, block, cast)


def halo(x, name, top):
    """A scale in the dtype of x, float32 quotients by it."""
    scale = (x.abs().max() / top).float()
    y = torch.div(x.float(), scale)
    q = y.round() if name == "int8" else rounded(y, name)
    return q, scale.reshape(1, 1), q * scale


def int8_rows(x, eps=1e-12):
    """torchao's rows of INT8: a scale in the dtype of x, and eps at least where elements are divided by it."""
    scale = x.abs().amax(1, keepdim=True) / 127
    inverse = 1.0 / scale.float().clip(eps)
    q = (x.float() * inverse).round().clip(-128, 127)
    return q, scale.float(), q * scale.float()


def mean_abs(w):
    return f32(math.fsum(w.double().abs().flatten().tolist()) / w.numel())


def bitnet_paper_weights(w):
    scale = mean_abs(w).clamp(min=1e-5)
    q = (w * torch.div(f32(1.0), scale)).round().clamp(-1, 1)
    return q, scale.reshape(1, 1), q * scale


def bitnet_weights(w):
    """torchao's bitnet.py: quotients by the clipped float32 scale, values by the scale itself in the dtype of w."""
    scale = mean_abs(w)
    q = (w.float() / scale.clip(1e-5)).round().clip(-1, 1)
    scale = scale.to(w.dtype).float()
    return q, scale.reshape(1, 1), q * scale


def bitnet_paper_tokens(x):
    def cast(part):
        r = torch.div(f32(127.0), part.abs().max().clamp(min=1e-5))
        return (part * r).round().clamp(-128, 127), torch.div(f32(1.0), r)

    return each_block(x, (1, None), cast)


def inc_pow2(amax, fullscale, backoff, hardware=None):
    """Intel's toolkit by torch's operations in the dtype of amax, then the set of the hardware (step, least, most)."""
    scale = torch.exp2(torch.ceil(torch.log2(amax / (fullscale * backoff))))
    if hardware is None:
        return scale.float()
    step, least, most = hardware
    powers = 2.0 ** (torch.ceil(torch.log2(scale) / step) * step)
    return torch.minimum(torch.maximum(powers, f32(2.0**least)), f32(2.0**most)).float()


def gaudi(x, backoff):
    scale = inc_pow2(x.abs().max().to(torch.bfloat16), 240.0, backoff, (4, -8, 4))
    q = rounded((x * torch.div(f32(1.0), scale)).clamp(-240, 240), "e4m3_ieee")
    return q, scale.reshape(1, 1), q * scale


def ao(x, name, top, block=(None, None), power=False):
    def cast(part):
        scale = torch.div(torch.tensor(top, dtype=torch.float64), part.abs().max().double().clamp(min=1e-12)).float()
        scale = floor2(scale) if power else scale
        return rounded((part * scale).clamp(-top, top), name), torch.div(f32(1.0), scale)

    return each_block(x, block, cast)


def ao_mx(x, rule, name="e4m3", emax=8, mantissa=3, top=448.0, block=(1, 32)):
    def cast(part):
        amax = part.abs().max()
        if rule == "rceil":
            power = ceil2(amax * f32(1 / top))
            exponent = int(math.log2(float(power))) if amax > 0 else -127
        else:
            bits = int(amax.view(torch.int32))
            bits = (bits + (1 << (23 - mantissa - 1))) & 0xFF800000 if rule == "even" else bits
            if bits == 0x7F800000:  # no longer finite: code 255
                return torch.full_like(part, math.nan), f32(math.nan)
            up = rule == "ceil" and bits & MASK23 != 0
            exponent = (bits >> 23) - 127 - emax + up
        exponent = min(max(exponent, -127), 128)
        return rounded((part * f32(2.0**-exponent)).clamp(-top, top), name), f32(2.0**exponent)

    return each_block(x, block, cast)


def int4_groups(w):
    """8da4w weights: a scale in the dtype of w for 32 neighbours, the least normal number of that dtype at least."""

    def cast(part):
        scale = (part.to(w.dtype).abs().max() / 7.5).clamp(min=torch.finfo(w.dtype).smallest_normal).float()
        return (part * torch.div(f32(1.0), scale)).round().clamp(-8, 7), scale

    return each_block(w.float(), (1, 32), cast)


def int8_tokens_with_zero(x):
    """8da4w activations: a zero point a token."""

    def cast(part):
        low, high = part.min().clamp(max=0), part.max().clamp(min=0)
        scale = torch.div(high - low, f32(255.0)).clamp(min=torch.finfo(torch.float32).tiny)
        zero = (-128 - torch.div(low, scale).round()).clamp(-128, 127)
        q = ((part * torch.div(f32(1.0), scale)).round() + zero).clamp(-128, 127)
        return q - zero, scale

    return each_block(x, (1, None), cast)


def mask_bits(x, mantissa):
    bits = x.view(torch.int32)
    return (bits & ~((1 << (23 - mantissa)) - 1)).view(torch.float32)


def lns(x, gamma=8, codes=127):
    """``sign * s * 2^(k / gamma)``, the largest magnitude at the top code; float64, for numbers that are not ties."""

    def cast(part):
        top = 2.0 ** (codes / gamma)
        s = part.double().abs().max() / top
        k = (gamma * (part.double().abs() / s).log2()).round().clamp(0, codes)
        return (part.sign().double() * 2.0 ** (k / gamma)).float(), s.float()

    return each_block(x, (1, None), cast)
