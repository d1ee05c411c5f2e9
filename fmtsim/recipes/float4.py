# SPDX-License-Identifier: Apache-2.0
"""Recipes of four bits in floating point."""

import math
from dataclasses import replace
from typing import Any, Literal

from fmtsim.formats.block import with_block
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import PowerOfTwo, ScaleRule, Scaling, TensorScale
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.recipes.attention_config import AttentionConfig, attention_like
from fmtsim.recipes.build import BF16, BLACKWELL, CHAIN, E4M3, E8M0, FORWARD, HIGH, HOPPER, STOCHASTIC, cast, layer
from fmtsim.recipes.recipe import Recipe, Rule, Steps
from fmtsim.rounding.modes import Rounding, RoundingName
from fmtsim.spec.quantizer import Clamp, ClipMask, Differentiable, Hadamard, Quantizer

_TE = "Transformer Engine d0067d0, NVFP4BlockScaling"
_ZOO = "Transformer Engine d0067d0, custom_recipes/quantizer_factory_zoo.py"
_TETRAJET = "thu-ml/TetraJet-v2-NVFP4Training ca5953f, TJv2-base.yaml and kernels/csrc/quant_fp4.cu"
_AO = "pytorch/ao pull request 4851, four_over_six_mm, MAE, block scales to 256"
_INT4 = (
    "448 * 7 * 16 / 17, by which gradients are scaled, is another float32 in the source, a unit in the last place off"
)
_AGAIN = "the source rounds the forward pass's values to the tensor's dtype before they are cast again"
_NVIDIA = "NVIDIA, arXiv:2509.25149"
_QUARTET = "Castro et al., Quartet, arXiv:2505.14669; IST-DASLab/Quartet 00ccd38"
_QUARTET2 = "arXiv:2601.22813; IST-DASLab/Quartet-II 8776a90"
_FP4 = "Wang et al., arXiv:2501.17116"
_TE_SIGNS = "+++-+------+-+--"
_MASK = sum(1 << i for i, sign in enumerate(_TE_SIGNS) if sign == "-")
_QUEST_FACTOR = 2.92247856 / 6  # the clip of least error of a normal distribution, in standard deviations
_EDEN_RANGE = 17 / 16 * 0.93
_NVFP4_STOCHASTIC = Rounding(mode="stochastic", random_bits=8)


def _nvfp4() -> LinearConfig:
    rotation = (Hadamard(size=16, signs=_MASK, rounded=BF16),)
    return layer(
        cast("nvfp4"), cast("nvfp4_16x16"), cast("nvfp4", rounding=_NVFP4_STOCHASTIC),
        w_back=FORWARD,
        g_back=cast("nvfp4", rounding=_NVFP4_STOCHASTIC, transforms=rotation),
        x_back=cast("nvfp4", transforms=rotation),
        casts_weight=False,
    )  # fmt: skip


_GRADIENT = cast("nvfp4", rounding=_NVFP4_STOCHASTIC)


