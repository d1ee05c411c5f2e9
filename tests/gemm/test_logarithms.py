# SPDX-License-Identifier: Apache-2.0
"""Products on a LogDatapath: a loop over Python's integers and decimals has the bits, for verbs and for layers."""

import re
from decimal import ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from functools import cache
from math import floor

import pytest
import torch
from torch import nn

import fmtsim
from fmtsim import GemmPlan
from fmtsim.formats.element import LogFormat
from fmtsim.gemm.layers.config import find_route
from fmtsim.gemm.units import unit as units
from fmtsim.gemm.units.unit import Mode, Unit
from fmtsim.spec.datapath import LogDatapath
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, FormatError
from tests.support.refusals import refused

LNS8 = fmtsim.get_format("lns8_g8")
FORMATS = {"formats": LNS8}


@cache
def constant(i: int, entries: int, fraction_bits: int) -> int:
    with localcontext() as context:
        context.prec = 80
        exact = Decimal(2) ** (Decimal(i) / entries + fraction_bits)
        return int((exact + Decimal("0.5")).to_integral_value(ROUND_FLOOR))


def dot(a: list[int], b: list[int], fmt_a: LogFormat, fmt_b: LogFormat, path: LogDatapath) -> Fraction:
    """One output from two rows of codes, step by step as docs/matmul.md has it."""
    gamma, share = fmt_a.gamma, fmt_a.gamma // path.entries
    unit = (fmt_a.max_code + fmt_b.max_code) // gamma + path.guard_bits + 2 - path.accumulator_bits
    limit, total = 1 << (path.accumulator_bits - 1), 0
    for first in range(0, len(a), path.block):
        bins = dict.fromkeys(range(path.entries), 0)
        for x, y in zip(a[first : first + path.block], b[first : first + path.block], strict=True):
            minus = (x > fmt_a.max_code) != (y > fmt_b.max_code)
            q, r = divmod((x & fmt_a.max_code) + (y & fmt_b.max_code), gamma)
            term = floor((1 + Fraction(r % share, gamma)) * Fraction(2) ** (q - unit))
            bins[r // share] += -term if minus else term
        block = sum(constant(i, path.entries, path.fraction_bits) * terms for i, terms in bins.items())
        total = min(max(total + floor(Fraction(block, 1 << path.fraction_bits)), -limit), limit - 1)
    return total * Fraction(2) ** unit


def codes(fmt: LogFormat, *shape: int, seed: int = 0, top: int = 0) -> torch.Tensor:
    """Codes of both signs, of the largest ``top`` magnitudes where it is given."""
    source = torch.Generator().manual_seed(seed)
    low = fmt.max_code + 1 - top if top else 0
    k = torch.randint(low, fmt.max_code + 1, shape, generator=source)
    return k + torch.randint(0, 2, shape, generator=source) * (fmt.max_code + 1)


def values(c: torch.Tensor, fmt: LogFormat) -> torch.Tensor:
    magnitudes = torch.tensor(fmt.magnitudes)[c & fmt.max_code]
    return torch.where(c > fmt.max_code, -magnitudes, magnitudes)


@pytest.mark.parametrize(
    ("path", "formats", "k"),
    [
        (LogDatapath(), ("lns8_g8", "lns8_g8"), 100),
        (LogDatapath(entries=4), ("lns8_g8", "lns8_g8"), 64),
        (LogDatapath(entries=1, fraction_bits=0, block=7), ("lns8_g8", "lns8_g8"), 50),
        (LogDatapath(entries=2, accumulator_bits=14, guard_bits=0, block=3), ("lns8_g8", "lns8_g8"), 40),  # clamps
        (LogDatapath(entries=8, accumulator_bits=46, fraction_bits=9), ("lns8_g16", "lns6_g16"), 33),
        (LogDatapath(entries=16, fraction_bits=14, block=1), ("lns12_g128", "lns8_g128"), 21),
        (LogDatapath(entries=2048, fraction_bits=20, block=16, accumulator_bits=25), ("lns16_g2048",) * 2, 20),
    ],
)
def test_a_product_has_the_bits_of_the_loop(path, formats, k):
    first, second = map(fmtsim.get_format, formats)
    top = 4 if path.guard_bits == 0 else 0
    a, b = codes(first, 5, k, top=top), codes(second, 6, k, seed=1, top=top)
    y = fmtsim.mm(values(a, first), values(b, second).T, target=path, formats=(first, second))
    wide = path.accumulator_bits > 25
    assert y.dtype == torch.float32
    sums = fmtsim.mma(values(a, first), values(b, second), target=path, formats=(first, second))
    assert sums.dtype == (torch.float64 if wide else torch.float32)
    exact = [[dot(x, z, first, second, path) for z in b.tolist()] for x in a.tolist()]
    assert [[Fraction(v) for v in row] for row in sums.tolist()] == exact
    assert torch.equal(y, sums.float())
    if path.guard_bits == 0:  # two sums of this seed reach the last bit
        assert {Fraction(v) for v in sums.abs().flatten().tolist()} >= {Fraction(2) ** 32}


def test_tiles_do_not_matter(monkeypatch):
    a, b = values(codes(LNS8, 40, 70), LNS8), values(codes(LNS8, 9, 70, seed=1), LNS8)
    y = fmtsim.mm(a, b.T, target=LogDatapath(), **FORMATS)
    monkeypatch.setattr("fmtsim.torch_engine.gemm_units._AT_ONCE", 1)
    assert torch.equal(fmtsim.mm(a, b.T, target=LogDatapath(), **FORMATS), y)


def test_codes_double_precision_batches_and_empty_sums_give_the_same():
    c, d = codes(LNS8, 4, 24).to(torch.uint8), codes(LNS8, 3, 24, seed=1).to(torch.uint8)
    a, b, path = values(c.long(), LNS8), values(d.long(), LNS8), LogDatapath()
    y = fmtsim.mm(a, b.T, target=path, **FORMATS)
    assert torch.equal(fmtsim.mm(c, d.T, target=path, **FORMATS), y)
    assert torch.equal(fmtsim.mm(a.double(), b.T.double(), target=path, **FORMATS), y.double())
    assert torch.equal(fmtsim.bmm(a[None], b.T[None], target=path, **FORMATS)[0], y)
    assert torch.equal(fmtsim.mm(a[:, :0], b.T[:0], target=path, **FORMATS), torch.zeros(4, 3))
    small = torch.ones(1, 8)  # every product lies below the last bit of the sum
    assert fmtsim.mm(small, small.T, target=path, **FORMATS).item() == 0


@pytest.mark.parametrize(("entries", "worst"), [(8, 1.0), (4, 1.125 / 2 ** (1 / 8)), (1, 1.5 / 2 ** (4 / 8))])
def test_a_conversion_errs_as_mitchells_line_does(entries, worst):
    """(1 + f) / 2^f at the lower remainder that is worst; 16 bits of a constant and of a term are to spare."""
    path = LogDatapath(entries=entries, fraction_bits=16, accumulator_bits=40, guard_bits=0)
    a = values(torch.arange(112, 120)[:, None], LNS8)
    found = fmtsim.mm(a, a[:1], target=path, out_dtype=torch.float64, **FORMATS)[:, 0]
    ratio = found / 2.0 ** (28 + torch.arange(8) / 8).double()
    assert float(ratio.max()) == pytest.approx(worst, abs=2e-5) and float(ratio.min()) == pytest.approx(1, abs=2e-5)


def split(t: torch.Tensor) -> tuple[list[list[int]], torch.Tensor]:
    """Codes and scales of the rows of a matrix in lns8_channel."""
    encoded = fmtsim.encode(t, "lns8_channel", dim=-1)
    return encoded.codes.tolist(), encoded.scales.reshape(-1, 1)


def test_a_layer_multiplies_the_codes_of_its_operands_in_all_three_products():
    torch.manual_seed(0)
    layer, path = nn.Linear(12, 5), LogDatapath(entries=4)
    x, g = torch.randn(7, 12, requires_grad=True), torch.randn(7, 5)
    w, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    fmtsim.convert(layer, recipe="lns", target=path)
    y = layer(x)
    y.backward(g)

    def product(a, b):
        (left, rows), (right, columns) = split(a), split(b)
        sums = torch.tensor([[float(dot(p, q, LNS8, LNS8, path)) for q in right] for p in left])
        return rows, columns.T, sums

    rows, columns, sums = product(x.detach(), w)
    assert torch.equal(y, sums * (rows * columns) + bias)
    for found, (a, b) in ((x.grad, (g, w.T)), (layer.weight.grad, (g.T, x.detach().T))):
        rows, columns, sums = product(a.contiguous(), b.contiguous())
        assert torch.equal(found, sums * (rows * columns))


def test_layers_without_the_unit_multiply_the_same_values_as_before():
    torch.manual_seed(0)
    layer, x = nn.Linear(12, 5, bias=False), torch.randn(7, 12)
    w = layer.weight.detach().clone()
    fmtsim.convert(layer, recipe="lns", target=fmtsim.Datapath(block=None, fraction_bits=None))
    q = [fmtsim.quantize(t, "lns8_channel", dim=-1) for t in (x, w)]
    assert torch.equal(layer(x), fmtsim.mm(q[0], q[1].T, target=fmtsim.Datapath(block=None, fraction_bits=None)))


def test_compiled_layers_have_the_bits_of_eager_ones():
    torch.manual_seed(0)
    model = fmtsim.convert(
        nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)), recipe="lns", target=LogDatapath()
    )
    x = torch.randn(7, 12)
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


