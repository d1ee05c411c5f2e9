# SPDX-License-Identifier: Apache-2.0
"""The table of recipes for training. Each record names the version of the source that it follows.

Recipes of 16 bits and more, and of integers and logarithmic numbers, are here; float8.py and float4.py have the others.
"""

from dataclasses import replace
from typing import Literal

from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.recipes import float4, float8
from fmtsim.recipes.build import BLACKWELL, CHAIN, FORWARD, HIGH, HOPPER, cast, layer
from fmtsim.recipes.recipe import LossScale, Recipe
from fmtsim.recipes.system import OptimizerConfig
from fmtsim.rounding.modes import RoundingName
from fmtsim.spec.quantizer import Hadamard, Quantizer, Sparsity

_AMP = "PyTorch 0202916b, torch/amp/grad_scaler.py and the CPU and CUDA kernels behind it"
_BACK = "Lee et al., To FP8 and Back Again, arXiv:2405.18710 (abstract and secondary sources; details unverified)"
_REDUCED = {
    "operands of a bfloat16 model with their low mantissa bits masked off": ("e8m3", "e8m4", "e8m5"),
    "operands of a bfloat16 model with fewer exponents: those beyond the range become its largest number": (
        "e5m7", "e6m7", "e7m7",
    ),
}  # fmt: skip
_TF32 = "NVIDIA Ampere whitepaper; truncation of raw float32 operands as recorded on an H200 (docs/evidence.md)"
_SPARSE = Quantizer(transforms=(Sparsity(tiles=True),))


def _whole(
    name: str, rounding: RoundingName = "nearest_even", out: str | None = None, dequantized: bool = False
) -> LinearConfig:
    """Return a layer whose operands, and results, are all of one format."""
    gemm = Gemm(
        a=cast(name, rounding=rounding), b=cast(name, rounding=rounding), out=cast(out), dequantized=dequantized
    )
    return LinearConfig(fprop=gemm, dgrad=gemm, wgrad=gemm)


_WIDE = (
    Recipe(
        name="fp32",
        machine=HOPPER,
        linear=LinearConfig(),
        source="IEEE 754-2019",
        notes="float32 products, sums in no order",
    ),
    Recipe(
        name="ao_sparse24",
        machine=HOPPER,
        linear=LinearConfig(fprop=Gemm(b=_SPARSE), dgrad=Gemm(b=FORWARD)),
        source="torchao 36027d8, sparsity.training: weights 2:4 sparse along both axes, pruned in every forward pass",
        notes="of magnitudes, while torch's kernel takes its default rule (unverified); activations are dense",
    ),
    Recipe(name="tf32", machine=HOPPER, linear=_whole("tf32", "toward_zero"), source=_TF32),
    Recipe(
        name="tf32_rna",
        machine=HOPPER,
        linear=_whole("tf32", "nearest_away"),
        source="PTX ISA, cvt.rna.tf32.f32: operands rounded in software, ties away from zero",
    ),
    Recipe(
        name="amp_bf16",
        machine=HOPPER,
        linear=_whole("bf16", out="bf16"),
        autocast="bfloat16",
        aliases=("bf16",),
        source=_AMP,
    ),
    Recipe(
        name="amp_fp16",
        machine=HOPPER,
        linear=_whole("fp16", out="fp16"),
        autocast="float16",
        loss_scale=LossScale(),
        aliases=("fp16",),
        source=_AMP,
    ),
    Recipe(
        name="amp_fp16_static",
        machine=HOPPER,
        linear=_whole("fp16", out="fp16"),
        autocast="float16",
        loss_scale=LossScale(initial=1024.0, interval=None),
        source="Micikevicius et al., arXiv:1710.03740, section 3.2: a constant loss scale",
    ),
    *(
        Recipe(
            name=name, machine=HOPPER, linear=_whole(name, "toward_zero", dequantized=True), source=_BACK, notes=notes
        )
        for notes, names in _REDUCED.items()
        for name in names
    ),
)


_HALO = "Ashkboos et al., HALO, arXiv:2501.02625; IST-DASLab/HALO d8c1dc9"
_LECTURE = "gpu-mode/lectures 7cb40f6, lecture 30; torchao 36027d8, int8 mixed-precision training"
_TENSOR = Scaling(arithmetic="divide")
_HALO_TENSOR = replace(_TENSOR, input_scale=True)
_HALO_NOTES = (
    "for 16-bit tensors scales are of their dtype and quotients float32, as torch.compile makes them of the source; "
    "run eagerly it rounds quotients as well. Rotated tensors are float32 here, and of x's dtype in the source"
)
_ROW = Scaling(block=(1, None), arithmetic="reciprocal", input_scale=True, eps=1e-12, eps_rule="inverse")


