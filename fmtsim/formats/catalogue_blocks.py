# SPDX-License-Identifier: Apache-2.0
"""The table of scaled formats: elements of the catalogue that share a scale, each with its source."""

from collections.abc import Callable, Iterator
from typing import cast

from fmtsim.formats.block import BlockFormat
from fmtsim.formats.scaling import Block, TensorScale, block_scaling
from fmtsim.formats.spec import ElementFormat, FloatFormat

_MX = "OCP Microscaling Formats (MX) v1.0, sections 5.1 (formats) and 6.3 (scale by floor)"
_MX_CEIL = "Transformer Engine d0067d0, MXFP8BlockScaling: the scale rounded up so that no element saturates"
_NVFP4 = "NVIDIA, arXiv:2509.25149, section 2; Transformer Engine d0067d0, NVFP4BlockScaling"
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
    yield from _microscaling(element)
    yield from _nvfp4(element)
    yield from _float8_scaled(element)
    yield from _integers(element)
    yield from _codebooks(element)


def _microscaling(element: Callable[[str], ElementFormat]) -> Iterator[BlockFormat]:
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
        yield BlockFormat(name=name, element=element(inner), scaling=scaling, aliases=aliases, source=_MX)
    for name, inner, _ in table[:2]:
        scaling = block_scaling((1, 32), "rceil")
        yield BlockFormat(name=f"{name}_rceil", element=element(inner), scaling=scaling, source=_MX_CEIL)


def _nvfp4(element: Callable[[str], ElementFormat]) -> Iterator[BlockFormat]:
    # The hardware reads the scales as ue4m3, whose codes are e4m3's without a sign; they are stored in whole bytes
    # (torch keeps them as float8_e4m3fn), so the 8-bit record says what they cost and decodes to the same values.
    scale = cast(FloatFormat, element("e4m3"))
    for name, block, aliases in (("nvfp4", (1, 16), ("nvfp4_1x16",)), ("nvfp4_16x16", (16, 16), ())):
        scaling = block_scaling(block, scale=scale, arithmetic="encode", tensor=TensorScale())
        yield BlockFormat(name=name, element=element("e2m1"), scaling=scaling, aliases=aliases, source=_NVFP4)


def _float8_scaled(element: Callable[[str], ElementFormat]) -> Iterator[BlockFormat]:
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


def _integers(element: Callable[[str], ElementFormat]) -> Iterator[BlockFormat]:
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


def _codebooks(element: Callable[[str], ElementFormat]) -> Iterator[BlockFormat]:
    for name, inner, block, source in (
        ("nf4_g64", "nf4", (1, 64), _QLORA),
        ("bnb_fp4_g64", "bnb_fp4", (1, 64), _QLORA),
        ("bnb_dynamic8_g256", "bnb_dynamic8", (1, 256), _BNB8),
        ("bnb_dynamic8_unsigned_g256", "bnb_dynamic8_unsigned", (1, 256), _BNB8),
        ("lns8_channel", "lns8_g8", _CHANNEL, _LNS),
        ("lns8_tensor", "lns8_g8", _TENSOR, _LNS),
    ):
        yield BlockFormat(name=name, element=element(inner), scaling=block_scaling(block), source=source)
