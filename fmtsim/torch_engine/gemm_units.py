# SPDX-License-Identifier: Apache-2.0
"""The units of AMD, Intel's dot products and integer units (docs/matmul.md, section 3)."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fmtsim.formats.element import FloatFormat, LogFormat
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.datapath import FP32, Datapath, FmaDatapath, LogDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.support.errors import ArgumentError
from fmtsim.torch_engine.gemm_blocks import FusedAddUnit, product_range
from fmtsim.torch_engine.gemm_operands import SAFE, Rows, cleaned, exact, exponents, round_value, specials
from fmtsim.torch_engine.gemm_wide import WideUnit
from fmtsim.torch_engine.reals import FLT_MIN, power_of_two

_AT_ONCE = 1 << 18  # products looked up at once on a CPU: 2 MB
_ON_GPUS = 1 << 24


def logarithmic_sums(a: Tensor, b: Tensor, spec: GemmSpec, out: Tensor) -> None:
    """Write the sums of ``a b^T`` of a LogDatapath into ``out``; arguments are those of ``gemm``, without an addend."""
    path, first, second = spec.datapath, spec.a, spec.b
    assert isinstance(path, LogDatapath) and isinstance(first, LogFormat) and isinstance(second, LogFormat)
    table = torch.tensor(_integers(path, first, second), device=a.device)
    signs = torch.cat([table, -table, table])  # of 0, 1 and 2 minus signs
    a_logs, b_logs = _exponents(a, first, len(table)), _exponents(b, second, len(table))
    top, unit = 1 << (path.accumulator_bits - 1), 2.0 ** path.lowest_exponent(first, second)
    outputs = max(1, (_ON_GPUS if a.is_cuda else _AT_ONCE) // max(1, b.shape[0]))  # times products of each
    span = min(path.block, outputs)
    rows = outputs // span
    for start in range(0, a.shape[0], rows):
        piece = a_logs[start : start + rows, None]
        total = torch.zeros(len(piece), b.shape[0], dtype=torch.int64, device=a.device)
        for x, y in zip(piece.split(path.block, -1), b_logs.split(path.block, -1), strict=True):
            terms = torch.zeros_like(total)
            for u, v in zip(x.split(span, -1), y.split(span, -1), strict=True):
                places = u + v  # of each product in the table of signed terms
                terms = terms + signs.index_select(0, places.flatten()).view(places.shape).sum(-1)
            total = (total + (terms >> path.fraction_bits)).clamp_(-top, top - 1)
        out[start : start + rows] = total.to(out.dtype) * unit  # exact


def _exponents(x: Tensor, fmt: LogFormat, count: int) -> Tensor:
    """Return the logarithm of each element, int32, plus ``count`` where there is a minus sign."""
    magnitudes = torch.tensor(fmt.magnitudes, dtype=torch.float32, device=x.device)
    places = torch.bucketize(x.abs().to(torch.float32).contiguous(), magnitudes, out_int32=True)  # each is one of them
    return places + count * x.signbit().to(torch.int32)


@lru_cache(maxsize=64)
def _integers(path: LogDatapath, a: LogFormat, b: LogFormat) -> list[int]:
    """Return what the unit makes of each sum of two exponents: a shifted term times its constant, all its bits."""
    gamma, lowest = a.gamma, path.lowest_exponent(a, b)
    share = gamma // path.entries
    integers, constants = [], path.constants
    for k in range(a.max_code + b.max_code + 1):
        quotient, remainder = divmod(k, gamma)
        shift, line = quotient - lowest, gamma + remainder % share
        term = (line << shift) // gamma if shift >= 0 else line // (gamma << -shift)
        integers.append(constants[remainder // share] * term)
    return integers


_ZERO = -126  # the exponent that zeros count with
_UNBOUNDED = FloatFormat(name="e10m23", exponent_bits=10, mantissa_bits=23)  # float32, exponents for all products


class TwoStageUnit:
    """CDNA3: products are aligned among themselves, then their sum with the running sum, in float64 integers."""

    def __init__(self, datapath: TwoStageDatapath, a: FloatFormat, b: FloatFormat) -> None:
        widest = max(datapath.fraction_bits, datapath.sum_bits) + 3 + datapath.block.bit_length()
        top, bottom = product_range(a, b)
        if widest > 52 or a.mantissa_bits + b.mantissa_bits > 50 or max(top, -bottom) > SAFE:
            raise ArgumentError(
                f"a two-stage unit of {datapath.fraction_bits} and {datapath.sum_bits} bits with {a.name} x {b.name} "
                "does not fit in float64; choose fewer bits, or operands of 25 mantissa bits in float32's range"
            )
        self.datapath, self.span = datapath, datapath.block
        self.weight = 2 * datapath.block
        self._lowest = a.min_exponent, b.min_exponent

    def step(self, pieces: Sequence[Rows], state: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """Return the running sum after one block, float64."""
        path, rows = self.datapath, pieces[0]
        values = [cleaned(exact(x), rows.finite) for x in (rows.a, rows.b)]
        first, second = (exponents(x, lowest) for x, lowest in zip(values, self._lowest, strict=True))
        products = values[0] * values[1]
        exponent = torch.where(products == 0, _ZERO, first + second).to(torch.int64)
        large = products.abs() >= 2.0**128
        if not path.parity:
            total, top = self._aligned(torch.where(large, 0.0, products), exponent)
        else:
            even, top_even = self._aligned(products[0::2], exponent[0::2])
            odd, top_odd = self._aligned(products[1::2], exponent[1::2]) if len(products) > 1 else (even * 0, top_even)
            top = torch.maximum(top_even, top_odd)
            total = torch.floor(even * power_of_two(top_even - top)) + torch.floor(odd * power_of_two(top_odd - top))
        result = self._with_addend(total, top, cleaned(state, False))
        special = specials(pieces, state)
        if not path.parity:
            infinite = torch.copysign(torch.full_like(products, torch.inf), products)
            special = special + torch.where(large, infinite, 0.0).sum(0)
        return torch.where(torch.isfinite(special), result, special)

    def _aligned(self, products: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the products truncated at ``2**(top - fraction_bits)``, in those units, and top."""
        top = exponent.amax(0)
        return torch.trunc(products * power_of_two(self.datapath.fraction_bits - top)).sum(0), top

    def _with_addend(self, total: torch.Tensor, top: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        path = self.datapath
        addend_exponent = exponents(state, _ZERO).clamp(min=_ZERO).to(torch.int64)
        both = torch.maximum(top, addend_exponent)
        gain = power_of_two(top - both + (path.sum_bits - path.fraction_bits))
        addend = torch.floor(state * power_of_two(path.fraction_bits - both))
        if path.parity:
            addend = torch.where(addend_exponent < both - path.fraction_bits - 1, 0.0, addend)
        products = torch.floor(total * gain) * power_of_two(both - path.sum_bits)
        return round_value(products + addend * power_of_two(both - path.fraction_bits), FP32) + 0.0


class PairwiseUnit:
    """CDNA2: float32 products and sums in pairs, subnormal numbers flushed at every step."""

    def __init__(self, datapath: PairwiseDatapath, a: FloatFormat, b: FloatFormat) -> None:
        self.datapath, self.span = datapath, datapath.block
        self.weight = 2 * datapath.block
        self._smallest = a.min_normal, b.min_normal
        self._wide = None
        if a.mantissa_bits + b.mantissa_bits > 51:  # float64 does not hold the product
            path = Datapath(block=1, fraction_bits=None, rounding=Rounding(), signed_zero=True)
            self._wide = WideUnit(path, a, b, 1)

    def step(self, pieces: Sequence[Rows], state: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """Return the running sum after one block, float64."""
        rows = pieces[0]
        a, b = (_without(exact(x), small) for x, small in zip((rows.a, rows.b), self._smallest, strict=True))
        if self._wide is None:
            terms = _flushed(a * b)
        else:
            minus_zero = torch.full(torch.broadcast_shapes(a.shape, b.shape), -0.0, dtype=a.dtype, device=a.device)
            terms = _flushed(self._wide.step([Rows(a[None], b[None], finite=rows.finite)], minus_zero, None))
        if len(terms) < self.datapath.block:
            terms = torch.cat([terms, terms.new_zeros(self.datapath.block - len(terms), *terms.shape[1:])])
        while len(terms) > 1:
            terms = _flushed(terms[0::2] + terms[1::2])
        return _flushed(_without(state, FLT_MIN) + terms[0])


class FmaUnit:
    """Intel's dot products: one fused multiply-add after another, subnormal numbers flushed at every step."""

    def __init__(self, datapath: FmaDatapath, a: FloatFormat, b: FloatFormat) -> None:
        self.datapath, self.span = datapath, datapath.block
        path = Datapath(block=1, fraction_bits=None, rounding=Rounding(), accumulator=_UNBOUNDED, signed_zero=True)
        self._fma = FusedAddUnit(path) if FusedAddUnit.fits(path, a, b, 1) else WideUnit(path, a, b, 1)
        self.weight = self._fma.weight + 2 * datapath.block

    def step(self, pieces: Sequence[Rows], state: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
        """Return the running sum after one block, float64."""
        rows, missing = pieces[0], self.datapath.block - len(pieces[0].a)
        a, b = (_zeroed(exact(x)) for x in (rows.a, rows.b))
        a, b = (torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x for x in (a, b))
        running = _zeroed(state)
        sums = [torch.zeros_like(running)] * 2 if self.datapath.parity else [running]
        for i in range(self.datapath.block):
            k, half = i ^ 1, (i ^ 1) % len(sums)  # the odd product of a pair first
            total = self._fma.step([Rows(a[k : k + 1], b[k : k + 1], finite=rows.finite)], sums[half], None)
            sums[half] = round_value(_zeroed(total), FP32)
        return _flushed(running + _flushed(sums[0] + sums[1])) if self.datapath.parity else sums[0]


def _zeroed(x: torch.Tensor) -> torch.Tensor:
    """Return x with zeros of their sign for numbers below float32's normal ones."""
    return torch.where(x.abs() < FLT_MIN, torch.copysign(torch.zeros_like(x), x), x)


def _without(x: torch.Tensor, smallest: float) -> torch.Tensor:
    """Return x with +0 for subnormal numbers."""
    return torch.where((x.abs() < smallest) & (x != 0), 0.0, x)


def _flushed(x: torch.Tensor) -> torch.Tensor:
    """Round to float32 and make zeros of their sign from subnormal results.

    A float64 sum of two float32 numbers may be rounded again: 53 bits are more than twice 24 and 2.
    """
    return _zeroed(round_value(x, FP32))


def integer_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a b^T`` of int8 matrices ``[m, L]`` and ``[n, L]`` as int64, exact up to ``L = 2**38``.

    Pieces of the product are taken in float32: partial sums are integers up to ``2**24``, in whatever order they are
    added, and int8 survives the narrower operands that torch may be set to use.
    """
    pieces = zip(a.split(1024, 1), b.split(1024, 1), strict=True)
    first, *rest = (torch.matmul(x.to(torch.float32), y.to(torch.float32).t()).to(torch.int64) for x, y in pieces)
    return sum(rest, first)


def wrapped(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int64 elements modulo ``2**bits`` as signed numbers of so many bits."""
    return x << (64 - bits) >> (64 - bits)
