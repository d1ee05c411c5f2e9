# SPDX-License-Identifier: Apache-2.0
"""How checkpoints of other programs store a quantised weight: the names of its tensors, and what they are."""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import decode
from fmtsim.formats.packing import pack, unpack, unswizzled
from fmtsim.formats.scaling import Block
from fmtsim.ptq.export import compressed_tensors, torchao
from fmtsim.ptq.export.stored_tensors import REAL, StoredWeight, json_object
from fmtsim.support.errors import DataError, shown
from fmtsim.support.records import check_items, located, read_json

_FLOAT8 = {
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz", torch.float8_e5m2fnuz: "e5m2fnuz",
}  # fmt: skip
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds column 0, 1, ... of eight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reordered:
    """Hold a weight that is an Encoded and a step behind it: another order of columns, factors, or another shape.

    Args:
        encoded: The codes and scales; columns are sorted by their groups.
        columns: Where each of them belongs, int64 [columns] (``g_idx`` of act-order); None where they lie in order.
        factors: What the values are multiplied by, of a shape that broadcasts: ``pre_quant_scale`` of each column, the
            scale of a GGUF file's tensor or of each expert; None without.
        size: The weight's shape, where blocks run through its rows (bitsandbytes); None where it is that of the codes.
    """

    encoded: Encoded
    columns: Tensor | None = None
    factors: Tensor | None = None
    size: torch.Size | None = None

    @property
    def shape(self) -> torch.Size:
        """The weight's."""
        return self.encoded.shape if self.size is None else self.size

    def arrange(self, values: Tensor) -> Tensor:
        """Return the weight, of the values of ``encoded``."""
        values = values if self.columns is None else values[:, self.columns.argsort()]
        values = values if self.factors is None else values * self.factors.to(values.dtype)
        return values.reshape(self.shape)

    def decode(self, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, as ``Encoded.decode`` does, every column at its place and with its factor."""
        if self.factors is None:
            return self.arrange(self.encoded.decode(out_dtype))
        return self.arrange(self.encoded.decode(torch.float64)).to(out_dtype or torch.float32)


_RULES = ("dynamic", "extra_config")  # fields that have settings of single layers
_FIELDS = {"config_groups": "compressed-tensors", "quant_algo": "modelopt", "qformat_weight": "mistral", "w_bit": "awq"}
"""Methods by a field of configs that lack ``quant_method``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Say what a checkpoint's JSON files, and the headers of its tensor files, have of its quantisation.

    Args:
        path: The file that has it, or the folder.
        fields: Its fields; none where a checkpoint has no such file.
        groups: compressed-tensors' groups by the way to them.
        metadata: The headers' texts by name, of all files.
    """

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The ``quant_method`` in small letters with hyphens, or the one whose fields these are, or ""."""
        said = self.fields.get("quant_method")
        if said is None:  # MLX writes fields into config.json, AutoGPTQ of 2023 into a file of its own
            bits = "" if "bits" not in self.fields else "mlx" if self.path.name == "config.json" else "gptq"
            said = next((method for name, method in _FIELDS.items() if name in self.fields), bits)
        if not isinstance(said, str):
            raise DataError(f"{self.path} has 'quant_method': {shown(said)}; it should be text")
        said = said.lower().replace("_", "-").removeprefix("intel/")
        if said == "auto-round":
            # as its export chooses packers: awq's, gptq's (zero points less one), its own (zero points as they are)
            packing = str(self.fields.get("packing_format", "auto_round:auto_gptq")).removeprefix("auto_round:")
            packer = {"auto_awq": "awq", "auto_gptq": "gptq"} | dict.fromkeys(("auto_round", "gptqmodel"), "own")
            said += f":{packer.get(packing, packing)}"
        return "modelopt" if said.startswith("modelopt") else said

    def size(self, name: str) -> int | None:
        """Return a number of the fields, None where there is none (-1 too, GPTQ's word for whole rows)."""
        value = self.fields.get(name)
        if value is not None and type(value) is not int:
            raise DataError(f"{self.path} has {name!r}: {shown(value)}; it should be a whole number")
        return None if value == -1 else value

    @property
    def block(self) -> Block | None:
        """Rows and columns that share a scale, where the fields have them."""
        value = self.fields.get("weight_block_size")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
            raise DataError(f"{self.path} has 'weight_block_size': {shown(value)}; it should be two whole numbers")
        return value[0], value[1]

    def of_layer(self, layer: str) -> "Config":
        """Return what holds for one layer: GPTQModel's ``dynamic`` (the first rule that matches the beginning of its
        name, "-:" for layers left out) and auto-round's ``extra_config`` (its name, else a pattern in it)."""
        for name in _RULES:
            rules = self.fields.get(name) or {}
            for rule in [layer] if name == "extra_config" and layer in rules else rules:
                pattern = re.sub(r"^[-+]:", "", rule)
                if name == "extra_config" and set(rule).isdisjoint("*+?^$()[]{}|\\"):
                    pattern = f"{re.escape(rule)}$"
                try:
                    found = (re.match if name == "dynamic" or pattern != rule else re.search)(pattern, layer)
                except re.error as error:
                    text = f"{self.path}: {name} has {shown(rule)}, which is not a regular expression: {error}"
                    raise DataError(text) from None
                if found and rule.startswith("-:"):
                    raise DataError(f"{self.path}: {name} leaves {layer!r} out by {rule!r}, and the files have codes")
                if found:
                    return dataclasses.replace(self, fields=self.fields | rules[rule])
        return self


def read_config(folder: Path, metadata: dict[str, str]) -> Config:
    """Return what the files of a folder, and the headers of its tensor files, say of its quantisation."""
    for name in ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json", "params.json"):
        path = folder / name
        if not path.is_file():
            continue
        config = read_json(path, DataError, name, nan=True)  # a model's own fields may be infinite
        if not isinstance(config, dict):
            raise DataError(f"{path} is {shown(config)}; expected an object")
        inner = config.get("text_config")
        places = [config, inner] if isinstance(inner, dict) else [config]
        keys = ("quantization_config", "compression_config", "quantization")
        fields = next((place[key] for place in places for key in keys if place.get(key) is not None), None)
        if fields is None and name.startswith("quant"):
            fields = config
        if fields is None:
            continue
        if not isinstance(fields, dict):
            raise DataError(f"{path} has 'quantization_config': {shown(fields)}; it should be a dict")
        found = Config(path=path, fields=fields, metadata=metadata)
        with located(str(path), DataError):
            groups = compressed_tensors.groups_of(fields) if found.method == "compressed-tensors" else {}
            if found.method.split(":")[0] in ("awq", "gptq", "auto-round"):  # whose layers ask of_layer
                rules = {name: fields[name] for name in _RULES if fields.get(name)}
                check_items(rules, dict.fromkeys(rules, dict[str, dict]), "its quantisation")
        return dataclasses.replace(found, groups=groups)
    path = folder / "config.json" if (folder / "config.json").is_file() else folder
    header = metadata.get("quantization_config", "{}")  # of ModelOpt's single files for ComfyUI
    fields = json_object(header, f"{path}: quantization_config of the header")
    return Config(path=path, fields=fields, metadata=metadata)


def read_mxfp4(weight: StoredWeight, config: Config) -> Encoded:
    """gpt-oss: two E2M1 codes a byte, 16 bytes a block, and E8M0 scales of the blocks."""
    blocks = weight.tensor(weight.codes, torch.uint8, 2, 3, 4)
    scales = weight.tensor(weight.scale, torch.uint8, 1, 2, 3)
    if blocks.shape[-1] != 16:
        raise DataError(
            f"tensor {weight.prefix + weight.codes!r} has blocks of {blocks.shape[-1]} bytes; MXFP4's have 16"
        )
    if scales.shape != blocks.shape[:-1]:
        raise DataError(
            f"tensor {weight.prefix + weight.scale!r} of shape {tuple(scales.shape)} is not a scale for each block of "
            f"{weight.prefix + weight.codes!r}, of which there are {tuple(blocks.shape[:-1])}"
        )
    codes = blocks.flatten(-2)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    return weight.encoded("e2m1", codes, shape, scales.reshape(-1, scales.shape[-1]), (1, 32))


def read_scaled(weight: StoredWeight, config: Config, block: Block | None = None) -> Encoded | Reordered:
    """Float8 or int8 codes under real scales or powers of two."""
    codes = weight.tensor(weight.codes, (*_FLOAT8, torch.int8), 2, 3)
    weight.refuse_points()
    scale, element = weight.scales(), _FLOAT8.get(codes.dtype, "int8_full")
    block = None if scale.numel() == 1 or codes.dtype == torch.int8 else config.block or block
    return _with_factors(weight, weight.encoded(element, codes.view(torch.uint8), tuple(codes.shape), scale, block))


def read_fp4(weight: StoredWeight, config: Config) -> Encoded | Reordered:
    """Two E2M1 codes a byte, the first in the low half, under E8M0 scales, or under E4M3 scales and a second one."""
    codes = weight.tensor(weight.codes, (torch.uint8, torch.int8), 2, 3).view(torch.uint8)
    scale = weight.scales((torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8))
    second = weight.number(".weight_scale_2") if ".weight_scale_2" in weight.places else None
    width = config.size("group_size") or (16 if scale.dtype == torch.float8_e4m3fn else 32)
    shape, comfy = (*codes.shape[:-1], 2 * codes.shape[-1]), ".comfy_quant" in weight.places
    if marked_format(weight, config) and scale.dtype == torch.float8_e4m3fn and len(shape) == 2:
        # 1. scales: ComfyUI has them in cuBLAS's tiles, ModelOpt's export for it may leave them in rows
        rows, blocks = shape[0], shape[1] // width
        if tuple(scale.shape) == (-(-rows // 128) * 128, -(-blocks // 4) * 4):
            scale = unswizzled(scale.view(torch.uint8), rows, blocks).contiguous().view(torch.float8_e4m3fn)
        elif comfy:
            full = f"tensor {weight.prefix + weight.scale!r} of shape {tuple(scale.shape)}"
            raise DataError(f"{full} is not tiles of 128 x 4 for {rows} x {blocks} blocks")
        # 2. halves of bytes: comfy-kitchen packs the first code into the high one (hi_first), ModelOpt into the low one
        if comfy:
            codes = codes >> 4 | codes << 4
        elif config.method != "modelopt" and bool((codes >> 4 != codes & 15).any()):
            raise DataError(
                f"layer {weight.prefix!r} is nvfp4 by the header, which does not say who packed it: ModelOpt has the "
                "first code in the low half (add its quantization_config), ComfyUI in the high one (add comfy_quant)"
            )
    return _with_factors(weight, weight.encoded("e2m1", codes, shape, scale, (1, width), second))


@lru_cache(maxsize=4)
def _marked_layers(metadata: str) -> dict[str, Any]:
    """Return what a header's ``_quantization_metadata`` says of each layer; cached, as all layers ask."""
    layers = json_object(metadata, "_quantization_metadata").get("layers")
    return layers if isinstance(layers, dict) else {}


def marked_format(weight: StoredWeight, config: Config) -> str:
    """Return the format that ComfyUI's marker beside a weight, or the header's entry for its layer, names, or "".

    It is refused on opening where it is not read: rotated or clustered codes have the names of others.
    """
    record = _marked_layers(config.metadata.get("_quantization_metadata", "{}")).get(weight.prefix, {})
    if ".comfy_quant" in weight.places:
        record = json_object(weight.text(".comfy_quant"), f"tensor '{weight.prefix}.comfy_quant'")
    marked = str(record.get("format", "") if isinstance(record, dict) else record).lower()
    of_modelopt = config.method == "modelopt" and ".comfy_quant" not in weight.places  # a word for all its layers
    if marked and not of_modelopt and not re.fullmatch(r"nvfp4|fp8|float8_e4m3fn|float8_e5m2", marked):
        raise DataError(
            f"layer {weight.prefix!r}: its marker says format {marked!r}; read are nvfp4, fp8, float8_e4m3fn and "
            "float8_e5m2: store the layer in one of these, or without quantisation"
        )
    return marked


def _with_factors(weight: StoredWeight, encoded: Encoded) -> Encoded | Reordered:
    """Multiply column k by ``pre_quant_scale[k]``, as ModelOpt multiplies inputs before the product."""
    if ".pre_quant_scale" not in weight.places:
        return encoded
    factors = weight.tensor(".pre_quant_scale", REAL, 1)
    if factors.shape[0] != encoded.shape[-1]:
        full = f"tensor '{weight.prefix}.pre_quant_scale'"
        raise DataError(f"{full} has {factors.shape[0]} factors for {encoded.shape[-1]} columns")
    return Reordered(encoded=encoded, factors=factors)


def read_modelopt_int4(weight: StoredWeight, config: Config) -> Encoded | Reordered:
    """Rows 2 i and 2 i + 1 share bytes."""
    codes, group = weight.tensor(weight.codes, torch.uint8, 2, 3), config.size("group_size")
    rows = torch.stack([codes & 15, codes >> 4], -2).flatten(-3, -2)
    block = None if group is None else (1, group)
    encoded = weight.encoded("int4_full", pack(rows, 4), tuple(rows.shape), weight.scales(REAL), block)
    return _with_factors(weight, encoded)


def read_w4afp8(weight: StoredWeight, config: Config) -> Encoded:
    """Two's complement in halves of a byte, the first in the low one (sglang, test_cutlass_w4a8_moe.py)."""
    codes, width = weight.tensor(weight.codes, torch.int8, 2, 3).view(torch.uint8), config.size("group_size") or 128
    return weight.encoded("int4_full", codes, (*codes.shape[:-1], 2 * codes.shape[-1]), weight.scales(REAL), (1, width))


def read_bitnet(weight: StoredWeight, config: Config) -> Encoded:
    """Ternary numbers plus one: bits 2 i and 2 i + 1 of stored row r, of R, are row i R + r."""
    codes = weight.tensor(weight.codes, torch.uint8)
    rows = torch.cat([codes >> 2 * i & 3 for i in range(4)])
    if bool((rows == 3).any()):
        raise DataError(f"tensor {weight.prefix + weight.codes!r} has codes 3, and BitNet's are 0, 1 and 2")
    scale = weight.scales(REAL).float()
    if config.fields.get("linear_class", "bitlinear") != "autobitlinear":
        scale = 1 / scale  # BitLinear divides by it
    return weight.encoded("int2_full", pack(rows + 3 & 3, 2), tuple(rows.shape), scale, (None, None))


def bnb_state(weight: StoredWeight, config: Config) -> dict[str, Any]:
    """Return shape, size of blocks and dtype of a weight of 4 bits, which a tensor holds as JSON."""
    name = next(name for name in weight.places if ".quant_state." in name)
    state = json_object(weight.text(name), place := f"tensor {weight.prefix + name!r}")
    nested = {"nested_blocksize": int, "nested_offset": float} if ".weight.nested_absmax" in weight.places else {}
    dtypes = Literal["float32", "float16", "bfloat16"]
    with located(place, DataError):
        check_items(state, {"shape": list[int], "blocksize": int, "dtype": dtypes} | nested, "its record")
    return state


def read_bnb4(weight: StoredWeight, config: Config, element: str) -> Encoded | Reordered:
    """bitsandbytes' 4 bits: blocks through the rows, the first code of a byte in its high half."""
    state, real = bnb_state(weight, config), torch.float32
    shape, width, count = tuple(state["shape"]), state["blocksize"], math.prod(state["shape"])
    raw = weight.tensor(weight.codes, (torch.uint8, *REAL), 1, 2).flatten().view(torch.uint8)
    absmax = weight.tensor(weight.scale, (real, torch.uint8), 1)
    if not shape or min(*shape, width) < 1 or raw.numel() != -(-count // 2) or absmax.numel() != -(-count // width):
        parts = f"{raw.numel()} bytes and {absmax.numel()} scales"
        raise DataError(f"layer {weight.prefix!r} has {parts}, which are no {shape} in blocks of {width}")
    if absmax.dtype == torch.uint8:  # double quantisation: codes under scales of their own, less their mean
        outer, codebook = (weight.tensor(f".weight.nested_{name}", real, 1) for name in ("absmax", "quant_map"))
        size = state["nested_blocksize"]
        if size < 1 or outer.numel() != -(-absmax.numel() // size) or codebook.numel() != 256:
            raise DataError(
                f"layer {weight.prefix!r} has {outer.numel()} scales for {absmax.numel()} in blocks of {size}"
            )
        outer = outer.repeat_interleave(size)[: absmax.numel()]
        absmax = codebook[absmax.long()] * outer + state["nested_offset"]
    if weight.tensor(".weight.quant_map", real, 1).tolist() != decode(torch.arange(16).byte(), element).tolist():
        raise DataError(f"tensor '{weight.prefix}.weight.quant_map' is not the codebook of {element}")
    codes = raw >> 4 | raw << 4
    if shape[-1] % width == 0:
        scale = absmax.reshape(-1, shape[-1] // width)
        return weight.encoded(element, codes.reshape(*shape[:-1], -1), shape, scale, (1, width))
    flat = weight.encoded(element, codes[None], (1, count), absmax[None], (1, width), ragged=True)
    return Reordered(encoded=flat, size=torch.Size(shape))


def bnb4_values(weight: StoredWeight, config: Config, value: Encoded | Reordered) -> Tensor:
    """Return the values as dequantize_4bit has them."""
    dtype = getattr(torch, bnb_state(weight, config)["dtype"])
    return value.decode(torch.float32).to(dtype)  # rounded twice, as there


def read_bnb8(weight: StoredWeight, config: Config) -> Encoded:
    """LLM.int8(): scales are the largest of rows, and code 127 stands for them."""
    codes, largest = weight.tensor(weight.codes, torch.int8), weight.tensor(weight.scale, torch.float32, 1)
    if ".weight_format" in weight.places and weight.tensor(".weight_format", torch.uint8, 0, 1).any():
        raise DataError(f"tensor '{weight.prefix}.weight_format' is not 0 (rows); save it by a later bitsandbytes")
    return weight.encoded("int8_full", codes.view(torch.uint8), tuple(codes.shape), (largest / 127)[:, None], (1, None))


def bnb8_values(weight: StoredWeight, config: Config, value: Encoded | Reordered) -> Tensor:
    """Return the values as int8_vectorwise_dequant has them."""
    assert isinstance(value, Encoded)
    codes, largest = value.codes.view(torch.int8), weight.tensor(weight.scale, torch.float32, 1)
    return codes * largest[:, None] * 7.874015718698502e-3  # 1 / 127


def read_experts(weight: StoredWeight, config: Config) -> Encoded:
    """Llama 4's experts, [experts, inputs, outputs]: a scale an output, which transformers turns for down_proj."""
    codes, scale = weight.tensor(weight.codes, _FLOAT8, 3), weight.tensor(weight.scale, REAL, 3)
    element, shape = _FLOAT8[codes.dtype], tuple(codes.shape)
    return weight.encoded(element, codes.view(torch.uint8), shape, scale.reshape(shape[0], -1), (shape[1], 1))


def read_compressed(weight: StoredWeight, config: Config) -> Encoded | Reordered:
    """Read a weight of compressed-tensors by the group that names its layer, has a pattern of it, or names a class."""

    def rank(target: str) -> int:
        try:
            matches = target.startswith("re:") and re.match(target[3:], weight.prefix)
        except re.error as error:
            text = f"{config.path}: target {shown(target)} is not a regular expression: {error}"
            raise DataError(text) from None
        kind = target.isidentifier() and target[0].isupper()  # the name of a class, such as Linear
        return 0 if target == weight.prefix else 1 if matches else 2 if kind else 3

    ranks = {way: min(map(rank, group["targets"]), default=3) for way, group in config.groups.items()}
    way = min(ranks, key=ranks.__getitem__, default="")
    if ranks.get(way, 3) == 3:
        name, way = weight.prefix + weight.codes, "quantization_config.config_groups"
        raise DataError(f"{config.path}: {way}: no targets name the layer of tensor {name!r}")
    with located(f"{config.path}: {way}"):
        order, index = None, weight.places.get(".weight_g_idx")
        if index is not None:
            order = _column_order(weight, ".weight_g_idx", weight.scales().shape[1], index.shape[0])
        encoded = compressed_tensors.encoded_of(weight, config.groups[way], order)
    return encoded if order is None else Reordered(encoded=encoded, columns=order)


def read_grouped(weight: StoredWeight, config: Config, awq: bool) -> Encoded | Reordered:
    """AWQ and GPTQ: unsigned codes and zero points in words of 32 bits, [inputs, outputs]."""
    config = config.of_layer(weight.prefix)
    words, zeros = weight.tensor(".qweight", torch.int32), weight.tensor(".qzeros", torch.int32)
    scale = weight.tensor(".scales", REAL)
    groups, outputs = scale.shape
    bits = config.size("bits") or config.size("w_bit") or 4
    inputs = words.shape[0] if awq else words.shape[0] * 32 // bits
    fits = words.shape[1] * 8 == outputs and bits == 4 if awq else words.shape[1] == outputs
    if not 2 <= bits <= 8 or not fits or (words.shape[0] * 32) % bits:
        raise DataError(
            f"tensor '{weight.prefix}.qweight' of shape {tuple(words.shape)} has neither AWQ's nor GPTQ's words of "
            f"{bits} bits for {outputs} outputs, whose scales are {tuple(scale.shape)}"
        )
    if zeros.shape != (groups, -(-outputs * bits // 32)):
        raise DataError(
            f"tensor '{weight.prefix}.qzeros' of shape {tuple(zeros.shape)} is not {groups} groups of {outputs} zero "
            f"points of {bits} bits, ({groups}, {-(-outputs * bits // 32)})"
        )
    points, order = _unpacked(zeros, bits, outputs, awq), None
    if awq:
        codes = _unpacked(words, bits, outputs, awq).t()
    else:
        codes = _unpacked(words.t(), bits, inputs, False)
        points = points + _zero_point_offset(weight, config, bits, points)
        order = _column_order(weight, ".g_idx", groups, inputs)
    width = config.size("group_size") or config.size("q_group_size") or (inputs if groups == 1 else None)
    encoded = weight.encoded(
        f"uint{bits}", pack(codes if order is None else codes[:, order], bits), (outputs, inputs), scale.t(),
        None if width is None else (1, None if width == inputs else width), zeros=points.t(),
    )  # fmt: skip
    return encoded if order is None else Reordered(encoded=encoded, columns=order)


def _zero_point_offset(weight: StoredWeight, config: Config, bits: int, points: Tensor) -> int:
    """Return what GPTQ's stored zero points lack: 1 in version 1, 0 in version 2.

    AutoGPTQ's and ExLlama's kernels add the 1 without wrapping. Symmetric codes have their zero in the middle, so that
    the stored numbers say which version they are of, whatever the field does.
    """
    form = config.fields.get("checkpoint_format") or config.fields.get("format")  # transformers 5 has both names
    later = config.method == "auto-round:own" or str(form).lower() == "gptq_v2"
    symmetric, middle, stored = config.fields.get("sym"), 1 << bits - 1, points.unique().tolist()
    says = {(middle,): True, (middle - 1,): False}.get(tuple(stored))
    if symmetric is True and says is not None:
        return 0 if says else 1
    if symmetric is True or (symmetric is None and says not in (None, later)):
        field = f"'sym': {symmetric}, 'checkpoint_format': {form!r}"
        raise DataError(
            f"tensor '{weight.prefix}.qzeros' has zero points of {stored[0]} to {stored[-1]}, {config.path} {field}: "
            f"of {bits} symmetric bits version 1 (gptq) stores {middle - 1}, version 2 (gptq_v2) {middle}; set 'sym' "
            "to false and 'checkpoint_format' to the version that wrote the file"
        )
    return 0 if later else 1


def _column_order(weight: StoredWeight, name: str, groups: int, inputs: int) -> Tensor | None:
    """Return the inputs sorted by their groups (act-order), None where they are sorted, or all numbers are -1."""
    if name not in weight.places:
        return None
    index = weight.tensor(name, torch.int32, 1)
    if bool((index == -1).all()) and index.shape[0] == inputs:
        return None
    if index.shape[0] != inputs or int(index.min()) < 0 or int(index.max()) >= groups:
        raise DataError(
            f"tensor {weight.prefix + name!r} of {index.shape[0]} numbers from {int(index.min())} to "
            f"{int(index.max())} is not the group, 0 to {groups - 1}, of each of {inputs} inputs"
        )
    counts = torch.bincount(index, minlength=groups)
    if int(counts.max()) != int(counts.min()):
        raise DataError(
            f"tensor {weight.prefix + name!r} has groups of {int(counts.min())} to {int(counts.max())} inputs; "
            f"expected {inputs // groups} in each"
        )
    return None if bool((index.diff() >= 0).all()) else index.argsort(stable=True)


def check_packing(weight: StoredWeight, config: Config) -> None:
    """Refuse AWQ's and GPTQ's other packings, which kernels of their own want."""
    config = config.of_layer(weight.prefix)
    allowed: dict[str, tuple[Any, ...]]
    allowed = {"data_type": ("int",), "pack_dtype": ("int32",), "is_marlin_format": (False,)}
    if config.method in ("awq", "gptq"):  # auto-round says it in packing_format
        form = ("gemm",) if config.method == "awq" else ("gptq", "gptq_v2")
        allowed |= dict.fromkeys(("checkpoint_format", "format", *(("version",) if "gemm" in form else ())), form)
    if config.fields.get("backend") == "llm-awq":  # other backends are kernels
        allowed["backend"] = ("autoawq",)
    for name, values in allowed.items():
        said = config.fields.get(name)
        if said is not None and (said.lower() if isinstance(said, str) else said) not in values:
            raise DataError(
                f"{config.path} has {name!r}: {shown(said)} for layer {weight.prefix!r}; {config.method} is read with "
                f"{' or '.join(map(repr, values))}: quantise again, or convert the file, with that packing"
            )


def _unpacked(words: Tensor, bits: int, count: int, interleaved: bool) -> Tensor:
    """Return the codes of rows of words, int16: a stream of bits, or AWQ's interleaved nibbles."""
    stream = words.flatten().view(torch.uint8).view(words.shape[0], -1)  # a column of words has no stride of 1
    codes = unpack(stream[:, : -(-count * bits // 8)], bits, count).to(torch.int16)
    return codes.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1) if interleaved else codes


def read_quark(weight: StoredWeight, config: Config) -> Encoded:
    """Quark's 4-bit integers: [inputs, outputs] in groups, nibbles in AWQ's order where ``pack_method`` says so."""
    words = weight.tensor(weight.codes, torch.int32)
    spec = config.fields.get("global_quant_config", {})
    spec = spec.get("weight") if isinstance(spec, dict) else None
    kind = spec.get("dtype") if isinstance(spec, dict) else None
    if kind not in ("int4", "uint4"):
        raise DataError(
            f"tensor '{weight.prefix}{weight.codes}' is torch.int32, and {config.path} does not say what it packs "
            f"(global_quant_config.weight.dtype is {shown(kind)}; known are 'int4' and 'uint4')"
        )
    export = config.fields.get("export")
    interleaved = not isinstance(export, dict) or export.get("pack_method", "reorder") == "reorder"
    scale = weight.scales(REAL)
    outputs = words.shape[1] * 8
    codes = _unpacked(words, 4, outputs, interleaved).t()
    points = None
    if kind == "uint4":
        points = _unpacked(weight.tensor(".weight_zero_point", torch.int32), 4, outputs, interleaved).t()
    elif ".weight_zero_point" in weight.places and weight.tensor(".weight_zero_point", torch.int32).any():
        raise DataError(f"tensor '{weight.prefix}.weight_zero_point' has numbers other than 0 beside signed codes")
    element = "uint4" if points is not None else "int4_full"
    return weight.encoded(element, pack(codes, 4), tuple(codes.shape), scale.t(), None, zeros=points)


def torchao_record(weight: StoredWeight, config: Config) -> dict[str, Any]:
    """Return the record of a weight in the headers; refuse one of another class."""
    name = f"{weight.prefix}.weight"
    if name not in config.metadata:
        raise DataError(f"{name!r}: no header has torchao's record of it, which tells its class; save the model again")
    record = json_object(config.metadata[name], repr(name))
    with located(repr(name), DataError):
        torchao.check_record(record)
    return record


def read_torchao(weight: StoredWeight, config: Config) -> Encoded:
    """What flattened tensor subclasses of torchao hold, by the record of each in the header."""
    record, start = torchao_record(weight, config), "._weight_"
    places = {name.removeprefix(start): place for name, place in weight.places.items()}
    with located(repr(f"{weight.prefix}.weight")):
        return torchao.encoded_of(StoredWeight(weight.prefix + start, places, "qdata", "scale"), record)


def torchao_values(weight: StoredWeight, config: Config, value: Any) -> Tensor:
    """Return the values as ``dequantize`` of their class has them."""
    return torchao.values_of(value, torchao_record(weight, config))
