# SPDX-License-Identifier: Apache-2.0
"""ggml's reference encoders and decoders, and HiF4's, number by number in float32, and blocks to try them on.

Slow and independent of fmtsim: layouts are written as the bits of single elements. Sources are the ``*_ref`` and
``dequantize_row_*`` functions of ggml d99724f2, src/ggml-quants.c.
"""

import math

import numpy as np

F = np.float32
LEAST = F(1e-15)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


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


def half(x):
    return int(np.array(x, F).astype(np.float16).view(np.uint16))


def of_half(code):
    return np.array(code, np.uint16).view(np.float16).astype(F)[()]


def put_half(block, place, x):
    block[place], block[place + 1] = half(x) & 255, half(x) >> 8
    return of_half(half(x))


def nearest(x):
    """nearest_int: the last 23 bits of x + 1.5 * 2**23."""
    return int((np.array(x + F(12582912), F).view(np.int32)) & 0x7FFFFF) - 0x400000


def truncated(x):
    """What x86 makes of a float32 as an int32."""
    return int(x) if abs(x) < 2**31 else -(2**31)


def away(x):
    """roundf, then an int32."""
    return truncated(math.copysign(math.floor(abs(float(x)) + 0.5), x)) if math.isfinite(x) else -(2**31)


def low8(n, signed=False):
    n &= 255
    return n - 256 if signed and n > 127 else n


def first_largest(x):
    best = F(0)
    for v in x:
        if abs(v) > abs(best):
            best = v
    return best


def inverse(d):
    return F(1) / d if d else F(0)


def put(block, place, bits, value):
    """Or a number into a block at a bit of a byte."""
    byte, shift = place
    block[byte] |= (value & ((1 << bits) - 1)) << shift


def nibble_place(i, start, group=32):
    return start + i // group * group // 2 + i % (group // 2), 4 * (i % group // (group // 2))


# Blocks of one scale.


