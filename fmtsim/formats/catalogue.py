# SPDX-License-Identifier: Apache-2.0
"""The tables of element formats and of scaled ones, which are made of them: every constant has its source."""

import struct
from collections.abc import Callable, Iterator
from typing import Any, cast

from fmtsim.formats.block import E8M0, FP32, BlockFormat, Format, LogTileFormat
from fmtsim.formats.element import CodebookFormat, ElementFormat, FloatFormat, IntFormat, LogFormat, hif8, tapered
from fmtsim.formats.scaling import Block, Scaling, TensorScale, block_scaling

_IEEE = "IEEE 754-2019, table 3.5"
_OCP8 = "OCP 8-bit Floating Point Specification (OFP8) v1.0, section 5; Micikevicius et al., arXiv:2209.05433, table 1"
_MX = "OCP Microscaling Formats (MX) v1.0, section 5.3"
_FNUZ = "Noune et al., arXiv:2206.02915: one zero, NaN in place of -0, no infinities"
_P3109 = "IEEE P3109 interim report, formats by width K, precision P, signedness and domain"

FLOATS: tuple[FloatFormat, ...] = (
    FloatFormat(name="fp64", exponent_bits=11, mantissa_bits=52, aliases=("float64", "double", "e11m52"), source=_IEEE),
    FP32,
    FloatFormat(name="tf32", exponent_bits=8, mantissa_bits=10, aliases=("tensorfloat32", "e8m10"),
                source="NVIDIA A100 architecture white paper: binary32's exponent, binary16's mantissa, 19 bits"),
    FloatFormat(name="bf16", exponent_bits=8, mantissa_bits=7, aliases=("bfloat16", "e8m7"),
                source="Intel BFLOAT16 Hardware Numerics Definition, section 1: the upper half of binary32"),
    FloatFormat(name="fp16", exponent_bits=5, mantissa_bits=10, aliases=("float16", "half", "e5m10"), source=_IEEE),
    FloatFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, nan="top", infinities=False,
                aliases=("float8_e4m3fn", "e4m3fn"), source=_OCP8),
    FloatFormat(name="e5m2", exponent_bits=5, mantissa_bits=2, aliases=("float8_e5m2",), source=_OCP8),
    FloatFormat(name="e4m3_ieee", exponent_bits=4, mantissa_bits=3, aliases=("float8_e4m3", "e4m3_gaudi2"),
                source="ml_dtypes README, float8_e4m3: IEEE 754 rules for the top exponent; Intel Gaudi 2 FP8"),
    FloatFormat(name="e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, nan="negative_zero", infinities=False,
                aliases=("float8_e4m3fnuz",), source=_FNUZ),
    FloatFormat(name="e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16, nan="negative_zero", infinities=False,
                aliases=("float8_e5m2fnuz",), source=_FNUZ),
    FloatFormat(name="e4m3b11fnuz", exponent_bits=4, mantissa_bits=3, bias=11, nan="negative_zero", infinities=False,
                aliases=("float8_e4m3b11fnuz",),
                source="ml_dtypes README, float8_e4m3b11fnuz; bias after Sun et al., HFP8, NeurIPS 2019"),
    FloatFormat(name="e3m4", exponent_bits=3, mantissa_bits=4, aliases=("float8_e3m4",),
                source="ml_dtypes README, float8_e3m4: IEEE 754 rules for the top exponent"),
    FloatFormat(name="e3m4fn", exponent_bits=3, mantissa_bits=4, nan="top", infinities=False,
                source="Shen et al., arXiv:2309.14592, table 1: extended E3M4 with one NaN, largest value 30"),
    FloatFormat(name="e5m6", exponent_bits=5, mantissa_bits=6,
                source="DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.3 (cached activations); the report "
                       "does not say where Inf and NaN live, IEEE 754 rules are taken"),
    FloatFormat(name="e2m3", exponent_bits=2, mantissa_bits=3, nan="none", infinities=False,
                aliases=("float6_e2m3fn", "fp6_e2m3"), source=_MX + ".2"),
    FloatFormat(name="e3m2", exponent_bits=3, mantissa_bits=2, nan="none", infinities=False,
                aliases=("float6_e3m2fn", "fp6_e3m2"), source=_MX + ".2"),
    FloatFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, nan="none", infinities=False,
                aliases=("float4_e2m1fn", "float4_e2m1fn_x2", "fp4"), source=_MX + ".3"),
    E8M0,
    FloatFormat(name="ue4m3", exponent_bits=4, mantissa_bits=3, signed=False, nan="top", infinities=False,
                source="PTX ISA 9.1, section 5.2.3: block scales of e2m1 operands, the non-negative codes of e4m3; "
                       "7 bits in a byte whose top bit is padding"),
    FloatFormat(name="ue5m3", exponent_bits=5, mantissa_bits=3, signed=False, nan="top", infinities=False,
                source="CUDA Math API 13.4, __nv_fp8_ue5m3: no sign, no infinity, NaN at 0xFF alone"),
)  # fmt: skip


