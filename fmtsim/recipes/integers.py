"""Recipes of integers and of logarithmic numbers."""

from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.recipes.build import FORWARD, HIGH, cast, layer
from fmtsim.recipes.spec import Recipe
from fmtsim.spec.quantizer import Quantizer
from fmtsim.spec.scaling import Scaling
from fmtsim.spec.transform import Hadamard

_HALO = "Ashkboos et al., HALO, arXiv:2501.02625; IST-DASLab/HALO d8c1dc9"
_LECTURE = "gpu-mode/lectures 7cb40f6, lecture 30; torchao 36027d8, int8 mixed-precision training"
_BF16 = get_format("bf16")
assert isinstance(_BF16, FloatFormat)

_TENSOR = Scaling(arithmetic="divide")
_ROW = Scaling(block=(1, None), arithmetic="reciprocal", scale=_BF16, eps=1e-12, eps_rule="scale")


def _halo(level: int, name: str) -> LinearConfig:
    turn = (Hadamard(size=None),) if level else ()
    operand, gradient = cast(name, _TENSOR, transforms=turn), cast(name, _TENSOR)
    if level < 2:
        return layer(operand, operand, gradient, w_back=FORWARD, g_back=FORWARD, x_back=FORWARD)
    turned = cast(name, _TENSOR, transforms=(Hadamard(size=None, axis="outer", undo=True),))
    return layer(operand, operand, turned, w_back=FORWARD, g_back=gradient, x_back=FORWARD)


def _bitnet() -> LinearConfig:
    ternary = Scaling(statistic="mean_abs", factor=1.0, arithmetic="reciprocal", eps=1e-5, eps_rule="scale")
    tokens = Scaling(block=(1, None), eps=1e-5)
    return layer(cast("int8", tokens), cast("int2", ternary), HIGH, w_back=FORWARD, x_back=FORWARD)


def _qat() -> LinearConfig:
    weights = Scaling(block=(1, 32), top=7.5, arithmetic="reciprocal")
    return layer(cast("uint8_channel_zp"), cast("int4_full", weights), HIGH, w_back=FORWARD, x_back=FORWARD)


def _rows() -> Quantizer:
    return cast("int8", _ROW)


RECIPES = (
    *(
        Recipe(name=f"halo{level}", linear=_halo(level, "int8"), source=f"{_HALO}: INT8, level {level}")
        for level in range(3)
    ),
    *(
        Recipe(name=f"halo{level}_fp8", linear=_halo(level, "e4m3"), source=f"{_HALO}: FP8, level {level}")
        for level in range(3)
    ),
    Recipe(name="int8_mixed", linear=layer(*(_rows(),) * 3), source=f"{_LECTURE}: every operand by rows"),
    Recipe(
        name="switchback",
        linear=layer(_rows(), cast("int8", _TENSOR), _rows(), g_back=HIGH, x_back=HIGH),
        source="Wortsman et al., arXiv:2304.13013: weight gradients in high precision",
    ),
    Recipe(
        name="bitnet",
        linear=_bitnet(),
        source=f"Ma et al., BitNet b1.58, arXiv:2402.17764; {_LECTURE}",
        notes="gradients in high precision, straight through the roundings",
    ),
    Recipe(
        name="ao_int4_qat",
        linear=_qat(),
        source="torchao 36027d8, 8da4w: weights in groups of 32, activations by token with a zero point",
    ),
    Recipe(
        name="lns",
        linear=layer(*(cast("lns8_channel"),) * 3),
        source="Zhao et al., LNS-Madam, arXiv:2106.13914: products of 8-bit logarithmic operands",
    ),
)
