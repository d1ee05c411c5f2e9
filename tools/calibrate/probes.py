# SPDX-License-Identifier: Apache-2.0
"""Ask a unit's arithmetic with a few hand-made products: what survives beside a large term, and how sums are rounded.

A probe is a list of products with their k positions. X is a large product; the block length L is known already.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from fmtsim.lab.explain.samples import STORED
from fmtsim.spec.call import GemmCall
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.plan import GemmPlan
from tools.calibrate.gpu import GPU
from tools.calibrate.order import meetings, sight

LENGTHS = (1, 2, 4, 8, 16, 32, 64)
SEEN = 64  # places whose blocks are looked at; no library splits so little
DEEPEST = 40  # terms this far below X are looked for
FP8_DEEPEST = 34

Product = tuple[int, float, float]
"""Place along K, and the two operands."""

# X = product of these two; products down to 2^-40 X (FP8: 2^-34 X) are in range too.
TOP = {"bf16": (0, 0), "tf32": (0, 0), "fp16": (8, 7), "e4m3": (8, 8), "e5m2": (8, 8)}


class Bench(NamedTuple):
    """A GPU, the call that carries the probes, and the length of its blocks."""

    gpu: GPU
    call: GemmCall
    block: int

    def ask(self, probes: Sequence[Iterable[Product]]) -> Tensor:
        """Return the results of some probes, one each, as the output's own dtype."""
        m = self.call.m
        return torch.cat([self._ask(probes[first : first + m]) for first in range(0, len(probes), m)])

    def _ask(self, probes: Sequence[Iterable[Product]]) -> Tensor:
        a, b = (torch.zeros(len(probes), self.call.k, dtype=torch.float64) for _ in range(2))
        for row, products in enumerate(probes):
            for k, x, y in products:
                a[row, k], b[row, k] = x, y
        first, second = STORED[self.call.a], STORED[self.call.b]
        out = self.gpu.ask(self.call, a.float().to(first), b.float().to(second))
        return out.diagonal().clone()

    def at(self, block: int, *terms: float, sign: float = 1.0) -> list[Product]:
        """Return products ``term X`` in a block; a term is a small integer times a power of two."""
        return [self._term(block * self.block + i, sign * term) for i, term in enumerate(terms)]

    def _term(self, k: int, term: float) -> Product:
        mantissa, exponent = numpy.frexp(term)
        while mantissa != int(mantissa):
            mantissa, exponent = mantissa * 2, exponent - 1
        first, second = TOP[self.call.a]
        low = int(exponent) // 2
        return k, float(mantissa) * 2.0 ** (first + int(exponent) - low), 2.0 ** (second + low)

    @property
    def unit(self) -> float:
        """X."""
        return 2.0 ** sum(TOP[self.call.a])


def block_length(gpu: GPU, call: GemmCall) -> int | None:
    """Return how many products are added at once, None where no length explains what is seen."""
    asked = []
    for first in (1, 2):  # ends among them tell blocks of 1, 2 and 4 apart
        ends = numpy.arange(first, SEEN, 4)
        units = numpy.array([x for x in range(1, SEEN) if x % 4 != first])
        asked.append((ends, units, sight(gpu, call, ends, units)))
    for length in LENGTHS:
        meets = meetings(SEEN, Datapath(block=length), GemmPlan())
        lost = [numpy.searchsorted(numpy.sort(meets[units]), meets[ends], side="right") for ends, units, _ in asked]
        if all((x == seen).all() for x, (_, _, seen) in zip(lost, asked, strict=True)):
            return length
    return None


def smallest(bench: Bench, make: Callable[[int], list[Product]]) -> int | None:
    """Return d where ``2^-d X`` is the smallest result of probes with ever smaller terms; None if all survive.

    The result counts, not the term: a term of half a step may be rounded up to a whole one.
    """
    top = FP8_DEEPEST if STORED[bench.call.a].itemsize == 1 else DEEPEST
    out = [abs(float(x)) for x in bench.ask([make(depth) for depth in range(top)])]
    alive = [x for x in out if 0 < x < float("inf")]
    if not alive:
        return 0
    return None if out[-1] else round(-math.log2(min(alive) / bench.unit))


def fraction_bits(bench: Bench) -> int | None:
    """Return F: ``2^-F X`` is what survives of the smallest term beside X and -X in one block; None if all do."""
    return smallest(bench, lambda f: bench.at(0, 1.0, -1.0, 2.0**-f))


def accumulator_bits(bench: Bench) -> int:
    """Return the fraction bits that the running sum keeps: X in one block, a small term in the next, then -X."""
    return smallest(bench, lambda f: [*bench.at(0, 1.0), *bench.at(1, 2.0**-f), *bench.at(2, -1.0)]) or 0


QUARTERS = (1, 2, 3, 5, 6, 7)
ROUNDINGS: dict[str, tuple[int, ...]] = {  # what becomes of a quarter ... seven quarters, positive, then negative
    "toward_zero": (0, 0, 0, 1, 1, 1, 0, 0, 0, -1, -1, -1),
    "nearest_even": (0, 0, 1, 1, 2, 2, 0, 0, -1, -1, -2, -2),
    "nearest_away": (0, 1, 1, 1, 2, 2, 0, -1, -1, -1, -2, -2),
    "down": (0, 0, 0, 1, 1, 1, -1, -1, -1, -2, -2, -2),
    "up": (1, 1, 1, 2, 2, 2, 0, 0, 0, -1, -1, -1),
    "to_odd": (1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1),
}


