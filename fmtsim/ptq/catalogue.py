"""The table of recipes of post-training quantisation. Each record names the version of the source that it follows."""

from typing import Any

from fmtsim.formats.registry import get_format
from fmtsim.formats.spec import FloatFormat
from fmtsim.ptq.spec import Calibration, Gptq, LearnedRounding, PtqRecipe, Smooth
from fmtsim.recipes.attention import AttentionConfig
from fmtsim.scaling.quantizer import Quantizer
from fmtsim.scaling.scale import PowerOfTwo, Scaling

_SHEN = "Shen et al., Efficient Post-training Quantization with FP8 Formats, arXiv:2309.14592 (details unverified)"
_AGGARWAL = "Aggarwal et al., minifloat post-training quantisation, arXiv:2311.12359; brevitas"
_INC = "Intel Neural Compressor 9b47d09"
_GPTQ = "Frantar et al., arXiv:2210.17323"
_OWN = "this package: a usual combination, no single source"

_TENSOR, _CHANNEL, _TOKEN = Scaling(), Scaling(block=(1, None)), Scaling(block=(1, None))
_ABSMAX = Calibration()


def minifloat(exponent_bits: int, mantissa_bits: int) -> FloatFormat:
    """Return ExMy with every code finite, bias ``2**(x - 1) - 1``, subnormals, saturating (arXiv:2311.12359)."""
    return FloatFormat(
        name=f"e{exponent_bits}m{mantissa_bits}_finite", exponent_bits=exponent_bits, mantissa_bits=mantissa_bits,
        nan="none", infinities=False,
    )  # fmt: skip


def operand(fmt: Any, scaling: Scaling | None = None) -> Quantizer:
    """Return the quantiser of a format, by name or as a record, under a rule of scales."""
    return Quantizer(format=get_format(fmt) if isinstance(fmt, str) else fmt, scaling=scaling)


def quantised_cache(fmt: Any) -> AttentionConfig:
    """Return attention that sees keys and values in a format, a scale for each token and head; the rest is exact."""
    k, v = operand(fmt, Scaling(block=(1, None))), operand(fmt, Scaling(block=(None, 1)))  # values come transposed
    return AttentionConfig(k=k, v=v)


def _groups(size: int) -> Scaling:
    return Scaling(block=(1, size))


def _clipped(scaling: Scaling) -> Scaling:
    """Return a rule that takes, block by block, the clip of least squared error among twenty."""
    return Scaling(
        block=scaling.block, candidates=tuple((20 - i) / 20 for i in range(14)), metric="mse", arithmetic="divide"
    )


def _gaudi(
    name: str, fmt: str, top: float, *, allowed: tuple[float, ...] = (), power: PowerOfTwo | None = "ceil",
    channels: bool = False, dynamic: bool = False, what: str,
) -> PtqRecipe:  # fmt: skip
    def rule(backoff: float, block: tuple[int | None, int | None]) -> Scaling:
        return Scaling(block=block, top=top * backoff, arithmetic="divide", power_of_two=power, allowed=allowed)

    return PtqRecipe(
        name=name,
        x=operand(fmt, rule(0.25, (None, None))),
        w=operand(fmt, rule(0.5, (1, None) if channels else (None, None))),
        calibration=None if dynamic else _ABSMAX,
        source=f"{_INC}: {what}; backoff 0.25 for activations and 0.5 for weights",
    )


def _fixed_scale(name: str, fmt: str, scale: float, what: str) -> PtqRecipe:
    same = Scaling(statistic="one", factor=scale, arithmetic="divide")
    return PtqRecipe(name=name, x=operand(fmt, same), w=operand(fmt, same), source=f"{_INC}: {what}")


def _gaudi_best() -> PtqRecipe:
    powers = tuple(2.0**k for k in range(-10, 10))
    best = Scaling(statistic="one", factor=1.0, arithmetic="divide", candidates=powers, metric="mse")
    x = Scaling(top=60.0, arithmetic="divide", power_of_two="ceil")
    return PtqRecipe(
        name="gaudi_opt",
        x=operand("e4m3_ieee", x),
        w=operand("e4m3_ieee", best),
        calibration=_ABSMAX,
        source=f"{_INC}: weights by the power of two of least squared error, 2^-10 to 2^9",
    )


