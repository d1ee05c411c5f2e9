# SPDX-License-Identifier: Apache-2.0
"""How checkpoints of other programs store a quantised weight: the names of its tensors, and what they are."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import decode
from fmtsim.formats.packing import pack, unpack, unswizzled
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Block
from fmtsim.formats.tensor_file import DTYPES, TensorPlace
from fmtsim.ptq.export import compressed_tensors, torchao
from fmtsim.ptq.export.stored import REAL, StoredWeight, spread_over
from fmtsim.support.errors import DataError, shown
from fmtsim.support.records import check_items, located, parse_json, read_json

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
        if said is None:
            said = next((method for name, method in _FIELDS.items() if name in self.fields), "")
            if not said and "bits" in self.fields:  # MLX writes config.json, AutoGPTQ of 2023 a file of its own
                said = "mlx" if self.path.name == "config.json" else "gptq"
        if not isinstance(said, str):
            raise DataError(f"{self.path} has 'quant_method': {shown(said)}; it should be text")
        said = said.lower().replace("_", "-")
        if said in ("auto-round", "intel/auto-round"):
            # as its export chooses packers: awq's, gptq's (zero points less one), or its own (zero points as they are)
            packing = str(self.fields.get("packing_format", "auto_round:auto_gptq"))
            kind = "awq" if "awq" in packing else "gptq" if "gptq" in packing and "gptqmodel" not in packing else ""
            own = packing.removeprefix("auto_round:") in ("auto_round", "gptqmodel", "exllamav2", "tritonv2")
            return f"auto-round:{kind or ('own' if own else packing)}"
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
        for name, exact in (("dynamic", False), ("extra_config", True)):
            rules = self.fields.get(name) or {}
            if not isinstance(rules, dict) or not all(isinstance(changes, dict) for changes in rules.values()):
                raise DataError(f"{self.path} has {name!r}: {shown(rules)}; it should be fields by patterns of layers")
            for rule in [layer] if exact and layer in rules else rules:
                pattern = rule if exact else rule.removeprefix("-:").removeprefix("+:")
                if exact and rule != layer and not set("*+?^$()[]{}|\\") & set(rule):
                    continue
                try:
                    found = rule == layer or (re.search if exact else re.match)(pattern, layer)
                except re.error as error:
                    text = f"{self.path}: {name} has {shown(rule)}, which is not a regular expression: {error}"
                    raise DataError(text) from None
                if found and rule.startswith("-:") and not exact:
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
        return dataclasses.replace(found, groups=groups)
    path = folder / "config.json"
    return Config(path=path if path.is_file() else folder, metadata=metadata)


def _mxfp4(weight: StoredWeight, config: Config) -> Encoded:
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


def _scaled(weight: StoredWeight, config: Config, block: Block | None = None) -> Encoded | Reordered:
    """Float8 or int8 codes under real scales or powers of two."""
    codes = weight.tensor(weight.codes, (*_FLOAT8, torch.int8), 2, 3)
    scale = weight.scales()
    element, points = _FLOAT8.get(codes.dtype, "int8_full"), ".weight_zero_point"
    if points in weight.places and weight.tensor(points, (torch.int8, torch.int32, torch.uint8, *REAL), 0, 1, 2).any():
        raise DataError(
            f"tensor {weight.prefix + points!r} has numbers other than 0, which are not read beside {element}"
        )
    block = None if scale.numel() == 1 or codes.dtype == torch.int8 else config.block or block
    encoded = weight.encoded(element, codes.view(torch.uint8), tuple(codes.shape), scale, block)
    return _with_factors(weight, encoded)


def _fp4(weight: StoredWeight, config: Config) -> Encoded | Reordered:
    """Two E2M1 codes a byte, the first in the low half, under E8M0 scales, or under E4M3 scales and a second one."""
    codes = weight.tensor(weight.codes, (torch.uint8, torch.int8), 2, 3).view(torch.uint8)
    scale = weight.scales((torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8))
    second = weight.number(".weight_scale_2") if ".weight_scale_2" in weight.places else None
    width = config.size("group_size") or (16 if scale.dtype == torch.float8_e4m3fn else 32)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    marked = _marked(weight, config)
    if "nvfp4" in marked and len(shape) == 2:
        # ComfyUI's files: scales in cuBLAS's tiles. ModelOpt's export for ComfyUI writes the header's entry alone, and
        # may leave them in rows, which their shape says where rows are no tiles.
        rows, blocks = shape[0], shape[1] // width
        tiles = (-(-rows // 128) * 128, -(-blocks // 4) * 4)
        if ".comfy_quant" in weight.places or tuple(scale.shape) == tiles:
            if tuple(scale.shape) != tiles:
                full = f"tensor {weight.prefix + weight.scale!r} of shape {tuple(scale.shape)}"
                raise DataError(f"{full} is not tiles of 128 x 4 for {rows} x {blocks} blocks, which are {tiles}")
            scale = unswizzled(scale.view(torch.uint8), rows, blocks).contiguous().view(torch.float8_e4m3fn)
        if ".comfy_quant" in weight.places:  # comfy-kitchen packs the first code into the high half
            codes = codes >> 4 | codes << 4
    return _with_factors(weight, weight.encoded("e2m1", codes, shape, scale, (1, width), second))


def _marked(weight: StoredWeight, config: Config) -> str:
    """Return what format ComfyUI's marker beside a weight names, or the entry of a header for its layer, or ""."""
    layer, name = weight.prefix.removesuffix(".weight"), ".comfy_quant"
    try:
        if name in weight.places:
            record: Any = parse_json(bytes(weight.tensor(name, torch.uint8, 1).tolist()).decode())
        else:
            record = parse_json(config.metadata.get("_quantization_metadata", "{}")).get("layers", {}).get(layer, {})
        return str(record.get("format", "")).lower()
    except (AttributeError, UnicodeDecodeError, ValueError) as error:
        raise DataError(
            f"layer {layer!r}: its marker ({name}, or _quantization_metadata) is no record: {error}"
        ) from None


