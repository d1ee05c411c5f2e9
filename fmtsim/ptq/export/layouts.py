# SPDX-License-Identifier: Apache-2.0
"""How checkpoints of other programs store a quantised weight: the names of its tensors, and what they are."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.formats.packing import pack, unpack
from fmtsim.formats.scaling import Block
from fmtsim.ptq.export import compressed_tensors
from fmtsim.ptq.export.stored import REAL, StoredWeight
from fmtsim.support.errors import DataError, shown
from fmtsim.support.records import located, read_json

_FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds column 0, 1, ... of eight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reordered:
    """Hold a weight whose columns lie in another order than their groups (GPTQ's ``g_idx`` under act-order).

    Args:
        encoded: The columns sorted by their groups.
        columns: Where each of them belongs, int64 [columns].
    """

    encoded: Encoded
    columns: Tensor

    @property
    def shape(self) -> torch.Size:
        """The weight's."""
        return self.encoded.shape

    def decode(self, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, as ``Encoded.decode`` does, every column at its place."""
        return self.encoded.decode(out_dtype)[:, self.columns.argsort()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Say what a checkpoint's JSON files have of its quantisation.

    Args:
        path: The file that has it, or the folder.
        fields: Its fields; none where a checkpoint has no such file.
        groups: compressed-tensors' groups by the way to them.
    """

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """Which program wrote the checkpoint, as it says itself, or ""."""
        return str(self.fields.get("quant_method", ""))

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


def read_config(folder: Path) -> Config:
    """Return what the files of a folder say of its quantisation."""
    for name in ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        config = read_json(path, DataError, name, nan=True)  # a model's own fields may be infinite
        if not isinstance(config, dict):
            raise DataError(f"{path} is {shown(config)}; expected an object")
        inner = config.get("text_config")
        places = [config, inner] if isinstance(inner, dict) else [config]
        keys = ("quantization_config", "compression_config", "quantization")
        fields = next((place[key] for place in places for key in keys if key in place), None)
        if fields is None and name.startswith("quant"):
            fields = config
        if fields is None:
            continue
        with located(str(path), DataError):
            compressed = name == "config.json" and not (isinstance(fields, dict) and _is_other(fields))
            groups = compressed_tensors.groups_of(fields) if compressed else {}
        return Config(path=path, fields=fields if isinstance(fields, dict) else {}, groups=groups)
    return Config(path=folder / "config.json" if (folder / "config.json").is_file() else folder)


def _is_other(fields: dict[str, Any]) -> bool:
    method = fields.get("quant_method", "compressed-tensors" if "config_groups" in fields else "")
    return method != "compressed-tensors"


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


def _by_dtype(weight: StoredWeight, config: Config, block: Block | None = None) -> Encoded:
    """Float8, int8 or packed FP4 codes under scales of a format: their dtypes say which."""
    if config.groups:
        return _compressed(weight, config)
    codes = weight.tensor(weight.codes, (*_FLOAT8, torch.int8, torch.uint8, torch.int32), 2, 3)
    if codes.dtype == torch.int32:
        return _quark(weight, config, codes)
    scale = weight.scales()
    second = weight.number(".weight_scale_2") if ".weight_scale_2" in weight.places else None
    if second is not None and scale.dtype != torch.float8_e4m3fn:
        raise DataError(f"tensor {weight.prefix + weight.scale!r} is {scale.dtype}; beside weight_scale_2 it is float8")
    if codes.dtype in _FLOAT8:
        block = None if scale.numel() == 1 else config.block or block
        return weight.encoded(_FLOAT8[codes.dtype], codes.view(torch.uint8), tuple(codes.shape), scale, block)
    if scale.dtype not in REAL:  # two E2M1 codes a byte
        width = config.size("group_size") or (16 if scale.dtype == torch.float8_e4m3fn else 32)
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        return weight.encoded("e2m1", codes.view(torch.uint8), shape, scale, (1, width), second)
    if codes.dtype == torch.int8:
        return weight.encoded("int8_full", codes.view(torch.uint8), tuple(codes.shape), scale, None)
    # ModelOpt's INT4: rows 2 i and 2 i + 1 share bytes
    rows = torch.stack([codes & 15, codes >> 4], -2).flatten(-3, -2)
    group = config.size("group_size")
    return weight.encoded("int4_full", pack(rows, 4), tuple(rows.shape), scale, None if group is None else (1, group))


def _compressed(weight: StoredWeight, config: Config) -> Encoded:
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
        return compressed_tensors.encoded_of(weight, config.groups[way])


def _grouped(weight: StoredWeight, config: Config) -> Encoded | Reordered:
    """AWQ and GPTQ: unsigned codes and zero points in words of 32 bits, [inputs, outputs]."""
    words, zeros = weight.tensor(".qweight", torch.int32), weight.tensor(".qzeros", torch.int32)
    scale = weight.tensor(".scales", REAL)
    groups, outputs = scale.shape
    bits = config.size("bits") or config.size("w_bit") or 4
    awq = bits == 4 and words.shape[1] * 8 == outputs
    inputs = words.shape[0] if awq else words.shape[0] * 32 // bits
    if bits not in (2, 3, 4, 8) or (not awq and words.shape[1] != outputs) or (words.shape[0] * 32) % bits:
        raise DataError(
            f"tensor '{weight.prefix}.qweight' of shape {tuple(words.shape)} has neither AWQ's nor GPTQ's words of "
            f"{bits} bits for {outputs} outputs, whose scales are {tuple(scale.shape)}"
        )
    if zeros.shape != (groups, -(-outputs * bits // 32)):
        raise DataError(
            f"tensor '{weight.prefix}.qzeros' of shape {tuple(zeros.shape)} is not {groups} groups of {outputs} zero "
            f"points of {bits} bits, ({groups}, {-(-outputs * bits // 32)})"
        )
    points = _unpacked(zeros, bits, outputs, awq)
    if awq:
        codes = _unpacked(words, bits, outputs, awq).t()
    else:
        codes = _unpacked(words.t(), bits, inputs, False)
        # version 1 stores zero points less one; AutoGPTQ's and ExLlama's kernels add it without wrapping
        points = points + (config.fields.get("checkpoint_format") != "gptq_v2")
    order = None  # inputs sorted by their groups, None where they are sorted
    if ".g_idx" in weight.places:
        index = weight.tensor(".g_idx", torch.int32, 1)
        if index.shape[0] != inputs or int(index.min()) < 0 or int(index.max()) >= groups:
            raise DataError(
                f"tensor '{weight.prefix}.g_idx' of {index.shape[0]} numbers from {int(index.min())} to "
                f"{int(index.max())} is not the group, 0 to {groups - 1}, of each of {inputs} inputs"
            )
        counts = torch.bincount(index, minlength=groups)
        if int(counts.max()) != int(counts.min()):
            raise DataError(
                f"tensor '{weight.prefix}.g_idx' has groups of {int(counts.min())} to {int(counts.max())} inputs; "
                f"expected {inputs // groups} in each"
            )
        order = None if bool((index.diff() >= 0).all()) else index.argsort(stable=True)
    width = config.size("group_size") or config.size("q_group_size") or (inputs if groups == 1 else None)
    encoded = weight.encoded(
        f"uint{bits}", pack(codes if order is None else codes[:, order], bits), (outputs, inputs), scale.t(),
        None if width is None else (1, None if width == inputs else width), zeros=points.t(),
    )  # fmt: skip
    return encoded if order is None else Reordered(encoded=encoded, columns=order)


def _unpacked(words: Tensor, bits: int, count: int, interleaved: bool) -> Tensor:
    """Return the codes of rows of words, int16: a stream of bits, or AWQ's interleaved nibbles."""
    stream = words.contiguous().view(torch.uint8)[:, : -(-count * bits // 8)]
    codes = unpack(stream, bits, count).to(torch.int16)
    return codes.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1) if interleaved else codes


def _quark(weight: StoredWeight, config: Config, words: Tensor) -> Encoded:
    """Quark's 4-bit integers: [inputs, outputs] in groups, nibbles in AWQ's order where ``pack_method`` says so."""
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


class Layout(NamedTuple):
    """A way to store a weight: the ends of the names of its codes, scales and other tensors, and who reads them."""

    name: str
    codes: str
    scale: str
    read: Callable[[StoredWeight, Config], Encoded | Reordered]
    needs: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()  # of codes, where other dtypes are ordinary weights
    weight: str = ".weight"  # how the name of the weight ends
    mx_dtype: torch.dtype = torch.float32  # of weights under E8M0 scales, as the library decodes them
    divisor: str = ""  # the tensor by which the library divides scales of blocks, and rounds values to bfloat16

    @property
    def ends(self) -> tuple[str, ...]:
        """How the names of all its tensors end."""
        return (self.codes, self.scale, *self.needs, *self.others)


CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "I32")
"""Tags of tensors that may be codes."""
COMPRESSED_TENSORS = Layout(
    "compressed-tensors", ".weight_packed", ".weight_scale", _compressed, mx_dtype=torch.bfloat16,
    others=(".weight_shape", ".weight_zero_point", ".weight_global_scale"), divisor=".weight_global_scale",
)  # fmt: skip
"""Weights are decoded by it under other names of tensors, too, where config.json has groups of compressed-tensors."""
LAYOUTS = (
    Layout("gpt-oss", "_blocks", "_scales", _mxfp4, weight="", mx_dtype=torch.bfloat16),
    Layout("gpt-oss", ".blocks", ".scales", _mxfp4, weight="", mx_dtype=torch.bfloat16),
    Layout("AWQ or GPTQ", ".qweight", ".scales", _grouped, (".qzeros",), (".g_idx",)),
    COMPRESSED_TENSORS,
    Layout("DeepSeek V3", "", "_scale_inv", partial(_by_dtype, block=(128, 128)), tags=CODES, weight=""),
    Layout("DeepSeek V4", ".weight", ".scale", _by_dtype, tags=CODES),
    Layout("ModelOpt, Quark or compressed-tensors", ".weight", ".weight_scale", _by_dtype,
           others=(".weight_scale_2", ".weight_zero_point"), tags=CODES),
)  # fmt: skip
"""Every layout that ``open_checkpoint`` knows by the names of tensors."""
