# SPDX-License-Identifier: Apache-2.0
"""The table of recipes for post-training quantisation. Each record names the version of the source that it follows."""

import dataclasses
from typing import Any

from fmtsim.formats.block import Block
from fmtsim.formats.element import FloatFormat
from fmtsim.formats.floating import FP32
from fmtsim.formats.packed import GGML_FORMATS
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling, TensorScale
from fmtsim.recipes.attention_config import AttentionConfig
from fmtsim.recipes.build import BF16
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.ptq_methods import Awq, Calibration, Clip, Gptq, Hqq, LearnedRounding, Rotate, Smooth
from fmtsim.spec.quantizer import Quantizer, Sparsity

_SHEN = "Shen et al., Efficient Post-training Quantization with FP8 Formats, arXiv:2309.14592 (details unverified)"
_AGGARWAL = "Aggarwal et al., minifloat post-training quantisation, arXiv:2311.12359; brevitas"
_INC = "Intel Neural Compressor 9b47d09"
_ROLLOUT = "NeMo-RL pull request 971, vllm/quantization/fp8.py, cast_tensor_to_fp8_blockwise; SkyRL pull request 1898"
_GPTQ = "Frantar et al., arXiv:2210.17323"
_OWN = "this package: a usual combination, no single source"

_E4M3 = get_format("e4m3")
assert isinstance(_E4M3, FloatFormat)
_TENSOR, _CHANNEL, _TOKEN = Scaling(), Scaling(block=(1, None)), Scaling(block=(1, None))
_ABSMAX = Calibration()


def minifloat(exponent_bits: int, mantissa_bits: int) -> FloatFormat:
    """Return ExMy with every code finite, bias ``2**(x - 1) - 1``, subnormals, saturating (arXiv:2311.12359)."""
    return get_format(f"e{exponent_bits}m{mantissa_bits}_finite")  # type: ignore[return-value]


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


_GAUDI2 = tuple(2.0**power for power in (-8, -4, 0, 4))  # exponent biases 15, 11, 7 and 3 of the product
_GAUDI3 = tuple(2.0**power for power in range(-55, 8))  # exponent biases 62 to 0


def _pow2(
    top: float, *, allowed: tuple[float, ...] = (), block: Block = (None, None), candidates: tuple[float, ...] = (1.0,)
) -> Scaling:  # fmt: skip
    """Return scales ``amax / top`` rounded up to powers of two, then to the next of a set of the hardware's.

    The toolkit computes the scale of a tensor in its hp_dtype, bfloat16 unless told, those of rows in their dtype.
    """
    rows = block != (None, None)
    return Scaling(
        block=block, top=top, arithmetic="divide", power_of_two="log2", allowed=allowed, candidates=candidates,
        metric="mse", scale=FP32 if rows else BF16, input_scale=rows,
    )  # fmt: skip


def _best(powers: tuple[float, ...]) -> Scaling:
    """Return a scale of the tensor: the number of least squared error, the first in a tie."""
    return Scaling(statistic="one", factor=1.0, arithmetic="divide", candidates=powers, metric="mse")


def _gaudi(
    name: str, x: Scaling, w: Scaling, what: str, *, element: str = "e4m3_ieee", dynamic: bool = False,
    aliases: tuple[str, ...] = (),
) -> PtqRecipe:  # fmt: skip
    fixed = x.statistic == "one"
    return PtqRecipe(
        name=name, x=operand(element, x), w=operand(element, w), calibration=None if dynamic or fixed else _ABSMAX,
        aliases=aliases, source=f"{_INC}: {what}",
    )  # fmt: skip


