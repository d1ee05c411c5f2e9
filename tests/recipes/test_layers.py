# SPDX-License-Identifier: Apache-2.0
"""Layers under a recipe: which tensors each product multiplies, and what is undone afterwards.

Products are sums in no particular order, so results are held to float64 products of the oracle's operands by 2e-6 of
the largest result; a wrong operand is off by 1e-3 and more.
"""

import pytest
import torch

from fmtsim.casts.arguments import random_keys
from fmtsim.gemm.layers.config import OPERANDS
from fmtsim.gemm.layers.emulated_gemm import EmulatedGEMM
from fmtsim.gemm.layers.keys import random_stream
from fmtsim.nn import convert
from fmtsim.recipes import get_recipe
from fmtsim.scaling.hadamard_matrix import random_signs, sign_bits
from fmtsim.spec.cast import RandomKey
from tests.support import recipe_oracle as oracle
from tests.support.operands import normal

SEED = 5
T, N, K = 64, 96, 128


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w, grad = (torch.randn(*shape, generator=g) for shape in ((T, K), (N, K), (T, N)))
    x[:, 3] *= 20
    return [t.bfloat16().float() for t in (x, w * 0.1, grad * 1e-3)]


def run(name, x, w, grad, rule=None):
    recipe = get_recipe(name)
    config = recipe.linear if rule is None else recipe.rules[rule].use
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = EmulatedGEMM.apply(x, w, None, config, SEED)
    y.backward(grad)
    return y.detach(), x.grad, w.grad


def key(use):
    """The key of a use of random numbers, as docs of ``random_stream`` number them."""
    return RandomKey(*random_keys(True, random_stream(SEED, use), None, torch.device("cpu")).tolist())


def element_key(operand):
    return key(OPERANDS.index(operand))


def signs(size):
    return torch.where(sign_bits(random_signs(size, key(19)), size), -1.0, 1.0)


def product(a, b):
    """``a b^T`` in float64."""
    return a.double() @ b.double().mT


def close(found, expected):
    assert float((found.double() - expected).abs().max()) <= 2e-6 * float(expected.abs().max())


def values(result):
    return result[2]


def e4(t, *how, **named):
    return values(oracle.te_current(t, "e4m3", 448.0, *how, **named))


def test_te_current_casts_each_tensor_once():
    x, w, g = tensors()
    y, dx, dw = run("te_current", x, w, g)
    xq, wq, gq = e4(x), e4(w), values(oracle.te_current(g, "e5m2", 57344.0))
    close(y, product(xq, wq))
    close(dx, product(gq, wq.mT))
    close(dw, product(gq.mT, xq.mT))


def test_te_block_takes_the_originals_along_tokens():
    x, w, g = tensors()
    y, dx, dw = run("te_block", x, w, g)
    wq = e4(w, (128, 128), True)
    close(y, product(e4(x, (1, 128), True), wq))
    close(dx, product(e4(g, (1, 128), True), wq.mT))
    close(dw, product(e4(g.mT.contiguous(), (1, 128), True), e4(x.mT.contiguous(), (1, 128), True)))


def test_te_nvfp4_rotates_only_along_tokens_and_keeps_the_codes_of_weights():
    x, w, g = tensors()
    y, dx, dw = run("te_nvfp4_all", x, w, g)
    eight = get_recipe("te_nvfp4").linear.dgrad.a.rounding
    wq = values(oracle.te_nvfp4(w, (16, 16)))
    close(y, product(values(oracle.te_nvfp4(x, (1, 16))), wq))
    close(dx, product(values(oracle.te_nvfp4(g, (1, 16), eight, element_key("g_d"))), wq.mT))
    gt, xt = (oracle.te_rht(t.mT.contiguous()) for t in (g, x))
    close(dw, product(values(oracle.te_nvfp4(gt, (1, 16), eight, element_key("g_w"))),
                      values(oracle.te_nvfp4(xt, (1, 16)))))  # fmt: skip


def mx(t):
    return values(oracle.te_mxfp8(t.contiguous()))


def fp4(t, block=(1, 16)):
    return values(oracle.te_nvfp4(t.contiguous(), block))


def four_six(t, block=(1, 16)):
    return values(oracle.te_four_six(t.contiguous(), block))