def _p3109_family() -> Iterator[FloatFormat]:
    """Yield every P3109 format of 3 to 8 bits that has an exponent field."""
    for width in range(3, 9):
        for signed in (True, False):
            for precision in range(1, width + (not signed)):
                for extended in (True, False):
                    # precision: significant bits, the implicit one counted. One zero; NaN takes the code of -0, or the
                    # top code of an unsigned format; infinities sit next below, at the largest magnitude left.
                    suffix = f"{'s' if signed else 'u'}{'e' if extended else 'f'}"
                    yield FloatFormat(
                        name=f"p3109_k{width}p{precision}{suffix}",
                        exponent_bits=width - precision + (not signed),
                        mantissa_bits=precision - 1,
                        bias=1 << (width - precision) >> signed,
                        signed=signed,
                        nan="negative_zero" if signed else "top",
                        infinities=extended,
                        aliases=(f"binary{width}p{precision}{suffix}",),
                        source=_P3109,
                    )


def integer(bits: int, *, signed: bool = True, grid: str = "symmetric", fraction_bits: int = 0) -> IntFormat:
    """Build the integer format whose name says the arguments: ``int8``, ``int8_full``, ``int8_half``, ``uint8_f4``.

    Args:
        bits: Width of a code.
        signed: Two's complement, or 0 upward.
        grid: ``"symmetric"``, ``"full"`` (the lowest code is used) or ``"half"`` (odd multiples of half a step);
            ignored when unsigned.
        fraction_bits: Binary places.
    """
    name = f"{'' if signed else 'u'}int{bits}"
    suffix = f"_f{fraction_bits}" if fraction_bits else ""
    tail = f"_{grid}" if signed and grid != "symmetric" else ""
    return IntFormat(
        name=name + tail + suffix,
        bits=bits,
        signed=signed,
        symmetric=signed and grid == "symmetric",
        half_offset=signed and grid == "half",
        fraction_bits=fraction_bits,
        aliases=(f"{name}_asymmetric{suffix}",) if tail == "_full" else (),
        source=_INTEGER_SOURCES[grid] if signed else "natural numbers from 0",
    )


_INTEGER_SOURCES = {
    "symmetric": "two's complement without its lowest code: Jacob et al., arXiv:1712.05877, section 3.1 (weights)",
    "full": "two's complement, every code used",
    "half": "mid-rise grid of odd half steps: Panferov et al., QuEST, arXiv:2502.05003, section 3",
}

INT8_F6 = IntFormat(
    name="int8_f6",
    bits=8,
    fraction_bits=6,
    source=_MX + ".4: two's complement with 6 fraction bits; the code of -2 is left unused, as the section allows",
)