def encode_q4_0(x, block, levels=16):
    d = first_largest(x) / F(-levels // 2)
    put_half(block, 0, d)
    for i, v in enumerate(x):
        code = min(levels - 1, low8(truncated(v * inverse(d) + F(levels // 2 + 0.5)), signed=True))
        put(block, nibble_place(i, 2 if levels == 16 else 6), 4, code)
        if levels == 32:
            put(block, (2 + i // 8, i % 8), 1, code >> 4)


def encode_q5_0(x, block):
    encode_q4_0(x, block, 32)


def encode_q4_1(x, block, levels=16):
    low, high = min(x), max(x)
    d = (high - low) / F(levels - 1)
    put_half(block, 0, d), put_half(block, 2, low)
    for i, v in enumerate(x):
        code = truncated((v - low) * inverse(d) + F(0.5))
        code = min(levels - 1, low8(code, signed=levels == 16))
        put(block, nibble_place(i, 4 if levels == 16 else 8), 4, code)
        if levels == 32:
            put(block, (4 + i // 8, i % 8), 1, code >> 4)


def encode_q5_1(x, block):
    encode_q4_1(x, block, 32)


def encode_q8_0(x, block):
    d = max(map(abs, x)) / F(127)
    put_half(block, 0, d)
    for i, v in enumerate(x):
        block[2 + i] = low8(away(v * inverse(d)))


def encode_q1_0(x, block):
    total = F(0)
    for v in x:
        total += abs(v)
    put_half(block, 0, total / F(128))
    for i, v in enumerate(x):
        put(block, (2 + i // 8, i % 8), 1, int(v >= 0))


def encode_q2_0(x, block):
    d = max(map(abs, x))
    put_half(block, 0, d)
    for i, v in enumerate(x):
        put(block, (2 + i // 4, 2 * (i % 4)), 2, max(0, min(3, away(v * inverse(d)) + 1)))


def ternary(x, block, place):
    d = max(map(abs, x))
    put_half(block, place, d)
    products = [v * inverse(d) for v in x]
    return [away(p) + 1 if math.isfinite(p) else 1 for p in products]


def encode_tq2_0(x, block):
    for i, code in enumerate(ternary(x, block, 64)):
        put(block, (i // 128 * 32 + i % 32, 2 * (i % 128 // 32)), 2, code)


def encode_tq1_0(x, block):
    digits = ternary(x, block, 52)
    for byte in range(52):
        start, width, first = (0, 32, 0) if byte < 32 else (32, 16, 160) if byte < 48 else (48, 4, 240)
        five = [digits[first + byte - start + width * i] for i in range(5 if byte < 48 else 4)]
        n = 0
        for digit in (*five, 0)[:5]:
            n = 3 * n + digit
        block[byte] = -(-n * 256 // 243)


def fp4(v, d):
    errors = [abs(F(value) * d - v) for value in FP4]
    return errors.index(min(errors))


def encode_mxfp4(x, block):
    amax = max(map(abs, x))
    block[0] = low8(math.floor(F(math.log2(amax))) + 125) if amax else 0
    for i, v in enumerate(x):
        put(block, nibble_place(i, 1), 4, fp4(v, F(2.0 ** (int(block[0]) - 128))))


def e4m3(code):
    e, m = code >> 3 & 15, code & 7
    return F(0) if code == 0x7F else F(m * 2.0**-10 if e == 0 else (8 + m) * 2.0 ** (e - 11))


def encode_nvfp4(x, block):
    for part in range(4):
        scale = float(max(map(abs, x[16 * part : 16 * part + 16])) / F(6))
        if scale < 2.0**-6:
            code = min(7, math.floor(scale * 512 + 0.5))
        else:
            exponent = math.frexp(scale)[1] - 1
            steps = math.floor(scale / 2.0 ** (exponent - 3) + 0.5)  # 8 to 16
            code = 8 * (exponent + 6) + steps
            code = code if code < 120 else 126
        block[part] = code
        for i in range(16):
            put(block, nibble_place(i, 4 + 8 * part, 16), 4, fp4(x[16 * part + i], e4m3(code)))


# Blocks of parts.


def range_search(x, w, top, steps, first, absolute):
    low, high, sum_w, sum_x = min(x), max(x), F(0), F(0)
    for v, weight in zip(x, w, strict=True):
        sum_w, sum_x = sum_w + weight, sum_x + weight * v
    low = min(low, F(0))
    if high == low:
        return F(0), -low, [0] * len(x)

    def error(scale, codes, low):
        total = F(0)
        for v, weight, code in zip(x, w, codes, strict=True):
            difference = scale * F(code) + low - v
            total += weight * (abs(difference) if absolute else difference * difference)
        return total

    def codes_for(step, low):
        return [max(0, min(top, nearest(step * (v - low)))) for v in x]

    step = F(top) / (high - low)
    scale, codes = F(1) / step, codes_for(step, low)
    best = error(scale, codes, low)
    for i in range(steps + 1):
        step = (F(first) + F(0.1) * F(i) + F(top)) / (high - low)
        tried = codes_for(step, low)
        l1 = l2 = lx = F(0)
        for v, weight, code in zip(x, w, tried, strict=True):
            product = weight * F(code)
            l1, l2, lx = l1 + product, l2 + product * F(code), lx + product * v
        determinant = sum_w * l2 - l1 * l1
        if determinant > 0:
            new_scale, new_low = (sum_w * lx - sum_x * l1) / determinant, (l2 * sum_x - l1 * lx) / determinant
            if new_low > 0:
                new_scale, new_low = lx / l2, F(0)
            new = error(new_scale, tried, new_low)
            if new < best:
                best, codes, scale, low = new, tried, new_scale, new_low
    return scale, -low, codes


def encode_range_parts(x, block, size, top, steps, first, places):
    parts = [x[i : i + size] for i in range(0, 256, size)]
    found = []
    for part in parts:
        w = [abs(v) for v in part]
        if size == 32:
            total = F(0)
            for v in part:
                total += v * v
            w = [np.sqrt(total / F(32)) + v for v in w]
        found.append(range_search(part, w, top, steps, first, size == 16))
    largest, grade = [max([F(0), *(f[i] for f in found)]) for i in (0, 1)], F(15 if size == 16 else 63)
    d, minimum = (put_half(block, place, value / grade) for place, value in zip(places, largest, strict=True))
    scales, minima = [], []
    for scale, low, _ in found:
        s, m = (
            nearest((grade / most if most > 0 else F(0)) * v) for v, most in zip((scale, low), largest, strict=True)
        )
        if size == 16:
            byte = low8(s) | low8(m << 4)
            scales.append(byte & 15), minima.append(byte >> 4)
        else:
            scales.append(min(63, low8(s))), minima.append(min(63, low8(m)))
    codes = []
    for part, s, m, (_, _, searched) in zip(parts, scales, minima, found, strict=True):
        step, offset = d * F(s), minimum * F(m)
        codes += [max(0, min(top, nearest((v + offset) / step))) for v in part] if step else searched
    return scales, minima, codes


def encode_q2_k(x, block):
    scales, minima, codes = encode_range_parts(x, block, 16, 3, 15, -0.5, (80, 82))
    for j in range(16):
        block[j] = scales[j] | minima[j] << 4
    put_pairs(block, 16, codes)


def put_pairs(block, start, codes):
    for i, code in enumerate(codes):
        put(block, (start + i // 128 * 32 + i % 32, 2 * (i % 128 // 32)), 2, code)


def put_scales(block, scales, minima):
    for j in range(4):
        block[4 + j], block[8 + j] = scales[j] | scales[j + 4] >> 4 << 6, minima[j] | minima[j + 4] >> 4 << 6
        block[12 + j] = scales[j + 4] & 15 | (minima[j + 4] & 15) << 4


def encode_q4_k(x, block):
    scales, minima, codes = encode_range_parts(x, block, 32, 15, 20, -1.0, (0, 2))
    put_scales(block, scales, minima)
    for i, code in enumerate(codes):
        put(block, nibble_place(i, 16, 64), 4, code)


def encode_q5_k(x, block):
    scales, minima, codes = encode_range_parts(x, block, 32, 31, 15, -0.5, (0, 2))
    put_scales(block, scales, minima)
    for i, code in enumerate(codes):
        put(block, nibble_place(i, 48, 64), 4, code)
        put(block, (16 + i % 32, i // 32), 1, code >> 4)


def three_bit_search(x):
    largest = first_largest(x)
    if abs(largest) < LEAST:
        return F(0), [0] * 16
    codes = [max(-4, min(3, nearest(F(-4) / largest * v))) for v in x]
    products = squares = F(0)
    for v, code in zip(x, codes, strict=True):
        products, squares = products + v * v * v * F(code), squares + v * v * F(code) * F(code)
    for _ in range(5):
        for i, v in enumerate(x):
            w, code = v * v, F(codes[i])
            p = products - w * v * code
            if p > 0:
                s = squares - w * code * code
                new = max(-4, min(3, nearest(v * s / p)))
                if new != codes[i]:
                    p, s = p + w * v * F(new), s + w * F(new) * F(new)
                    if s > 0 and p * p * squares > products * products * s:
                        codes[i], products, squares = new, p, s
    return products / squares if squares > 0 else F(0), [code + 4 for code in codes]


def encode_q3_k(x, block):
    found = [three_bit_search(x[i : i + 16]) for i in range(0, 256, 16)]
    largest = first_largest([scale for scale, _ in found])
    scales = [0] * 16
    d = F(0)
    if largest:
        step = F(-32) / largest
        scales = [max(-32, min(31, nearest(step * scale))) + 32 for scale, _ in found]
        d = F(1) / step
    d = put_half(block, 108, d)
    codes = []
    for j, (_, searched) in enumerate(found):
        step = d * F(scales[j] - 32)
        codes += [max(-4, min(3, nearest(v / step))) + 4 for v in x[16 * j : 16 * j + 16]] if step else searched
        put(block, (96 + j % 8, 4 * (j // 8)), 4, scales[j])
        put(block, (104 + j % 4, 2 * (j // 4)), 2, scales[j] >> 4)
    put_pairs(block, 32, codes)
    for i, code in enumerate(codes):
        put(block, (i % 32, i // 32), 1, code >> 2)


def signed_search(x, top):
    largest = first_largest(x)
    if abs(largest) < LEAST:
        return F(0), [0] * 16
    scale = best = codes = None
    for i in (0, *range(-9, 0), *range(1, 10)):
        step = -(F(top) + F(0.1) * F(i)) / largest
        tried = [max(-top, min(top - 1, nearest(step * v))) for v in x]
        products = squares = F(0)
        for v, code in zip(x, tried, strict=True):
            products, squares = products + v * v * v * F(code), squares + v * v * F(code) * F(code)
        if i == 0 or (squares > 0 and products * products > best * squares):
            scale, codes = products / squares if squares else F(0), [code + top for code in tried]
            best = scale * products
    return scale, codes


def encode_q6_k(x, block):
    found = [signed_search(x[i : i + 16], 32) for i in range(0, 256, 16)]
    largest = first_largest([scale for scale, _ in found])
    if abs(largest) < LEAST:
        return
    step = F(-128) / largest
    d = put_half(block, 208, F(1) / step)
    codes = []
    for j, (scale, searched) in enumerate(found):
        graded = low8(min(127, nearest(step * scale)), signed=True)
        block[192 + j] = graded & 255
        part = d * F(graded)
        codes += [max(-32, min(31, nearest(v / part))) + 32 for v in x[16 * j : 16 * j + 16]] if part else searched
    for i, code in enumerate(codes):
        put(block, nibble_place(i, 0, 128), 4, code)
        put(block, (128 + i // 128 * 32 + i % 32, 2 * (i % 128 // 32)), 2, code >> 4)


def nearest_iq4(x):
    if x <= IQ4[0] or x >= IQ4[-1]:
        return 0 if x <= IQ4[0] else 15
    upper = next((i for i, value in enumerate(IQ4) if x < value), 15)
    return upper - 1 if x - F(IQ4[upper - 1]) < F(IQ4[upper]) - x else upper


def iq4_search(x, tries):
    largest = first_largest(x)
    if abs(largest) < LEAST:
        return F(0), [0] * 32
    d = (-largest if tries else largest) / F(IQ4[0])
    steps = [F(1) / d, *([F(i + IQ4[0]) / largest for i in range(-tries, tries + 1)] if tries else [])]
    scale = best = codes = None
    for number, step in enumerate(steps):
        tried = [nearest_iq4(step * v) for v in x]
        products = squares = F(0)
        for v, code in zip(x, tried, strict=True):
            w, q = v * v, F(IQ4[code])
            products, squares = products + w * q * v, squares + w * q * q
        if number == 0:
            scale, codes = products / squares if squares > 0 else F(0), tried
            best = scale * products
        elif squares > 0 and products * products > best * squares:
            scale = products / squares
            best = scale * products
    return scale, codes


def encode_iq4_nl(x, block):
    scale, codes = iq4_search(x, 0)
    put_half(block, 0, scale)
    for i, code in enumerate(codes):
        put(block, nibble_place(i, 2), 4, code)


def encode_iq4_xs(x, block):
    scales = [iq4_search(x[i : i + 32], 7)[0] for i in range(0, 256, 32)]
    d = -first_largest(scales) / F(32)
    put_half(block, 0, d)
    for j, scale in enumerate(scales):
        graded = max(-32, min(31, nearest(inverse(d) * scale)))
        put(block, (4 + j // 2, 4 * (j % 2)), 4, graded + 32)
        put(block, (2 + j // 4, 2 * (j % 4)), 2, graded + 32 >> 4)
        step = inverse(d * F(graded))
        for i in range(32):
            put(block, nibble_place(i, 8 + 16 * j), 4, nearest_iq4(step * x[32 * j + i]))


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
        put(block, (4 + i // 2, 4 * (i % 2)), 4, code | 8 * bool(x[i] < 0))


def decode_hif4(block):
    """Return the values of a block, float32 [64]."""
    scale = math.nan if block[0] == 255 else math.ldexp(4 + (block[0] & 3), int(block[0] >> 2) - 50)
    values = np.empty(64, F)
    for i in range(64):
        code = int(block[4 + i // 2]) >> 4 * (i % 2)
        doublings = (int(block[1]) >> i // 8 & 1) + (int(block[2 + i // 32]) >> i // 4 % 8 & 1)
        values[i] = scale * math.ldexp((code & 7) * (-1.0 if code & 8 else 1.0), doublings - 2)
    return values


def encode(name, x, size):
    """Return the bytes [blocks, size] of float32 blocks."""
    out = np.zeros((len(x), size), np.int64)
    with np.errstate(all="ignore"):
        for row, block in zip(x, out, strict=True):
            globals()[f"encode_{name.removesuffix('_ggml')}"](list(row), block)
    return out.astype(np.uint8)