def _two_ways() -> tuple[Recipe, ...]:
    """Return recipes whose forward and backward passes differ in format: factories of Transformer Engine, torchao's."""
    mxfp8, row, plain, base = cast("mxfp8_e4m3_rceil"), cast("nvfp4_row"), cast("nvfp4"), _nvfp4()
    again, plain_again = (replace(quantizer, source="requantised") for quantizer in (mxfp8, plain))
    nvfp4_dx = replace(base.dgrad, b=plain_again)
    composer = layer(row, plain, mxfp8, w_back=again, x_back=again, casts_weight=False)
    fp8 = attention_like(layer(cast("e4m3", Scaling()), HIGH, cast("e5m2", Scaling())))
    x, w = cast("nvfp4_four_six_mae_256"), cast("nvfp4_16x16_four_six_mae_256")
    values: dict[str, Any] = {"w_back": FORWARD, "x_back": FORWARD}
    tj, turned = cast("nvfp4_double_scale"), (Hadamard(size=16, signs="random"),)
    tj_g = cast("nvfp4_double_scale", rounding=STOCHASTIC, transforms=turned)
    tj_again = replace(tj_g, source="requantised")
    # The factories of Transformer Engine's zoo, run on a CPU with stubs, give the quantiser of 90 operands; none
    # differs. ao_four_six follows the text of the pull request (its formats have Transformer Engine's bits); torchao's
    # own code was not run. tetrajet2: 127 of 131,072 scales and 1,873 of 2,097,152 elements of bfloat16 numbers differ
    # from the source's steps, which divide by 448, then by 6.
    recipes: tuple[tuple[str, str, LinearConfig, str, dict[str, Any]], ...] = (
        ("high_precision_fwd_mxfp8_bwd", _ZOO, layer(HIGH, HIGH, mxfp8, w_back=mxfp8, x_back=mxfp8),
         "MXFP8 of the originals in products of the backward pass", {}),
        ("mxfp8_fwd_nvfp4_bwd", _ZOO, replace(base, fprop=Gemm(a=mxfp8, b=mxfp8), dgrad=nvfp4_dx),
         "MXFP8 forward, gradients as in te_nvfp4 with weights cast again, from MXFP8",
         {"notes": "another version of the source, 0043a63, casts the original weights for dx, in blocks of 16x16"}),
        ("nvfp4_1d_weight", _ZOO, replace(base, fprop=Gemm(a=plain, b=plain), dgrad=nvfp4_dx),
         "te_nvfp4 with weights in blocks of 1x16, cast again for dx",
         {"notes": _AGAIN, "aliases": ("nvfp4_1d_double_quantized_weight",)}),
        ("mxfp8_fwd_high_precision_bwd", _ZOO, layer(mxfp8, mxfp8, HIGH, **values),
         "MXFP8 forward, gradients in high precision by the forward pass's values",
         {"aliases": ("mxfp8_fwd_dequantized_bwd",)}),
        ("nvfp4_row_scaled_fwd_high_precision_bwd", _ZOO, layer(row, plain, HIGH, **values),
         "NVFP4 with a scale a row of x forward, gradients in high precision by the forward pass's values",
         {"aliases": ("nvfp4_row_scaled_fwd_dequantized_bwd",)}),
        ("nvfp4_row_scaled_fwd_mxfp8_bwd", _ZOO, composer,
         "NVFP4 with a scale a row of x forward, MXFP8 of these values backward, in every layer", {"notes": _AGAIN}),
        ("composer2", _ZOO, layer(mxfp8, mxfp8, mxfp8),
         "nvfp4_row_scaled_fwd_mxfp8_bwd in experts, MXFP8 elsewhere, after Composer 2, arXiv:2603.24477",
         {"rules": (Rule(name=r"(^|\.)experts(\.|$)", use=composer, optional=True),), "notes": _AGAIN}),
        ("nvfp4_linear_fp8_dpa", _ZOO, base, "te_nvfp4 in every layer, attention in FP8 with scales of tensors",
         {"attention": fp8, "notes": "the source scales softmax weights and ds by their largest of the call before, in "
          "cuDNN's kernels (unverified), here by their largest"}),
        ("ao_four_six", _AO, layer(x, w, plain), "plain NVFP4 gradients, x and w of the originals, no rotations", {}),
        ("ao_four_six_high_precision", _AO, layer(x, w, HIGH, w_back=HIGH, x_back=HIGH),
         "gradients of the originals", {}),
        ("tetrajet2", _TETRAJET, layer(tj, tj, tj_g, w_back=tj_again, x_back=tj_again, dequantized=True),
         "E4M3 scales of 16 under float32 scales of 128, the forward values rotated and cast again",
         {"machine": CHAIN, "notes": "two divisions there make a scale: 0.1 % of scales and codes of bfloat16 numbers "
          "differ; without OsciReset and FP8 channels"}),
        ("ao_four_six_dequantized", _AO, layer(x, w, HIGH, **values), "gradients of the forward values", {}),
    )  # fmt: skip
    return tuple(
        Recipe(
            name=name,
            linear=replace(linear, casts_weight=source != _ZOO),
            source=f"{source}: {text}",
            **{"machine": BLACKWELL, **fields},
        )
        for name, source, linear, text, fields in recipes
    )


