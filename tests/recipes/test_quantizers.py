# SPDX-License-Identifier: Apache-2.0
"""Every quantiser of every recipe equals its source's formulas, bit for bit, on bfloat16 numbers."""

from dataclasses import replace

import pytest
import torch

from fmtsim.gemm.layers.quantize_operand import quantize_operand
from fmtsim.recipes import get_recipe
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.hadamard_matrix import random_signs, sign_bits
from fmtsim.scaling.history import DelayedScale
from fmtsim.scaling.scaled_cast import scales
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import Keys
from tests.support import recipe_oracle as oracle
from tests.support.bits import assert_same_bits
from tests.support.operands import normal

ELEMENT_KEY, SCALE_KEY, SIGN_KEY = RandomKey(11, 3), RandomKey(12, 5), RandomKey(13, 7)
DRAWS = Keys(ELEMENT_KEY, SCALE_KEY, SIGN_KEY)


def matrix(rows=48, columns=256, seed=0):
    """bfloat16 numbers: normal, rows of very different size, outliers, zeros, a block of zeros, a row of one number."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * torch.logspace(-6, 3, rows)[:, None]
    x[:, 7] *= 40
    x[torch.rand(rows, columns, generator=g) < 0.05] = 0
    x[3, 32:64] = 0
    x[4] = 0.75
    x[5, ::2] = -448.0
    return x.bfloat16().float()


def signs(size):
    return torch.where(sign_bits(random_signs(size, SIGN_KEY), size), -1.0, 1.0)


def made(name, operand, x, rule=None):
    recipe = get_recipe(name)
    config = recipe.linear if rule is None else recipe.rules[rule].use
    quantizer = config.operands[operand]
    delayed = None
    if quantizer.scaling is not None and quantizer.scaling.history is not None:
        delayed = DelayedScale(quantizer)
        delayed.record(x.abs().amax())  # the scale of this tensor is in force
        for _ in range(quantizer.scaling.history.refresh_every - 1):
            delayed.record(x.abs().amax())
    return quantize_operand(x, quantizer, DRAWS, delayed)


def check(operand, expected):
    """Compare elements, scales of blocks that are not zero, and values."""
    elements, scale, values = expected[:3]
    assert_same_bits(operand.elements.float() + 0.0, elements + 0.0)  # the sign of zeros is not compared
    assert_same_bits(operand.values(torch.float32) + 0.0, values + 0.0)
    sizes = operand.block
    filled = torch.nn.functional.max_pool2d(
        elements.abs()[None], sizes, sizes, ceil_mode=True
    )[0] > 0  # fmt: skip
    assert_same_bits(operand.scale[filled], scale[filled])


TENSOR_E4M3 = ("te_current", "te_delayed")
CASES = [
    *((name, o, lambda x: oracle.te_current(x, "e4m3", 448.0)) for name in TENSOR_E4M3 for o in ("x_f", "w_f")),
    *((name, "g_d", lambda x: oracle.te_current(x, "e5m2", 57344.0)) for name in TENSOR_E4M3),
    *(("te_block", o, lambda x: oracle.te_current(x, "e4m3", 448.0, (1, 128), True)) 
      for o in ("x_f", "g_d", "g_w", "x_w")),
    ("te_block", "w_f", lambda x: oracle.te_current(x, "e4m3", 448.0, (128, 128), True)),
    *(("te_mxfp8", o, oracle.te_mxfp8) for o in ("x_f", "w_f", "g_d", "w_d", "g_w", "x_w")),
    ("te_nvfp4", "x_f", lambda x: oracle.te_nvfp4(x, (1, 16))),
    ("te_nvfp4", "w_f", lambda x: oracle.te_nvfp4(x, (16, 16))),
    ("te_nvfp4", "x_w", lambda x: oracle.te_nvfp4(oracle.te_rht(x), (1, 16))),
    *(("mxfp4", o, lambda x: oracle.ao_mx(x, "ceil", "e2m1", 2, 1, 6.0)) for o in ("x_f", "w_f", "w_d")),
    ("mxfp4", "x_w", lambda x: oracle.ao_mx(oracle.rotate(x, 32, signs(32)), "ceil", "e2m1", 2, 1, 6.0)),
    *(("mxfp4_rne", o, lambda x: oracle.ao_mx(x, "floor", "e2m1", 2, 1, 6.0)) for o in ("x_f", "w_f", "g_d", "x_w")),
    *(("quartet", o, lambda x: oracle.quest(oracle.rotate(x, 32))) for o in ("x_f", "w_f")),
    *(("quartet", o, lambda x: oracle.quartet_backward(oracle.rotate(x, 32, signs(32)), ELEMENT_KEY))
      for o in ("g_d", "w_d", "g_w", "x_w")),
    *(("quartet2", o, oracle.quartet2_forward) for o in ("x_f", "w_f")),
    *(("quartet2_4over6", o, lambda x: oracle.quartet2_forward(x, True)) for o in ("x_f", "w_f")),
    *(("quartet2", o, lambda x: oracle.eden(oracle.rotate(x, 128, signs(128)), SCALE_KEY))
      for o in ("g_d", "w_d", "g_w", "x_w")),
    ("fp4_ms", "x_f", lambda x: oracle.fp4_ms(oracle.occ(x, 0.99, False), (1, None))),
    ("fp4_ms", "w_f", lambda x: oracle.fp4_ms(x, (1, None))),
    ("fp4_ms", "g_d", lambda x: oracle.fp8lm(x, "e5m2", 57344.0)),
    ("fp4_ms_code", "x_f", lambda x: oracle.fp4_msamp(oracle.occ(x, 0.99, True), 1)),
    ("fp4_ms_code", "w_f", lambda x: oracle.fp4_msamp(x, 0)),
    *(("fp8lm", o, lambda x: oracle.fp8lm(x, "e4m3", 448.0)) for o in ("x_f", "w_f")),
    ("fp8lm", "g_d", lambda x: oracle.fp8lm(x, "e5m2", 57344.0)),
    *(("intel_2t", o, lambda x: oracle.fp8lm(x, "e4m3_ieee", 240.0)) for o in ("x_f", "w_f")),
    *(("intel_2t", o, lambda x: oracle.fp8lm(x, "e5m2", 57344.0)) for o in ("x_w", "w_d")),
    ("coat", "x_f", lambda x: oracle.coat(x, "e4m3", 448.0)),
    ("coat", "w_f", lambda x: oracle.coat(x, "e4m3", 448.0, x.dtype)),
    ("coat", "g_d", lambda x: oracle.coat(x, "e5m2", 57344.0)),
    *(("deepseek_v3", o, lambda x: oracle.deepseek(x, (1, 128))) for o in ("x_f", "g_d", "g_w", "x_w")),
    ("deepseek_v3", "w_f", lambda x: oracle.deepseek(x, (128, 128))),
    *((f"halo{n}", o, lambda x: oracle.halo(x, "int8", 127.0)) for n in (0,) for o in ("x_f", "w_f", "g_d")),
    *((f"halo{n}", o, lambda x: oracle.halo(oracle.rotate(x, 256), "int8", 127.0))
      for n in (1, 2) for o in ("x_f", "w_f")),
    ("halo1", "g_d", lambda x: oracle.halo(x, "int8", 127.0)),
    ("halo2", "g_w", lambda x: oracle.halo(x, "int8", 127.0)),
    ("halo0_fp8", "x_f", lambda x: oracle.halo(x, "e4m3", 448.0)),
    ("halo1_fp8", "w_f", lambda x: oracle.halo(oracle.rotate(x, 256), "e4m3", 448.0)),
    *(("halo0_fp6", o, lambda x: oracle.halo(x, "e3m2", 28.0)) for o in ("x_f", "w_f", "g_d")),
    ("halo2_fp6", "x_f", lambda x: oracle.halo(oracle.rotate(x, 256), "e3m2", 28.0)),
    *(("int8_mixed", o, oracle.int8_rows) for o in ("x_f", "w_f", "g_d", "w_d", "g_w", "x_w")),
    *(("switchback", o, oracle.int8_rows) for o in ("x_f", "g_d")),
    ("switchback", "w_f", lambda x: oracle.halo(x, "int8", 127.0)),
    ("bitnet", "x_f", lambda x: oracle.int8_rows(x, 1e-5)),
    ("bitnet", "w_f", oracle.bitnet_weights),
    ("bitnet_paper", "x_f", oracle.bitnet_paper_tokens),
    ("bitnet_paper", "w_f", oracle.bitnet_paper_weights),
    ("ao_int4_qat", "w_f", oracle.int4_groups),
    ("gaudi", "x_f", lambda x: oracle.gaudi(x, 0.25)),
    ("gaudi", "w_f", lambda x: oracle.gaudi(x, 0.5)),
    *(("ao_tensorwise", o, lambda x: oracle.ao(x, "e4m3", 448.0)) for o in ("x_f", "w_f")),
    ("ao_tensorwise", "g_d", lambda x: oracle.ao(x, "e5m2", 57344.0)),
    *(("ao_rowwise", o, lambda x: oracle.ao(x, "e4m3", 448.0, (1, None), True)) for o in ("x_f", "g_d", "x_w")),
    *(("ao_rowwise_gw_hp", o, lambda x: oracle.ao(x, "e4m3", 448.0, (1, None), True)) for o in ("x_f", "w_f", "g_d")),
    ("ao_rowwise_gw_hp", "w_d", lambda x: oracle.ao(x, "e4m3", 448.0, (None, None), True)),
    *((f"ao_mxfp8_{rule}", o, lambda x, rule=rule: oracle.ao_mx(x, rule))
      for rule in ("floor", "ceil", "even", "rceil") for o in ("x_f", "g_w")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "operand", "source"), CASES, ids=[f"{n}-{o}-{i}" for i, (n, o, _) in enumerate(CASES)]
)
def test_a_quantiser_is_its_sources(name, operand, source):
    whole_axis = "halo" in name and name[4] != "0"  # rotations of 384 numbers do not exist
    for shape in ((48, 256),) if whole_axis else ((48, 256), (40, 384)):
        x = matrix(*shape, seed=len(name))
        check(made(name, operand, x), source(x))


OF_THE_DTYPE = ("ao_int4_qat", "bitnet", "coat", "fp4_ms_code", "halo0", "halo0_fp6", "halo0_fp8", "int8_mixed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "operand", "source"),
    [case for case in CASES if case[0] in OF_THE_DTYPE],
    ids=[f"{n}-{o}" for n, o, _ in CASES if n in OF_THE_DTYPE],
)
def test_a_quantiser_that_looks_at_the_dtype_is_its_sources(name, operand, source, dtype):
    x = normal(200, 1504, seed=5) / 32
    x[3] = 3e-11  # a float32 scale below 1e-12, where torchao floors the inverse alone
    x = x.to(dtype)
    check(made(name, operand, x), source(x))


def test_clamping_keeps_the_dtype_that_logarithms_are_taken_in():
    """MS-AMP's quantile clipping returns x's dtype: in bfloat16 48.25 * 2^-3 is 6, in float32 it would be above."""
    x = torch.tensor([[48.25] * 128 + [3.0] * 128])
    assert made("fp4_ms_code", "x_f", x.bfloat16()).values(torch.float32)[0, 128] == 4  # 3 / 8 is nearest to 0.5
    assert made("fp4_ms_code", "x_f", x).values(torch.float32)[0, 128] == 0  # 3 / 16 is nearest to 0
    x = normal(128, 1024, seed=3).bfloat16()
    check(made("fp4_ms_code", "x_f", x), oracle.fp4_msamp(oracle.occ(x, 0.99, True), 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_small_ternary_weights_are_their_mean(dtype):
    w = torch.full((4, 32), 7e-6, dtype=dtype)  # 0.7 of the least divisor
    assert_same_bits(made("bitnet", "w_f", w).values(torch.float32), w.float())
    assert made("bitnet_paper", "w_f", w).values(torch.float32).unique().item() == float(oracle.f32(1e-5))
    check(made("bitnet", "w_f", w / 2), oracle.bitnet_weights(w / 2))  # 0.35 of it: zeros


@pytest.mark.parametrize("operand", ["g_d", "g_w"])
def test_stochastic_gradients_of_nvfp4(operand):
    x = matrix()
    turned = oracle.te_rht(x) if operand == "g_w" else x
    eight = Rounding(mode="stochastic", random_bits=8)
    found = made("te_nvfp4", operand, x)
    check(found, oracle.te_nvfp4(turned, (1, 16), eight, ELEMENT_KEY))
    nearest = oracle.te_nvfp4(turned, (1, 16))
    assert not torch.equal(found.elements.float(), nearest[0]) and torch.equal(found.scale, nearest[1])


def test_stochastic_gradients_of_intel_2t_and_mxfp4():
    x = matrix()
    found, (elements, scale, _) = made("intel_2t", "g_d", x), oracle.fp8lm(x, "e5m2", 57344.0)
    assert_same_bits(found.scale, scale)
    assert_same_bits(
        found.elements.float(), oracle.rounded(x * torch.div(1.0, scale), "e5m2", "stochastic", ELEMENT_KEY)
    )
    assert not torch.equal(found.elements.float(), elements)
    _, scale, _ = oracle.ao_mx(x, "ceil", "e2m1", 2, 1, 6.0)
    assert_same_bits(made("mxfp4", "g_d", x).scale[x.abs().unflatten(1, (-1, 32)).amax(-1) > 0],
              scale[x.abs().unflatten(1, (-1, 32)).amax(-1) > 0])  # fmt: skip


@pytest.mark.parametrize("operand", ["x_w", "x_f", "w_f"])
def test_deepseeks_layers_behind_attention(operand):
    """Power-of-two scales; inputs kept in E5M6 by 1x128 along the features, then cast again along tokens."""
    x = matrix(256, 128)
    found = made("deepseek_v3", operand, x, rule=2)
    if operand == "x_w":
        kept = oracle.deepseek(x, (128, 1), True, "e5m6", top_of("e5m6"))[2]
        check(found, oracle.deepseek(kept, (1, 128), True))
    else:
        check(found, oracle.deepseek(x, (1, 128) if operand == "x_f" else (128, 128), True))


def top_of(name):
    from fmtsim.formats.registry import get_format

    return float(get_format(name).max)


@pytest.mark.parametrize("name", ["rollout_fp8", "rollout_fp8_pow2"])
def test_weights_and_activations_of_a_rollout(name):
    """NeMo-RL's 128x128 of weights and vLLM's 1x128 of activations, over ragged edges."""
    recipe, x, power = get_recipe(name), matrix(136, 200), name.endswith("pow2")

    def weights(part):
        amax = part.abs().max()
        scale = torch.exp2(-torch.ceil(torch.log2(amax / 448))) if power else torch.div(torch.tensor(448.0), amax)
        return oracle.rounded((part * scale).clamp(-448, 448), "e4m3"), 1 / scale

    def tokens(part):
        amax = part.abs().max().clamp(min=1e-10)
        if power:
            scale = torch.exp2(torch.floor(torch.log2(448.0 / amax)))
            return oracle.rounded((part * scale).clamp(-448, 448), "e4m3"), 1 / scale
        return oracle.rounded(part / (amax / 448.0), "e4m3"), amax / 448.0

    check(quantize_operand(x, recipe.w), oracle.each_block(x, (128, 128), weights))
    check(quantize_operand(x, recipe.x), oracle.each_block(x, (1, 128), tokens))


def test_tokens_with_a_zero_point():
    x = matrix()
    assert_same_bits(made("ao_int4_qat", "x_f", x).values(torch.float32), oracle.int8_tokens_with_zero(x)[2] + 0.0)


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_masked_bits_are_masked(bits):
    x = matrix()
    for operand in ("x_f", "w_f", "g_d", "w_d", "g_w", "x_w"):
        assert_same_bits(made(f"e8m{bits}", operand, x).values(torch.float32), oracle.mask_bits(x, bits))


@pytest.mark.parametrize(
    ("name", "operand", "fmt"),
    [("unit_scaling", "x_f", "e4m3fnuz"), ("unit_scaling", "g_d", "e5m2fnuz"), ("mu_s", "x_f", "e4m3"),
     ("mu_s", "g_w", "e5m2"), ("amp_bf16", "x_f", "bf16")],
)  # fmt: skip
def test_casts_without_scales(name, operand, fmt):
    x = matrix() * 50
    found = made(name, operand, x)
    assert found.scale is None
    assert_same_bits(found.values(torch.float32), oracle.rounded(x, fmt))
    if fmt == "e5m2fnuz":  # the library's FPFormat(5, 2): 57344 and 2^-17
        assert top_of(fmt) == 57344 and oracle.rounded(torch.tensor([2.0**-17]), fmt) == 2.0**-17


def test_amp_fp16_and_tf32():
    x = matrix() * 1e3
    assert_same_bits(made("amp_fp16", "g_d", x).values(torch.float32), x.half().float())
    y = normal(64, 64, seed=1)
    assert_same_bits(made("tf32", "x_f", y).values(torch.float32), oracle.mask_bits(y, 10))
    away = ((y.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)
    assert_same_bits(made("tf32_rna", "x_f", y).values(torch.float32), away)


def test_logarithmic_operands():
    x = matrix()
    x = torch.where(x == 0, x.abs().amax(1, keepdim=True) / 16, x)
    found, (_, _, values) = made("lns", "x_f", x).values(torch.float32), oracle.lns(x)
    # Powers of two to the k / 8 are not float32; a value may differ in its last place, a code (9 %) may not.
    assert torch.allclose(found, values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("operand", ["x_f", "w_f"])
def test_quartets_clip_mask(operand):
    x = matrix()
    expected = oracle.quest(oracle.rotate(x, 32))[3]
    found = made("quartet", operand, x).slope.float()
    assert_same_bits(found, expected)
    assert 0 < float((expected == 0).float().mean()) < 0.1


def test_the_paper_clamps_and_keeps_the_rest_and_the_code_does_not():
    x = matrix()
    rest = made("fp4_ms", "x_f", x).rest
    assert_same_bits(rest, x - oracle.occ(x, 0.99, False))
    assert 0 < float((rest != 0).float().mean()) <= 0.02
    assert made("fp4_ms_code", "x_f", x).rest is None


def test_the_slope_of_a_weight():
    w = matrix(16, 64)
    y = w * torch.div(torch.tensor(6.0), w.abs().amax(1, keepdim=True))
    found = made("fp4_ms", "w_f", w).slope
    assert torch.allclose(found.double(), oracle.dge(y), rtol=2e-4, atol=0)  # torch.pow near the middle of an interval


def torchao_s(amax):
    """torchao's _round_scale_down_to_power_of_2 of the float32 number that amax_to_scale gives."""
    return torch.exp2(torch.floor(torch.log2((448.0 / amax.double().clamp(min=1e-12)).float())))