def _halo(level: int, name: str) -> LinearConfig:
    rotation = (Hadamard(size=None),) if level else ()
    operand, gradient = cast(name, _HALO_TENSOR, transforms=rotation), cast(name, _HALO_TENSOR)
    if level < 2:
        return layer(operand, operand, gradient, w_back=FORWARD, g_back=FORWARD, x_back=FORWARD)
    rotated = cast(name, _HALO_TENSOR, transforms=(Hadamard(size=None, axis="outer", undo=True),))
    return layer(operand, operand, rotated, w_back=FORWARD, g_back=gradient, x_back=FORWARD)


def _bitnet(*, paper: bool) -> LinearConfig:
    ternary = Scaling(statistic="mean_abs", factor=1.0, arithmetic="reciprocal", eps=1e-5, eps_rule="scale")
    tokens = Scaling(block=(1, None), eps=1e-5)
    if not paper:  # the least divisor is no scale: values are made with the scale as it is, in the tensor's dtype
        ternary = replace(ternary, arithmetic="divide", eps_rule="inverse", input_scale=True)
        tokens = replace(_ROW, eps=1e-5)
    return layer(cast("int8", tokens), cast("int2", ternary), HIGH, w_back=FORWARD, x_back=FORWARD)


def _rows() -> Quantizer:
    return cast("int8", _ROW)


_BITNETS: tuple[tuple[str, Literal["paper", "code"], str], ...] = (
    (
        "bitnet",
        "code",
        f"{_LECTURE}: bitnet.py divides by scales of 1e-5 at least, and multiplies by the scales themselves",
    ),
    ("bitnet_paper", "paper", "its authors' training tips, figure 3: scales of 1e-5 at least both ways"),
)

_INTEGERS = (
    *(
        Recipe(
            name=f"halo{level}{suffix}",
            machine=machine,
            linear=_halo(level, element),
            source=f"{_HALO}: {title}, level {level}",
            notes=_HALO_NOTES,
        )
        for suffix, element, title, machine in (
            ("", "int8", "INT8", HOPPER),
            ("_fp8", "e4m3", "FP8", HOPPER),
            ("_fp6", "e3m2", "FP6 (E3M2, unverified)", BLACKWELL),
        )
        for level in range(3)
    ),
    Recipe(
        name="int8_mixed", machine=HOPPER, linear=layer(*(_rows(),) * 3), source=f"{_LECTURE}: every operand by rows"
    ),
    Recipe(
        name="switchback",
        machine=HOPPER,
        linear=layer(_rows(), cast("int8", _TENSOR), _rows(), g_back=HIGH, x_back=HIGH),
        source="Wortsman et al., arXiv:2304.13013: weight gradients in high precision",
    ),
    *(
        Recipe(
            name=name,
            machine=HOPPER,
            linear=_bitnet(paper=variant == "paper"),
            variant=variant,
            source=f"Ma et al., BitNet b1.58, arXiv:2402.17764; {source}",
            notes="gradients in high precision, straight through the roundings",
        )
        for name, variant, source in _BITNETS
    ),
    Recipe(
        name="ao_int4_qat",
        machine=HOPPER,
        linear=layer(
            cast("uint8_channel_zp"),
            cast("int4_full", Scaling(block=(1, 32), top=7.5, arithmetic="reciprocal", input_scale=True)),
            HIGH,
            w_back=FORWARD,
            x_back=FORWARD,
            dequantized=True,
        ),
        source="torchao 36027d8, 8da4w: weights in groups of 32, activations by token with a zero point",
        notes="scales of weights are 2^-126 at least, as in the source; torchao before 0.18 took the dtype's eps, "
        "2^-23 of float32. Those of activations are float32 of 2^-126 at least; the source's are computed in x's "
        "dtype, and are 2^-23 at least",
    ),
    Recipe(
        name="lns",
        machine=CHAIN,
        linear=layer(*(cast("lns8_channel"),) * 3),
        optimizer=OptimizerConfig(rule="madam", state="lns_madam"),
        aliases=("lns_madam",),
        source="Zhao et al., LNS-Madam, arXiv:2106.13914: products of 8-bit logarithmic operands",
    ),
)

RECIPES: tuple[Recipe, ...] = (*_WIDE, *float8.RECIPES, *float4.RECIPES, *_INTEGERS)