_GAUDI2 = tuple(2.0**power for power in (-8, -4, 0, 4))
_GAUDI3 = tuple(2.0**power for power in range(-55, 8))

_FP8 = (
    *(
        PtqRecipe(
            name=f"{name}_static", x=operand(fmt, _TENSOR), w=operand(fmt, _CHANNEL), calibration=_ABSMAX,
            source=f"{_SHEN}: weights by channel, activations by tensor, both from the largest magnitude",
        )
        for name, fmt in (("e4m3", "e4m3"), ("e3m4", "e3m4fn"))
    ),
    *(
        PtqRecipe(
            name=f"{name}_dynamic", x=operand(fmt, _TENSOR), w=operand(fmt, _CHANNEL),
            source=f"{_SHEN}: activations by the tensor at hand",
        )
        for name, fmt in (("e4m3", "e4m3"), ("e3m4", "e3m4fn"), ("e5m2", "e5m2"))
    ),
    PtqRecipe(
        name="e5m2_direct", x=operand("e5m2"), w=operand("e5m2", _CHANNEL),
        source=f"{_SHEN}: activations cast without a scale",
    ),
    PtqRecipe(
        name="e4m3_e3m4_static", x=operand("e4m3", _TENSOR), w=operand("e3m4fn", _CHANNEL), calibration=_ABSMAX,
        aliases=("fp8_mixed",), source=f"{_SHEN}: E4M3 activations, E3M4 weights",
    ),
    PtqRecipe(
        name="e4m3_smooth", x=operand("e4m3", _TENSOR), w=operand("e4m3", _CHANNEL), calibration=_ABSMAX,
        smooth=Smooth(), source=f"{_SHEN}: with SmoothQuant, alpha 0.5",
    ),
    PtqRecipe(name="e4m3_token", x=operand("e4m3", _TOKEN), w=operand("e4m3", _CHANNEL), source=_OWN),
    PtqRecipe(
        name="nemotron_kv8", x=operand("e4m3", _TENSOR), w=operand("e4m3", _TENSOR), calibration=_ABSMAX,
        attention=quantised_cache("e4m3"), source="nemotron, with keys and values in E4M3, a scale a token and head",
        notes="for models that call scaled_dot_product_attention; the toolkit's scales of the cache are static",
    ),
    PtqRecipe(
        name="nemotron", x=operand("e4m3", _TENSOR), w=operand("e4m3", _TENSOR), calibration=_ABSMAX,
        aliases=("modelopt_fp8",),
        source="Nemotron-4 340B technical report, arXiv:2406.11704: FP8 deployment; scales of TensorRT Model Optimizer",
        notes="the report gives no recipe; amax / 448 by tensor is the toolkit's default (unverified)",
    ),
)  # fmt: skip

_INTEGERS = (
    PtqRecipe(name="int8_static", x=operand("int8", _TENSOR), w=operand("int8", _CHANNEL), calibration=_ABSMAX,
              aliases=("w8a8",), source=_OWN),
    PtqRecipe(name="int8_percentile", x=operand("int8", _TENSOR), w=operand("int8", _CHANNEL),
              calibration=Calibration(rule="percentile"), source=_OWN),
    PtqRecipe(name="int8_mse", x=operand("int8", _TENSOR), w=operand("int8", _clipped(_CHANNEL)),
              calibration=Calibration(rule="mse"), source=_OWN),
    PtqRecipe(name="int8_token", x=operand("int8", _TOKEN), w=operand("int8", _CHANNEL), aliases=("int8_dynamic",),
              source="torchao 36027d8, int8 dynamic activations, weights by channel",
              notes="here amax / 127 both ways; the source divides by 127.5"),
    PtqRecipe(name="int8_smooth", x=operand("int8", _TENSOR), w=operand("int8", _CHANNEL), calibration=_ABSMAX,
              smooth=Smooth(), aliases=("smoothquant",), source="Xiao et al., SmoothQuant, arXiv:2211.10438, O3"),
    PtqRecipe(name="int4_g32", w=operand("int4", _groups(32)), source=_OWN),
    PtqRecipe(name="int4_g128", w=operand("int4", _groups(128)), aliases=("w4a16",), source=_OWN),
    PtqRecipe(name="int4_channel", w=operand("int4", _CHANNEL), source=_OWN),
    PtqRecipe(name="int4_token", x=operand("int8", _TOKEN), w=operand("int4", _groups(32)), aliases=("w4a8",),
              source="torchao 36027d8, 8da4w: weights in groups of 32",
              notes="here activations are symmetric; the source gives them a zero point"),
    PtqRecipe(name="w4a4", x=operand("int4", _TOKEN), w=operand("int4", _groups(32)), source=_OWN),
    PtqRecipe(name="int4_gptq", w=operand("int4", _groups(32)), weights=Gptq(act_order=True), aliases=("gptq",),
              source=f"{_GPTQ}: groups of 32 with scales from the original weights"),
    PtqRecipe(name="int4_learned", w=operand("int4", _groups(32)), weights=LearnedRounding(), aliases=("adaround",),
              source="Nagel et al., AdaRound, arXiv:2004.10568",
              notes="on the layer's own output error, without the following activation"),
)  # fmt: skip

