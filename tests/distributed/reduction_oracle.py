# SPDX-License-Identifier: Apache-2.0
"""Reductions in plain Python: E4M3 by its table of values, messages passed from rank to rank; no code of fmtsim."""

from bisect import bisect_left
from fractions import Fraction

import numpy as np

F = np.float32


def e4m3_values():
    """Return the non-negative finite values in the order of their codes."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(
            Fraction(mantissa, 8 * 64) if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
        )
    return values


TABLE = e4m3_values()


def e4m3(x):
    """Round one float32 to nearest even, saturating; NaN stays."""
    x = F(x)
    if np.isnan(x):
        return x
    sign = F(-1) if np.signbit(x) else F(1)
    if np.isinf(x):
        return sign * F(448)
    magnitude = abs(Fraction(float(x)))
    place = bisect_left(TABLE, magnitude)
    if place == len(TABLE):
        return sign * F(448)
    if place and TABLE[place] != magnitude:
        below, above = magnitude - TABLE[place - 1], TABLE[place] - magnitude
        if below < above or (below == above and place % 2):
            place -= 1
    return sign * F(float(TABLE[place]))


def rounded(xs):
    with np.errstate(all="ignore"):
        return np.array([e4m3(x) for x in xs], dtype=F)


def power_below(x):
    """Return the largest power of two that is no larger."""
    return F(2.0) ** F(np.frexp(x)[1] - 1)


def casts(ranks, factor):
    """Return the casts of all ranks and what sums are multiplied with; one tensor, finite, scale by powers of two."""
    n = F(len(ranks))
    amax = max(np.max(np.abs(x), initial=0) for x in ranks)
    with np.errstate(over="ignore", under="ignore"):
        r = power_below(min(F(448) / F(amax), np.finfo(F).max)) if amax else F(1)
        e = min(max(r * F(factor), np.finfo(F).tiny), np.finfo(F).max)
    decode = (F(1) / e) / n
    with np.errstate(over="ignore", under="ignore"):
        return [rounded(x * e) for x in ranks], decode


def ring(q):
    """Sum with messages: at every step all ranks send at once, and each adds what it gets to its own chunk."""
    n, count = len(q), len(q[0])
    length = -(-count // n)
    padded = [np.concatenate([x, np.zeros(n * length - count, F)]).reshape(n, length) for x in q]
    partial = [{chunk: padded[rank][chunk] for chunk in range(n)} for rank in range(n)]
    for step in range(n - 1):
        sent = [((rank - 1 - step) % n, partial[rank][(rank - 1 - step) % n]) for rank in range(n)]
        for rank in range(n):
            chunk, message = sent[(rank - 1) % n]
            partial[rank][chunk] = rounded(message + padded[rank][chunk])
    return np.concatenate([partial[chunk][chunk] for chunk in range(n)])[:count]


def tree(q):
    """Sum pairs, pairs of pairs, ...: a list that halves, each with its right neighbour; an odd last one waits."""
    level = list(q)
    while len(level) > 1:
        pairs = [rounded(a + b) for a, b in zip(level[::2], level[1::2])]  # noqa: B905
        level = pairs + ([level[-1]] if len(level) % 2 else [])
    return level[0]


def reduce(ranks, factor, algorithm):
    q, decode = casts(ranks, factor)
    sums = q[0] if len(q) == 1 else {"ring": ring, "tree": tree}[algorithm](q)
    return sums * decode, sums