def factors(name, amax):
    scaling = replace(get_recipe(name).linear.operands["w_f"].scaling, history=None)
    return 1 / scales(amax.float().reshape(-1, 1), scaling, 448.0).scale.flatten()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "source"), [("ao_rowwise", torchao_s), ("fp8lm", lambda amax: oracle.msamp_factor(amax.float(), 448.0))]
)
def test_logarithms_of_sources_carry_for_no_amax_of_16_bits(name, source, dtype):
    amax = torch.arange(1, int(torch.tensor(torch.inf, dtype=dtype).view(torch.int16)), dtype=torch.int16).view(dtype)
    expected = source(amax)
    assert torch.equal(factors(name, amax), expected.clamp(max=2.0**127))
    assert torch.equal(expected.isinf(), (amax.double() < 2.0**-118) & (expected > 2.0**127))


def test_logarithms_of_sources_carry_for_a_few_float32_amaxes():
    """docs/recipes.md, "Where recipes differ": powers of two are exact here."""
    one = torch.nextafter(torch.tensor(1.75 * 2.0**30), torch.tensor(torch.inf)).reshape(1)
    assert (1 / factors("ao_rowwise", one)).item() == 8388608 and (1 / torchao_s(one)).item() == 4194304
    for power in (-30, -6, 5, 17, 30, 60, 120):
        first = int(torch.tensor(1.75 * 2.0**power).view(torch.int32))
        amax = torch.arange(first - 300, first + 301, dtype=torch.int32).view(torch.float32)
        differs = factors("ao_rowwise", amax) != torchao_s(amax)
        assert not differs[:301].any() and int(differs.sum()) <= 38 and not differs[-200:].any()


def test_even_exponents_of_the_largest_amaxes_are_codes():
    x = torch.full((1, 32), 3.4e38)
    found = made("ao_mxfp8_even", "x_f", x)
    assert float(found.scale) == 2.0 ** (247 - 127) and oracle.ao_mx(x, "even")[1].isnan().all()
    assert (found.elements.float() == 256).all()
    below = torch.full((1, 32), 1.93 * 2.0**127)
    check(made("ao_mxfp8_even", "x_f", below), oracle.ao_mx(below, "even"))
