# SPDX-License-Identifier: Apache-2.0
"""The folder that compressed-tensors, and with it vLLM and transformers, reads: safetensors beside a config.json.

Names and shapes are those of compressed-tensors 0.20 (``compressors/``); the tests read the folders with it.
"""

import json
import re
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fmtsim.casts.encoded import Encoded
from fmtsim.formats.packing import pack, unpack
from fmtsim.ptq.export.stored_tensors import REAL, StoredWeight, spread_over
from fmtsim.ptq.export.weights import CodedWeight
from fmtsim.ptq.quantize_model import output_heads
from fmtsim.support.errors import DataError
from fmtsim.support.records import check_items

_CHOICES = "choose int4_g32, int8_token, e4m3_static, mxfp4_dynamic, mxfp8_dynamic or nvfp4_static"
Tensors = dict[str, Tensor]


def tensors_of(weight: CodedWeight, allow_rescale: bool = False) -> tuple[Tensors, dict[str, Any], str]:
    """Return the tensors of a layer by the names that follow its own, its scheme, and what rescaling changed, or ""."""
    changes = ""
    if weight.tensor_scale is not None and weight.is_element("e2m1") and weight.block == (1, 16):
        stored, changes = _nvfp4(weight, allow_rescale)
        coded = stored, "nvfp4-pack-quantized"
    elif weight.is_integer:
        scales = _scales(weight)
        if weight.inputs != "none" and weight.element.bits == 8:
            coded = {"weight": weight.integers, "weight_scale": scales}, "int-quantized"
        else:
            if weight.per == "tensor":
                raise weight.refuse("packed integers have a scale a channel or group, and this one a tensor", _CHOICES)
            bits, (rows, columns) = weight.element.bits, weight.elements.shape
            packed = pack(weight.integers.to(torch.int32) + (1 << bits - 1), bits)  # the least integer is code 0
            words = torch.nn.functional.pad(packed, (0, -packed.shape[1] % 4)).view(torch.int32)
            shape = torch.tensor([rows, columns])
            coded = {"weight_packed": words, "weight_scale": scales, "weight_shape": shape}, "pack-quantized"
    elif weight.is_element("e4m3") and not weight.is_mx("e4m3"):
        coded = {"weight": weight.codes.view(torch.float8_e4m3fn), "weight_scale": _scales(weight)}, "float-quantized"
    else:
        mx = {"e2m1": "mxfp4-pack", "e2m3": "mxfp6-pack", "e4m3": "mxfp8"}
        element = next((element for element in mx if weight.is_mx(element)), "")
        if not element:
            raise weight.refuse(f"compressed-tensors has no {weight.kind}", _CHOICES)
        _scales(weight)
        codes = weight.codes.view(torch.float8_e4m3fn) if element == "e4m3" else pack(weight.codes, weight.element.bits)
        name = "weight" if element == "e4m3" else "weight_packed"
        coded = {name: codes, "weight_scale": weight.powers}, f"{mx[element]}-quantized"
    tensors, layout = coded
    inputs = _inputs(weight, layout)
    if weight.inputs == "static":
        assert weight.x_scale is not None
        tensors["input_scale"] = weight.x_scale.reshape(1)
    two_level = layout.startswith("nvfp4")
    if weight.inputs == "nvfp4_static":
        assert weight.x_scale is not None
        tensors["input_global_scale"] = _reciprocals(weight.x_scale)[0].reshape(1)  # Transformer Engine's rule has one
    kind = "int" if weight.is_integer else "float"
    strategy = "tensor_group" if two_level else weight.per
    weights = {"num_bits": weight.element.bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    weights |= {"group_size": weight.block[1]} if weight.per == "group" or two_level else {}
    weights |= {"scale_dtype": "torch.uint8"} if layout.startswith("mx") else {}
    weights |= {"scale_dtype": "torch.float8_e4m3fn"} if two_level else {}
    weights |= {"block_structure": list(weight.block)} if weight.per == "block" else {}
    scheme = {"weights": weights, "input_activations": inputs, "output_activations": None, "format": layout}
    return tensors, scheme, changes


def _nvfp4(weight: CodedWeight, allow_rescale: bool) -> tuple[Tensors, str]:
    """Return the tensors of an NVFP4 weight, and what the reciprocal of its tensor scale changes, or "".

    The file has ``1 / tensor scale``; kernels invert it, and compressed-tensors decodes by ``_decoded``. The reciprocal
    stored is one that gives the tensor scale and the weights (rounded to bfloat16) back, if there is one.
    """
    assert weight.tensor_scale is not None
    scale, block_scale = weight.tensor_scale, _scales(weight)
    expected = weight.values.bfloat16()
    candidates = _reciprocals(scale)
    # values as compressed-tensors has them: bfloat16 of element times (scale / global scale)
    counts = [
        int((spread_over(weight.elements.float(), block_scale / g).bfloat16() != expected).sum()) for g in candidates
    ]
    different = min(counts)
    global_scale = candidates[counts.index(different)]
    inverse, changes = 1 / global_scale, []
    if inverse != scale:
        changes.append(f"tensor scale {scale.item():.9g} becomes {inverse.item():.9g}, the nearest reciprocal")
    if different:
        changes.append(f"{different} of {expected.numel()} weights decode to a neighbour in bfloat16")
    if changes and not allow_rescale:
        other = (
            "quantise with nvfp4_static or nvfp4_weights, whose scales are reciprocals, or " if inverse != scale else ""
        )
        raise weight.refuse(" and ".join(changes), f"{other}pass allow_rescale=True, which stores and reports that")
    stored = block_scale.to(torch.float8_e4m3fn)  # on its grid: nothing is rounded
    tensors = {"weight_packed": pack(weight.codes, 4), "weight_scale": stored}
    tensors["weight_global_scale"] = global_scale.reshape(1)
    return tensors, " and ".join(changes)


def _reciprocals(scale: Tensor) -> list[Tensor]:
    """Return the float32 numbers whose reciprocal is a scale; where there is none, that of the nearest reciprocal."""
    nearest = (1 / scale.double()).float()
    near = nearest.view(torch.int32) + torch.tensor([0, -1, 1, -2, 2], dtype=torch.int32)  # neighbours by their bits
    return [g for g in near.view(torch.float32) if 1 / g == scale] or [nearest]


def _scales(weight: CodedWeight) -> Tensor:
    weight.check_blocks()
    return weight.scale.reshape(1) if weight.per == "tensor" else weight.scale


def _inputs(weight: CodedWeight, layout: str) -> dict[str, Any] | None:
    kind = weight.inputs
    if kind == "none":
        return None
    common = {"symmetric": True, "dynamic": kind != "static"}
    if layout.startswith("nvfp4") and kind == "nvfp4_static":
        levels = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
        return {"num_bits": 4, "type": "float", **levels, **common, "dynamic": "local", "observer": "static_minmax"}
    if kind == "mx" and layout.startswith("mx"):
        return {"num_bits": weight.element.bits, "type": "float", "strategy": "group", "group_size": 32, **common}
    for element, numbers in (("int8", "int"), ("int4", "int"), ("e4m3", "float")):
        if weight.inputs_are(element) and kind in ("static", "tensor", "token"):
            bits = 4 if element == "int4" else 8
            return {"num_bits": bits, "type": numbers, "strategy": "token" if kind == "token" else "tensor", **common}
    if layout.startswith("nvfp4") and weight.inputs_are("e2m1"):
        raise weight.refuse(
            "the scale of the inputs' tensor is made in every call, and compressed-tensors stores one from calibration",
            "quantise with nvfp4_static",
        )
    raise weight.refuse(f"compressed-tensors has no scheme for inputs in {weight.x}", _CHOICES)


def config_of(model: nn.Module, schemes: dict[str, dict[str, Any]], ignored: list[str]) -> str:
    """Return config.json: the model's own, where it has one, with what is quantised and how."""
    groups: dict[str, dict[str, Any]] = {}
    for layer, scheme in schemes.items():
        groups.setdefault(json.dumps(scheme), {"targets": [], **scheme})["targets"].append(layer)
    layouts = {scheme["format"] for scheme in schemes.values()}
    quantization = {
        "quant_method": "compressed-tensors", "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed", "ignore": ignored, "kv_cache_scheme": None,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups.values())},
    }  # fmt: skip
    model_config: Any = getattr(model, "config", None)
    config = model_config.to_dict() if hasattr(model_config, "to_dict") else {}
    heads = output_heads(model) if isinstance(model, nn.Module) else ["lm_head"]
    if any(name in schemes for name in heads):  # the file has the head beside the embedding
        for fields in (config, config.get("text_config")):
            if isinstance(fields, dict) and "tie_word_embeddings" in fields:
                fields["tie_word_embeddings"] = False
    if config.get("architectures", ()) is None:  # save_pretrained writes it, and vLLM needs it
        config["architectures"] = [type(model).__name__]
    return json.dumps({**config, "quantization_config": quantization}, indent=2, default=str) + "\n"