def test_the_operand_of_a_layer_has_elements_and_a_scale_for_each_row():
    from fmtsim.gemm.layers.quantize_operand import quantize_operand

    made = quantize_operand(torch.randn(3, 8), fmtsim.get_recipe("lns").linear.fprop.a)
    assert isinstance(made, Operand) and made.scale is not None and made.scale.shape == (3, 1)
    assert set(made.elements.abs().flatten().tolist()) <= set(LNS8.magnitudes)


A = torch.ones(2, 4)
REFUSED = (
    (lambda: fmtsim.mm(A, A.T, target=LogDatapath()), FormatError,
     "LogDatapath does not multiply fp32 x fp32; choose logarithmic formats (formats='lns8_g8'; "
     "fmtsim mm --dtype lns8_g8; recipe='lns'), or another datapath"),
    (lambda: fmtsim.mm(0 * A, A.T, target=LogDatapath(), **FORMATS), ArgumentError,
     "a holds 0, which is not a value of lns8_g8; round it first with fmtsim.quantize(a, 'lns8_g8')"),
    (lambda: fmtsim.mm(A, torch.full((4, 2), float("nan")), target=LogDatapath(), **FORMATS), ArgumentError,
     "b holds nan, which is not a value of lns8_g8"),
    (lambda: fmtsim.mm(A, A.T, target=LogDatapath(), formats=("lns8_g8", "lns8_g16")), FormatError,
     "lns8_g8 has 8 steps an octave, lns8_g16 16; choose formats of one gamma"),
    (lambda: fmtsim.mm(A, A.T, target=LogDatapath(entries=16), **FORMATS), ArgumentError,
     "entries=16 is more than the 8 steps of lns8_g8; choose 8"),
    (lambda: fmtsim.mm(A, A.T, target=LogDatapath(entries=1), formats="lns8_g1"), FormatError,
     "sums of products of lns8_g1 x lns8_g1 leave float32; choose formats of fewer octaves, or accumulator_bits=26"),
    (lambda: fmtsim.mm(A, A.T, target=LogDatapath(), plan=GemmPlan(promote_every=16), **FORMATS), ArgumentError,
     "a LogDatapath adds its blocks one after another; leave plan= out"),
    (lambda: fmtsim.mma(A, A, torch.zeros(2, 2), target=LogDatapath(), **FORMATS), ArgumentError,
     "a LogDatapath starts its sums at zero; leave c out, and add it to the result"),
    (lambda: fmtsim.mm(A, A.T, target=fmtsim.Datapath(), **FORMATS), FormatError,
     "Datapath does not multiply lns8_g8 x lns8_g8; choose floating-point formats, or another datapath"),
    (lambda: fmtsim.mm(A, A.T, target="hopper.wgmma", **FORMATS), ArgumentError, "pass target=LogDatapath"),
    (lambda: fmtsim.convert(nn.Linear(4, 4), recipe="te_current", target=LogDatapath()), FormatError,
     "LogDatapath does not multiply e4m3 x e4m3; choose logarithmic formats"),
)  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_the_unit_does_not_take_is_refused(call, error, message):
    refused(re.escape(message), call, error=error)


