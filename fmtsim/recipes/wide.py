# SPDX-License-Identifier: Apache-2.0
"""Recipes of 16 bits and more, and of bfloat16 with fewer bits of mantissa or exponent."""

from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.recipes.build import FORWARD, HOPPER, cast
from fmtsim.recipes.spec import LossScale, Recipe
from fmtsim.rounding.modes import RoundingName
from fmtsim.spec.quantizer import Quantizer, Sparsity

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


RECIPES = (
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
