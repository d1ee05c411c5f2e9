# SPDX-License-Identifier: Apache-2.0
"""torchao's tensors as a safetensors file, which its ``unflatten_tensor_state_dict`` turns into a state_dict.

Classes and their fields are those of torchao 0.18 (``prototype/safetensors``); the tests load the files with it.
"""

import json
from typing import Any, Literal

import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.formats.packing import pack
from fmtsim.ptq.export.stored_tensors import REAL, StoredWeight, two_products
from fmtsim.ptq.export.weights import CodedWeight
from fmtsim.support.errors import DataError, shown
from fmtsim.support.records import check_items

_CHOICES = "choose int4_g32, int8_token, e4m3_token, mxfp4_weights or nvfp4_weights, or another layout="
_NVFP4 = "choose nvfp4_weights, or nvfp4_static with layout='compressed-tensors'"
Tensors = dict[str, Tensor]


def tensors_of(weight: CodedWeight) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of a layer's weight by their attribute, and the record that says which class they make."""
    weight.check_blocks()
    if weight.is_integer:
        kind, tensors, fields = _integers(weight)
    elif weight.is_element("e2m1") and weight.tensor_scale is not None and weight.block == (1, 16):
        if weight.inputs != "none":
            raise weight.refuse(f"this layout has NVFP4 weights alone, and inputs are {weight.x}", _NVFP4)
        kind, scale = "NVFP4Tensor", weight.scale.to(torch.float8_e4m3fn)  # on its grid: nothing is rounded
        tensors = {"qdata": pack(weight.codes, 4), "scale": scale, "per_tensor_scale": weight.tensor_scale}
        fields = {"block_size": 16, "orig_dtype": _dtype(weight.dtype), "is_swizzled_scales": False,
                  "use_triton_kernel": False, "act_quant_kwargs": None}  # fmt: skip
    elif weight.is_mx("e4m3") or weight.is_mx("e2m1"):
        if weight.inputs != "none":
            raise weight.refuse(f"this layout has MX weights alone, and inputs are {weight.x}", _CHOICES)
        small = weight.is_element("e2m1")
        codes = pack(weight.codes, 4) if small else weight.codes.view(torch.float8_e4m3fn)
        kind, tensors = "MXTensor", {"qdata": codes, "scale": weight.powers.view(torch.float8_e8m0fnu)}
        element = _dtype(torch.float4_e2m1fn_x2 if small else torch.float8_e4m3fn)
        fields = {"elem_dtype": element, "block_size": 32, "orig_dtype": _dtype(weight.dtype),
                  "kernel_preference": _typed("KernelPreference", "EMULATED"), "act_quant_kwargs": None,
                  "is_swizzled_scales": False}  # fmt: skip
    elif weight.is_element("e4m3") and weight.tensor_scale is None:
        kind, tensors, fields = _float8(weight)
    else:
        raise weight.refuse(f"torchao has no {weight.kind}", _CHOICES)
    return tensors, {"_type": kind, "_data": fields, "_tensor_data_names": list(tensors)}


def _integers(weight: CodedWeight) -> tuple[str, Tensors, dict[str, Any]]:
    tensors = {"qdata": weight.integers, "scale": weight.scale}
    if weight.inputs == "token" and weight.inputs_are("int8") and weight.element.bits == 8 and weight.per == "channel":
        act = {"granularity": _PER_ROW, "mapping_type": _typed("MappingType", "SYMMETRIC"), "reduce_range": False}
        act = _typed("QuantizeTensorToInt8Kwargs", act)
        own = {"block_size": [1, weight.block[1]], "dtype": _dtype(weight.dtype), "act_quant_kwargs": act}
        return "Int8Tensor", tensors, own
    dynamic = {"none": None, "token_zp": "int8_asym_per_token"}
    if weight.inputs not in dynamic:
        raise weight.refuse(f"torchao has no integer weights under inputs in {weight.x}", _CHOICES)
    tensors["zero_point"] = torch.zeros_like(weight.scale, dtype=torch.int8)
    target = {"_type": "torch.dtype", "_data": f"int{weight.element.bits}"}
    fields: Any = {"target_dtype": target, "block_size": list(weight.block), "dtype": _dtype(weight.dtype),
              "activation_quantization": dynamic[weight.inputs]}  # fmt: skip
    return "IntxUnpackedToInt8Tensor", tensors, fields


