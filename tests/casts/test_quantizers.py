# SPDX-License-Identifier: Apache-2.0
"""A Quantizer where a verb takes a format, and block scales in any format, against the oracle and against layers."""

import dataclasses

import pytest
import torch

import fmtsim
from fmtsim import BlockFormat, FloatFormat, Quantizer, Rounding, Scaling, TensorScale, get_format
from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.lab.verify.vectors import vectors
from fmtsim.recipes import get_recipe
from fmtsim.scaling.oracle import quantize_matrix
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys
from fmtsim.spec.quantizer import Clamp, Hadamard, TrustMask
from fmtsim.support.errors import ArgumentError, FormatError

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 8)[:, None]
X[2, 16:32] = 0


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("scale", ["e4m0", "e3m0", "ue5m3", "uint6", "int8", "e5m2", "fp16", "e8m0"])
@pytest.mark.parametrize("element", ["e3m2", "int4"])
def test_block_scales_in_any_format_are_the_oracles(scale, element):
    x = X[::2, :32].clone()
    x[1, 3], x[3, 20] = float("nan"), float("inf")
    for rule in ("floor", "ceil", "rceil", "even", None):
        if rule is None and scale in ("e4m0", "e3m0", "e8m0"):
            continue
        for arithmetic in ("divide", "encode", "reciprocal"):
            scaling = Scaling(block=(1, 16), exponent_rule=rule, scale=scale, arithmetic=arithmetic)
            fmt = BlockFormat("b", get_format(element), scaling)
            wanted = torch.tensor(quantize_matrix(x.tolist(), fmt).values)
            assert same(fmtsim.quantize(x, fmt), wanted), fmt
            assert same(fmtsim.encode(x, fmt).decode(), wanted), fmt
            assert fmtsim.explain(X[3, :16], fmt).engine_agrees


def test_a_power_that_a_narrow_scale_lacks_becomes_its_largest_or_lowest():
    fmt = BlockFormat("b", get_format("e2m1"), Scaling(block=(1, 2), exponent_rule="ceil", scale="e3m0"))
    assert fmt.exponents == (-2, 4)  # e3m0: 2^-2 to 2^4 above zero
    x = torch.tensor([1000.0, 3.0, 2.0**-4, 0.0, 0.0, 0.0, float("nan"), 1.0])
    assert fmtsim.quantize(x, fmt).tolist() == [96.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.5, 1.0]
    assert fmtsim.encode(x, fmt).parts().scales.flatten().tolist() == [16.0, 0.25, 0.25, 0.25]


def test_integers_as_scales_have_their_values():
    for name in ("uint6", "int5", "uint4_f2", "int8"):
        fmt, integers = Scaling(scale=name).scale, get_format(name)
        values = [v for v in integers.values if v >= 0] if name.startswith("u") else [*integers.values][1:]
        assert isinstance(fmt, FloatFormat) and {v for v in values if v >= 0} == {v for v in fmt.values if v >= 0}