NF4 = CodebookFormat(
    name="nf4",
    values=(
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    aliases=("normalfloat4",),
    source="Dettmers et al., QLoRA, arXiv:2305.14314, appendix E",
)  # fmt: skip


def _float32(value: float) -> float:
    """Round to the nearest binary32 value."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def dynamic_values(*, signed: bool, decades: int = 7) -> tuple[float, ...]:
    """Return the values of a dynamic map: decade i is cut into 2^i cells (2^(i+1) when unsigned).

    Values are the cells' centres in float32, then 0 and 1, sorted. A cell boundary is ``0.1 + step * k`` from below
    and ``1 - step * k`` from above the middle, rounded to float32 once, as torch.linspace does with fused
    multiply-add.
    """
    values = [0.0, 1.0]
    for decade in range(decades):
        cells = 1 << (decade + (not signed))
        low = _float32(0.1)
        step = _float32(_float32(1.0 - low) / cells)
        middle = (cells + 1) // 2
        edges = [_float32(low + step * k) for k in range(middle)]
        edges += [_float32(1.0 - step * (cells - k)) for k in range(middle, cells + 1)]
        factor = _float32(10.0 ** (decade - decades + 1))
        for lower, upper in zip(edges, edges[1:], strict=False):
            centre = _float32(factor * (_float32(lower + upper) / 2))
            values += [centre, -centre] if signed else [centre]
    return tuple(sorted(values))


def _bnb_dynamic8(*, signed: bool) -> CodebookFormat:
    """Build bitsandbytes' dynamic 8-bit map of 7 decades."""
    return CodebookFormat(
        name="bnb_dynamic8" if signed else "bnb_dynamic8_unsigned",
        values=dynamic_values(signed=signed),
        aliases=("bnb_dynamic8_signed",) if signed else (),
        source="Dettmers et al., arXiv:2110.02861 (dynamic quantization); bitsandbytes 95f9af3, create_dynamic_map",
    )


_AO = "pytorch/ao 36027d8, torchao/optim"
_AO_STATES = (
    CodebookFormat(
        name="dynamic4",
        values=dynamic_values(signed=True, decades=3),
        source=f"{_AO}: create_dynamic_map(signed=True, 3, 4)",
    ),
    CodebookFormat(
        name="linear4_unsigned",
        values=tuple(i / 16 for i in range(1, 17)),
        source=f"{_AO}: linspace(0, 1, 17)[1:], without zero",
    ),
)

LNS_SOURCE = "Zhao et al., LNS-Madam, arXiv:2106.13914, section 2: 2^(k/gamma), gamma a power of two"
LOGFMT_SOURCE = "Zhao et al., Insights into DeepSeek-V3, arXiv:2505.09343, section 3.2 (LogFMT-nBit), 1x128 tiles"


def elements() -> Iterator[Format]:
    """Yield every catalogued format that is not built from another, LogFMT's tiles last."""
    yield from FLOATS
    yield from _p3109_family()
    for grid in ("symmetric", "full", "half"):
        for bits in range(2, 17):
            yield integer(bits, grid=grid)
    for bits in range(1, 17):
        yield integer(bits, signed=False)
    yield INT8_F6
    yield NF4
    # bitsandbytes' FP4: sign bit and three bits of magnitude, in twelfths; code 8 is zero again.
    magnitudes = [_float32(twelfths / 12) for twelfths in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
    yield CodebookFormat(
        name="bnb_fp4",
        values=(*magnitudes, 0.0, *(-value for value in magnitudes[1:])),
        source="bitsandbytes 95f9af3, csrc/kernels.cu, the FP4 decoding tree; 0.0625/12 is its subnormal",
    )
    yield _bnb_dynamic8(signed=True)
    yield _bnb_dynamic8(signed=False)
    yield from _AO_STATES
    yield hif8()
    for kind in ("posit", "takum", "takum_linear"):
        yield tapered(kind, 8)
    yield LogFormat(name="lns8_g8", bits=8, gamma=8, source=LNS_SOURCE)
    yield LogFormat(name="lns16_g2048", bits=16, gamma=2048, source=LNS_SOURCE + "; 16-bit updates keep 16 octaves")
    for bits in (8, 10):
        yield LogTileFormat(name=f"logfmt{bits}", bits=bits, source=LOGFMT_SOURCE)


_MX_BLOCKS = "OCP Microscaling Formats (MX) v1.0, sections 5.1 (formats) and 6.3 (scale by floor)"
_MX_CEIL = "Transformer Engine d0067d0, MXFP8BlockScaling: the scale rounded up so that no element saturates"
_MSFP = (
    "Rouhani et al., Microsoft Floating Point, NeurIPS 2020: 16 signs and magnitudes share an exponent; "
    "its rounding is not known here"
)
_NVFP4 = "NVIDIA, arXiv:2509.25149, section 2; Transformer Engine d0067d0, NVFP4BlockScaling"
_E5M3 = "intel/auto-round b9f3d00, data_type/nvfp.py, nvfp4_v2, whose rounding of scales clamps a carry"
_TE_ROW = "Transformer Engine d0067d0, NVFP4BlockScaling with row_scaled_activation"
_TE_TOKEN = "Transformer Engine e767493, custom_recipes/quantization_nvfp4_per_token.py"
_TE_WINDOW = "Transformer Engine 92350db, custom_recipes/quantization_nvfp4_1x64.py"
_TETRAJET = "thu-ml/TetraJet-v2-NVFP4Training ca5953f, kernels/csrc/quant_fp4.cu"
_TRTLLM = "FlashInfer fb28d724, TensorRT-LLM: quantization_utils.cuh with fast math; unverified on a Blackwell GPU"
_FOUR_SIX = "mit-han-lab/fouroversix dadfad6 (arXiv:2512.02010); Transformer Engine d0067d0, nvfp4_4over6"
_NVINT = "mit-han-lab/fouroversix dadfad6, DataType.{}: integers under NVFP4's two levels"
_INT_FLOAT = "mit-han-lab/fouroversix dadfad6, DataType.{}: floats or integers, whichever errs less in a block"
_MAGNITUDES = "e1m4_finite"  # the integers -31 to 31 as sign and magnitude
_MODELOPT = "NVIDIA Model-Optimizer a2fbac7, qtensor/nvfp4_tensor.py: the tensor's scale is amax / (6 * 448)"
_COMPRESSED = "compressed-tensors ac8e2ba, generate_gparam and calculate_qparams: its reciprocal, (448 * 6) / amax"
_TORCHAO = "torchao 36027d8, NVFP4Tensor: block scales from 2**-6"
_DEEPSEEK = "DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2; arithmetic of DeepGEMM 54e2261"
_TE = "Transformer Engine d0067d0, Float8CurrentScaling"
_ROWS = "Wortsman et al., SwitchBack, arXiv:2304.13013 (row-wise int8); torchao 36027d8"
_GROUPS = "torchao 36027d8, symmetric groups of weights along the inner axis"
_ZERO_POINT = "Jacob et al., arXiv:1712.05877, section 2.1; torchao 36027d8, asymmetric integers"
_QLORA = "Dettmers et al., QLoRA, arXiv:2305.14314, section 3: 64 elements a scale"
_BNB8 = "bitsandbytes 95f9af3, block-wise optimizer states: 256 elements a scale (2048 in arXiv:2110.02861)"
_LNS = "Zhao et al., LNS-Madam, arXiv:2106.13914, section 2: a scale a channel"
_PTQ = "Shen et al., arXiv:2309.14592, section 3: weights by channel, activations by tensor"

_CHANNEL: Block = (1, None)
_TENSOR: Block = (None, None)


def blocks(element: Callable[[str], ElementFormat]) -> Iterator[BlockFormat]:
    """Yield every catalogued scaled format; ``element`` looks an element format up by its name."""
    block: Block
    aliases: tuple[str, ...]
    # 1. OCP MX
    table = (
        ("mxfp8_e4m3", "e4m3", ("mxfp8",)),
        ("mxfp8_e5m2", "e5m2", ()),
        ("mxfp6_e2m3", "e2m3", ()),
        ("mxfp6_e3m2", "e3m2", ()),
        ("mxfp4", "e2m1", ("mxfp4_e2m1",)),
        ("mxint8", "int8_f6", ()),
    )
    for name, inner, aliases in table:
        scaling = block_scaling((1, 32), "floor")
        yield BlockFormat(name=name, element=element(inner), scaling=scaling, aliases=aliases, source=_MX_BLOCKS)
    for name, inner, _ in table[:2]:
        scaling = block_scaling((1, 32), "rceil")
        yield BlockFormat(name=f"{name}_rceil", element=element(inner), scaling=scaling, source=_MX_CEIL)
    # 2. NVFP4 and its kin
    yield from _nvfp4(element)
    # 3. MSFP: sign and magnitude without an implicit bit; the one exponent bit makes an even grid of magnitudes
    for name, inner in (("msfp12", "e1m2_finite"), ("msfp16", "e1m6_finite")):
        yield BlockFormat(name=name, element=element(inner), scaling=block_scaling((1, 16), "floor"), source=_MSFP)
    # 4. FP8 with real scales
    for name, block in (("e4m3_1x128", (1, 128)), ("e4m3_128x128", (128, 128))):
        yield BlockFormat(name=name, element=element("e4m3"), scaling=block_scaling(block), source=_DEEPSEEK)
        powers = block_scaling(block, "rceil")
        yield BlockFormat(name=f"{name}_pow2", element=element("e4m3"), scaling=powers,
                          source=_DEEPSEEK + "; scales rounded up to powers of two")  # fmt: skip
    for inner in ("e4m3", "e5m2"):
        record = element(inner)
        encoded = block_scaling(_TENSOR, arithmetic="encode")
        yield BlockFormat(name=f"{inner}_tensor", element=record, scaling=encoded, source=_TE)
        yield BlockFormat(name=f"{inner}_channel", element=record, scaling=block_scaling(_CHANNEL), source=_PTQ)
    # 5. integers
    groups = tuple((f"int4_g{size}", "int4", (1, size), (), _GROUPS) for size in (32, 64, 128))
    for name, inner, block, aliases, source in (
        ("int8_channel", "int8", _CHANNEL, ("int8_row",), _ROWS),
        ("int8_tensor", "int8", _TENSOR, (), _ROWS),
        ("int4_channel", "int4", _CHANNEL, (), _GROUPS),
        *groups,
    ):
        scaling = block_scaling(block)
        yield BlockFormat(name=name, element=element(inner), scaling=scaling, aliases=aliases, source=source)
    for name, inner, block in (
        ("uint8_channel_zp", "uint8", _CHANNEL),
        ("uint8_tensor_zp", "uint8", _TENSOR),
        ("uint4_g32_zp", "uint4", (1, 32)),
        ("uint4_g64_zp", "uint4", (1, 64)),
        ("uint4_g128_zp", "uint4", (1, 128)),
    ):
        scaling = block_scaling(block, zero_point=True)
        yield BlockFormat(name=name, element=element(inner), scaling=scaling, source=_ZERO_POINT)
    # 6. codebooks and logarithms
    for name, inner, block, source in (
        ("nf4_g64", "nf4", (1, 64), _QLORA),
        ("bnb_fp4_g64", "bnb_fp4", (1, 64), _QLORA),
        ("bnb_dynamic8_g256", "bnb_dynamic8", (1, 256), _BNB8),
        ("bnb_dynamic8_unsigned_g256", "bnb_dynamic8_unsigned", (1, 256), _BNB8),
        ("lns8_channel", "lns8_g8", _CHANNEL, _LNS),
        ("lns8_tensor", "lns8_g8", _TENSOR, _LNS),
    ):
        yield BlockFormat(name=name, element=element(inner), scaling=block_scaling(block), source=source)


def _nvfp4(element: Callable[[str], ElementFormat]) -> Iterator[BlockFormat]:
    # The hardware reads the scales as ue4m3, whose codes are e4m3's without a sign; they are stored in whole bytes
    # (torch keeps them as float8_e4m3fn), so the 8-bit record says what they cost and decodes to the same values.
    scale = cast(FloatFormat, element("e4m3"))
    for name, block, aliases in (("nvfp4", (1, 16), ("nvfp4_1x16",)), ("nvfp4_16x16", (16, 16), ())):
        scaling = block_scaling(block, scale=scale, arithmetic="encode", tensor=TensorScale())
        yield BlockFormat(name=name, element=element("e2m1"), scaling=scaling, aliases=aliases, source=_NVFP4)
    wide = block_scaling(
        (1, 16), scale=cast(FloatFormat, element("ue5m3")), arithmetic="divide"
    )  # needs no second level
    yield BlockFormat(name="nvfp4_e5m3", element=element("e2m1"), scaling=wide, source=_E5M3)
    four_six = TensorScale(order="fouroversix")
    up_to_256 = TensorScale(top=256.0, order="fouroversix")
    variants: list[tuple[str, str, TensorScale, str, dict[str, Any]]] = [
        ("nvfp4_row", "e2m1", TensorScale(block=(1, None)), _TE_ROW, {}),
        ("nvfp4_per_token", "e2m1", TensorScale(order="te_quotient", block=(1, None)), _TE_TOKEN, {}),
        ("nvfp4_1x64", "e2m1", TensorScale(order="te_quotient", block=(1, 64)), _TE_WINDOW, {}),
        ("nvfp4_double_scale", "e2m1", TensorScale(order="fouroversix", block=(1, 128)), _TETRAJET, {}),
        ("nvfp4_trtllm", "e2m1", TensorScale(order="trtllm"), _TRTLLM, {}),
        ("nvfp4_modelopt", "e2m1", TensorScale(order="modelopt"), _MODELOPT, {}),
        ("nvfp4_compressed_tensors", "e2m1", TensorScale(order="compressed_tensors"), _COMPRESSED, {}),
        ("nvfp4_torchao", "e2m1", TensorScale(order="torchao"), _TORCHAO, {}),
    ]
    for bits in (3, 4, 6):
        variants.append((f"nvint{bits}", f"int{bits}", four_six, _NVINT.format(f"nvint{bits}"), {}))
    for metric in ("mae", "mse"):  # a block's largest element becomes 6 or, its scale times 1.5, 4
        chosen = {"candidates": (1.0, 1.5), "metric": metric}
        variants.append((f"nvfp4_four_six_{metric}", "e2m1", four_six, _FOUR_SIX, chosen))
        variants.append((f"nvfp4_four_six_{metric}_256", "e2m1", up_to_256, _FOUR_SIX, chosen))
        tiles = {**chosen, "block": (16, 16)}
        variants.append((f"nvfp4_16x16_four_six_{metric}_256", "e2m1", up_to_256, _FOUR_SIX, tiles))
    for name, inner, other in (
        ("if4", "e2m1", "int4"),
        ("if6_e2m3", "e2m3", _MAGNITUDES),
        ("if6_e3m2", "e3m2", _MAGNITUDES),
    ):
        for metric, aliases in (("mse", (name,)), ("mae", ())):
            scaling = Scaling(block=(1, 16), scale=scale, tensor=four_six, metric=metric)  # type: ignore[arg-type]
            yield BlockFormat(
                name=f"{name}_{metric}", element=element(inner), alternative=element(other), scaling=scaling,
                aliases=aliases, source=_INT_FLOAT.format(name),
            )  # fmt: skip
    for name, inner, tensor, source, fields in variants:
        scaling = Scaling(**{"block": (1, 16), "scale": scale, "tensor": tensor, **fields})
        yield BlockFormat(name=name, element=element(inner), scaling=scaling, source=source)