class _Layout(NamedTuple):
    """Name, dtype, bits and format of codes; dtypes of scales. "" are integers, whose bits the scheme says."""

    name: str
    dtype: torch.dtype
    bits: tuple[int, ...]
    element: str
    scales: tuple[torch.dtype, ...] = REAL


_F8, _U8 = torch.float8_e4m3fn, torch.uint8
_LAYOUTS = {
    "int-quantized": _Layout(".weight", torch.int8, (8,), ""),
    "pack-quantized": _Layout(".weight_packed", torch.int32, tuple(range(2, 9)), ""),
    "float-quantized": _Layout(".weight", _F8, (8,), "e4m3"),
    "mxfp4-pack-quantized": _Layout(".weight_packed", _U8, (4,), "e2m1", (_U8,)),
    "mxfp6-pack-quantized": _Layout(".weight_packed", _U8, (6,), "e2m3", (_U8,)),
    "mxfp8-quantized": _Layout(".weight", _F8, (8,), "e4m3", (_U8,)),
    "nvfp4-pack-quantized": _Layout(".weight_packed", _U8, (4,), "e2m1", (_F8,)),
}
_OLD = {"int": "int-quantized", "float": "float-quantized"}  # what "naive-quantized" was of
_GROUP = {"targets": list[str], "format": Literal[*_LAYOUTS], "weights": dict}  # type: ignore[valid-type]
_STRATEGY = Literal["tensor", "channel", "group", "tensor_group", "block"]
_SIZES: dict[str, Any] = {"group": {"group_size": int}, "block": {"block_structure": list[int]}}