def _gaudis() -> tuple[PtqRecipe, ...]:
    """Return the scale methods of Intel's toolkit; scales are what elements are multiplied with when decoded.

    A fullscale is 240 on Gaudi 2 and 448 on Gaudi 3; backoffs are 0.25 for calibrated activations, 0.5 for weights and
    for activations at hand.
    """
    x2, w2 = _pow2(60.0, allowed=_GAUDI2), _pow2(120.0, allowed=_GAUDI2)
    x3, w3 = (_pow2(448.0 * backoff, allowed=_GAUDI3) for backoff in (0.25, 0.5))
    old_x3, old_w3 = (_pow2(240.0 * backoff, allowed=_GAUDI3) for backoff in (0.25, 0.5))
    x, channel = _pow2(60.0), _pow2(120.0, block=(1, None))
    few = _pow2(120.0, block=(1, None), candidates=tuple(2.0**k for k in range(-3, 5)))
    exact_x, exact_w = (Scaling(top=240.0 * backoff, arithmetic="divide") for backoff in (0.25, 0.5))
    powers = tuple(2.0**k for k in reversed(range(-10, 10)))  # in a tie the toolkit takes the largest
    one, sixteen, high = (Scaling(statistic="one", factor=f, arithmetic="divide") for f in (1.0, 16.0, 128.0))
    return (
        _gaudi("gaudi2_hw", x2, w2, "MAXABS_HW on Gaudi 2, scales 2^-8, 2^-4, 1, 2^4"),
        _gaudi("gaudi2_hw_channel", x2, channel, "ACT_MAXABS_HW_WEIGHTS_PCS_MAXABS_POW2 on Gaudi 2"),
        _gaudi("gaudi2_hw_opt", x2, _best(_GAUDI2), "MAXABS_HW_OPT_WEIGHT on Gaudi 2"),
        _gaudi("gaudi3_hw", x3, w3, "MAXABS_HW on Gaudi 3, scales 2^-55 to 2^7, E4M3 up to 448", element="e4m3",
               aliases=("gaudi3_448",)),
        _gaudi("gaudi3_240", old_x3, old_w3, "MAXABS_HW on Gaudi 3 in versions that take 240 for its fullscale"),
        _gaudi("gaudi_pow2", x, _pow2(120.0), "MAXABS_POW2"),
        _gaudi("gaudi_pow2_channel", x, channel, "ACT_MAXABS_POW2_WEIGHTS_PCS_MAXABS_POW2"),
        _gaudi("gaudi_opt", x, _best(powers), "MAXABS_POW2_OPT_WEIGHT, 2^-10 to 2^9 by least squared error"),
        _gaudi("gaudi_opt_channel", x, few, "ACT_MAXABS_POW2_WEIGHTS_PCS_OPT_POW2, 2^-3 to 2^4 times POW2's"),
        _gaudi("gaudi_exact", exact_x, exact_w, "MAXABS_ARBITRARY, scales not rounded"),
        _gaudi("gaudi_dynamic", _pow2(120.0), w2, "MAXABS_HW's weights on Gaudi 2, dynamic activations of granularity "
               "PTS, rounded by POW2 (a custom configuration, no named method)", dynamic=True),
        _gaudi("gaudi_dynamic_token", _pow2(120.0, block=(1, None)), w2,
               "ACT_MAXABS_PCS_POW2_WEIGHT_MAXABS_PTS_POW2_HW on Gaudi 2", dynamic=True),
        _gaudi("gaudi2_fixed", sixteen, sixteen, "HW_ALIGNED_SINGLE_SCALE on Gaudi 2: the set's first, 2^4"),
        _gaudi("gaudi3_fixed", high, high, "HW_ALIGNED_SINGLE_SCALE on Gaudi 3: the set's first, 2^7", element="e4m3"),
        _gaudi("gaudi_unit", one, one, "UNIT_SCALE"),
    )  # fmt: skip


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
            name=f"{name}_extended", x=operand(fmt, _TENSOR), w=operand(fmt, _CHANNEL), calibration=_ABSMAX,
            extended=operand(fmt, _TENSOR),
            source=f"{_SHEN}: as static, with the extended operators",
            notes="normalisation, softmax and embeddings that are modules, under the scale of the tensor at hand; the "
            "source calibrates them, and quantises additions and products of activations as well",
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
    # rollout_fp8: torch computes the source's 448 / amax as (1 / amax) * 448: one scale of w in five differs in its
    # last bit, and 7,255 of 10,485,760 bfloat16 elements. rollout_fp8_pow2 has the source's bits (as many float32 and
    # bfloat16 elements tested).
    *(
        PtqRecipe(
            name=f"rollout_fp8{suffix}", x=operand("e4m3", x), w=operand("e4m3", w), source=f"{_ROLLOUT}: {title}",
            notes=f"beside training in amp_bf16 or te_block; {note}vLLM's kernels make those of x (unverified)",
        )
        for suffix, title, note, x, w in (
            ("", "float32 scales", "the source takes (1 / amax) * 448, so that scales of w differ in last bits; ",
             Scaling(block=(1, 128), eps=1e-10, arithmetic="divide"), Scaling(block=(128, 128))),
            ("_pow2", "scales that are powers of two", "", Scaling(block=(1, 128), eps=1e-10, power_of_two="ceil"),
             Scaling(block=(128, 128), arithmetic="divide", power_of_two="log2")),
        )
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
    *(
        PtqRecipe(name=fmt.name, w=operand(fmt), source=f"llama.cpp: ggml's {fmt.type} by quantize_row_*_ref of ggml "
                  "d99724f2, without an importance matrix")
        for fmt in GGML_FORMATS if fmt.encoder
    ),
    PtqRecipe(name="int4_channel", w=operand("int4", _CHANNEL), source=_OWN),
    PtqRecipe(name="int4_token", x=operand("int8", _TOKEN), w=operand("int4", _groups(32)), aliases=("w4a8",),
              source="torchao 36027d8, 8da4w: weights in groups of 32",
              notes="here activations are symmetric; the source gives them a zero point"),
    PtqRecipe(name="w4a4", x=operand("int4", _TOKEN), w=operand("int4", _groups(32)), source=_OWN),
    PtqRecipe(name="int4_gptq", w=operand("int4", _groups(32)), weights=Gptq(act_order=True), aliases=("gptq",),
              source=f"{_GPTQ}: groups of 32 with scales from the original weights"),
    PtqRecipe(name="int4_gptq_dynamic", w=operand("int4", _groups(32)), weights=Gptq(act_order=True, groups="dynamic"),
              source=f"{_GPTQ}: groups of 32 with scales made as they are reached",
              notes="stored, it needs the group of each column, too"),
    PtqRecipe(name="int4_awq", w=operand("uint4_g128_zp"), smooth=Awq(), weights=Clip(), aliases=("awq",),
              source="Lin et al., AWQ, arXiv:2306.00978; AutoAWQ 0.2.9",
              notes="each layer has its own factors, from its own output error; the source shares them among layers of "
              "one input, by the error of attention or of the feed-forward block"),
    PtqRecipe(name="int4_hqq", w=operand("uint4_g64_zp"), weights=Hqq(), aliases=("hqq",),
              source="Badri and Shaji, Half-Quadratic Quantization, 2023; hqq 0.2.8, axis=1"),
    PtqRecipe(name="w4a4_quarot", x=operand("int4", _TOKEN), w=operand("int4", _CHANNEL), weights=Gptq(),
              rotate=Rotate(online=True), aliases=("quarot",), source="Ashkboos et al., QuaRot, arXiv:2404.00456",
              notes="for decoders built as Llama is; without the source's clipping of inputs and weights; its rotation "
              "of keys and its INT4 cache are not in it (KVCache rounds a cache)"),
    PtqRecipe(name="int4_learned", w=operand("int4", _groups(32)), weights=LearnedRounding(), aliases=("adaround",),
              source="Nagel et al., AdaRound, arXiv:2004.10568",
              notes="on the layer's own output error, without the following activation"),
)  # fmt: skip