def _mxfp4(rule: ScaleRule, *, rotate: bool) -> LinearConfig:
    fmt = with_block(get_format("mxfp4"), None, rule)
    rotation = (Hadamard(size=32, signs="random"),) if rotate else ()
    gradient: dict[str, Any] = {"format": fmt, "rounding": STOCHASTIC if rotate else Rounding()}
    x = Quantizer(format=fmt)
    return layer(
        x, x, Quantizer(**gradient),
        g_back=Quantizer(**gradient, transforms=rotation), x_back=Quantizer(format=fmt, transforms=rotation),
    )  # fmt: skip


def _quartet() -> LinearConfig:
    quest = Scaling(
        block=(1, 32), statistic="std", factor=_QUEST_FACTOR, offset=1e-8, arithmetic="divide", power_of_two="floor",
        scale=E8M0,
    )  # fmt: skip
    forward = cast("e2m1", quest, "nearest_toward_zero", transforms=(Hadamard(size=32),), gradient=ClipMask())
    # 2^(floor(log2 amax) - 2) * 4/3: the largest element becomes at most 6, so that stochastic rounding never clips.
    unbiased = Scaling(block=(1, 32), top=4.0, arithmetic="divide", power_of_two="floor", multiplier=4 / 3)
    rotation = (Hadamard(size=32, signs="random"),)
    g = cast("e2m1", unbiased, "stochastic", transforms=rotation)
    again = cast("e2m1", unbiased, "stochastic", transforms=rotation, source="requantised")
    return layer(forward, forward, g, w_back=again, x_back=again)


def _quartet2(candidates: tuple[float, ...] = (1.0,)) -> LinearConfig:
    top = 448.0 if len(candidates) == 1 else 256.0
    tensor = TensorScale(top=top, order="quartet2")
    x = cast("e2m1", Scaling(block=(1, 16), scale=E4M3, tensor=tensor, candidates=candidates, metric="mse"))
    g, again = _eden(128, "random")
    return layer(x, x, g, w_back=again, x_back=again)


def _eden(size: int, signs: Literal["random"] | None) -> tuple[Quantizer, Quantizer]:
    """Return the quantisers of a gradient, and of what was quantised in the forward pass, under MS-EDEN."""
    eden = Scaling(
        block=(1, 16), top=6 / _EDEN_RANGE, scale=E4M3, scale_rounding="stochastic", eden=size,
        tensor=TensorScale(top=255.99, order="quartet2"),
    )  # fmt: skip
    g = cast("e2m1", eden, "nearest_away", transforms=(Hadamard(size=size, signs=signs),))
    return g, replace(g, source="requantised")