def _rounding(bench: Bench, make: Callable[[int, float], list[Product]], step: float) -> str | None:
    """Name the rounding that turns quarters of a step into what is seen."""
    probes = [make(q, sign) for sign in (1.0, -1.0) for q in QUARTERS]
    seen = tuple(float(x) / step for x in bench.ask(probes))
    return next((name for name, row in ROUNDINGS.items() if row == seen), None)


def term_rounding(bench: Bench, bits: int) -> str | None:
    """Return how a term is cut to F bits beside X and -X."""
    step = 2.0**-bits
    return _rounding(bench, lambda q, s: bench.at(0, 1.0, -1.0, s * q * step / 4), bench.unit * step)


def sum_rounding(bench: Bench, bits: int) -> str | None:
    """Return how a sum is rounded to the accumulator's bits: a quarter of X, three more and a little, then -X."""
    step = 2.0**-bits

    def chain(q: int, s: float) -> list[Product]:
        fourth = s / 4
        return [
            *bench.at(0, fourth), *bench.at(1, fourth, fourth, fourth, s * q * step / 4),
            *bench.at(2, -2 * fourth, -2 * fourth),
        ]  # fmt: skip

    return _rounding(bench, chain, bench.unit * step)


def deepest(bench: Bench, make: Callable[[int], list[Product]], depths: Iterable[int]) -> int | None:
    """Return the largest depth whose probe is not zero, None where all are zero."""
    depths = list(depths)
    alive = [depth for depth, x in zip(depths, bench.ask([make(d) for d in depths]), strict=True) if x != 0]
    return max(alive, default=None)


def lowest_exponent(bench: Bench, bits: int, kept: int, terms: str, sums: str) -> tuple[bool, int | None]:
    """Return whether a lower bound of the alignment exponent can be seen, and the bound.

    Products near the smallest number q of the accumulator, whose last bits are 2^-c: they sum to q, and to less where
    those bits are cut; or, where sums are rounded to nearest, to a little more than q / 2, which rounds to q. A bound
    that is too low to be seen counts as none.
    """
    call = bench.call
    if (
        terms not in ("toward_zero", "down")
        or sums not in ("toward_zero", "nearest_even")
        or (call.accumulate != "fp16" and call.a not in ("bf16", "tf32"))
    ):
        return False, None
    least = 24 if call.accumulate == "fp16" else 126 + kept
    if sums == "nearest_even":
        depths = range(least + 2, 49 if call.accumulate == "fp16" else least + 40)
        cut = deepest(bench, lambda c: [_power(0, least + 1), _power(1, c)], depths)
        natural = least + 1 + bits
    else:
        whole = int(math.log2(bench.block))
        depths = range(least + 1, least + whole + 8)
        cut = deepest(bench, lambda c: _tiny(bench.block, least, whole, c), depths)
        natural = depths[-1]
    if cut is None:
        return True, bits - depths[0] + 1
    return True, None if cut in (depths[-1], natural) else bits - cut


def _power(k: int, depth: int) -> Product:
    return k, 2.0 ** -(depth // 2), 2.0 ** -(depth - depth // 2)


def _tiny(block: int, least: int, whole: int, c: int) -> list[Product]:
    """Return products that sum to 2^-least, the smallest part of any of them being 2^-c."""
    if c <= least + whole:
        return [_power(i, c) for i in range(1 << (c - least))]
    ratio = 1 << (c - least - whole)
    return [(i, (ratio + (1 if i % 2 else -1)) * 2.0**-80, 2.0 ** (80 - c)) for i in range(block)]


def joins(bench: Bench, bits: int, terms: str) -> bool:
    """Return True if the accumulator is part of the aligned sum: terms that are truncated beside it are lost."""
    small = [2.0 ** -(bits + (1 if terms == "toward_zero" else 2))] * bench.block
    return float(bench.ask([[*bench.at(0, 1.0), *bench.at(1, *small), *bench.at(2, -1.0)]])[0]) == 0.0


def tf32_rounding(bench: Bench) -> str | None:
    """Return how float32 operands are rounded to TF32."""
    make = lambda q, s: [(0, s * (1 + q * 2.0**-12), 1.0), (1, -s, 1.0)]  # noqa: E731
    return _rounding(bench, make, 2.0**-10)


def special_values(bench: Bench) -> dict[str, str]:
    """Return the bits of NaN and zero results and what becomes of Inf, as hexadecimal text."""
    inf, nan, one = float("inf"), float("nan"), 1.0
    has_inf = bench.call.a not in ("e4m3",)
    least = {"fp32": -150, "fp16": -26}[bench.call.accumulate]
    probes: dict[str, list[Product]] = {
        "NaN times 1": [(0, nan, one)],
        "sum of -0 and -0": [(0, -0.0, one), (1, -0.0, one)],
        "X - X": bench.at(0, 1.0, -1.0),
    }
    if bench.call.a in ("bf16", "tf32") or bench.call.accumulate == "fp16":
        probes["negative, rounded to zero"] = [(0, -(2.0 ** (least // 2)), 2.0 ** (least - least // 2))]
    if has_inf:
        probes |= {"Inf times 0": [(0, inf, 0.0)], "Inf - Inf": [(0, inf, one), (1, -inf, one)]}
        probes |= {"Inf times 1": [(0, inf, one)]}
    out = bench.ask(list(probes.values()))
    bits = out.view({2: torch.int16, 4: torch.int32}[out.element_size()]).tolist()
    digits = 2 * out.element_size()
    return {name: f"0x{x & (1 << 4 * digits) - 1:0{digits}X}" for name, x in zip(probes, bits, strict=True)}