def test_te_high_precision_forward_and_mxfp8_backward():
    x, w, g = tensors()
    y, dx, dw = run("high_precision_fwd_mxfp8_bwd", x, w, g)
    close(y, product(x, w))
    close(dx, product(mx(g), mx(w.mT)))
    close(dw, product(mx(g.mT), mx(x.mT)))


@pytest.mark.parametrize("name", ["mxfp8_fwd_nvfp4_bwd", "nvfp4_1d_weight"])
def test_te_nvfp4_backward_casts_the_forward_weights_again(name):
    x, w, g = tensors()
    y, dx, dw = run(name, x, w, g)
    cast, eight = (mx if name == "mxfp8_fwd_nvfp4_bwd" else fp4), get_recipe("te_nvfp4").linear.dgrad.a.rounding
    close(y, product(cast(x), cast(w)))
    again = fp4(cast(w).mT)
    close(dx, product(values(oracle.te_nvfp4(g, (1, 16), eight, element_key("g_d"))), again))
    assert not torch.equal(again, fp4(w.mT))
    assert torch.equal(dw, run("te_nvfp4_all", x, w, g)[2])


@pytest.mark.parametrize("name", ["mxfp8_fwd_dequantized_bwd", "nvfp4_row_scaled_fwd_dequantized_bwd"])
def test_te_backward_in_high_precision_takes_the_forward_values(name):
    x, w, g = tensors()
    y, dx, dw = run(name, x, w, g)
    xq, wq = (mx(x), mx(w)) if name[0] == "m" else (oracle.te_nvfp4_rows(x), fp4(w))
    close(y, product(xq, wq))
    close(dx, product(g, wq.mT))
    close(dw, product(g.mT, xq.mT))


@pytest.mark.parametrize(("name", "rule"), [("nvfp4_row_scaled_fwd_mxfp8_bwd", None), ("composer2", 0)])
def test_te_rows_of_nvfp4_become_mxfp8_backward(name, rule):
    x, w, g = tensors()
    y, dx, dw = run(name, x, w, g, rule)
    xq, wq = oracle.te_nvfp4_rows(x), fp4(w)
    assert not torch.equal(xq, fp4(x))
    close(y, product(xq, wq))
    close(dx, product(mx(g), mx(wq.mT)))
    close(dw, product(mx(g.mT), mx(xq.mT)))
    for one, other in zip(run("composer2", x, w, g), run("te_mxfp8", x, w, g), strict=True):
        assert torch.equal(one, other)  # layers that are no experts


def test_te_nvfp4_layers_beside_attention_in_fp8():
    """Current scales of tensors: E4M3 for q, k, v and the weights, E5M2 for do and ds."""
    recipe = get_recipe("nvfp4_linear_fp8_dpa")
    assert recipe.linear == get_recipe("te_nvfp4_all").linear
    casts = {name: q for name, q in recipe.attention.operands.items() if q.source == "original"}
    assert {name: q.format.name for name, q in casts.items()} == {
        **dict.fromkeys("qkvp", "e4m3"), **dict.fromkeys(("dv.do", "dp.do", "dq.ds", "dk.ds"), "e5m2")
    }  # fmt: skip
    assert {q.scaling for q in casts.values()} == {get_recipe("te_current").linear.fprop.a.scaling}


def test_torchao_four_over_six_has_three_backward_passes():
    x, w, g = tensors()
    xq, wq = four_six(x), four_six(w, (16, 16))
    assert not torch.equal(xq, fp4(x))
    backward = {
        "": (product(fp4(g), four_six(w.mT, (16, 16))), product(fp4(g.mT), four_six(x.mT))),
        "_high_precision": (product(g, w.mT), product(g.mT, x.mT)),
        "_dequantized": (product(g, wq.mT), product(g.mT, xq.mT)),
    }
    for name, (expected_dx, expected_dw) in backward.items():
        y, dx, dw = run(f"ao_four_six{name}", x, w, g)
        close(y, product(xq, wq))
        close(dx, expected_dx)
        close(dw, expected_dw)