def _float8(weight: CodedWeight) -> tuple[str, Tensors, dict[str, Any]]:
    act = None
    if weight.inputs in ("token", "tensor") and weight.inputs_are("e4m3"):
        per = _PER_ROW if weight.inputs == "token" else _typed("PerTensor", {})
        act = {"float8_dtype": _dtype(torch.float8_e4m3fn), "granularity": per, "kernel_preference": _AUTO}
    elif weight.inputs != "none":
        raise weight.refuse(f"torchao has no float8 weights under inputs in {weight.x}", _CHOICES)
    inputs = act and _typed("QuantizeTensorToFloat8Kwargs", act)
    fields = {"block_size": list(weight.block), "mm_config": None, "act_quant_kwargs": inputs,
              "kernel_preference": _AUTO, "dtype": _dtype(weight.dtype)}  # fmt: skip
    return "Float8Tensor", {"qdata": weight.codes.view(torch.float8_e4m3fn), "scale": weight.scale}, fields


def _typed(kind: str, data: Any) -> dict[str, Any]:
    """Return the fields of a record, or the name of an enumeration's member, below the name of the class."""
    return {"_type": kind, "_data": data}


def _dtype(dtype: torch.dtype) -> dict[str, Any]:
    return _typed("torch.dtype", str(dtype).removeprefix("torch."))


_PER_ROW, _AUTO = _typed("PerRow", {"dim": -1}), _typed("KernelPreference", "AUTO")


def named(layer: str, attribute: str) -> str:
    """Return the key of an attribute of a layer's weight in the file."""
    return f"{layer}._weight_{attribute}"


def metadata_of(records: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the file's metadata from the record of every tensor by its name in a state_dict."""
    return {"tensor_names": json.dumps(list(records))} | {name: json.dumps(record) for name, record in records.items()}


_F8, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_CODES = {
    "Int8Tensor": (torch.int8, "int8_full", REAL), "IntxUnpackedToInt8Tensor": (torch.int8, "int8_full", REAL),
    "Float8Tensor": (_F8, "e4m3", REAL), "MXTensor": (_F8, "e4m3", (_E8M0,)),
    "NVFP4Tensor": (torch.uint8, "e2m1", (_F8,)),
}  # fmt: skip
_RECORD = {"_type": Literal[*_CODES], "_data": dict, "_tensor_data_names": list[str]}  # type: ignore[valid-type]


def check_record(record: Any) -> None:
    """Raise ArgumentError where a record is of a class that is not read, or a field is wrong."""
    check_items(record, _RECORD, "its record")
    fields = record["_data"]
    check_items(fields, {"block_size": int | list[int]}, "_data")
    if _CODES[record["_type"]][2] is not REAL:
        check_items(fields, {"is_swizzled_scales": Literal[False]}, "_data")


def encoded_of(layer: StoredWeight, record: Any) -> Encoded:
    """Return the weight of a record's tensors; an error names a field or tensor that does not fit."""
    fields, (dtype, element, scales) = record["_data"], _CODES[record["_type"]]
    if scales == (_E8M0,):
        small, other = (_dtype(dtype) for dtype in (torch.float4_e2m1fn_x2, _F8))
        if fields.get("elem_dtype") == small:
            dtype, element = torch.uint8, "e2m1"
        elif fields.get("elem_dtype") != other:
            raise DataError(f"_data has 'elem_dtype': {shown(fields.get('elem_dtype'))}; expected {small} or {other}")
    if "zero_point" in layer.places and layer.tensor("zero_point", torch.int8).any():
        raise DataError(f"tensor '{layer.prefix}zero_point' has numbers other than 0; fmtsim.export writes none")
    block, codes = fields["block_size"], layer.tensor("qdata", dtype)
    shape = (codes.shape[0], codes.shape[1] * (2 if dtype == torch.uint8 else 1))
    scale = layer.scales(scales)
    two_level = "per_tensor_scale" in {*layer.places, *record["_tensor_data_names"]}
    second = layer.number("per_tensor_scale") if two_level else None
    block = (1, block) if isinstance(block, int) else tuple(block)
    return layer.encoded(element, codes.view(torch.uint8), shape, scale, block, second)


def values_of(weight: Encoded, record: Any) -> Tensor:
    """Return the values as ``dequantize`` of the record's class computes them, in the dtype that it records."""
    fields = record["_data"]
    said = fields.get("dtype") or fields.get("orig_dtype")
    known = {str(_dtype(dtype)): dtype for dtype in REAL}
    if str(said) not in known:
        raise DataError(f"the record has 'dtype': {shown(said)}; expected one of {', '.join(known)}")
    if weight.tensor_scale is None:
        return weight.decode(known[str(said)])
    scale = weight.parts().scales
    assert scale is not None
    return two_products(weight, scale * weight.tensor_scale).to(known[str(said)])