SCALINGS = {
    "tensor": Scaling(), "narrow": Scaling(block=(1, 16), power_of_two="ceil", scale="e4m0"),
    "divide": Scaling(block=(1, 16), power_of_two="floor", scale="e3m0", arithmetic="divide"),
    "margin": Scaling(block=(1, 16), scale="ue5m3", margin=1), "factor": Scaling(block=(1, None), factor=0.3),
    "eps": Scaling(block=(1, 32), scale="uint6", eps=1e-3, eps_rule="scale", arithmetic="divide"),
    "offset": Scaling(block=(1, 16), arithmetic="multiply", offset=0.1),
    "log2": Scaling(block=(1, 16), power_of_two="log2"),
    "allowed": Scaling(block=(1, 16), allowed=(0.5, 1.0, 8.0)),
    "two levels": Scaling(block=(1, 16), scale="e4m3", tensor=TensorScale()),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("element", ["e4m3", "e3m2", "int4"])
def test_verbs_on_tensors_do_what_layers_do(name, element):
    q = Quantizer(element, scaling=SCALINGS[name], rounding="nearest_away")
    wanted = quantize_operand(X, q).values(torch.float32)
    assert torch.equal(fmtsim.quantize(X, q), wanted)
    assert torch.equal(q(X), wanted) and torch.equal(q(X.T, dim=0), wanted.T)
    assert torch.equal(fmtsim.encode(X, q).decode(), wanted)
    assert torch.equal(torch.from_numpy(q(X.numpy())), wanted)
    wide = wanted.double() - X.double()  # sums of observe come in another order: a tolerance of theirs
    sqnr = 10 * torch.log10(X.double().square().sum() / wide.square().sum())
    assert fmtsim.observe(X, q).sqnr_db == pytest.approx(sqnr.item(), rel=1e-9)


def test_vectors_of_a_quantiser():
    q = Quantizer("e3m2", rounding="nearest_away")
    tensors = vectors(q, generator=1).tensors
    assert torch.equal(tensors["decoded"], q(tensors["input"]))
    assert not torch.equal(tensors["decoded"], fmtsim.quantize(tensors["input"], "e3m2"))


def test_what_is_more_than_a_cast_has_values_and_gradients():
    q = Quantizer("e3m2", scaling=Scaling(block=(1, 16), statistic="rms", factor=0.2), transforms=(Clamp(level=0.99),))
    wanted = quantize_operand(X, q).values(torch.float32)
    assert torch.equal(q(X), wanted) and torch.equal(q(X.T, dim=0), wanted.T)
    out, half = torch.empty_like(X), fmtsim.quantize(X, q, out_dtype=torch.bfloat16)
    assert fmtsim.quantize(X, q, out=out) is out and torch.equal(out, wanted)
    assert half.dtype == torch.bfloat16 and torch.equal(half, wanted.bfloat16())
    assert q(X[:0]).shape == (0, 64) and q(X[0, :0]).shape == (0,)
    masked = Quantizer("e3m2", scaling=Scaling(), gradient=TrustMask(limit=0.05))
    x = X.clone().requires_grad_()
    masked(x).sum().backward()
    assert set(x.grad.unique().tolist()) == {0.0, 1.0}
    drawn = Quantizer("e3m2", scaling=Scaling(block=(1, 16), eden=16, scale="e4m3", scale_rounding="stochastic"),
                      rounding="stochastic")  # fmt: skip
    assert torch.equal(drawn(X, generator=3), drawn(X, generator=3))
    assert not torch.equal(drawn(X, generator=3), drawn(X, generator=4))
    keys = Keys(RandomKey(3), RandomKey(3, 1 << 40))  # words of elements and of scales
    assert torch.equal(drawn(X, generator=3), quantize_operand(X, drawn, keys).values(torch.float32))


def test_layers_take_quantisers_as_they_are():
    q = Quantizer("e3m2", scaling=SCALINGS["narrow"], rounding="nearest_away")
    config = fmtsim.linear_config(q, g="e5m2", rounding="up", grad_rounding="down")
    assert [config.operands[name] for name in ("x_f", "w_d", "x_w")] == [q, q, q]
    assert config.dgrad.a == Quantizer("e5m2", rounding="down")
    assert fmtsim.linear_config("e4m3") == fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3")
    assert fmtsim.linear_config("e4m3", g=None).dgrad.a.format is None
    layer = fmtsim.convert(torch.nn.Linear(64, 4, bias=False), format=q)
    assert torch.equal(layer(X), q(X) @ q(layer.weight.detach()).T)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fmtsim.quantize(X, Quantizer("e4m3"), rounding="up"), ArgumentError, "rounding='up' beside a Q"),
        (lambda: fmtsim.encode(X, Quantizer("e4m3"), block_size=8), ArgumentError, "block_size=8 beside a Quantizer"),
        (lambda: Quantizer("e4m3", transforms=(Hadamard(),))(X), FormatError, "has a rotation that its product undoes"),
        (lambda: get_recipe("te_delayed").linear.fprop.a(X), FormatError, "has what an earlier pass or step left"),
        (lambda: fmtsim.encode(X, Quantizer("e4m3", scaling=Scaling(statistic="rms"))), FormatError, "no format"),
        (lambda: Quantizer("e4m3", scaling=Scaling(block=(1, 16)))(X[:, :5]), ArgumentError, "does not divide 5"),
        (lambda: Quantizer("e4m3", scaling=Scaling(block=(1, 2), eden=2))(X[:, :5]), ArgumentError, "not divide 5"),
        (lambda: fmtsim.explain(X[0], Quantizer("e4m3", scaling=SCALINGS["margin"])), FormatError, "does not follow"),
        (lambda: vectors(Quantizer("e4m3", rounding=Rounding("stochastic", variant="b"))), FormatError, "variant 'a'"),
        (lambda: fmtsim.linear_config("e4m3", grad_format="e5m2"), TypeError, "write g="),
        (lambda: fmtsim.convert(torch.nn.Linear(2, 2), rounding="up"), TypeError, r"write recipe=linear_con"),
        (lambda: fmtsim.Datapath(acc_bits=24), TypeError, "'acc_bits'; did you mean 'fraction_bits'.*it takes block, "),
        (lambda: FloatFormat("x", 3, 2, 4), TypeError, "takes name, exponent_bits, mantissa_bits by position; write b"),
        (lambda: FloatFormat("x", mantissa_bits=2), TypeError, r"FloatFormat\(\) needs exponent_bits= \(it takes name"),
        (lambda: FloatFormat("x", 3, 2, name="y"), TypeError, "multiple values for argument 'name'"),
        (lambda: BlockFormat("b"), TypeError, r"BlockFormat\(\) needs element= and scaling= \(it takes name, element"),
        (lambda: FloatFormat("x", 3, 2, infinities=False), FormatError, "nan='top' or nan='none'"),
        (lambda: dataclasses.replace(Rounding(), moed="up"), TypeError, "did you mean 'mode'"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_first_arguments_by_position():
    assert FloatFormat("x", 3, 2) == FloatFormat(name="x", exponent_bits=3, mantissa_bits=2)
    assert Rounding("stochastic", random_bits=4) == Rounding(mode="stochastic", random_bits=4)
    assert Quantizer("e4m3") == Quantizer(format="e4m3")