@pytest.mark.parametrize(
    ("name", "forward", "wgrad"),
    [("nvfp4", "e2m1", "e2m1"), ("nvint4", "int4", "int4"), ("wgrad_nvint4", "e2m1", "int4")],
)
def test_fouroversix_rounds_gradients_without_clipping(name, forward, wgrad):
    x, w, g = tensors()
    y, dx, dw = run(f"fouroversix_{name}", x, w, g)

    def cast(t, element=forward):
        return values(oracle.fouroversix(t.contiguous(), element, 6.0 if element == "e2m1" else 7.0))

    def gradient(t, element, operand):
        elements, _, numbers = oracle.fouroversix(
            t.contiguous(), element, 6.0 if element == "e2m1" else 7.0, "stochastic", element_key(operand), True
        )
        assert float(elements.abs().max()) == (6.0 if element == "e2m1" else 7.0)
        return numbers

    close(y, product(cast(x), cast(w)))
    close(dx, product(gradient(g, forward, "g_d"), cast(w.mT)))
    gt, xt = (oracle.te_rht(t.mT.contiguous()) for t in (g, x))
    close(dw, product(gradient(gt, wgrad, "g_w"), cast(xt, wgrad)))


def test_fouroversix_corrects_every_block_under_eden():
    x, w, g = tensors()
    y, dx, dw = run("fouroversix_4over6_mseden", x, w, g)
    xq, wq = (values(oracle.te_four_six(t, (1, 16), "mse")) for t in (x, w))
    close(y, product(xq, wq))

    def again(t, name):
        use = key(12 + OPERANDS.index(name))
        return values(oracle.eden(oracle.rotate(t.contiguous(), 16), use, 16))

    close(dx, product(again(g, "g_d"), again(wq.mT, "w_d")))
    close(dw, product(again(g.mT, "g_w"), again(xq.mT, "x_w")))


def test_tetrajet_casts_rotated_forward_values_again_under_windows_of_128():
    x, w, g = tensors()
    x, g = torch.cat([x, x.flip(0)]), normal(128, 128, seed=3).bfloat16().float() * 2**-9
    w = torch.cat([w, w[:32] * 2])
    x[:, ::7], x[3, 16:32] = x[:, ::7] * 8, 0
    y, dx, dw = run("tetrajet2", x, w, g)

    def double(t, mode="nearest_even", use=None):
        scaled, s8, decode = torch.zeros_like(t), torch.zeros(len(t), 8), torch.zeros(len(t), 1)
        for i, row in enumerate(t[:, None]):
            _, s8[i], _ = oracle.fouroversix(row, "e2m1", 6.0)
            decode[i] = 1 / torch.div(torch.tensor(2688.0), row.abs().max())
            scaled[i] = row * torch.div(torch.tensor(1.0), s8[i] * decode[i]).clamp(
                max=oracle.FLT_MAX
            ).repeat_interleave(16)
        q = oracle.rounded(scaled, "e2m1", mode, use)
        return (q.double() * s8.double().repeat_interleave(16, 1) * decode.double()).float()

    def again(t, name):
        return double(oracle.rotate(t.contiguous(), 16, signs(16)), "stochastic", element_key(name))

    xq, wq = double(x), double(w)
    close(y, product(xq, wq))
    close(dx, product(again(g, "g_d"), again(wq.mT, "w_d")))
    close(dw, product(again(g.mT, "g_w"), again(xq.mT, "x_w")))


def test_deepseek_casts_the_forward_codes_again():
    x, w, g = tensors()
    y, dx, dw = run("deepseek_v3", x, w, g)
    xq, wq = values(oracle.deepseek(x, (1, 128))), values(oracle.deepseek(w, (128, 128)))
    close(y, product(xq, wq))
    close(dx, product(values(oracle.deepseek(g, (1, 128))), wq.mT))
    again = values(oracle.deepseek(xq.mT.contiguous(), (1, 128)))
    close(dw, product(values(oracle.deepseek(g.mT.contiguous(), (1, 128))), again))
    original = values(oracle.deepseek(x.mT.contiguous(), (1, 128)))
    assert not torch.equal(again, original)


def test_quartet_multiplies_rotated_tensors_and_turns_gradients_back():
    x, w, g = tensors()
    y, dx, dw = run("quartet", x, w, g)
    (xq, mx), (wq, mw) = (oracle.quest(oracle.rotate(t, 32))[2:] for t in (x, w))
    close(y, product(xq, wq))

    def again(t, name):
        return values(oracle.quartet_backward(oracle.rotate(t.mT.contiguous() if name != "g_d" else t, 32, signs(32)),
                                              element_key(name)))  # fmt: skip

    dxh = product(again(g, "g_d"), again(wq, "w_d")).float()
    dwh = product(again(g, "g_w"), again(xq, "x_w")).float()
    close(dx, oracle.rotate(dxh * mx, 32, inverse=True).double())
    close(dw, oracle.rotate(dwh * mw, 32, inverse=True).double())


