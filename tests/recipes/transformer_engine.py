# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's FP8 and NVFP4 linear layers on a GPU, written from their definitions: nothing of fmtsim is used.

Numbers are NumPy's: float32 where the library rounds to it, float64 only for values that it holds exactly, and integers
for the sums of matrix units. Operands are [rows, K], K being the axis that a product sums over.

Sources: Transformer Engine d0067d0 (recipe_common.cuh, core_nvfp4.cuh, nvfp4.cu, hadamard_transform.cu); the arithmetic
of warp-group FP8 products (blocks of 32, 13 fraction bits) as recorded on an H200, and of block-scaled FP4 products
(four groups of 16, 35 fraction bits) as Microsoft's MMA-Sim reports it.
"""

import numpy as np

FLT_MAX = np.finfo(np.float32).max
E4M3 = (3, -6, 448.0)  # bits of the fraction, lowest normal exponent, largest value
E5M2 = (2, -14, 57344.0)
E2M1 = (1, 0, 6.0)
BF16 = (7, -126, np.inf)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])  # of the weight gradient's rotation


def exponent(values, lowest):
    """floor(log2|v|), at least `lowest`; `lowest` for zero."""
    fraction, power = np.frexp(np.where(np.isfinite(values), values, 1.0))
    return np.maximum(np.where(fraction == 0, lowest, power - 1), lowest)


def rounded(values, fmt):
    """The nearest value of a format, ties to even, saturating; NaN stays NaN. Only bfloat16 has Inf here."""
    bits, lowest, largest = fmt
    values = np.asarray(values, np.float64)
    unit = np.ldexp(1.0, exponent(values, lowest) - bits)
    result = np.clip(np.rint(values / unit) * unit, -largest, largest)
    return np.where(np.abs(result) >= 2.0**128, np.copysign(np.inf, values), result) if fmt is BF16 else result


def multiplied(values, scale):
    """One float32 multiplication."""
    return np.multiply(values, scale, dtype=np.float32)


def amax_of(x, axes=None):
    """The largest magnitude as fmaxf finds it: NaN does not count, Inf does."""
    return np.max(np.where(np.isnan(x), 0, np.abs(x)), axis=axes, keepdims=axes is not None).astype(np.float32)


# FP8, one scale a tensor


def current_scaling(x, fmt):
    """(elements, scale of decoding) of a whole tensor: the scale is max / amax, 1 where amax is zero or not finite."""
    amax, scale = amax_of(x), np.float32(1)
    if np.isfinite(amax) and amax != 0:
        scale = np.minimum(np.float32(fmt[2]) / amax, FLT_MAX)
    return rounded(multiplied(x, scale), fmt), np.float32(1) / scale


def significands(values, fmt):
    """Integers and exponents with values = integer * 2^(exponent - bits); subnormals keep the lowest exponent."""
    powers = exponent(values, fmt[1])
    return np.nan_to_num(values / np.ldexp(1.0, powers - fmt[0])).astype(np.int64), powers


def shifted(integers, places):
    """integers * 2^places, cut toward zero."""
    down, up = np.clip(-places, 0, 62), np.clip(places, 0, 62)
    return np.sign(integers) * ((np.abs(integers) >> down) << up)


def cut(integers, bits):
    """Integers without what lies below their leading `bits` bits."""
    extra = np.maximum(np.frexp(np.abs(integers).astype(np.float64))[1] - bits, 0)
    return np.sign(integers) * ((np.abs(integers) >> extra) << extra)


def hopper_chain(a, b, formats):
    """Blocks of 32 products onto a running sum: all terms cut to 13 bits below the largest, the sum to 14 bits."""
    bits = formats[0][0] + formats[1][0]
    (sig_a, exp_a), (sig_b, exp_b) = significands(a, formats[0]), significands(b, formats[1])
    total = np.zeros((len(a), len(b)))
    for k in range(0, a.shape[1], 32):
        products = sig_a[:, None, k : k + 32] * sig_b[None, :, k : k + 32]
        powers = exp_a[:, None, k : k + 32] + exp_b[None, :, k : k + 32]
        before = exponent(total, -126)
        running = (total * np.ldexp(1.0, 13 - before)).astype(np.int64)
        largest = np.max(np.where(products != 0, powers, -999), axis=-1)
        largest = np.maximum(largest, np.where(running != 0, before, -999))
        largest = np.where(largest == -999, 0, largest)
        terms = shifted(products, powers - bits + 13 - largest[..., None]).sum(-1)
        total = cut(terms + shifted(running, before - largest), 14) * np.ldexp(1.0, largest - 13)
    return total.astype(np.float32)


def hopper(a, b, formats, fast):
    """The sums of an FP8 product without parts: one chain, or float32 sums of chains of 128."""
    if fast:
        total = hopper_chain(a, b, formats)
    else:
        total = np.zeros((len(a), len(b)), np.float32)
        for k in range(0, a.shape[1], 128):
            total = total + hopper_chain(a[:, k : k + 128], b[:, k : k + 128], formats)
    bad = np.isnan(a).any(1)[:, None] | np.isnan(b).any(1)[None, :]
    return np.where(bad, np.float32(np.nan), total)


def finish(sums, alpha, bias=None, bfloat16=True):
    """The scale, then the bias, each rounded to float32, then the result's dtype."""
    result = multiplied(sums, alpha)
    if bias is not None:
        result = np.add(result, bias, dtype=np.float32)
    return rounded(result, BF16).astype(np.float32) if bfloat16 else result


