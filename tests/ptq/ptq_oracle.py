# SPDX-License-Identifier: Apache-2.0
"""Slow second definitions, in numpy, ml_dtypes and fractions; nothing of fmtsim."""

from fractions import Fraction

import ml_dtypes
import numpy as np

KINDS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def cast(x, kind, scale_of):
    """Quantise float32 numpy numbers under scales ``amax / top`` (encode order); ``scale_of`` is broadcast amax."""
    x = np.asarray(x, np.float32)
    top = np.float32(127 if kind == "int8" else 7 if kind == "int4" else KINDS[kind][1])
    r = np.where(scale_of > 0, top / np.where(scale_of > 0, scale_of, 1).astype(np.float32), np.float32(1))
    y = np.clip((x * r).astype(np.float32), -top, top)
    # integers have no -0
    q = np.rint(y) + np.float32(0) if kind.startswith("int") else y.astype(KINDS[kind][0]).astype(np.float32)
    return q.astype(np.float32) * (np.float32(1) / r).astype(np.float32)


def rounded(value, step, top):
    """Round a fraction to a multiple of step, ties to even, at most top steps."""
    places = value / step
    low = places.numerator // places.denominator
    rest = places - low
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2)
    return max(-top, min(top, low + up)) * step


def inverse(matrix):
    """Invert a matrix of fractions by Gauss and Jordan."""
    n = len(matrix)
    rows = [list(row) + [Fraction(int(i == j)) for j in range(n)] for i, row in enumerate(matrix)]
    for i in range(n):
        pivot = next(k for k in range(i, n) if rows[k][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [v / rows[i][i] for v in rows[i]]
        for k in range(n):
            if k != i:
                rows[k] = [a - rows[k][i] * b for a, b in zip(rows[k], rows[i], strict=True)]
    return [row[n:] for row in rows]


def brain_surgeon(w, hessian, steps, top, order, made=None, width=0, lazy=0):
    """Quantise columns in order by the update of Optimal Brain Quantisation, removing each from the inverse; exact.

    Each error spreads over the columns that are left by ``(w_j - q_j) / [H^-1]_jj * [H^-1]_jk``, and then j leaves:
    ``H^-1 -= [H^-1]_:j [H^-1]_j: / [H^-1]_jj``. ``steps`` are a row's, or ``made(numbers)`` makes them of each group
    of ``width`` columns, in the order they are taken, as they are then; with ``lazy`` as they were at the first column
    of the lazy block.
    """
    result = []
    for row, step in zip(w, steps, strict=True):
        values, inv = [Fraction(float(v)) for v in row], inverse(hessian)
        q = [Fraction(0)] * len(values)
        remaining = set(range(len(values)))
        for i, j in enumerate(order):
            if not lazy or i % lazy == 0:
                seen = list(values)
            if made is not None and i % width == 0:
                step = made([(seen if lazy else values)[k] for k in order[i : i + width]])
            q[j] = rounded(values[j], step, top)
            off = (values[j] - q[j]) / inv[j][j]
            remaining.discard(j)
            for k in remaining:
                values[k] -= off * inv[j][k]
            column = [inv[a][j] for a in range(len(values))]
            for a in remaining:
                for b in remaining:
                    inv[a][b] -= column[a] * column[b] / inv[j][j]
        result.append(q)
    return result


def encoded_step(numbers, top):
    """Return the float32 scale ``1 / (top / amax)`` of some numbers, exact."""
    amax = np.float32(float(max(abs(v) for v in numbers)))
    return Fraction(float(np.float32(1) / (np.float32(top) / amax)))