def groups_of(quantization: Any) -> dict[str, Any]:
    """Return the groups of a config.json by the way to them; ArgumentError names a field that is wrong."""
    way = "quantization_config"
    check_items({way: quantization}, {way: dict}, "config.json")
    method = {"quant_method": Literal["compressed-tensors"]} if "quant_method" in quantization else {}
    check_items(quantization, method, way)
    transforms = quantization.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        names = ", ".join(map(repr, transforms["config_groups"]))
        raise DataError(
            f"{way}.transform_config rotates weights ({names}), which is not undone; export the model without"
        )
    sparsity = quantization.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise DataError(
            f"{way}.sparsity_config has 'format': {sparsity['format']!r}, which is not read; save it as 'dense'"
        )
    if quantization.get("config_groups") is None:  # caches alone, for example
        return {}
    check_items(quantization, {"config_groups": dict}, way)
    groups = {f"{way}.config_groups.{name}": group for name, group in quantization["config_groups"].items()}
    for way, group in list(groups.items()):
        if isinstance(group, dict) and group.get("format") is None and "format" in quantization:
            group["format"] = quantization["format"]  # of all groups, as older versions write it
        if isinstance(group, dict) and (group.get("weights") is None or group.get("format") == "dense"):
            del groups[way]  # it says nothing of weights
            continue
        if isinstance(group, dict) and group.get("format") == "naive-quantized" and isinstance(group["weights"], dict):
            group["format"] = _OLD.get(str(group["weights"].get("type")), "naive-quantized")
        check_items(group, _GROUP, way)
        layout = _LAYOUTS[group["format"]]
        kind = Literal["float"] if layout.element else Literal["int"]
        fields = {"strategy": _STRATEGY, "num_bits": Literal[layout.bits], "type": kind}  # type: ignore[valid-type]
        check_items(group["weights"], fields | dict(symmetric=bool, dynamic=Literal[False]), f"{way}.weights")
        sizes = _SIZES.get(group["weights"]["strategy"].removeprefix("tensor_"), {})
        check_items(group["weights"], sizes, f"{way}.weights")
        group["version"] = quantization.get("version")
    return groups


