# SPDX-License-Identifier: Apache-2.0
"""Recipes of eight bits in floating point."""

from dataclasses import replace
from functools import partial
from typing import Literal

from fmtsim.formats.block import FP32, scaled, with_block
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import SCALE_RULES, History, PowerOfTwo, ScaleRule, Scaling
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.recipes.attention_config import AttentionConfig, flash_attention_3
from fmtsim.recipes.build import (
    BF16,
    BLACKWELL,
    CHAIN,
    E4M3,
    FORWARD,
    HOPPER,
    STOCHASTIC,
    SavedActivations,
    cast,
    layer,
)
from fmtsim.recipes.recipe import LossScale, Recipe, Replacement, Rule
from fmtsim.recipes.system import Level, OptimizerConfig
from fmtsim.spec.quantizer import Quantizer

_TE = "Transformer Engine d0067d0"
_MX_TRAINING = "Rouhani et al., Microscaling Data Formats for Deep Learning, arXiv:2310.10537 (details unverified)"
_MX_NOTES = "E3M2 with scales by floor, ties to even, both directions from the original; the head as any layer"
_AO = "torchao 36027d8"
_FP8LM = "Peng et al., FP8-LM, arXiv:2310.18313"
_MSAMP = "MS-AMP 9746ea8"
_FA3 = "Shah et al., FlashAttention-3, arXiv:2407.08608, section 3.3"
_FA3_CODE = "Dao-AILab/flash-attention 0251105a"
_DEEPSEEK = "DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3"

# Output projections of attention: Llama, torch, GPT-2, BERT, this package's GPT, DeepSeek.
_GATING = r"(^|\.)(gate|router|gating|shared_expert_gate)(\.|$)"  # not gate_proj
_BEHIND_ATTENTION = r"(o_proj|out_proj|attn\.c_proj|attention\.(out|output\.dense)|wo)$"

_DELAYED = Scaling(history=History(length=1024), empty="previous")
_TENSOR = Scaling()
_POWER = Scaling(power_of_two="ceil", empty="one")

_INTEL = "Fishman et al., arXiv:2409.12517; Megatron-DeepSpeed 20029cf"
_SMOOTHED: tuple[tuple[str, Literal["token", "channel"], Literal["paper", "code"]], ...] = (
    ("intel_2t", "token", "code"), ("intel_2t_paper", "channel", "paper"),
)  # fmt: skip

# torchao 36027d8, float8_linear.py: weights are not cast, and forward adds the bias to the rounded output.
_float8_linear = partial(layer, fast=True, casts_weight=False, bias_after_rounding=True)

_FP8LM_STATES = OptimizerConfig(state="fp8lm")


def _same_codes(x: Quantizer, w: Quantizer, g: Quantizer, *, fast: bool = True) -> LinearConfig:
    """Return a layer that casts each tensor once; the backward products take the transposed codes."""
    return layer(x, w, g, w_back=FORWARD, g_back=FORWARD, x_back=FORWARD, fast=fast)


def _hybrid(scaling: Scaling) -> LinearConfig:
    """Return the hybrid of E4M3 forward and E5M2 gradients, each tensor cast once."""
    codes = _same_codes(cast("e4m3", scaling), cast("e4m3", scaling), cast("e5m2", scaling))
    return replace(codes, casts_weight=False)


def _te_block() -> LinearConfig:
    row = Scaling(block=(1, 128), power_of_two="ceil")
    tile = Scaling(block=(128, 128), power_of_two="ceil")
    x, w = cast("e4m3", row), cast("e4m3", tile)
    return layer(x, w, x, w_back=FORWARD, casts_weight=False)


def _fp8lm() -> LinearConfig:
    history = History(length=16, immediate=16)
    delayed = Scaling(power_of_two="ceil", history=history, empty="previous")
    config = _same_codes(cast("e4m3", delayed), cast("e4m3", _POWER), cast("e5m2", delayed))
    gradient = Quantizer(format=scaled(E4M3, (None, None), "rceil"))  # a power of two from the gradient itself
    return replace(config, wgrad=replace(config.wgrad, out=gradient))


def _intel() -> LinearConfig:
    history = History(length=1024, refresh_every=1024)

    def window(top: float) -> Scaling:
        return Scaling(top=top, power_of_two="ceil", history=history)

    forward, backward = cast("e4m3_ieee", window(240.0)), cast("e5m2", window(57344.0))
    gradient = cast("e5m2", window(57344.0), STOCHASTIC)
    return layer(forward, forward, gradient, w_back=backward, g_back=FORWARD, x_back=backward)