def _known_marker(weight: StoredWeight, config: Config) -> None:
    marked = _marked(weight, config)
    if marked and not re.fullmatch(r"nvfp4\w*|fp8\w*|float8_e4m3fn|float8_e5m2", marked):
        raise DataError(
            f"layer {weight.prefix!r}: its marker says format {marked!r}; read are nvfp4, fp8, float8_e4m3fn and float8_e5m2: store the layer in "
            "one of these, or without quantisation"
        )


def _with_factors(weight: StoredWeight, encoded: Encoded) -> Encoded | Reordered:
    """Multiply column k by ``pre_quant_scale[k]``, as ModelOpt multiplies inputs before the product."""
    if ".pre_quant_scale" not in weight.places:
        return encoded
    factors = weight.tensor(".pre_quant_scale", REAL, 1)
    if factors.shape[0] != encoded.shape[-1]:
        full = f"tensor '{weight.prefix}.pre_quant_scale'"
        raise DataError(f"{full} has {factors.shape[0]} factors for {encoded.shape[-1]} columns")
    return Reordered(encoded=encoded, factors=factors)


def _modelopt_int4(weight: StoredWeight, config: Config) -> Encoded | Reordered:
    """Rows 2 i and 2 i + 1 share bytes."""
    codes = weight.tensor(weight.codes, torch.uint8, 2, 3)
    rows = torch.stack([codes & 15, codes >> 4], -2).flatten(-3, -2)
    group, scale = config.size("group_size"), weight.scales(REAL)
    block = None if group is None else (1, group)
    return _with_factors(weight, weight.encoded("int4_full", pack(rows, 4), tuple(rows.shape), scale, block))


def _w4afp8(weight: StoredWeight, config: Config) -> Encoded:
    """Two's complement in halves of a byte, the first in the low one (sglang, test_cutlass_w4a8_moe.py)."""
    codes, scale = weight.tensor(weight.codes, torch.int8, 2, 3), weight.scales(REAL)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    return weight.encoded("int4_full", codes.view(torch.uint8), shape, scale, (1, config.size("group_size") or 128))