_BLOCKS = (
    *(
        PtqRecipe(name=name, x=operand(fmt), w=operand(fmt), source="OCP MX v1.0")
        for name, fmt in (
            ("mxfp8_dynamic", "mxfp8_e4m3"),
            ("mxfp6_dynamic", "mxfp6_e2m3"),
            ("mxfp4_dynamic", "mxfp4"),
            ("mxint8_dynamic", "mxint8"),
        )
    ),
    PtqRecipe(
        name="nvfp4_dynamic", x=operand("nvfp4"), w=operand("nvfp4"), source="NVIDIA, NVFP4 with a scale of the tensor"
    ),
    PtqRecipe(
        name="nvfp4_static",
        w=operand("nvfp4"),
        calibration=_ABSMAX,
        x=operand("e2m1", Scaling(block=(1, 16), scale=_E4M3, tensor=TensorScale())),
        source="compressed-tensors 0.20, the scheme NVFP4",
        notes="as nvfp4_dynamic, but calibration fixes the scale of the activations' tensor; vLLM serves its export",
    ),
    PtqRecipe(
        name="hif4",
        x=operand("hif4"),
        w=operand("hif4"),
        source="global-computing-consortium/HiFloat4 6d937b6, README: inputs and weights of linear layers",
    ),  # fmt: skip
    PtqRecipe(name="mxfp4_weights", w=operand("mxfp4"), source=_OWN),
    PtqRecipe(name="nvfp4_weights", w=operand("nvfp4"), source=_OWN),
    PtqRecipe(
        name="mxfp4_gptq", x=operand("mxfp4"), w=operand("mxfp4"), weights=Gptq(), source=f"{_GPTQ}; OCP MX v1.0"
    ),
    PtqRecipe(name="nvfp4_gptq", x=operand("nvfp4"), w=operand("nvfp4"), weights=Gptq(), source=f"{_GPTQ}; NVFP4"),
)

_SPARSE = tuple(
    PtqRecipe(
        name=f"{name}_token_24", x=operand(name, _TOKEN),
        w=dataclasses.replace(operand(name, _CHANNEL), transforms=(Sparsity(),)),
        source=f"torchao 36027d8, {title} dynamic activations, weights by channel, 2:4 sparse",
        notes="pruned by magnitude without further training, as apply_fake_sparsity of the source does",
    )
    for name, title in (("int8", "int8"), ("e4m3", "float8"))
)  # fmt: skip

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

RECIPES: tuple[PtqRecipe, ...] = (*_FP8, *_INTEGERS, *_BLOCKS, *_SPARSE, *_gaudis(), *_MINIFLOATS)