def _unpacked(words: Tensor, bits: int, count: int, version: Any, place: str) -> Tensor:
    """Return the codes of rows of words: a stream of bits, or, until version 0.17, floor(32 / bits) codes in each word.

    Without a version the number of words decides; DataError where it fits both.
    """
    found = re.match(r"(\d+)\.(\d+)", str(version))
    streams, separate = -(-count * bits // 32), -(-count // (32 // bits))
    old = (int(found[1]), int(found[2])) < (0, 18) if found else words.shape[1] != streams
    if not found and streams == separate and 32 % bits and 32 // bits < count:
        raise DataError(
            f"{place} are those of two packings of {bits} bits, compressed-tensors' up to 0.17 and from 0.18; write "
            "'version' into quantization_config, that of the writer"
        )
    if words.shape[1] != (separate if old else streams):
        raise DataError(f"{place} do not hold codes of {bits} bits")
    if old and 32 % bits:
        codes = torch.stack([words >> bits * i & (1 << bits) - 1 for i in range(32 // bits)], -1)
        return codes.flatten(1)[:, :count].to(torch.uint8)
    stream = words.flatten().view(_U8).view(words.shape[0], -1)  # a column of words has no stride of 1
    return unpack(stream[:, : -(-count * bits // 8)], bits, count)


def encoded_of(layer: StoredWeight, scheme: dict[str, Any], order: Tensor | None = None) -> Encoded:
    """Return the weight of a layer's tensors and scheme, columns in an order; DataError names what does not fit."""
    layout, weights = _LAYOUTS[scheme["format"]], scheme["weights"]
    block = {"tensor": (None, None), "channel": (1, None), "block": weights.get("block_structure")}.get(
        weights["strategy"], (1, weights.get("group_size"))
    )
    if layout.dtype == torch.int32:
        bits, words = weights["num_bits"], layer.tensor(".weight_packed", torch.int32)
        rows, columns = shape = layer.tensor(".weight_shape", (torch.int64, torch.int32), 1).tolist()[:2] or (0, 0)
        place = f"tensor '{layer.prefix}.weight_shape' is {shape}, of which {tuple(words.shape)} words"
        if rows != words.shape[0] or (order is not None and order.shape[0] != columns):
            raise DataError(f"{place} do not hold codes of {bits} bits, or their index is of other columns")
        codes = _unpacked(words, bits, columns, scheme["version"], place)
        codes = codes if order is None else codes[:, order]
        scale, least = layer.scales(REAL), 1 << bits - 1  # the least integer is code 0
        if weights["symmetric"]:
            layer.refuse_points()
            return layer.encoded(f"int{bits}_full", pack(codes ^ least, bits), (rows, columns), scale, block)
        points = layer.tensor(".weight_zero_point", torch.int32).t()
        place = f"tensor '{layer.prefix}.weight_zero_point' of {points.shape[1]} x {points.shape[0]} words"
        if points.shape[0] != scale.shape[1]:
            raise DataError(f"{place} is not {rows} x {scale.shape[1]}")
        zeros = _unpacked(points, bits, rows, scheme["version"], place).t()
        return layer.encoded(f"uint{bits}", pack(codes, bits), (rows, columns), scale, block, zeros=zeros)
    if order is not None:
        raise DataError(f"tensor '{layer.prefix}.weight_g_idx' is read beside packed integers, not {scheme['format']}")
    codes, scale = layer.tensor(layout.name, layout.dtype), layer.scales(layout.scales)
    if not weights["symmetric"]:
        raise DataError(f"tensor {layer.prefix + layout.name!r} has zero points, which are read beside packed codes")
    layer.refuse_points()
    element, bits = layout.element or "int8_full", layout.bits[0]
    if codes.shape[1] * 8 % bits:
        raise DataError(
            f"tensor {layer.prefix + layout.name!r} has rows of {codes.shape[1]} bytes, no {bits}-bit codes"
        )
    shape = (codes.shape[0], codes.shape[1] * 8 // bits if layout.dtype == _U8 else codes.shape[1])
    second = 1 / layer.number(".weight_global_scale") if layout.scales == (_F8,) else None
    return layer.encoded(element, codes.view(_U8), shape, scale, block, second)