def _bitnet(weight: StoredWeight, config: Config) -> Encoded:
    """Ternary numbers plus one: bits 2 i and 2 i + 1 of stored row r, of R, are row i R + r."""
    codes = weight.tensor(weight.codes, torch.uint8)
    rows = torch.cat([codes >> 2 * i & 3 for i in range(4)])
    if bool((rows == 3).any()):
        raise DataError(f"tensor {weight.prefix + weight.codes!r} has codes 3, and BitNet's are 0, 1 and 2")
    scale = weight.scales(REAL).float()
    if config.fields.get("linear_class", "bitlinear") != "autobitlinear":
        scale = 1 / scale  # BitLinear divides by it
    packed = pack(rows + 3 & 3, 2)  # less one, in two's complement
    return weight.encoded("int2_full", packed, tuple(rows.shape), scale, (None, None))


def _bnb4(weight: StoredWeight, config: Config, element: str) -> Encoded | Reordered:
    """bitsandbytes' 4 bits: blocks through the rows, the first code of a byte in its high half."""
    fmt, state_name = get_format(element), next(name for name in weight.places if ".quant_state." in name)
    state = parse_json(bytes(weight.tensor(state_name, torch.uint8, 1).tolist()).decode())
    check_items(state, {"shape": list[int], "blocksize": int, "dtype": Literal["float32", "float16", "bfloat16"]}, "it")
    raw = weight.tensor(weight.codes, (torch.uint8, *REAL), 1, 2).flatten().view(torch.uint8)
    absmax, shape, width = (
        weight.tensor(weight.scale, (torch.float32, torch.uint8), 1),
        tuple(state["shape"]),
        state["blocksize"],
    )
    if ".weight.nested_absmax" in weight.places:
        # double quantisation: scales are codes under scales of their own, less their mean
        check_items(state, {"nested_blocksize": int, "nested_offset": float}, "it")
        outer = weight.tensor(".weight.nested_absmax", torch.float32, 1).repeat_interleave(state["nested_blocksize"])
        codebook = weight.tensor(".weight.nested_quant_map", torch.float32, 1)
        absmax = codebook[absmax.long()] * outer[: absmax.shape[0]] + state["nested_offset"]
    if not torch.equal(
        weight.tensor(".weight.quant_map", torch.float32, 1), decode(torch.arange(16, dtype=torch.uint8), fmt)
    ):
        raise DataError(f"tensor '{weight.prefix}.weight.quant_map' is not the codebook of {element}")
    codes = raw >> 4 | raw << 4
    if shape[-1] % width == 0:
        scale = absmax.reshape(-1, shape[-1] // width)
        return weight.encoded(element, codes.reshape(*shape[:-1], -1), shape, scale, (1, width))
    flat = weight.encoded(element, codes[None], (1, math.prod(shape)), absmax[None], (1, width), ragged=True)
    return Reordered(encoded=flat, size=torch.Size(shape))


def _bnb4_values(weight: StoredWeight, config: Config, value: Encoded | Reordered) -> Tensor:
    """Return float32 products in the dtype that the file says."""
    state_name = next(name for name in weight.places if ".quant_state." in name)
    dtype = parse_json(bytes(weight.tensor(state_name, torch.uint8, 1).tolist()).decode())["dtype"]
    return value.decode(torch.float32).to(getattr(torch, dtype))


def _bnb8(weight: StoredWeight, config: Config) -> Encoded:
    """LLM.int8(): scales are the largest of rows, and code 127 stands for them."""
    codes, largest = weight.tensor(weight.codes, torch.int8), weight.tensor(weight.scale, torch.float32, 1)
    if ".weight_format" in weight.places and weight.tensor(".weight_format", torch.uint8, 0, 1).any():
        raise DataError(
            f"tensor '{weight.prefix}.weight_format' is not 0, rows in their order; save it with a later bitsandbytes"
        )
    return weight.encoded("int8_full", codes.view(torch.uint8), tuple(codes.shape), (largest / 127)[:, None], (1, None))


def _bnb8_values(weight: StoredWeight, config: Config, value: Encoded | Reordered) -> Tensor:
    """Return code times largest, times 1/127 as bitsandbytes writes it (``int8_vectorwise_dequant``)."""
    codes, largest = weight.tensor(weight.codes, torch.int8), weight.tensor(weight.scale, torch.float32, 1)
    return codes * largest[:, None] * 7.874015718698502e-3


def _experts(weight: StoredWeight, config: Config) -> Encoded:
    """Llama 4's stacked experts in FP8, [experts, inputs, outputs]: a scale an output, [experts, 1, outputs] or turned."""
    codes, scale = weight.tensor(weight.codes, _FLOAT8, 3), weight.tensor(weight.scale, REAL, 3)
    count, inputs, outputs = codes.shape
    turned = config.method == "fbgemm-fp8" and tuple(scale.shape) == (count, outputs, 1)  # transformers' down_proj
    if tuple(scale.shape) != (count, 1, outputs) and not turned:
        raise DataError(
            f"tensor {weight.prefix + weight.scale!r} of shape {tuple(scale.shape)} is not a scale for each of {outputs} "
            f"outputs of {count} experts, ({count}, 1, {outputs})"
        )
    element = _FLOAT8[codes.dtype]
    return weight.encoded(
        element, codes.view(torch.uint8), tuple(codes.shape), scale.reshape(count, outputs), (inputs, 1)
    )


def _compressed(weight: StoredWeight, config: Config) -> Encoded | Reordered:
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


def _grouped(weight: StoredWeight, config: Config, awq: bool) -> Encoded | Reordered:
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
    later = config.method == "auto-round:own" or config.fields.get("checkpoint_format") == "gptq_v2"
    symmetric, middle, stored = config.fields.get("sym"), 1 << bits - 1, points.unique().tolist()
    says = {(middle,): True, (middle - 1,): False}.get(tuple(stored))
    if symmetric is True and says is not None:
        return 0 if says else 1
    if symmetric is True or (symmetric is None and says not in (None, later)):
        field = f"'sym': {symmetric}, 'checkpoint_format': {config.fields.get('checkpoint_format')!r}"
        raise DataError(
            f"tensor '{weight.prefix}.qzeros' has zero points of {stored[0]} to {stored[-1]}, and {config.path} {field}: "
            f"of {bits} symmetric bits version 1 (gptq) stores {middle - 1}, version 2 (gptq_v2) {middle}; set 'sym' to "
            "false and 'checkpoint_format' to the version that wrote the file"
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


def _packs_words(weight: StoredWeight, config: Config) -> None:
    """Refuse AWQ's and GPTQ's other packings, which kernels of their own want."""
    config = config.of_layer(weight.prefix)
    allowed = {"version": ("gemm",), "checkpoint_format": ("gptq", "gptq_v2"), "backend": ("autoawq", "auto", None),
               "is_marlin_format": (False,), "data_type": ("int", "int_sym", "int_asym"), "pack_dtype": ("int32",)}  # fmt: skip
    if config.method != "awq":
        del allowed["version"], allowed["backend"]  # auto-round's backends are kernels
    for name, values in allowed.items():
        said = config.fields.get(name)
        if said is not None and (said.lower() if isinstance(said, str) else said) not in values:
            raise DataError(
                f"{config.path} has {name!r}: {shown(said)} for layer {weight.prefix!r}; {config.method} is read with {' or '.join(map(repr, values))}: "
                "quantise again, or convert the file, with that packing"
            )


def _unpacked(words: Tensor, bits: int, count: int, interleaved: bool) -> Tensor:
    """Return the codes of rows of words, int16: a stream of bits, or AWQ's interleaved nibbles."""
    stream = words.flatten().view(torch.uint8).view(words.shape[0], -1)  # a column of words has no stride of 1
    codes = unpack(stream[:, : -(-count * bits // 8)], bits, count).to(torch.int16)
    return codes.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1) if interleaved else codes


def _quark(weight: StoredWeight, config: Config) -> Encoded:
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


def _torchao_record(weight: StoredWeight, config: Config) -> Any:
    """Return the record of a weight in the headers; refuse one of another class."""
    name = f"{weight.prefix}.weight"
    try:
        record = parse_json(config.metadata[name])
    except (KeyError, ValueError) as error:
        raise DataError(f"{name!r}: the header of the file has no record of torchao for it ({error})") from None
    with located(repr(name), DataError):
        torchao.check_record(record)
    return record


def _torchao(weight: StoredWeight, config: Config) -> Encoded:
    """What flattened tensor subclasses of torchao hold, by the record of each in the header."""
    record, start = _torchao_record(weight, config), "._weight_"
    places = {name.removeprefix(start): place for name, place in weight.places.items()}
    with located(repr(f"{weight.prefix}.weight")):
        return torchao.encoded_of(StoredWeight(weight.prefix + start, places, "qdata", "scale"), record)


def _torchao_values(weight: StoredWeight, config: Config, value: Encoded | Reordered) -> Tensor:
    return torchao.values_of(value, _torchao_record(weight, config))  # type: ignore[arg-type]


class Layout(NamedTuple):
    """A way to store a weight: who writes it, the names and tags of its tensors, and what reads it."""

    name: str
    methods: tuple[str, ...]  # ``Config.method`` of checkpoints that have it; "": also without one
    codes: str  # how the name of its codes ends
    scale: str  # how that of its scales ends
    holds: str  # for the table of docs/ptq.md: the formats, or what to do instead
    source: str  # what it was compared with, and the version
    read: Callable[[StoredWeight, Config], Encoded | Reordered] | None = None  # None: refused on opening
    needs: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()  # of codes, where other dtypes are ordinary weights
    scale_tags: tuple[str, ...] = ()
    weight: str = ".weight"  # how the name of the weight ends
    check: Callable[[StoredWeight, Config], Any] | None = None  # refuses on opening what the config says of a layer
    values: Callable[[StoredWeight, Config, Encoded | Reordered], Tensor] | None = None  # as its library decodes it
    mx_dtype: torch.dtype = torch.float32  # of weights under E8M0 scales, as the library decodes them
    divisor: str = ""  # the tensor by which the library divides scales of blocks, and rounds values to bfloat16

    @property
    def ends(self) -> tuple[str, ...]:
        """How the names of all its tensors end."""
        return (self.codes, self.scale, *self.needs, *self.others)

    def fits(self, places: Mapping[str, TensorPlace], name: str) -> str | None:
        """Return the prefix of the weight whose scale a tensor is, None where a tensor or a tag is another."""
        if not name.endswith(self.scale):
            return None
        prefix = name.removesuffix(self.scale)
        codes = places.get(prefix + self.codes)
        if codes is None or (self.tags and codes.tag not in self.tags):
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
            codes, scale, *_ = encoded.parts()
            assert scale is not None
            divides = bool(self.divisor) and self.divisor in weight.places
            scale = scale / weight.number(self.divisor) if divides else scale * encoded.tensor_scale
            values = spread_over(decode(codes, encoded.format.element).flatten(0, -2), scale).reshape(encoded.shape)  # type: ignore[union-attr]
            values = values.bfloat16() if divides else values
        else:
            dtype = DTYPES[weight.places[weight.scale].tag]
            dtype = self.mx_dtype if dtype == torch.uint8 else dtype
            values = encoded.decode(dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32)
        return value.arrange(values) if isinstance(value, Reordered) else values


_F8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_REAL, _POWERS = ("F32", "BF16", "F16"), ("U8", "F8_E8M0")
_MODELOPT = "Model-Optimizer 0.47"
_CT: dict[str, Any] = {
    "others": (".weight_shape", ".weight_zero_point", ".weight_global_scale", ".weight_g_idx"),
    "mx_dtype": torch.bfloat16, "divisor": ".weight_global_scale", "source": "compressed-tensors 0.20, 0.12.2",
}  # fmt: skip
_FACTORS: dict[str, Any] = {
    "others": (".pre_quant_scale", ".comfy_quant", ".weight_zero_point"),
    "check": _known_marker,
}
_VALUES, _SOURCE = "save the values that its library decodes", "open the checkpoint that it was made of"
_HF = "transformers 5.23"
_BNB4 = (".weight.nested_absmax", ".weight.nested_quant_map")
_SERVED = ("", "modelopt", "quark")
LAYOUTS = (
    Layout("gpt-oss", ("", "mxfp4", "fp8"), "_blocks", "_scales", "MXFP4, stacked experts", "transformers 5.23, gpt-oss 7b58334",
           _mxfp4, tags=("U8",), weight="", mx_dtype=torch.bfloat16),
    Layout("gpt-oss", ("", "mxfp4", "fp8"), ".blocks", ".scales", "", "", _mxfp4, tags=("U8",), weight="", mx_dtype=torch.bfloat16),
    Layout("AWQ", ("awq", "auto-round:awq"), ".qweight", ".scales", "UINT4 with zero points, GEMM packing alone",
           "AutoAWQ 88e4c76", partial(_grouped, awq=True), (".qzeros",), tags=("I32",), check=_packs_words),
    Layout("GPTQ", ("gptq", "auto-round:gptq", "auto-round:own"), ".qweight", ".scales",
           "UINT2 to UINT8 with zero points, versions 1 and 2; Reordered under act-order; `dynamic`, `extra_config`",
           "AutoGPTQ 9f7d370, auto-round 0.16.1", partial(_grouped, awq=False), (".qzeros",), (".g_idx",), tags=("I32",),
           check=_packs_words),
    Layout("compressed-tensors", ("compressed-tensors",), ".weight_packed", ".weight_scale",
           "integers of 2 to 8 bits (Kimi-K2's too), act-order; E4M3, int8; MXFP4, MXFP6, MXFP8, NVFP4", read=_compressed, **_CT),
    Layout("compressed-tensors", ("compressed-tensors",), ".weight", ".weight_scale", "", read=_compressed,
           tags=(*_F8, "I8"), **_CT),
    Layout("bitsandbytes", ("", "bitsandbytes"), ".weight", ".weight.absmax", "NF4, FP4, double quantisation; int8 rows",
           "bitsandbytes 0.50.2", partial(_bnb4, element="nf4"), (".weight.quant_map", ".weight.quant_state.bitsandbytes__nf4"),
           _BNB4, values=_bnb4_values),
    Layout("bitsandbytes", ("", "bitsandbytes"), ".weight", ".weight.absmax", "", "", partial(_bnb4, element="bnb_fp4"),
           (".weight.quant_map", ".weight.quant_state.bitsandbytes__fp4"), _BNB4, values=_bnb4_values),
    Layout("bitsandbytes", ("", "bitsandbytes"), ".weight", ".SCB", "", "", _bnb8, others=(".weight_format",), tags=("I8",),
           values=_bnb8_values),
    Layout("BitNet", ("bitnet",), ".weight", ".weight_scale", "INT2, ternary", "transformers 5.23", _bitnet, tags=("U8",),
           scale_tags=_REAL),
    Layout("W4AFP8", ("w4afp8",), "", "_scale_inv", "INT4 in groups", "sglang's tests", _w4afp8, tags=("I8",), weight="",
           scale_tags=_REAL),
    Layout("DeepSeek V3", ("", "fp8", "w4afp8", "mxfp8"), "", "_scale_inv", "E4M3 in blocks of 128 x 128 (`weight_block_size`)",
           "transformers 5.23", partial(_scaled, block=(128, 128)), tags=_F8, weight=""),
    Layout("DeepSeek V4", ("", "fp8"), ".weight", ".scale", "MXFP4, or E4M3 under E8M0", "transformers 5.23", _scaled, tags=_F8),
    Layout("DeepSeek V4", ("", "fp8"), ".weight", ".scale", "", "", _fp4, tags=("I8", "U8", "F4"), scale_tags=_POWERS),
    Layout("Mistral", ("", "mistral", "fp8"), ".weight", ".qscale_weight", "E4M3", "vLLM's mapping of names; not run", _scaled,
           tags=_F8),
    Layout("ComfyUI", ("",), ".weight", ".scale_weight", "E4M3, E5M2; NVFP4 by ModelOpt's names and a marker",
           "comfy-kitchen 0.2.40", _scaled, tags=_F8),
    Layout("ModelOpt or ComfyUI", ("", "modelopt"), ".weight", ".weight_scale",
           "NVFP4 (also in cuBLAS's tiles), `pre_quant_scale`; E4M3, INT8, INT4, MXFP4, MXFP8", _MODELOPT, _fp4,
           (".weight_scale_2",), tags=("U8", "F4"), scale_tags=("F8_E4M3",), **_FACTORS),
    Layout("ModelOpt", ("modelopt",), ".weight", ".weight_scale", "", "", _modelopt_int4, tags=("U8",), scale_tags=_REAL,
           **_FACTORS),
    Layout("ModelOpt or Quark", _SERVED, ".weight", ".weight_scale", "", "", _fp4, tags=("U8", "F4"), scale_tags=_POWERS,
           **_FACTORS),
    Layout("Quark", ("quark",), ".weight", ".weight_scale", "MXFP4, E4M3, INT8; INT4 and UINT4 in groups",
           "Quark 0.13; its kernel that multiplies is unverified", _quark, others=(".weight_zero_point",), tags=("I32",),
           scale_tags=_REAL),
    Layout("ModelOpt, Quark or FBGEMM", (*_SERVED, "fp8", "fbgemm-fp8", "ptpc-fp8", "mxfp8"), ".weight", ".weight_scale",
           "float8 under a scale a tensor, row or block", "transformers 5.23", _scaled, tags=_F8,
           scale_tags=(*_REAL, *_POWERS), **_FACTORS),
    Layout("ModelOpt or Quark", (*_SERVED, "w8a8-int8"), ".weight", ".weight_scale", "", "", _scaled, tags=("I8",),
           scale_tags=_REAL, **_FACTORS),
    Layout("Llama 4", ("", "fbgemm-fp8"), "", "_scale", "E4M3, stacked experts", "transformers 5.23", _experts, tags=_F8,
           scale_tags=_REAL, weight=""),
    Layout("torchao", ("", "torchao"), "._weight_qdata", "._weight_scale", "its int8, float8, MX and NVFP4 tensors",
           "torchao 0.18, transformers 5.23", _torchao, values=_torchao_values, check=_torchao_record,
           others=("._weight_zero_point", "._weight_per_tensor_scale", "._weight_act_per_tensor_scale")),
    # refused by name: ``holds`` says what to do instead
    Layout("MLX", ("mlx",), ".weight", ".scales", "`mlx_lm.convert --dequantize`", "mlx-lm 0.29", tags=("U32",)),
    Layout("Metal", ("metal",), ".weight", ".scales", _VALUES, _HF, needs=(".qbiases",)),
    Layout("HQQ", ("hqq",), ".W_q", ".scale", _VALUES, "hqq 0.2.8"),
    Layout("Quanto", ("quanto",), ".weight._data", ".weight._scale", _VALUES, "optimum-quanto 0.2.7"),
    Layout("Marlin", ("marlin", "gptq-marlin", "gptq-marlin-24", "awq-marlin"), ".B", ".s", _SOURCE, "AutoGPTQ 9f7d370"),
    Layout("AQLM", ("aqlm",), ".codes", ".codebooks", _VALUES, _HF),
    Layout("EXL2", ("exl2",), ".q_weight", ".q_scale", _SOURCE, "names alone"),
    Layout("EXL3", ("exl3",), ".trellis", ".suh", _SOURCE, "names alone"),
    Layout("QuIP#", ("quip", "quip-sharp"), ".Qidxs", ".SU", _SOURCE, "names alone"),
    Layout("VPTQ", ("vptq",), ".indices", ".centroids.weight", _VALUES, _HF),
    Layout("SpQR", ("spqr",), ".dense_weights", ".row_offsets", _VALUES, _HF),
    Layout("HIGGS", ("higgs",), ".weight", ".scales", _VALUES, _HF, needs=(".tables",)),
    Layout("EETQ", ("eetq",), ".weight", ".weight_scales", _SOURCE, _HF, tags=("I8",)),
    Layout("FP-Quant", ("fp-quant",), ".qweight", ".scales", _SOURCE, _HF, needs=(".forward_hadamard_matrix",)),
    Layout("FourOverSix", ("fouroversix",), ".quantized_weight_values", ".quantized_weight_scale_factors", _SOURCE, _HF),
    Layout("SINQ", ("sinq",), ".W_q", ".scales", _SOURCE, _HF),
    Layout("Gemma's packed integers", ("gemma",), ".embedding_quantized", ".embedding_scale", _VALUES, _HF),
    Layout("transformers' NVFP4", ("nvfp4",), ".weight", ".weight_sf", _SOURCE, _HF),
    Layout("SVDQuant", ("svdquant", "nunchaku"), ".qweight", ".wscales", _SOURCE, "auto-round 0.16.1"),
    Layout("BitBLAS", ("bitblas", "gptq-bitblas"), ".qweight", ".scales", _SOURCE, "names alone", tags=("I8",)),
    Layout("compressed-tensors' sparse bitmask", ("sparse-24-bitmask",), ".compressed", ".bitmask", _VALUES,
           "compressed-tensors 0.12.2"),
)  # fmt: skip
"""Every layout that ``open_checkpoint`` knows by the names of tensors and by methods: one record each."""
