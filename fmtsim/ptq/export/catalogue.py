# SPDX-License-Identifier: Apache-2.0
"""Every way to store a quantised weight that ``open_checkpoint`` knows, read or refused: one record each."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.formats.tensor_file import DTYPES, TensorPlace
from fmtsim.ptq.export import layouts as by
from fmtsim.ptq.export.layouts import Config, Reordered
from fmtsim.ptq.export.stored_tensors import StoredWeight, two_products


class Layout(NamedTuple):
    """A way to store a weight: who writes it, the names and tags of its tensors, and what reads it."""

    name: str
    methods: tuple[str, ...]  # ``Config.method`` of checkpoints that have it; "": without one
    codes: str  # how the name of its codes ends
    scale: str  # how that of its scales ends
    tags: tuple[str, ...]  # of codes, where others are ordinary weights or other layouts; () are any
    scale_tags: tuple[str, ...]
    read: Callable[[StoredWeight, Config], Encoded | Reordered] | None  # None: refused on opening
    holds: str = ""  # for the table of docs/ptq.md; what to do where it is refused
    source: str = ""  # what it was compared with, and the version; where it is refused, whose names these are
    needs: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    weight: str = ".weight"  # how the name of the weight ends
    check: Callable[[StoredWeight, Config], Any] | None = None  # refuses on opening what config and markers say
    values: Callable[[StoredWeight, Config, Encoded | Reordered], Tensor] | None = None  # as its library decodes
    mx_dtype: torch.dtype = torch.float32  # of weights under E8M0 scales, as the library decodes them
    divisor: str = ""  # the tensor by which the library divides scales of blocks, and rounds values to bfloat16

    @property
    def ends(self) -> tuple[str, ...]:
        """How the names of all its tensors end."""
        return (self.codes, self.scale, *self.needs, *self.others)

    def fits(self, places: Mapping[str, TensorPlace], name: str) -> str | None:
        """Return the prefix of the weight whose scale a tensor is, None where a tensor or a tag is another."""
        prefix = name.removesuffix(self.scale)
        codes = places.get(prefix + self.codes) if name.endswith(self.scale) else None
        if codes is None or name not in places or (self.tags and codes.tag not in self.tags):
            return None
        if self.scale_tags and places[name].tag not in self.scale_tags:
            return None
        return prefix if all(prefix + end in places for end in self.needs) else None

    def decode(self, weight: StoredWeight, config: Config, value: Encoded | Reordered) -> Tensor:
        """Return the values as the library computes them, in its dtype."""
        if self.values is not None:
            return self.values(weight, config, value)
        encoded = value.encoded if isinstance(value, Reordered) else value
        if encoded.tensor_scale is not None:
            scale = encoded.parts().scales
            assert scale is not None
            divides = bool(self.divisor) and self.divisor in weight.places
            scale = scale / weight.number(self.divisor) if divides else scale * encoded.tensor_scale
            values = two_products(encoded, scale)
            values = values.bfloat16() if divides else values
        else:
            dtype = DTYPES[weight.places[weight.scale].tag]
            dtype = self.mx_dtype if dtype == torch.uint8 else dtype
            values = encoded.decode(dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32)
        return value.arrange(values) if isinstance(value, Reordered) else values


_W, _S, _BF16 = ".weight", ".weight_scale", torch.bfloat16
_F8, _FP4 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), ("U8", "F4")
_REAL, _POWERS, _ANY = ("F32", "BF16", "F16"), ("U8", "F8_E8M0"), ()
_HF, _NAMES = "transformers 5.23", "names alone"
_CT: dict[str, Any] = {
    "others": (".weight_shape", ".weight_zero_point", ".weight_global_scale", ".weight_g_idx"),
    "mx_dtype": _BF16, "divisor": ".weight_global_scale",
}  # fmt: skip
_MARKED: dict[str, Any] = {
    "others": (".pre_quant_scale", ".comfy_quant", ".weight_zero_point"),
    "check": by.marked_format,
}
_BNB: dict[str, Any] = {"others": (".weight.nested_absmax", ".weight.nested_quant_map"), "values": by.bnb4_values,
                        "check": by.bnb_state}  # fmt: skip
_NF4, _FP4_MAP = ((".weight.quant_map", f".weight.quant_state.bitsandbytes__{kind}") for kind in ("nf4", "fp4"))
_SERVED, _GPTQ = ("", "modelopt", "quark"), ("gptq", "auto-round:gptq", "auto-round:own")
_OSS: dict[str, Any] = {"weight": "", "mx_dtype": _BF16}
_VALUES, _SOURCE = "save the values that its library decodes", "open the checkpoint that it was made of"
_CONVERT = "convert it by `mlx_lm.convert -d`"
LAYOUTS = (
    Layout("gpt-oss", ("", "mxfp4", "fp8"), "_blocks", "_scales", ("U8",), _ANY, by.read_mxfp4,
           "MXFP4, stacked experts", f"{_HF}, gpt-oss 7b58334", **_OSS),
    Layout("gpt-oss", ("", "mxfp4", "fp8"), ".blocks", ".scales", ("U8",), _ANY, by.read_mxfp4, **_OSS),
    Layout("AWQ", ("awq", "auto-round:awq"), ".qweight", ".scales", ("I32",), _REAL, partial(by.read_grouped, awq=True),
           "UINT4 with zero points, packing `gemm`", "AutoAWQ 88e4c76", (".qzeros",), check=by.check_packing),
    Layout("GPTQ", _GPTQ, ".qweight", ".scales", ("I32",), _REAL, partial(by.read_grouped, awq=False),
           "UINT2 to UINT8 with zero points, versions 1 and 2; act-order; `dynamic`, `extra_config`",
           "AutoGPTQ 9f7d370, auto-round 0.16.1", (".qzeros",), (".g_idx",), check=by.check_packing),
    Layout("compressed-tensors", ("compressed-tensors",), ".weight_packed", _S, ("I32", "U8"), _ANY, by.read_compressed,
           "INT2 to INT8 (Kimi-K2), both packings, act-order; E4M3; MXFP4, MXFP6, MXFP8; NVFP4",
           "compressed-tensors 0.20, 0.12.2", **_CT),
    Layout("compressed-tensors", ("compressed-tensors",), _W, _S, (*_F8, "I8"), _ANY, by.read_compressed, **_CT),
    Layout("bitsandbytes", ("", "bitsandbytes"), _W, ".weight.absmax", _ANY, _ANY, partial(by.read_bnb4, element="nf4"),
           "NF4, FP4, double quantisation; INT8", "bitsandbytes 0.50.2", _NF4, **_BNB),
    Layout("bitsandbytes", ("", "bitsandbytes"), _W, ".weight.absmax", _ANY, _ANY,
           partial(by.read_bnb4, element="bnb_fp4"), needs=_FP4_MAP, **_BNB),
    Layout("bitsandbytes", ("", "bitsandbytes"), _W, ".SCB", ("I8",), ("F32",), by.read_bnb8,
           others=(".weight_format",), values=by.bnb8_values),
    Layout("BitNet", ("bitnet",), _W, _S, ("U8",), _REAL, by.read_bitnet, "ternary INT2", _HF),
    Layout("W4AFP8", ("w4afp8",), "", "_scale_inv", ("I8",), _REAL, by.read_w4afp8, "INT4", "sglang, not run",
           weight=""),
    Layout("DeepSeek V3", ("", "fp8", "w4afp8", "mxfp8"), "", "_scale_inv", _F8, _ANY,
           partial(by.read_scaled, block=(128, 128)), "E4M3 in blocks of 128 x 128 (`weight_block_size`)", _HF,
           weight=""),
    Layout("DeepSeek V4", ("", "fp8"), _W, ".scale", _F8, _ANY, by.read_scaled, "MXFP4, or E4M3 under E8M0", _HF),
    Layout("DeepSeek V4", ("", "fp8"), _W, ".scale", ("I8", *_FP4), _POWERS, by.read_fp4),
    Layout("Mistral", ("", "mistral", "fp8"), _W, ".qscale_weight", _F8, _REAL, by.read_scaled, "E4M3", "not run"),
    Layout("ComfyUI", ("",), _W, ".scale_weight", _F8, _REAL, by.read_scaled, "float8; NVFP4 by `comfy_quant`",
           "comfy-kitchen 0.2.40"),
    Layout("ModelOpt", ("", "modelopt"), _W, _S, _FP4, ("F8_E4M3",), by.read_fp4,
           "NVFP4 (in cuBLAS's tiles, too), MXFP4, MXFP8, E4M3, INT8, INT4; `pre_quant_scale`", "Model-Optimizer 0.47",
           (".weight_scale_2",), **_MARKED),
    Layout("ModelOpt", ("modelopt",), _W, _S, ("U8",), _REAL, by.read_modelopt_int4, **_MARKED),
    Layout("ModelOpt or Quark", _SERVED, _W, _S, _FP4, _POWERS, by.read_fp4, **_MARKED),
    Layout("Quark", ("quark",), _W, _S, ("I32",), _REAL, by.read_quark, "MXFP4, E4M3, INT8; INT4, UINT4 in groups",
           "Quark 0.13; its kernel that multiplies is unverified", others=(".weight_zero_point",)),
    Layout("ModelOpt, Quark or FBGEMM", (*_SERVED, "fp8", "fbgemm-fp8", "ptpc-fp8", "mxfp8"), _W, _S, _F8,
           (*_REAL, *_POWERS), by.read_scaled, **_MARKED),
    Layout("ModelOpt or Quark", (*_SERVED, "w8a8-int8"), _W, _S, ("I8",), _REAL, by.read_scaled, **_MARKED),
    Layout("FBGEMM", ("", "fbgemm-fp8"), "", "_scale", _F8, _REAL, by.read_experts, "E4M3, Llama 4 too",
           f"{_HF}, not run", weight=""),
    Layout("torchao", ("", "torchao"), "._weight_qdata", "._weight_scale", _ANY, _ANY, by.read_torchao,
           "its int8, float8, MX and NVFP4 tensors", f"torchao 0.18, {_HF}", values=by.torchao_values,
           others=("._weight_zero_point", "._weight_per_tensor_scale", "._weight_act_per_tensor_scale"),
           check=by.torchao_record),
    # refused by name
    Layout("MLX", ("mlx",), _W, ".scales", ("U32",), _ANY, None, _CONVERT, _NAMES),
    Layout("Metal", ("metal",), _W, ".scales", _ANY, _ANY, None, _VALUES, _HF, needs=(".qbiases",)),
    Layout("HQQ", ("hqq",), ".W_q", ".scale", _ANY, _ANY, None, _VALUES, "hqq 0.2.8"),
    Layout("Quanto", ("quanto",), ".weight._data", ".weight._scale", _ANY, _ANY, None, _VALUES, "optimum-quanto 0.2.7"),
    Layout("Quanto", ("quanto",), ".weight._data._data", ".weight._scale", _ANY, _ANY, None),
    Layout("Marlin", ("marlin", "gptq-marlin", "gptq-marlin-24", "awq-marlin"), ".B", ".s", _ANY, _ANY, None, _SOURCE,
           _NAMES),
    Layout("AQLM", ("aqlm",), ".codes", ".codebooks", _ANY, _ANY, None, _VALUES, _NAMES),
    Layout("EXL2", ("exl2",), ".q_weight", ".q_scale", _ANY, _ANY, None, _SOURCE, _NAMES),
    Layout("EXL3", ("exl3",), ".trellis", ".suh", _ANY, _ANY, None, _SOURCE, _NAMES),
    Layout("QuIP#", ("quip", "quip-sharp"), ".Qidxs", ".SU", _ANY, _ANY, None, _SOURCE, _NAMES),
    Layout("VPTQ", ("vptq",), ".indices", ".centroids.weight", _ANY, _ANY, None, _VALUES, _NAMES),
    Layout("SpQR", ("spqr",), ".dense_weights", ".row_offsets", _ANY, _ANY, None, _VALUES, _HF),
    Layout("HIGGS", ("higgs",), _W, ".scales", _ANY, _ANY, None, _VALUES, _HF, needs=(".tables",)),
    Layout("EETQ", ("eetq",), _W, ".weight_scales", ("I8",), _ANY, None, _SOURCE, _HF),
    Layout("FP-Quant", ("fp-quant",), ".qweight", ".scales", ("U8",), _ANY, None, _SOURCE, _HF),
    Layout("FourOverSix", ("fouroversix",), ".quantized_weight_values", ".quantized_weight_scale_factors", _ANY, _ANY,
           None, _SOURCE, _NAMES),
    Layout("SINQ", ("sinq",), ".W_q", ".meta", _ANY, _ANY, None, _SOURCE, _HF),
    Layout("Gemma's packed integers", ("gemma",), ".embedding_quantized", ".embedding_scale", _ANY, _ANY, None, _VALUES,
           _HF),
    Layout("transformers' NVFP4", ("nvfp4",), _W, ".weight_sf", _ANY, _ANY, None, _SOURCE, _HF),
    Layout("SVDQuant", ("svdquant", "nunchaku"), ".qweight", ".wscales", _ANY, _ANY, None, _SOURCE, _NAMES),
    Layout("BitBLAS", ("bitblas", "gptq-bitblas"), ".qweight", ".scales", ("I8",), _ANY, None, _SOURCE, _NAMES),
    Layout("sparse bitmask", ("sparse-24-bitmask",), ".compressed", ".bitmask", _ANY, _ANY, None, _VALUES,
           "compressed-tensors 0.12.2"),
)  # fmt: skip
"""The first record that fits a layer of a method has it."""


def table() -> str:
    """Return the rows of docs/ptq.md: what is read, and what is refused by name, with what to do instead."""
    rows = [(layout.name, layout.holds, layout.source) for layout in LAYOUTS if layout.read and layout.holds]
    for advice in (_CONVERT, _VALUES, _SOURCE):
        names = (f"{layout.name} ({layout.source})" for layout in LAYOUTS if layout.holds == advice)
        rows.append((", ".join(names), f"refused: {advice}", ""))
    return "\n".join(f"|{'|'.join(row)}|" for row in [("layout", "Encoded as", "compared with"), ("---",) * 3, *rows])
