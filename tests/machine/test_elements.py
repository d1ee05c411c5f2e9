# SPDX-License-Identifier: Apache-2.0
"""Operators on elements, sorted and random ones: where each comes from, what is named, and errors that are seen."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import fmtsim
from fmtsim.machine import elementwise, indexing, random, sorting
from fmtsim.support.errors import ArgumentError, DeviceError
from tests.machine.cases import digest
from tests.machine.element_cases import element_cases
from tools.elementwise import SOURCE, functions, ptx

RECORD = json.loads((Path(__file__).parent / "data" / "h200.json").read_text("utf-8"))["cases"]


def test_every_function_is_compiled():
    with zipfile.ZipFile(SOURCE.with_suffix(".zip")) as archive:
        assert {name.partition(".")[0] for name in archive.namelist()} == set(functions())


def test_the_kept_ptx_is_the_compilers():
    with zipfile.ZipFile(SOURCE.with_suffix(".zip")) as archive:
        kept = {name: archive.read(name).decode() for name in archive.namelist()}
    try:
        made = ptx("mse_loss", functions()["mse_loss"])
    except DeviceError as error:
        pytest.skip(str(error))
    if not made["mse_loss.float32"].startswith(".version 9.0"):
        pytest.skip("another NVRTC than 13.0, whose functions differ: expm1f")
    assert all(kept[name] == text for name, text in made.items())


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "value"),
    [
        ("loss topk", sorting, "_BITONIC", 0),
        ("index scatter_add", indexing, "_positions", lambda x: torch.arange(x.numel()).flip(0).reshape(x.shape)),
        ("pool avg3s2p1", indexing, "rounding", lambda dtype: lambda x: x),
        ("multinomial 4x1000", random, "_UNROLL", 2),
        ("elements mse 2", elementwise, "_module", lambda name, dtype: MODULE(name, torch.float32)),
    ],
)
def test_planted_errors_are_seen(name, owner, attribute, value, monkeypatch):
    case = next(case for case in element_cases() if case.name == name)
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(owner, attribute, value)
        with fmtsim.simulate(strict=True):
            assert (digest(*case.call("cpu")) == RECORD[name]) is not planted


MODULE = elementwise._module


def test_a_bitonic_network_exchanges_equal_elements():
    # by hand: of eight ones the first three stay, and the network of 32 turns them round
    with fmtsim.simulate(strict=True):
        assert torch.topk(torch.ones(8), 3).indices.tolist() == [2, 1, 0]
        assert torch.topk(torch.ones(80), 40).indices.tolist() == list(range(40))


def test_folding_adds_windows_in_ascending_order():
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((1, 2 * 9, 30)).astype(np.float32))
    expected = np.zeros((2, 7, 8), np.float32)
    columns = x[0].reshape(2, 3, 3, 5, 6).numpy()
    for i, j in np.ndindex(5, 6):
        for a, b in np.ndindex(3, 3):
            expected[:, i + a, j + b] += columns[:, a, b, i, j]
    with fmtsim.simulate(strict=True):
        found = functional.fold(x, (7, 8), 3)[0].numpy()
    assert np.array_equal(found, expected)


def test_what_a_gpu_does_not_repeat_is_named():
    x, twice = torch.rand(4, 8), torch.tensor([0, 0, 0, 1])
    with fmtsim.simulate() as run:
        x.index_add(0, twice, x)
        x.scatter(0, twice[None].expand(1, 4) * 0, x[:1, :4]), x.scatter(1, twice[None], x[:1])
        torch.ones(4, 8).index_add(0, twice, torch.ones(4, 8))  # sums of small integers are exact in any order
        functional.adaptive_avg_pool2d(torch.rand(1, 1, 8, 8).requires_grad_(), 3).sum().backward()
    assert len(run.nondeterministic) == 3  # noqa: PLR2004
    assert run.exact["index_add"] == 1
    with fmtsim.simulate() as run:
        torch.zeros(3).index_add(0, torch.tensor([1]), torch.tensor([1e-40]))
    assert any("subnormal" in guess for guess in run.guess)
    with pytest.raises(ArgumentError, match="several values at one place"), fmtsim.simulate(strict=True):
        x.index_add(0, twice, x)


_ATEN = torch.ops.aten
PAIRS = """
atan2 hypot fmod mish_backward hardswish_backward hardsigmoid_backward remainder logaddexp xlogy fmax fmin maximum
floor_divide sigmoid_backward gelu_backward silu_backward tanh_backward logit_backward add mul sub div pow
"""
BROADCAST = {
    **{name: (getattr(_ATEN, name), 2, (), {}) for name in PAIRS.split()},
    "gelu_backward, tanh": (_ATEN.gelu_backward, 2, (), {"approximate": "tanh"}),
    "add, alpha": (_ATEN.add, 2, (), {"alpha": 0.3}),
    "softplus_backward": (_ATEN.softplus_backward, 2, (1.0, 20.0), {}),
    "lerp": (_ATEN.lerp, 2, (0.3,), {}),
    "mse_loss": (_ATEN.mse_loss, 2, (0,), {}),
    "lerp, tensors": (_ATEN.lerp, 3, (), {}),
    "clamp": (_ATEN.clamp, 3, (), {}),
    "addcmul": (_ATEN.addcmul, 3, (), {}),
    "addcmul, value": (_ATEN.addcmul, 3, (), {"value": 0.3}),
    "addcdiv": (_ATEN.addcdiv, 3, (), {"value": 0.3}),
    "mse_loss_backward": (_ATEN.mse_loss_backward, 3, (2,), {}),
    "smooth_l1_loss_backward": (_ATEN.smooth_l1_loss_backward, 3, (2, 0.3), {}),
    "huber_loss_backward": (_ATEN.huber_loss_backward, 3, (0, 0.3), {}),
    "binary_cross_entropy_backward": (_ATEN.binary_cross_entropy_backward, 3, (None, 0), {}),
}


def _operands(dtype):
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape):
        return (torch.rand(shape, generator=generator) * 0.8 + 0.1).to(dtype)

    row, column, one = numbers(3), numbers(4, 1), numbers()
    return [numbers(4, 3), row, column, one, numbers(1), row.expand(4, 3), one.expand(4, 3), numbers(3, 4).t()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BROADCAST)
def test_operands_that_broadcast_have_the_bits_of_expanded_ones(name, dtype):
    operator, count, numbers, options = BROADCAST[name]
    close = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 1e-2)}[dtype]
    for first in _operands(dtype):
        for second in _operands(dtype)[::-1]:
            tensors = [first, second, *_operands(dtype)[3:4]][:count]
            expanded = [x.contiguous() for x in torch.broadcast_tensors(*tensors)]
            if name == "binary_cross_entropy_backward" and second.shape != expanded[1].shape:
                with fmtsim.simulate(strict=True), pytest.raises(ArgumentError, match="larger than the first"):
                    operator(*tensors, *numbers, **options)  # torch writes as many numbers as the loss's operand has
                continue
            with fmtsim.simulate(strict=True):
                y = operator(*tensors, *numbers, **options)
                assert torch.equal(y, operator(*expanded, *numbers, **options))
            host = operator(*expanded, *numbers, **options)
            assert y.shape == host.shape and y.dtype == host.dtype
            torch.testing.assert_close(y, host, rtol=close[0], atol=close[1])


def test_dtypes_that_differ_are_promoted():
    g, y = torch.rand(4, 3), torch.rand(3).bfloat16()
    for operator in (_ATEN.tanh_backward, _ATEN.silu_backward, _ATEN.gelu_backward):
        with fmtsim.simulate(strict=True):
            results = operator(g, y), operator(y, g)
            expected = operator(g, y.float().expand(4, 3)), operator(y.float().expand(4, 3), g)
        assert all(
            torch.equal(*pair) and pair[0].dtype == torch.float32 for pair in zip(results, expected, strict=True)
        )


def test_strides_are_those_of_the_host():
    row, transposed = torch.rand(3), torch.rand(3, 4).t()
    for operator in (_ATEN.tanh_backward, _ATEN.silu_backward, _ATEN.hypot, lambda *x: torch.add(*x, alpha=0.3)):
        for dtype in (torch.float32, torch.bfloat16):
            for first in (row, row.expand(4, 3), transposed):
                operands = first.to(dtype).expand(first.shape), transposed.to(dtype)
                with fmtsim.simulate(strict=True):
                    strides = operator(*operands).stride()
                assert strides == operator(*operands).stride()


def test_jacobians_by_tanh():
    x = torch.tensor([1.0, 2.0, 3.0])
    with fmtsim.simulate(strict=True):
        jacobian = torch.func.jacrev(torch.tanh)(x)
        expected = torch.stack([_ATEN.tanh_backward(row, torch.tanh(x)) for row in torch.eye(3)])
    assert torch.equal(jacobian, expected)
    torch.testing.assert_close(jacobian, torch.func.jacrev(torch.tanh)(x))


def _adamw(p, g, m, v):
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    return _ATEN._fused_adamw_([p], [g], [m], [v], [], [torch.ones(())], **numbers, amsgrad=False, maximize=False)


def _attention(q, k, v):
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v)


def _attention_gradient(g, q, output):
    backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(g, q, q, q, output, torch.ones(1, 2, 8), 0.0, False)


_HEADS = (1, 2, 8, 16)
_OTHER_SHAPES = {  # operator, shapes that fit, what replaces which
    "layer_norm: weight": (lambda x, w: functional.layer_norm(x, (8,), w), [(4, 8), (8,)], {1: (3,)}),
    "rms_norm: weight": (lambda x, w: functional.rms_norm(x, (8,), w), [(4, 8), (8,)], {1: (3,)}),
    "group_norm: weight": (lambda x, w: _ATEN.native_group_norm(x, w, None, 2, 8, 4, 2, 1e-5), [(2, 8, 4), (8,)],
                           {1: (1,)}),
    "batch_norm: weight": (lambda x, w: _ATEN.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5),
                           [(2, 8, 4), (8,)], {1: (1,)}),
    "the gradient of a norm: g": (
        lambda g, x, s: _ATEN.native_layer_norm_backward(g, x, [8], s, s, None, None, [True] * 3),
        [(4, 8), (4, 8), (4, 1)], {0: (2, 8)}),
    "the gradient of a norm: rstd": (
        lambda g, x, s: _ATEN.native_layer_norm_backward(g, x, [8], x[:, :1], s, None, None, [True] * 3),
        [(4, 8), (4, 8), (4, 1)], {2: (2, 1)}),
    "the gradient of softmax: g": (lambda g, y: _ATEN._log_softmax_backward_data(g, y, 1, torch.float32),
                                   [(4, 8), (4, 8)], {0: (2, 8)}),
    "fused AdamW: gradient": (_adamw, [(8,)] * 4, {1: (4,)}),
    "fused AdamW: second moment": (_adamw, [(8,)] * 4, {3: (4,)}),
    "attention: v": (_attention, [_HEADS] * 3, {2: (1, 2, 5, 16)}),
    "attention: g": (_attention_gradient, [_HEADS] * 3, {0: (1, 2, 4, 16)}),
    "nll_loss: target": (lambda x, t: _ATEN.nll_loss_forward(x, t.long(), None, 1, -100), [(4, 5), (4,)], {1: (2,)}),
    "index_add: values": (lambda x, y: torch.index_add(x, 0, torch.arange(2), y), [(4, 3), (2, 3)], {1: (3, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("what", _OTHER_SHAPES)
def test_a_kernel_reads_no_further_than_its_operands(what):
    operator, shapes, others = _OTHER_SHAPES[what]
    for wrong in (False, True):
        with fmtsim.simulate():
            tensors = [torch.rand(others.get(i, shape) if wrong else shape) for i, shape in enumerate(shapes)]
            if wrong:
                with pytest.raises(ArgumentError, match=rf"{what} has shape .*; pass it in shape"):
                    operator(*tensors)
            else:
                operator(*tensors)