def test_quartet2_casts_the_forward_tensors_again_under_eden():
    x, w = (t[:, :K] for t in tensors()[:2])
    g = normal(128, 128, seed=3).bfloat16().float() * 2**-9
    x, w = torch.cat([x, x.flip(0)]), torch.cat([w, w[:32] * 2])
    y, dx, dw = run("quartet2", x, w, g)
    xq, wq = (values(oracle.quartet2_forward(t)) for t in (x, w))
    close(y, product(xq, wq))

    def again(t, name):
        use = key(12 + OPERANDS.index(name))
        return values(oracle.eden(oracle.rotate(t.contiguous(), 128, signs(128)), use))

    close(dx, product(again(g, "g_d"), again(wq.mT, "w_d")))
    close(dw, product(again(g.mT, "g_w"), again(xq.mT, "x_w")))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_halo_rotates_features_and_then_tokens(level):
    x, w, g = tensors()
    y, dx, dw = run(f"halo{level}", x, w, g)

    def turned(t):
        return oracle.rotate(t, K) if level else t

    def back(t):
        return oracle.rotate(t.float(), K, inverse=True).double() if level else t

    def int8(t):
        return values(oracle.halo(t, "int8", 127.0))

    xq, wq, gq = int8(turned(x)), int8(turned(w)), int8(g)
    close(y, product(xq, wq))
    close(dw, back(product(gq.mT, xq.mT)))
    if level == 2:
        over_tokens = int8(oracle.rotate(g.mT.contiguous(), T).mT.contiguous())
        inner = product(over_tokens, wq.mT).float()
        close(dx, back(oracle.rotate(inner.mT.contiguous(), T, inverse=True).mT.contiguous()))
    else:
        close(dx, back(product(gq, wq.mT)))


def test_fp4_ms_compensates_and_scales_the_gradient_of_weights():
    x, w, g = tensors()
    y, dx, dw = run("fp4_ms", x, w, g)
    clamped = oracle.occ(x, 0.99, False)
    xq = values(oracle.fp4_ms(clamped, (1, None)))
    wq = values(oracle.fp4_ms(w, (1, None)))
    gq = values(oracle.fp8lm(g, "e5m2", 57344.0))
    close(y, product(xq, wq) + product(x - clamped, wq))
    close(dx, product(gq, wq.mT))
    slope = oracle.dge(w * torch.div(torch.tensor(6.0), w.abs().amax(1, keepdim=True)))
    assert torch.allclose(dw.double(), product(gq.mT, xq.mT) * slope, rtol=1e-3, atol=1e-9)  # torch.pow, as in slope


def test_weight_gradients_in_high_precision():
    x, w, g = tensors()
    for name in ("ao_rowwise_gw_hp", "switchback"):
        close(run(name, x, w, g)[2], product(g.mT, x.mT))
    rows = values(oracle.ao(w.mT.contiguous(), "e4m3", 448.0, (None, None), True))
    close(run("ao_rowwise_gw_hp", x, w, g)[1], product(values(oracle.ao(g, "e4m3", 448.0, (1, None), True)), rows))


def test_int8_mixed_quantises_along_every_contraction():
    x, w, g = tensors()
    y, dx, dw = run("int8_mixed", x, w, g)

    def int8(t):
        return values(oracle.int8_rows(t.contiguous()))

    close(y, product(int8(x), int8(w)))
    close(dx, product(int8(g), int8(w.mT)))
    close(dw, product(int8(g.mT), int8(x.mT)))


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("name", ["halo1", "halo2", "halo2_fp8"])
@pytest.mark.parametrize(("t", "n", "k"), [(4, 8, 0), (0, 8, 8), (4, 0, 8)])
def test_rotations_of_whole_axes_take_empty_ones(name, t, n, k):
    layer = convert(torch.nn.Linear(k, n), name)
    x = torch.ones(t, k, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, layer.bias.expand(t, n)) or (t and k)
    assert not x.grad.any() and not layer.weight.grad.any() and layer.bias.grad.tolist() == [float(t)] * n