def current_scaling_layer(x, w, g, bias=None, bfloat16=True):
    """(y, dx, dw) of one layer under Float8CurrentScaling on a Hopper GPU; only the forward product sums fast."""
    (xq, xs), (wq, ws), (gq, gs) = current_scaling(x, E4M3), current_scaling(w, E4M3), current_scaling(g, E5M2)
    y = finish(hopper(xq, wq, (E4M3, E4M3), fast=True), xs * ws, bias, bfloat16)
    dx = finish(hopper(gq, wq.T, (E5M2, E4M3), fast=False), gs * ws, None, bfloat16)
    dw = finish(hopper(gq.T, xq.T, (E5M2, E4M3), fast=False), gs * xs, None, bfloat16)
    return y, dx, dw


# NVFP4, E4M3 scales of 16 and a scale of the tensor


def nvfp4(x, rows=1, cast=rounded):
    """(elements, block scales one a row and 16 columns, amax of the tensor); blocks of `rows` by 16.

    `cast` rounds the scaled elements.
    """
    amax = amax_of(x)
    with np.errstate(divide="ignore"):
        encode = np.minimum(np.float32(448 * 6) / amax, FLT_MAX)
    encode = np.float32(1) if amax == 0 or encode == 0 else encode
    decode = np.float32(1) / encode
    blocks = amax_of(x.reshape(len(x) // rows, rows, -1, 16), (1, 3))
    scales = rounded(np.minimum(blocks * (encode * (np.float32(1) / np.float32(6))), FLT_MAX), E4M3).astype(np.float32)
    with np.errstate(divide="ignore"):
        back = np.minimum(np.float32(1) / (scales * decode), FLT_MAX)
    elements = cast(multiplied(x.reshape(len(x) // rows, rows, -1, 16), back), E2M1).reshape(x.shape)
    return elements, np.repeat(scales[:, 0, :, 0], rows, axis=0).astype(np.float64), amax


def transposed(operand):
    """The same codes and 16x16 scales, for the product that sums over the other axis."""
    elements, scales, amax = operand
    return elements.T, np.repeat(scales[::16].T, 16, axis=0), amax


def rotation():
    """diag(SIGNS) H / 4, H being Sylvester's matrix."""
    matrix = np.array([[1.0]])
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return SIGNS[:, None] * matrix / 4


def rotated(x):
    """Groups of 16 along the rows, rotated; exact sums, rounded to bfloat16."""
    groups = x.astype(np.float64).reshape(len(x), -1, 16) @ rotation()
    return rounded(groups, BF16).reshape(x.shape).astype(np.float32)


def blackwell(a, b):
    """Blocks of 64: exact sums of 16, times both scales, cut to 35 bits below the largest; running sums in float32."""
    (qa, sa, _), (qb, sb, _) = a, b
    (sig_a, exp_a), (sig_b, exp_b) = significands(sa, E4M3), significands(sb, E4M3)
    halves_a, halves_b = (2 * qa).astype(np.int64), (2 * qb).astype(np.int64)
    groups = np.einsum("mgk,ngk->mng", halves_a.reshape(*sa.shape, 16), halves_b.reshape(*sb.shape, 16))
    groups = groups * sig_a[:, None] * sig_b[None]  # in units of 2^(exponent - 8)
    powers = exp_a[:, None] + exp_b[None]
    total = np.zeros((len(qa), len(qb)))
    for g in range(0, sa.shape[1], 4):
        before = exponent(total, -126)
        running = (total * np.ldexp(1.0, 23 - before)).astype(np.int64)
        largest = powers[..., g : g + 4].max(-1)
        largest = np.maximum(largest, np.where(running != 0, before, -999))
        terms = shifted(groups[..., g : g + 4], powers[..., g : g + 4] - 8 + 35 - largest[..., None]).sum(-1)
        total = cut(terms + shifted(running, before - 23 + 35 - largest), 24) * np.ldexp(1.0, largest - 35)
    return total.astype(np.float32)


def tensor_scales(a, b):
    """What sums are multiplied by: both scales of decoding as torch multiplies them, and as Transformer Engine does."""
    with np.errstate(divide="ignore"):
        encode = [np.minimum(np.float32(448 * 6) / t[2], FLT_MAX) if t[2] else np.float32(1) for t in (a, b)]
    return (np.float32(1) / encode[0]) * (np.float32(1) / encode[1]), a[2] * b[2] * np.float32(1 / (36 * 448 * 448))


def nvfp4_layer(x, w, g, bias=None, bfloat16=True, order=0):
    """(y, dx, dw) of one layer under NVFP4BlockScaling on a Blackwell GPU, all rounding to nearest even.

    `order` chooses among `tensor_scales`.
    """
    xq, wq, gq = nvfp4(x), nvfp4(w, rows=16), nvfp4(g)
    gt, xt = nvfp4(rotated(g.T)), nvfp4(rotated(x.T))
    products = (xq, wq, bias), (gq, transposed(wq), None), (gt, xt, None)
    return [finish(blackwell(a, b), tensor_scales(a, b)[order], more, bfloat16) for a, b, more in products]