def _fouroversix() -> tuple[Recipe, ...]:
    """Return the configurations with which fouroversix trains, but those of IF4.

    IF4's are missing: neither a gradient's two tops nor MS-EDEN combine with two grids here.
    """
    # Held to the source's own `quantize` on a CPU, errors of candidates added from left to right: 65,536 scales and
    # 1,048,576 elements of each operand are equal, of gradients the scales, and elements up to the random choice of a
    # neighbour. Gradients of nvint4 and wgrad_nvint4 are the exception: 448 * 7 * 16 / 17 is 2951.5293 in the source
    # and 2951.5295 here, so that 96 of 65,536 block scales differ.

    def operand(element: str, mse: bool, top: float = 1.0, **fields: Any) -> Quantizer:
        tensor = TensorScale(top=256.0 if mse else None, order="fouroversix")
        scaling = Scaling(
            block=(1, 16), top=get_format(element).max * top, scale=E4M3, tensor=tensor,  # type: ignore[union-attr]
            candidates=(1.0, 1.5) if mse else (1.0,), metric="mse",
        )  # fmt: skip
        return cast(element, scaling, **fields)

    def products(element: str, mse: bool, wgrad: str) -> LinearConfig:
        rotated: dict[str, Any] = {"transforms": (Hadamard(size=16, signs=_MASK, rounded=BF16),)}
        g: dict[str, Any] = {
            "top": 16 / 17,
            "rounding": STOCHASTIC,
        }  # E4M3 rounds a scale by 17/16 at most: no clipping
        return layer(
            operand(element, mse), operand(element, mse), operand(element, mse, **g), dequantized=wgrad == "int4",
            g_back=operand(wgrad, mse, **g, **rotated), x_back=operand(wgrad, mse, **rotated),
        )  # fmt: skip

    x, (g, again) = operand("e2m1", True), _eden(16, None)
    return tuple(
        Recipe(
            name=f"fouroversix_{name}", machine=machine, linear=linear, notes=notes,
            rules=(Rule(head=True), Rule(last_blocks=1 / 6)),
            source=f"mit-han-lab/fouroversix dadfad6, scripts/train/configs/transformer_340M_{file}.json",
        )
        for name, file, machine, linear, notes in (
            ("nvfp4", "nvfp4", BLACKWELL, products("e2m1", False, "e2m1"), ""),
            ("4over6", "nvfp4_fouroversix", BLACKWELL, products("e2m1", True, "e2m1"),
             "both candidates of a gradient's block are rounded with the same random bits"),
            ("nvint4", "nvint4", CHAIN, products("int4", False, "int4"), _INT4),
            ("wgrad_nvint4", "nvfp4_wgradnvint4", CHAIN, products("e2m1", False, "int4"), _INT4),
            ("4over6_mseden", "nvfp4_fouroversix_mseden", BLACKWELL,
             layer(x, x, g, w_back=again, x_back=again), f"{_AGAIN}; kernel in Triton, unverified"),
        )
    )  # fmt: skip


def _fp4_ms(*, paper: bool) -> LinearConfig:
    power: PowerOfTwo | None = None if paper else "log2"
    eight = cast("e4m3", Scaling(power_of_two="ceil"))
    rounding: RoundingName = "nearest_even" if paper else "nearest_away"
    rows = Scaling(block=(1, None), power_of_two=power)
    columns = rows if paper else Scaling(block=(None, 1), power_of_two=power)
    clamp = Clamp(level=0.99, per="tensor" if paper else "row", compensate=paper)
    x = cast("e2m1", rows, rounding, transforms=(clamp,), then=eight)
    w = cast("e2m1", columns, rounding, gradient=Differentiable(k=5.0, cap=3.0), then=eight)
    g = cast("e5m2", Scaling(power_of_two="ceil"))
    return layer(x, w, g, w_back=FORWARD, g_back=FORWARD, x_back=FORWARD, fast=True)


_RULES = (Rule(head=True), Rule(last_blocks=0.15))

_NVFP4 = Scaling(block=(1, 16), scale=E4M3, arithmetic="reciprocal")
_QKV = cast("e2m1", _NVFP4)
_SAGE = AttentionConfig(
    q=_QKV, k=_QKV, v=_QKV, offset=math.log2(448 * 6), smooth_k=True, smooth_q=128,
    p=cast("e2m1", replace(_NVFP4, arithmetic="divide", eps_rule="inverse")),
)  # fmt: skip