def _deepseek(power: bool = False, cache: bool = False) -> LinearConfig:
    rule: PowerOfTwo | None = "ceil" if power else None
    row = Scaling(block=(1, 128), eps=1e-4, arithmetic="reciprocal", power_of_two=rule)
    tile = Scaling(block=(128, 128), eps=1e-4, arithmetic="reciprocal", power_of_two=rule)
    x, w, g = cast("e4m3", row), cast("e4m3", tile), cast("e4m3", row)
    again = cast("e4m3", row, source="requantised")
    if cache:  # 1x128 along the features, which is the outer axis of the product over tokens
        cached = Scaling(block=(128, 1), eps=1e-4, arithmetic="reciprocal", power_of_two="ceil")
        again = cast("e5m6", cached, then=cast("e4m3", row))
    # DeepSeek-V3 9b4e9788, inference/model.py: linear adds the bias to fp8_gemm's bfloat16 result
    return layer(x, w, g, w_back=FORWARD, x_back=again, bias_after_rounding=True)


def _coat() -> LinearConfig:
    scaling = Scaling(arithmetic="divide", eps=1e-10, eps_rule="sum", scale=BF16)
    weights = replace(scaling, scale=FP32, input_scale=True)
    return _same_codes(cast("e4m3", scaling), cast("e4m3", weights), cast("e5m2", scaling), fast=False)


def _gaudi() -> LinearConfig:
    biases = tuple(2.0**power for power in (-8, -4, 0, 4))

    def tensor(backoff: float) -> Scaling:
        return Scaling(top=240.0 * backoff, arithmetic="divide", power_of_two="log2", allowed=biases, scale=BF16)

    return layer(cast("e4m3_ieee", tensor(0.25)), cast("e4m3_ieee", tensor(0.5)), cast("e5m2", Scaling(top=57344.0)))


def _rows() -> Quantizer:
    return cast("e4m3", Scaling(block=(1, None), arithmetic="double", power_of_two="ceil", eps=1e-12))


def _ao_tensor(name: str) -> Quantizer:
    return cast(name, Scaling(arithmetic="double", eps=1e-12))


def _ao_rows_hp() -> LinearConfig:
    tensor = cast("e4m3", Scaling(arithmetic="double", power_of_two="ceil", eps=1e-12))
    row, high = _rows(), cast(None)
    return _float8_linear(row, row, row, w_back=tensor, g_back=high, x_back=high)


def _mx(rule: ScaleRule) -> LinearConfig:
    operand = Quantizer(format=with_block(get_format("mxfp8_e4m3"), None, rule))
    return layer(operand, operand, operand, bias_after_rounding=True)  # torchao 0.18, moe_training/mxfp8_linear.py


_MXFP8 = cast("mxfp8_e4m3_rceil")
_ROWS = Scaling(block=(2, None), arithmetic="divide", offset=1e-7)
_SAGE = AttentionConfig(
    q=cast("int8", _ROWS, "nearest_away"), k=cast("int8", replace(_ROWS, block=(32, None)), "nearest_away"),
    v=cast("e4m3", Scaling(block=(1, None))), p=cast("e4m3"), offset=8.807, smooth_k=True,
    q_tile=(16, 8, 1), k_tile=(128, 8, 2),
)  # fmt: skip

