# SPDX-License-Identifier: Apache-2.0
"""EmulatedGEMM: the bits of F.linear without quantisers, of explicit quantisation with them."""

import math

import pytest
import torch
import torch.nn.functional as F

from fmtsim.casts.quantize import quantize
from fmtsim.formats.block import scaled
from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.config import Gemm, LinearConfig, linear_config
from fmtsim.gemm.layers.emulated_gemm import EmulatedGEMM
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, DtypeError, FmtsimError
from tests.support.bits import all_same_bits
from tests.support.refusals import refused

T, K, N = 21, 40, 34  # ragged for every block size


def tensors(bias=True, shape=(3, 7), dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(*s, generator=g, dtype=dtype).requires_grad_() for s in ((*shape, K), (N, K)))
    b = torch.randn(N, generator=g, dtype=dtype).requires_grad_() if bias else None
    return x, w, b, torch.randn(*shape, N, generator=g, dtype=dtype)


def run(x, w, b, grad, *rest):
    y = EmulatedGEMM.apply(x, w, b, *rest)
    return y, *torch.autograd.grad(y, [t for t in (x, w, b) if t is not None], grad)


def distinct():
    """Give six operands six different quantisers, scaled in rows and blocks so that a wrong axis shows."""
    names = ("e4m3", "e3m4", "e5m2", "e2m3", "e3m2", "e2m1")
    blocks = ((1, None), (1, 16), (1, 8), (1, None), (1, 4), (2, 8))
    q = [Quantizer(format=scaled(get_format(n), b)) for n, b in zip(names, blocks, strict=True)]
    return LinearConfig(fprop=Gemm(a=q[0], b=q[1]), dgrad=Gemm(a=q[2], b=q[3]), wgrad=Gemm(a=q[4], b=q[5]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 7), (21,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_quantisers_it_is_linear(bias, shape, dtype):
    x, w, b, grad = tensors(bias, shape, dtype)
    y = F.linear(x, w, b)
    expected = (y, *torch.autograd.grad(y, [t for t in (x, w, b) if t is not None], grad))
    actual = run(x, w, b, grad, LinearConfig())
    if shape == ():  # torch takes a matrix-vector kernel there, which sums in another order
        torch.testing.assert_close(actual, expected)
    else:
        assert all_same_bits(actual, expected)


def test_each_operand_has_its_own_quantiser_and_contraction_axis():
    x, w, b, grad = tensors()
    c = distinct()
    x2, g2 = x.detach().flatten(0, 1), grad.flatten(0, 1)

    def q(t, quantizer, dim):
        return quantize(t.detach(), quantizer.format, dim=dim, pad=True, out_dtype=torch.float32)

    y = F.linear(q(x2, c.fprop.a, 1), q(w, c.fprop.b, 1), b)
    dx = q(g2, c.dgrad.a, 1) @ q(w, c.dgrad.b, 0)
    dw = q(g2, c.wgrad.a, 0).t() @ q(x2, c.wgrad.b, 0)
    expected = (y.view(3, 7, N), dx.view_as(x), dw, g2.sum(0))
    assert all_same_bits(run(x, w, b, grad, c), expected)


def test_the_observer_sees_every_operand_once():
    seen = {}

    def observer(operand, original, quantised, quantizer, dim):
        assert operand not in seen
        seen[operand] = (tuple(original.shape), dim, quantizer)
        assert torch.equal(quantised, quantize(original, quantizer.format, dim=dim, pad=True, out_dtype=torch.float32))

    c = distinct()
    run(*tensors(), c, None, observer)
    xs, ws, gs = (T, K), (N, K), (T, N)
    axes = {"x_f": (xs, -1), "w_f": (ws, -1), "g_d": (gs, -1), "w_d": (ws, 0), "g_w": (gs, 0), "x_w": (xs, 0)}
    assert seen == {name: (*axes[name], q) for name, q in c.operands.items()}


def test_only_the_gradients_that_are_needed():
    seen = []
    x, w, b, grad = tensors()
    observer = lambda operand, *_: seen.append(operand)  # noqa: E731
    y = EmulatedGEMM.apply(x.detach(), w, b, distinct(), None, observer)
    torch.autograd.grad(y, [w, b], grad)
    assert seen == ["x_f", "w_f", "g_w", "x_w"]
    seen.clear()
    y = EmulatedGEMM.apply(x, w.detach(), None, distinct(), None, observer)
    torch.autograd.grad(y, [x], grad)
    assert seen == ["x_f", "w_f", "g_d", "w_d"]


def test_compiled_code_takes_no_observer():
    config, (x, w, b, _) = distinct(), tensors()
    compiled = torch.compile(lambda *t: EmulatedGEMM.apply(*t, config, 5, print), backend="aot_eager", fullgraph=True)
    refused("takes no observer and no state in compiled code; convert a model", compiled, x, w, b, error=Exception)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_multiplied_in_float32(dtype):
    x, w, b, grad = tensors(dtype=dtype)
    exact = run(*(t.detach().float().requires_grad_() for t in (x, w, b)), grad.float(), distinct())
    assert all_same_bits(run(x, w, b, grad, distinct()), [t.to(dtype) for t in exact])


def test_expanded_gradients_are_taken():
    x, w, b, _ = tensors()
    y = EmulatedGEMM.apply(x, w, b, distinct())
    expected = run(*tensors()[:3], torch.ones(3, 7, N), distinct())[1:]
    assert all_same_bits(torch.autograd.grad(y.sum(), [x, w, b]), expected)


@pytest.mark.parametrize("unit", [None, "hopper.wgmma"])
@pytest.mark.parametrize("leaf", [0, 1])
def test_differentiating_twice_says_why_not(leaf, unit):
    x, w, b, _ = tensors()
    y = EmulatedGEMM.apply(x, w, b, linear_config(x="e4m3", w="e4m3", g="e5m2", target=unit))
    grads = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
    with pytest.raises(FmtsimError, match=r"cannot be differentiated twice.*fmtsim\.revert"):
        grads[leaf].square().sum().backward()


def test_create_graph_alone_is_no_error():
    x, w, b, grad = tensors()
    y = EmulatedGEMM.apply(x, w, b, LinearConfig())
    plain = torch.autograd.grad(y, x, grad, retain_graph=True)
    assert all_same_bits(torch.autograd.grad(y, x, grad, create_graph=True), plain)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (torch.ones(2, 3), torch.ones(4, 5), None),
            ArgumentError,
            r"x of shape \(2, 3\) does not fit w of shape \(4, 5\)",
        ),
        ((torch.ones(2, 3), torch.ones(3), None), ArgumentError, r"w is \[N, K\]"),
        ((torch.ones(2, 3), torch.ones(4, 3), [1.0]), DtypeError, "bias is list, not a tensor"),
        (
            (torch.ones(2, 3), torch.ones(4, 3), torch.ones(4).to_sparse()),
            ArgumentError,
            "bias has layout torch.sparse",
        ),
        ((torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)), ArgumentError, r"bias of shape \(3,\).*bias is \[N\]"),
        (
            (torch.ones(2, 3), torch.ones(4, 3).double(), None),
            DtypeError,
            r"x has dtype torch.float32, w or bias torch.float64",
        ),
        ((torch.ones(2, 3).long(), torch.ones(4, 3), None), DtypeError, r"x has dtype torch.int64; pass float16"),
    ],
)
def test_operands_that_do_not_fit_are_named(arguments, error, message):
    refused(message, EmulatedGEMM.apply, *arguments, LinearConfig(), error=error)