RECIPES = (
    Recipe(
        name="te_nvfp4",
        machine=BLACKWELL,
        linear=_nvfp4(),
        rules=_RULES,
        aliases=("nvfp4", "nvfp4_pretrain"),
        source=f"{_TE}; {_NVIDIA}: the last 15 % of the blocks and the head in bfloat16",
    ),
    Recipe(name="te_nvfp4_all", machine=BLACKWELL, linear=_nvfp4(), source=f"{_TE}: every layer"),
    *(
        Recipe(
            name=name,
            machine=BLACKWELL,
            linear=layer(cast(x), cast(w), _GRADIENT, w_back=FORWARD, casts_weight=False),
            source=f"{_TE} with nvfp4_4over6={scope!r}, its scales to 256, errors by {metric}, without rotations",
        )
        for name, scope, metric, x, w in (
            ("four_six", "all", "MAE", "nvfp4_four_six_mae_256", "nvfp4_16x16_four_six_mae_256"),
            ("four_six_mse", "all", "MSE", "nvfp4_four_six_mse_256", "nvfp4_16x16_four_six_mse_256"),
            ("four_six_weights", "weights", "MAE", "nvfp4", "nvfp4_16x16_four_six_mae_256"),
            ("four_six_acts", "activations", "MAE", "nvfp4_four_six_mae_256", "nvfp4_16x16"),
        )
    ),
    *_two_ways(),
    *_fouroversix(),
    Recipe(
        name="nvfp4_switch",
        machine=BLACKWELL,
        linear=_nvfp4(),
        rules=(Rule(steps=Steps(first=0.82)), *_RULES),
        source=f"{_NVIDIA}: te_nvfp4, and bfloat16 in the last 18 % of the steps",
    ),
    Recipe(
        name="mxfp4",
        machine=BLACKWELL,
        linear=_mxfp4("ceil", rotate=True),
        rules=_RULES,
        source=f"{_NVIDIA}, section 5: MXFP4 with scales rounded up, rotations of 32 and stochastic gradients",
        notes="the source's vector of signs is not published: they are random here",
    ),
    Recipe(
        name="mxfp4_rne",
        machine=BLACKWELL,
        linear=_mxfp4("floor", rotate=False),
        source="OCP MX v1.0: every operand cast as it says",
    ),
    Recipe(
        name="quartet",
        machine=BLACKWELL,
        linear=_quartet(),
        rules=(Rule(head=True),),
        source=_QUARTET,
        notes="the code's rounding of ties (toward zero); the sign of a zero is kept here, the code gives -0",
    ),
    Recipe(name="quartet2", machine=BLACKWELL, linear=_quartet2(), rules=(Rule(head=True),), source=_QUARTET2),
    Recipe(
        name="quartet2_4over6",
        machine=BLACKWELL,
        linear=_quartet2((1.0, 1.5)),
        rules=(Rule(head=True),),
        source=f"{_QUARTET2}: forward scales that map a block to 6 or to 4, whichever errs less",
    ),
    Recipe(
        name="fp4_ms",
        machine=HOPPER,
        linear=_fp4_ms(paper=True),
        rules=(Rule(head=True),),
        variant="paper",
        source=f"{_FP4}: rows and output channels, exact scales, compensated clamping",
    ),
    Recipe(
        name="fp4_ms_code",
        machine=HOPPER,
        linear=_fp4_ms(paper=False),
        rules=(Rule(head=True),),
        variant="code",
        source=f"{_FP4}; MS-AMP 9746ea8: power-of-two scales, one an input channel of w, clamping without compensation",
        notes="the code's table rounds ties toward +Inf; here they go away from zero, which differs for negative ties. "
        "Scales follow its arithmetic in x's dtype; the code itself casts x and w to bfloat16 first",
    ),
    # preprocess_qkv of the source's api.py gives the same q, k and products (714,248 numbers on a CPU, 0 differ, with
    # means in torch; Triton's means of 128 rows in float16 are its own). The FP4 kernels were compared with a numpy
    # version of their source text alone: unverified.
    Recipe(
        name="sage3",
        attention=_SAGE,
        source="thu-ml/SageAttention d1a57a5, sageattn3: api.py, fp4_quantization_4d.cu, softmax_fused.h",
        notes="elements of p are divided by block scales before these are rounded to E4M3; the source makes them by "
        "exp2 of a block's largest score, and sums 128 queries in Triton's order; kernels unverified",
    ),
)
