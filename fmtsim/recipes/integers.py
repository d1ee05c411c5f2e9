# SPDX-License-Identifier: Apache-2.0
"""Recipes of integers and of logarithmic numbers."""

from dataclasses import replace

from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.recipes.build import BLACKWELL, CHAIN, FORWARD, HIGH, HOPPER, cast, layer
from fmtsim.recipes.spec import Recipe
from fmtsim.recipes.system import OptimizerConfig
from fmtsim.spec.quantizer import Hadamard, Quantizer

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


def _bitnet() -> LinearConfig:
    ternary = Scaling(statistic="mean_abs", factor=1.0, arithmetic="reciprocal", eps=1e-5, eps_rule="scale")
    tokens = Scaling(block=(1, None), eps=1e-5)
    return layer(cast("int8", tokens), cast("int2", ternary), HIGH, w_back=FORWARD, x_back=FORWARD)


def _qat() -> LinearConfig:
    weights = Scaling(block=(1, 32), top=7.5, arithmetic="reciprocal", input_scale=True)
    return layer(
        cast("uint8_channel_zp"), cast("int4_full", weights), HIGH, w_back=FORWARD, x_back=FORWARD, dequantized=True
    )  # fmt: skip


def _rows() -> Quantizer:
    return cast("int8", _ROW)


RECIPES = (
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
    Recipe(
        name="bitnet",
        machine=HOPPER,
        linear=_bitnet(),
        source=f"Ma et al., BitNet b1.58, arXiv:2402.17764; {_LECTURE}",
        notes="gradients in high precision, straight through the roundings",
    ),
    Recipe(
        name="ao_int4_qat",
        machine=HOPPER,
        linear=_qat(),
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
