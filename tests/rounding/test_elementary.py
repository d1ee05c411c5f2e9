# SPDX-License-Identifier: Apache-2.0
"""The fixed double sequences of ln and exp, held to mpmath."""

import hashlib
import math
import random
import struct

import mpmath
import pytest

from fmtsim.rounding import elementary
from fmtsim.support.errors import ArgumentError

mpmath.mp.prec = 160


def ulps(got: float, exact: mpmath.mpf) -> float:
    """Return the error in units of the last place of the double nearest to the exact value."""
    return float(abs(mpmath.mpf(got) - exact) / mpmath.mpf(math.ulp(float(exact))))


def ln_arguments() -> list[float]:
    """Return positive doubles: all binades, neighbours of 1, of sqrt(1/2) and of sqrt(2), extremes."""
    generator = random.Random(1)
    around = [1.0, elementary.SQRT_HALF, 2 * elementary.SQRT_HALF, math.e, 2.0, 0.5, 448.0, 2.0**-149]
    near = [math.nextafter(x, side) for x in around for side in (0.0, math.inf)]
    near += [1.0 + sign * 2.0**-e for e in range(1, 53) for sign in (-1, 1)]
    spread = [math.ldexp(generator.uniform(0.5, 1.0), generator.randint(-1070, 1024)) for _ in range(3000)]
    close = [generator.uniform(0.5, 2.0) for _ in range(3000)]
    return [*around, *near, *spread, *close, 5e-324, 2.0**-1022, math.nextafter(math.inf, 0.0)]


def exp_arguments() -> list[float]:
    """Return doubles over the whole range, dense where logarithms of float32 values lie."""
    generator = random.Random(2)
    halves = [(n + 0.5) * math.log(2.0) for n in range(-150, 130)]
    near = [math.nextafter(x, side) for x in halves for side in (-math.inf, math.inf)]
    tiny = [sign * 2.0**-e for e in range(0, 80) for sign in (-1, 1)]
    dense = [generator.uniform(-104.0, 89.0) for _ in range(4000)]
    wide = [generator.uniform(-708.0, 709.7) for _ in range(2000)]
    return [*halves, *near, *tiny, *dense, *wide, elementary.EXP_OVERFLOW]


def test_ln_is_within_one_ulp():
    worst = max(ulps(elementary.ln(x), mpmath.log(x)) for x in ln_arguments() if x != 1.0)
    assert worst < 1.0


def test_exp_is_within_one_ulp():
    worst = max(ulps(elementary.exp(x), mpmath.exp(x)) for x in exp_arguments())
    assert worst < 1.0


def test_exp_of_subnormal_results():
    for x in (-708.5, -720.25, -740.0, -744.4, elementary.EXP_UNDERFLOW):
        assert ulps(elementary.exp(x), mpmath.exp(x)) <= 1.0


def test_exact_points():
    assert elementary.ln(1.0) == 0.0
    assert elementary.ln(math.ldexp(elementary.SQRT_HALF, 21)) == 14.20951720147888  # not below: it is not doubled
    assert elementary.exp(0.0) == 1.0
    assert elementary.exp(-0.0) == 1.0
    assert [elementary.ln(2.0**k) for k in (1, -1, 10)] == [math.log(2.0), -math.log(2.0), float(10 * mpmath.log(2))]


def test_limits_of_exp():
    assert elementary.exp(math.inf) == math.inf
    assert elementary.exp(math.nextafter(elementary.EXP_OVERFLOW, math.inf)) == math.inf
    assert elementary.exp(elementary.EXP_OVERFLOW) < math.inf
    assert elementary.exp(-math.inf) == 0.0
    assert elementary.exp(elementary.EXP_UNDERFLOW) == math.ulp(0.0)
    assert elementary.exp(math.nextafter(elementary.EXP_UNDERFLOW, -math.inf)) == 0.0
    assert math.isnan(elementary.exp(math.nan))


@pytest.mark.parametrize("x", [0.0, -0.0, -1.0, math.inf, math.nan])
def test_ln_names_what_it_takes(x):
    with pytest.raises(ArgumentError, match="pass a positive finite number"):
        elementary.ln(x)


def test_constants():
    ln2 = mpmath.log(2)
    assert float(mpmath.floor(ln2 * 2**42) / 2**42) == elementary.LN2_HI
    assert float(ln2 - mpmath.mpf(elementary.LN2_HI)) == elementary.LN2_LO
    assert float(1 / ln2) == elementary.INV_LN2
    assert float(mpmath.sqrt(0.5)) == elementary.SQRT_HALF
    assert elementary.ROUND_TO_INTEGER == 1.5 * 2.0**52
    assert len(elementary.LN_COEFFICIENTS) == 10 and elementary.LN_COEFFICIENTS[0] == 2 / 21
    assert len(elementary.EXP_COEFFICIENTS) == 12 and elementary.EXP_COEFFICIENTS[-1] == 0.5


def test_the_bits_never_move():
    """A change of one operation or constant changes one of these bits, and with them some LogFMT tile."""
    generator = random.Random(3)
    digest = hashlib.sha256()
    for _ in range(2000):
        x = math.ldexp(generator.uniform(0.5, 1.0), generator.randint(-149, 128))
        digest.update(struct.pack("<dd", elementary.ln(x), elementary.exp(generator.uniform(-104.0, 89.0))))
    assert digest.hexdigest()[:16] == "58334b54014c095c"