RECIPES = (
    Recipe(
        name="te_delayed",
        machine=HOPPER,
        linear=_hybrid(_DELAYED),
        source=f"{_TE}, DelayedScaling: hybrid, history of 1024, max",
        notes="the history rolls at every call; the source rolls once a forward context and once a backward pass",
    ),
    Recipe(name="te_current", machine=HOPPER, linear=_hybrid(_TENSOR), source=f"{_TE}, Float8CurrentScaling: hybrid"),
    Recipe(
        name="te_block",
        machine=HOPPER,
        linear=_te_block(),
        source=f"{_TE}, Float8BlockScaling: E4M3, power-of-two scales",
    ),
    Recipe(
        name="te_mxfp8",
        machine=BLACKWELL,
        linear=layer(*(cast("mxfp8_e4m3_rceil"),) * 3, casts_weight=False),
        aliases=("mxfp8",),
        multiple=32,  # quantizer.cpp of the source: "MXFP8 requires tensor dims that are divisible by 32"
        source=f"{_TE}, MXFP8BlockScaling: E4M3, both directions from the original",
    ),
    Recipe(
        name="fp8lm",
        machine=HOPPER,
        linear=_fp8lm(),
        aliases=("msamp",),
        optimizer=_FP8LM_STATES,
        reduction="fp8lm",
        levels=(
            Level(name="O1", optimizer=OptimizerConfig(state="fp8lm_o1"), reduction="fp8lm"),
            Level(name="O2", optimizer=_FP8LM_STATES, reduction="fp8lm"),
            Level(name="O3", optimizer=_FP8LM_STATES, reduction="fp8lm", gather="e4m3"),
        ),
        source=f"{_FP8LM}, section 2; {_MSAMP}: power-of-two scales, windows of 16 for x and g",
        notes="paper and code agree in the products; they differ in the collectives (reduction msamp is the code's). "
        "Level O2 unless another is asked for. Weights that O3 gathers in E4M3 are the codes that O2's products make "
        "of the master weights, so both train with the same bits; the bytes on each rank are others",
    ),
    # The source's class lets the gradient through Smooth-SwiGLU's scale unless DETACH_SCALED_SWIGLU is true, as its
    # script for FP8 (run_llama2_7b_fp8.sh) sets it. The recipe follows the script: the function does not depend on the
    # scale, so that both gradients are equal but for roundings.
    *(
        Recipe(
            name=name,
            machine=CHAIN,
            linear=_intel(),
            replace=(Replacement(kind="swiglu", by="SmoothSwiGLU", per=per, optional=True),),
            optimizer=OptimizerConfig(state="intel_2t"),
            variant=variant,
            source=f"{_INTEL}: window of 1024, refreshed once a window",
        )
        for name, per, variant in _SMOOTHED
    ),
    Recipe(
        name="coat",
        machine=HOPPER,
        linear=_coat(),
        activations=SavedActivations(),
        optimizer=OptimizerConfig(state="coat"),
        source="Xi et al., COAT, arXiv:2410.19313; NVlabs/COAT 80ec99f",
        notes="scales of x and g are bfloat16 numbers, those of w numbers of its dtype",
    ),
    Recipe(
        name="deepseek_v3",
        machine=HOPPER,
        linear=_deepseek(),
        rules=(
            Rule(head=True),
            Rule(name=_GATING, optional=True),
            Rule(name=_BEHIND_ATTENTION, use=_deepseek(power=True, cache=True), optional=True),
        ),
        optimizer=OptimizerConfig(state="deepseek_v3"),
        source=f"{_DEEPSEEK}; arithmetic of DeepGEMM 54e2261",
        notes="head and gating of experts stay in high precision; inputs of layers behind attention are kept in E5M6 "
        "with power-of-two scales",
    ),
    Recipe(
        name="gaudi",
        machine=CHAIN,
        linear=_gaudi(),
        source="Intel Neural Compressor 9b47d09: Gaudi 2, scales of the hardware",
    ),
    Recipe(
        name="ao_tensorwise",
        machine=HOPPER,
        linear=_float8_linear(_ao_tensor("e4m3"), _ao_tensor("e4m3"), _ao_tensor("e5m2")),
        source=f"{_AO}, float8 tensorwise",
    ),
    # Powers of two are exact here, and so they are in ao_rowwise_gw_hp, fp8lm, intel_2t and fp4_ms. The sources take
    # exp2(floor(log2(r))) of r = top / amax with a float32 logarithm, which rounds up to the next integer where r lies
    # just below a power of two. On a CPU that happens to at most 38 of the 8,388,608 float32 amaxes of an octave, next
    # above 448 / 2^k: for amax = nextafter(1.75 * 2^30) torchao's scale is 4194304, and here 8388608. It happens to no
    # bfloat16 or float16 amax. On a GPU the last bit of its log2 decides, which is not recorded. For amaxes below
    # 2^-118 the factors of MS-AMP and of Intel's code are infinite; here they are 2^127 at most.
    Recipe(
        name="ao_rowwise",
        linear=_float8_linear(*(_rows(),) * 3),
        machine=HOPPER,
        source=f"{_AO}, float8 rowwise, powers of two",
    ),
    Recipe(
        name="ao_rowwise_gw_hp",
        machine=HOPPER,
        linear=_ao_rows_hp(),
        source=f"{_AO}, float8 rowwise_with_gw_hp: weight gradients in high precision",
    ),
    # ao_mxfp8_even from amax 1.9375 * 2^127 on: the source's rounding carries into infinity, which makes scale code
    # 255, a block of NaN. Here such a block has the exponent of 2^128: scale code 247, and elements up to 256.
    *(
        Recipe(name=f"ao_mxfp8_{rule}", machine=BLACKWELL, linear=_mx(rule), source=f"{_AO}, to_mx {rule.upper()}")
        for rule in SCALE_RULES
        if rule != "amax"
    ),
    *(
        Recipe(
            name=name,
            machine=BLACKWELL,
            linear=layer(cast("mxfp6_e3m2"), cast(weights), cast("mxfp6_e3m2")),
            source=f"{_MX_TRAINING}: {what}",
            notes=_MX_NOTES,
        )
        for name, weights, what in (
            ("mxfp6", "mxfp6_e3m2", "every operand in MXFP6"),
            ("mxfp6_w4", "mxfp4", "weights in MXFP4, the rest in MXFP6"),
        )
    ),
    Recipe(
        name="unit_scaling",
        machine="cdna3.mfma",
        linear=layer(cast("e4m3fnuz"), cast("e4m3fnuz"), cast("e5m2fnuz")),
        source="Blake et al., arXiv:2303.11257; graphcore-research/unit-scaling a7b5b3c: casts without scales",
        replace=(Replacement(kind="operations", by="UnitScaled"),),
        notes="the library's E4M3 and E5M2 have the grids of e4m3fnuz and e5m2fnuz; tau is that of u-muP",
    ),
    # muS: gradients are those of the function itself, which under a mean loss are too small for E5M2. In a GPT of width
    # 128 in fmtsim train 99.9 % of them were 0 after 60 steps; with the loss scale 7 % are.
    Recipe(
        name="mu_s",
        machine=HOPPER,
        linear=layer(cast("e4m3"), cast("e4m3"), cast("e5m2", overflow="saturate")),
        rules=(Rule(head=True),),
        source="Narayan et al., arXiv:2502.05967: static scale 1; embedding, head and norms in bfloat16",
        replace=(Replacement(kind="operations", by="MuScaled"),),
        loss_scale=LossScale(initial=65536.0, interval=None),
        notes="the source does not say how gradients of a mean loss reach E5M2's range; the loss scale is fmtsim's",
    ),
    Recipe(
        name="fa3",
        machine=HOPPER,
        attention=flash_attention_3(),
        variant="paper",
        source=f"{_FA3}: a scale for each 128 queries or keys, incoherent processing; the offset of {_FA3_CODE}",
        notes="no backward pass in FP8: gradients are high precision, straight through the roundings",
    ),
    Recipe(
        name="fa3_code",
        machine=HOPPER,
        attention=flash_attention_3(rotate=False, blocks=False),
        variant="code",
        source=f"{_FA3_CODE}: a scale for each head, rotations left to the caller",
        notes="where heads of q share one of k and v, the code has one scale for those of q as well; here each has one",
    ),
    Recipe(
        name="fa4",
        machine=BLACKWELL,
        attention=AttentionConfig(p=cast("bf16"), exp2=(10, 4, 1)),
        source="Dao-AILab/flash-attention 0251105a, flash_attn/cute: heads of 128, two CTAs, no causal mask (else 16)",
        notes="not modelled: one fused multiply-add of score, scale and maximum, maxima that stay while they grow by "
        "less than 2^8, ex2.approx, NaN scores that become weights of 0; unverified on a GPU",
    ),
    # Codes and scales of q and k are those of the source's Triton kernels in Triton's interpreter on a CPU (615,312
    # numbers, 0 differ). Unverified: the scales of v to the last bit, the attention kernel.
    Recipe(
        name="sage2",
        machine=CHAIN,
        attention=_SAGE,
        source="thu-ml/SageAttention d1a57a5, sageattn_qk_int8_pv_fp8_cuda_sm90, qk_quant_gran='per_thread'",
        notes="the source rounds x / s = 0.49999997 to 1, by adding 0.5 in float32; its scales of v differ from "
        "1 / (448 / amax) in last bits; it takes keys in ascending order; kernels unverified",
    ),
    Recipe(
        name="mxfp8_attention",
        attention=AttentionConfig(q=_MXFP8, k=_MXFP8, v=_MXFP8, p=_MXFP8),
        source=f"{_TE}, MXFP8 DotProductAttention, blocks along the summed axis; the softmax is cuDNN's (unverified)",
        notes="cuDNN gives p one fixed scale, 16: replace(attention, p=Quantizer(format='e4m3'), offset=4)",
    ),
)