def test_a_registered_unit_is_the_same_by_its_name(monkeypatch):
    monkeypatch.setattr(units, "_units", dict(units._units))
    mode = Mode(inputs=("lns8_g8",), accumulate="fp32", datapath=LogDatapath(), evidence="none", strength="defined")
    fmtsim.register_unit(Unit(name="test.logarithms", modes=(mode,)))
    a = values(codes(LNS8, 4, 24), LNS8)
    same = [fmtsim.mm(a, a.T, target=unit, **FORMATS) for unit in ("test.logarithms", LogDatapath())]
    assert torch.equal(*same)
    torch.manual_seed(0)
    layers, x = [nn.Linear(12, 5), nn.Linear(12, 5)], torch.randn(7, 12)
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, unit in zip(layers, ("test.logarithms", LogDatapath()), strict=True):
        fmtsim.convert(layer, recipe="lns", target=unit)
    assert torch.equal(layers[0](x), layers[1](x))


def test_a_route_keeps_the_format_of_each_operand():
    narrow = LogFormat(name="lns6_g8", bits=6, gamma=8)
    route = find_route(Quantizer(format=LNS8), Quantizer(format=narrow), logarithms=True)
    assert (route.how, route.formats) == ("elements", (LNS8, narrow))


def test_the_unit_is_described_and_explained():
    shown = str(fmtsim.explain_mm(A, A.T, target=LogDatapath(entries=4), **FORMATS))
    assert "logarithms in blocks of 32, 4 constants of 8 bits, clamped to 24 bits" in shown