_BLOCKS = (
    *(
        PtqRecipe(name=name, x=operand(fmt), w=operand(fmt), source="OCP MX v1.0")
        for name, fmt in (("mxfp8", "mxfp8_e4m3"), ("mxfp6", "mxfp6_e2m3"), ("mxfp4", "mxfp4"), ("mxint8", "mxint8"))
    ),
    PtqRecipe(name="nvfp4", x=operand("nvfp4"), w=operand("nvfp4"), source="NVIDIA, NVFP4 with a scale of the tensor"),
    PtqRecipe(name="mxfp4_weights", w=operand("mxfp4"), source=_OWN),
    PtqRecipe(name="nvfp4_weights", w=operand("nvfp4"), source=_OWN),
    PtqRecipe(
        name="mxfp4_gptq", x=operand("mxfp4"), w=operand("mxfp4"), weights=Gptq(), source=f"{_GPTQ}; OCP MX v1.0"
    ),
    PtqRecipe(name="nvfp4_gptq", x=operand("nvfp4"), w=operand("nvfp4"), weights=Gptq(), source=f"{_GPTQ}; NVFP4"),
)

_GAUDI = (
    _gaudi("gaudi2_hw", "e4m3_ieee", 240.0, allowed=_GAUDI2, what="HW_ALIGNED, scales 2^-8, 2^-4, 1, 2^4"),
    _gaudi("gaudi3_hw", "e4m3_ieee", 240.0, allowed=_GAUDI3, what="HW_ALIGNED, scales 2^-55 to 2^7"),
    _gaudi("gaudi3_448", "e4m3", 448.0, allowed=_GAUDI3, what="HW_ALIGNED on E4M3 up to 448"),
    _gaudi("gaudi_pow2", "e4m3_ieee", 240.0, what="POW2, any power of two"),
    _gaudi("gaudi_pow2_channel", "e4m3_ieee", 240.0, channels=True, what="POW2, weights by channel"),
    _gaudi("gaudi_exact", "e4m3_ieee", 240.0, power=None, what="ACT_MAXABS without rounding of scales"),
    _gaudi("gaudi_dynamic", "e4m3_ieee", 240.0, dynamic=True, what="POW2, activations by the tensor at hand"),
    _fixed_scale("gaudi2_fixed", "e4m3_ieee", 16.0, "HW_ALIGNED_FIXED of Gaudi 2, scale 2^4"),
    _fixed_scale("gaudi3_fixed", "e4m3_ieee", 128.0, "HW_ALIGNED_FIXED of Gaudi 3, scale 2^7"),
    _fixed_scale("gaudi_unit", "e4m3_ieee", 1.0, "SCALE_UNIT"),
    _gaudi_best(),
)

_MINIFLOATS = tuple(
    PtqRecipe(
        name=f"minifloat_e{e}m{bits - 1 - e}",
        x=operand(minifloat(e, bits - 1 - e), _TENSOR),
        w=operand(minifloat(e, bits - 1 - e), _CHANNEL),
        calibration=_ABSMAX,
        source=_AGGARWAL,
    )
    for bits in range(3, 9)
    for e in range(1, bits)
)

RECIPES: tuple[PtqRecipe, ...] = (*_FP8, *_INTEGERS, *_BLOCKS, *_GAUDI, *_MINIFLOATS)