def test_a_config_that_is_none_is_named():
    refused(r"takes a LinearConfig, not 'e4m3'", EmulatedGEMM.apply, torch.ones(2, 3), torch.ones(4, 3), None, "e4m3")
    for wrong, message in (
        (
            dict(observer=abs),
            "observer=<built-in function abs> does not take five arguments; pass a function that does",
        ),
        (dict(observer="x"), "observer='x' does not take five arguments"),
        (dict(state=2), "state=2 is not allowed; pass a Mapping or None"),
    ):
        refused(message, EmulatedGEMM.apply, torch.ones(2, 3), torch.ones(4, 3), None, LinearConfig(), **wrong)


@pytest.mark.parametrize(("lead", "n", "k"), [((2,), 3, 0), ((0,), 3, 4), ((2, 3), 0, 4), ((), 3, 0), ((0,), 0, 0)])
def test_empty_operands(lead, n, k):
    x, w, bias = (torch.zeros(shape, requires_grad=True) for shape in ((*lead, k), (n, k), (n,)))
    y = EmulatedGEMM.apply(x, w, bias, linear_config(x="e4m3", w="e4m3", g="e5m2"))
    y.sum().backward()
    assert y.shape == (*lead, n) and not y.any() and x.grad.shape == x.shape and not w.grad.any()
    assert torch.equal(bias.grad, torch.full((n,), float(math.prod(lead))))


def test_high_precision_bfloat16_products_are_rounded_once():
    """An output format, and operands that no quantiser touches: the sum is float32 before it is rounded."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 8, generator=generator).bfloat16() for rows in (4, 6))
    config = LinearConfig(fprop=Gemm(out=Quantizer(format=get_format("e4m3"))))
    found = EmulatedGEMM.apply(a, b, None, config)
    expected = quantize(a.float() @ b.float().mT, "e4m3", out_dtype=torch.float32).bfloat16()
    assert torch.equal(found, expected)
