# SPDX-License-Identifier: Apache-2.0
"""export and read_export: files of compressed-tensors, torchao and GGUF, with the codes that fmtsim rounded to."""

import hashlib
import math
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Never, get_args

import torch
from torch import Tensor, nn

from fmtsim.casts.arguments import check_module, refuse_others, spelled
from fmtsim.casts.encoded import Encoded
from fmtsim.formats.tensor_file import DTYPES, TensorPlace, open_tensors, read_tensors, stored_tensor, tensor_content
from fmtsim.nn.coverage import Coverage
from fmtsim.ptq.export import compressed_tensors, gguf, torchao
from fmtsim.ptq.export.catalogue import LAYOUTS, Layout
from fmtsim.ptq.export.layouts import Config, Reordered, read_config
from fmtsim.ptq.export.stored_tensors import StoredWeight, read_tensor
from fmtsim.ptq.export.weights import CodedWeight, weights_of
from fmtsim.ptq.ptq_report import coverage_of_weights, coverage_text
from fmtsim.support.errors import ArgumentError, DataError, shown
from fmtsim.support.files import TEMPORARY, write_folder
from fmtsim.support.records import located, parse_json, read_json
from fmtsim.support.table import some

_OTHER = "other tensors"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Reader(NamedTuple):
    """What reads a tensor, the name of the layout that stores it ("" of one that is not quantised), and its values."""

    name: str
    read: Callable[[], Any]
    decode: Callable[[Any], Tensor] = lambda value: value.decode()
    plain: str = _OTHER  # what tensors are called that no layout stores


class Checkpoint(Mapping[str, "Encoded | Reordered | Tensor"]):
    """Map the names of a checkpoint's weights to what the files hold: ``open_checkpoint`` makes it.

    A quantised weight is an Encoded, or a Reordered where its columns are sorted by their groups; any other tensor is
    one in its own dtype. Each is read from its file when it is asked for, and nothing is kept.
    """

    def __init__(self, path: Path, readers: Mapping[str, Reader]) -> None:
        self.path = path
        self._readers = readers

    def __getitem__(self, name: str) -> Encoded | Reordered | Tensor:
        value: Encoded | Reordered | Tensor = self._readers[name].read()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def layout(self, name: str) -> str:
        """Return which layout stores a weight, ``""`` for a tensor that is not quantised."""
        return self._readers[name].name

    def decode(self, name: str) -> Tensor:
        """Return the values as the checkpoint's own library computes them, in its dtype.

        ``Encoded.decode`` rounds the product of code and scales once. The libraries do the same but for NVFP4:
        ModelOpt rounds the product of both scales first, compressed-tensors the quotient of them, and the value to
        bfloat16. The dtype is that of 16-bit scales, bfloat16 for gpt-oss and MX in compressed-tensors, else float32.
        """
        value = self[name]
        return value if isinstance(value, Tensor) else self._readers[name].decode(value)

    def __repr__(self) -> str:
        counts = Counter(f"weights of {one.name}" if one.name else one.plain for one in self._readers.values())
        counts[_OTHER] = counts.pop(_OTHER, 0)  # they come last
        return f"Checkpoint({str(self.path)!r}: {', '.join(f'{n} {kind}' for kind, n in counts.items())})"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of quantised weights; only the headers of its files are read.

    A layout is known by the ``quant_method`` of config.json, by headers and marker tensors, and by the names and dtypes
    of a layer's tensors, all of which its reader takes (docs/ptq.md lists what is read, and what is refused by name).

    Args:
        path: A folder with safetensors files (``model.safetensors``, or the shards that
            ``model.safetensors.index.json`` lists) and the JSON files beside them, a folder with one GGUF file, or a
            file: of several parts (``-00001-of-00002``), any.

    Returns:
        A mapping of names to Encoded, Reordered or Tensor. The weight of ``x.weight_packed``, ``x.qweight`` and so
        on is ``x.weight``, that of ``x_blocks`` is ``x``; scales of inputs and caches are tensors of their own.

    Raises:
        DataError: A file or a part is missing, truncated or corrupt, the method is not read, or tensors look quantised
            in a way that no layout has; the message names the file, the keys and the layouts that they resemble. A
            weight whose tensors do not fit each other is named, with both sizes, when it is asked for.

    >>> import tempfile, torch, fmtsim
    >>> model = fmtsim.ptq(torch.nn.Sequential(torch.nn.Linear(64, 32)), "mxfp4_weights")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = fmtsim.export(model, folder, "compressed-tensors")
    ...     fmtsim.open_checkpoint(folder)["0.weight"]
    Encoded(mxfp4, shape (32, 64), dim -1, 1088 bytes, 4.25 bits an element, cpu)
    """
    if not isinstance(path, str | os.PathLike):
        raise DataError(f"path={shown(path)} is not a path; pass a checkpoint, a folder or a file")
    path = Path(path).expanduser()
    files, shards = _files(path)
    if files and gguf.is_gguf(files[0]):
        return Checkpoint(path, {name: Reader(kind, read) for name, (kind, read) in gguf.readers(files).items()})
    # 1. where tensors lie, and what the headers and the JSON files say
    places: dict[str, TensorPlace] = {}
    metadata: dict[str, str] = {}
    for file in files:
        tensors, texts = open_tensors(file)
        for name, place in tensors.items():
            if shards.get(name, file.name) != file.name:
                continue  # the index says another file
            if name in places:
                raise DataError(f"{path}: {places[name].path.name} and {file.name} both have {name!r}; pass one file")
            places[name] = place
        metadata |= texts
    absent = next((name for name in shards if name not in places), None)
    if absent is not None:
        raise DataError(f"{path / _INDEX}: tensor {absent!r} is not in {shards[absent]}, as 'weight_map' says")
    config = read_config(path if path.is_dir() else path.parent, metadata)
    # 2. layers of a layout that the method has, and what no layout took
    weights, taken = _weights(places, config)
    _refuse_unknown({name: place for name, place in places.items() if name not in taken}, places, config)
    readers: dict[str, Reader] = {}
    for name, place in places.items():
        if name in weights:
            layout, weight = weights[name]
            read = partial(_read, layout, weight, config, str(place.path))
            decode = partial(layout.decode, weight, config)
            readers[f"{weight.prefix}{layout.weight}"] = Reader(layout.name, read, decode)
        elif name not in taken:
            plain = f"tensors of {place.tag} without scales" if place.tag.startswith("F8") else _OTHER
            readers[name] = Reader("", partial(read_tensor, name, place), plain=plain)
    if "tensor_names" in metadata:  # a list by torchao of all that belongs to a model
        try:
            names = parse_json(metadata["tensor_names"])
        except ValueError:
            names = None
        if not isinstance(names, list):
            raise DataError(f"{path} has no tensors of torchao ('tensor_names'); pass what fmtsim.export wrote")
        lost = next((name for name in names if name not in readers), None)
        if lost is not None:
            raise DataError(f"{path}: the header lists {shown(lost)}, and no tensors of it are there")
    return Checkpoint(path, readers)


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files of a checkpoint, all parts of one in parts, and the names of files by tensors of an index."""
    if not path.is_dir():
        return parts_of(path), {}
    if (path / _INDEX).exists():
        index = read_json(path / _INDEX, DataError, _INDEX)
        shards: Any = index.get("weight_map") if isinstance(index, dict) else None
        names = shards.values() if isinstance(shards, dict) else (None,)
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise DataError(f"{path / _INDEX}: 'weight_map' is {shown(shards)}; it should be names of files by tensors")
        return [path / name for name in dict.fromkeys(names)], shards
    if (path / _SINGLE).exists():
        return [path / _SINGLE], {}
    found = sorted(path.glob("*.safetensors")) or sorted(file for file in path.iterdir() if gguf.is_gguf(file))
    parts = {file: None for one in found for file in parts_of(one)}
    if len(parts) > 1 and gguf.is_gguf(found[0]) and len(parts_of(found[0])) != len(parts):
        raise DataError(f"{path} has {', '.join(file.name for file in found)}; pass one of these files")
    return list(parts) or [path / _SINGLE], {}


def parts_of(file: Path) -> list[Path]:
    """Return all parts of a checkpoint whose files end in ``-00001-of-0000N``, of which one is passed."""
    numbered = re.fullmatch(r"(.*-)(\d{1,6})(-of-)(\d{1,6})((?:\.\w+)?)", file.name)
    if numbered is None:
        return [file]
    start, digits, of, count, end = numbered[1], len(numbered[2]), numbered[3], numbered[4], numbered[5]
    names = [f"{start}{number:0{digits}}{of}{count}{end}" for number in range(int(count) + 1)]
    names = names[:-1] if file.with_name(names[0]).is_file() else names[1:]  # some writers begin with 0
    if lost := ", ".join([name for name in names if not file.with_name(name).is_file()][:3]):
        raise DataError(f"{file} is a part of {len(names)}, and {lost} is not beside it; fetch all parts")
    return [file.with_name(name) for name in names]


def _weights(
    places: Mapping[str, TensorPlace], config: Config
) -> tuple[dict[str, tuple[Layout, StoredWeight]], set[str]]:
    """Return the weights that layouts of the method know by their tensors, and the names of all their tensors."""
    method = config.method
    weights: dict[str, tuple[Layout, StoredWeight]] = {}
    taken: set[str] = set()
    layers = _layers(places)
    for layout in LAYOUTS:
        if layout.read is not None and method not in layout.methods:
            continue
        for name in places:
            prefix = layout.fits(places, name)
            if prefix is None or name in taken or prefix + layout.codes in taken:
                continue
            place = places[prefix + layout.codes]
            if layout.read is None:
                keys = ", ".join(prefix + end for end in (layout.codes, layout.scale, *layout.needs))
                raise DataError(f"{place.path}: {keys} are {_refused(layout, config)}")
            parts = {end: places[prefix + end] for end in layout.ends if prefix + end in places}
            weight = StoredWeight(prefix, parts, layout.codes, layout.scale)
            _refuse_others(layers, layout, weight, config, place)
            if layout.check is not None:
                with located(str(place.path), DataError):
                    layout.check(weight, config)
            weights[prefix + layout.codes] = layout, weight
            taken.update(prefix + end for end in parts)
    if method and not any(method in layout.methods and layout.read for layout in LAYOUTS):
        first = next((f", as {name} ({place.tag})" for name, place in places.items() if place.tag not in _FLOATS), "")
        for layout in LAYOUTS:
            if method in layout.methods:
                raise DataError(f"{config.path}: weights{first} are {_refused(layout, config)}")
        known = sorted({name.split(":")[0] for layout in LAYOUTS if layout.read for name in layout.methods if name})
        text = f"weights{first} are of quant_method {method!r}, which is not known; read are {', '.join(known)}"
        raise DataError(f"{config.path}: {text}: save the values that its library decodes")
    return weights, taken


def _refused(layout: Layout, config: Config) -> str:
    """Say whose weights are not read, with what the config has of them, and what to do."""
    said = ", ".join(f"{key} {config.fields[key]}" for key in ("quant_method", "mode", "bits") if key in config.fields)
    return f"{layout.name}'s{f' ({said})' if said else ''}, which is not read; {layout.holds}"


def _layers(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of tensors by their layer: ``l.weight``, ``l.weight.absmax`` and ``l.lora_A.weight`` are l's."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer = name.rpartition(".")[0]
        while re.match(r"weight|lora|low_rank|_", layer.rpartition(".")[2]):
            layer = layer.rpartition(".")[0]
        layers.setdefault(layer, []).append(name)
    return layers


_FLOATS = ("F64", "F32", "F16", "BF16")
_BESIDE = re.compile(
    r"\w*bias|(in(put)?|act(ivation)?|output|prob(_output)?|[qkv]|kv|kv_cache)_(activation_)?"
    r"(global_)?(scale(_inv|_ub)?|zero_point|amax)|scale_input|qscale_act"
)
"""Names, in a quantised layer, of what says nothing of its weight: scales of inputs, outputs and caches."""
_WORDS = re.compile(r"scal|zero|code_?book|absmax|quant|scb|centroid|palett|(^|_)(zp|lut)s?(_|$)", re.IGNORECASE)
_ORDINARY = re.compile(
    r"(layer|logits?|res(idual)?|attn|attention|softmax|skip|embed\w*|rope|router)_?scal\w*|scale_shift\w*|scaled_fp8|"
    r"\w*(position|token|num_)\w*|(\w*_)?ids|tid2eid|\w*mask|\w*steps?|n_averaged|spiece\w*|tekken\w*"
)
"""Names of numbers and integers that ordinary layers have."""


def _refuse_others(
    layers: Mapping[str, list[str]], layout: Layout, weight: StoredWeight, config: Config, place: TensorPlace
) -> None:
    """Raise DataError where a layer has a tensor, a factor or an index for one, that its layout does not take."""
    prefix = weight.prefix
    if layout.weight or prefix.endswith(".weight"):
        layer = prefix.removesuffix(".weight")
        near = layers.get(layer, [])
    else:  # a stack of experts, beside others in its module
        layer, module = prefix, prefix.rpartition(".")[0]
        near = [name for name in layers.get(module, []) if name.startswith(f"{prefix}_")] + layers.get(prefix, [])
    own = {prefix + end for end in weight.places}
    others = [name for name in near if name not in own and not _BESIDE.fullmatch(name[len(layer) + 1 :])]
    if others:
        keys = ", ".join(map(repr, sorted(others)[:6]))
        raise DataError(
            f"{place.path}: layer {layer!r} is {layout.name}'s (quant_method {config.method!r}) but for {keys}, which "
            "its reader does not apply; store the layer without, or save its values"
        )


def _refuse_unknown(rest: Mapping[str, TensorPlace], places: Mapping[str, TensorPlace], config: Config) -> None:
    """Raise DataError where tensors that no layout took have names, or dtypes, of codes or their scales."""
    generic = ("", ".weight", ".scale", ".scales")
    ends = {end for layout in LAYOUTS if layout.read for end in layout.ends if end not in generic}
    layers = _layers(rest)
    for name, place in rest.items():
        if place.tag not in DTYPES:
            raise DataError(f"{place.path}: tensor {name!r} is {place.tag}; expected one of {', '.join(DTYPES)}")
        layer = next(iter(_layers([name])))
        leaf, float8 = name[len(layer) + bool(layer) :], place.tag.startswith("F8")
        coded = float8 or place.tag == "F4" or place.tag.startswith(("I", "U"))
        if not coded or math.prod(place.shape) < 2 or _ORDINARY.fullmatch(leaf):
            continue
        end = max((end for end in ends if name.endswith(end)), key=len, default=None)
        stem, matrix = name.removesuffix(end or ".weight"), len(place.shape) > 1
        beside = [key[len(layer) + bool(layer) :] for key in layers[layer]]
        words = [key for key in beside if _WORDS.search(key) and not _ORDINARY.fullmatch(key)]
        if not (
            (leaf == "weight" and not float8)  # no layer computes with integers
            or (matrix and float8 and config.method)  # a scale of it is missing
            or (words and (matrix or place.tag not in ("I16", "I32", "I64")))
            or (end and place.tag in ("I8", "U8", "I32", "F4", "F8_E4M3", "F8_E5M2"))
        ):
            continue
        codes = places.get(f"{stem}.weight") or places.get(stem)
        if end and codes is not None and codes.tag in _FLOATS:
            continue  # an ordinary weight, which is quantised when the model runs
        keys = [key for key in rest if key.startswith(stem)] if stem else [name]
        if keys == [name] and not end:  # names of no layout: all of its layer
            stem, keys = layer, layers[layer]
        why = _why(stem, sorted(key.removeprefix(stem) for key in keys), places, config)
        kind = f"tensor {name!r} ({place.tag} {list(place.shape)}) is quantised in a way that is not known"
        raise DataError(f"{place.path}: {kind}; {why}")


def _why(stem: str, keys: list[str], places: Mapping[str, TensorPlace], config: Config) -> str:
    """Say what an unknown weight has, and which layout would have read it but for its method or a tensor."""
    text, readers = f"{stem!r} has {', '.join(keys[:8])}", [layout for layout in LAYOUTS if layout.read]
    others = [layout for layout in readers if config.method not in layout.methods]
    if fits := [layout for layout in others if any(layout.fits(places, stem + key) is not None for key in keys)]:
        methods = " or ".join(dict.fromkeys(name.split(":")[0] or "none" for fit in fits for name in fit.methods))
        named, said = " or ".join(dict.fromkeys(fit.name for fit in fits)), config.method or "none"
        return f"{text}; {named} has such tensors under quant_method {methods}, and {config.path} says {said!r}"

    def likeness(layout: Layout) -> tuple[int, bool]:
        codes = places.get(stem + layout.codes)
        common = len((set(layout.ends) - {"", ".weight", ".scale"}) & set(keys))
        return common, codes is not None and layout._replace(needs=()).fits(places, stem + layout.scale) is not None

    most = max(map(likeness, readers))
    if not most[0]:
        return f"{text}; known are {', '.join(dict.fromkeys(layout.name for layout in readers))}"
    likest = [layout for layout in readers if likeness(layout) == most]
    missing = [end for end in (likest[0].codes, likest[0].scale, *likest[0].needs) if end not in keys]
    names = " or ".join(dict.fromkeys(layout.name for layout in likest if layout.needs == likest[0].needs))
    return f"{text}; they resemble {names}, which has {' and '.join(missing) or 'codes of another dtype'} as well"


def _read(layout: Layout, weight: StoredWeight, config: Config, place: str) -> Encoded | Reordered:
    assert layout.read is not None
    with located(place, DataError):
        return layout.read(weight, config)


FileLayout = Literal["compressed-tensors", "torchao", "gguf"]
_FILES = ("model.safetensors", "config.json")
_INPUTS = (".input_scale", ".input_global_scale")  # of layers, which no state_dict has


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """List the files and tensors that were written; ``print`` shows them.

    Args:
        layout: The layout.
        files: What was written.
        coded: Layers whose weights are codes and scales, with their formats.
        values: Other tensors, which are stored as the values that they have.
        rescaled: What ``allow_rescale=True`` changed, by layer.
        checked: How many tensors were read back and have the bits that they should have.
        coverage: Elements of the weights that products read; ``simulated`` are those that are coded.
    """

    layout: str
    files: tuple[Path, ...]
    coded: dict[str, str]
    values: tuple[str, ...]
    rescaled: dict[str, str] = field(default_factory=dict)
    checked: int = 0
    coverage: Coverage = Coverage(total=0, simulated=0, backward=0)

    def __str__(self) -> str:
        formats: dict[str, int] = {}
        for name in self.coded.values():
            formats[name] = formats.get(name, 0) + 1
        counts = ", ".join(f"{count} in {name}" for name, count in formats.items())
        where = " and ".join(map(str, self.files))
        text = f"{where}: {self.layout}, weights of {counts}, {len(self.values)} tensors as values"
        lines = [text, f"read back: all {self.checked} tensors have the bits that were meant"]
        lines += [coverage_text(self.coverage, "coded")] if self.coverage.raw else []
        return "\n".join([*lines, *(f"layer {name!r}: {change}" for name, change in self.rescaled.items())])


@spelled
def export(
    model: nn.Module, path: str | Path, layout: FileLayout | None = None, *more: Never,
    names: Mapping[str, str] | None = None, allow_rescale: bool = False, **others: Never,
) -> Export:  # fmt: skip
    """Write a quantised model for another library: the codes and scales that its linear weights were rounded to.

    The model is one that ``fmtsim.ptq`` or ``fmtsim.load_state`` made, or one in training under a recipe that casts its
    weights (``ao_int4_qat``): those are rounded as its next forward pass would round them. Other tensors, quantised
    convolutions among them, are written as values. No number is rounded: what a layout cannot hold is an error. Files
    are read back before they get their names, and every tensor's bits are compared with the model's.

    Args:
        model: The quantised model.
        path: ``"compressed-tensors"``: a folder, for ``model.safetensors`` and ``config.json`` (the model's own,
            where it has a ``config``, with ``quantization_config``). Others: a file.
        layout: ``"compressed-tensors"``, ``"torchao"`` (a safetensors file that torchao's
            ``unflatten_tensor_state_dict`` reads), or ``"gguf"`` (ggml's blocks of recipes such as ``q4_k``, and MXFP4;
            weights alone; needs ``fmtsim[gguf]``).
        allow_rescale: compressed-tensors stores the reciprocal of an NVFP4 weight's tensor scale. Where no float32
            reciprocal gives the scale and the weights back, store the nearest one, and list what changes in
            ``Export.rescaled``, instead of raising an error.
        names: Names of tensors in a GGUF file by those of the state_dict, as the program that reads it wants them.

    Returns:
        What was written, as an Export.

    Raises:
        ArgumentError: The layout is unknown, or has no place for a weight or the quantised inputs of a layer, which
            is named; or no weight of the model is quantised.
        DataError: The files cannot be written, or do not read back as they should; no file has its name then.
        FmtsimError: GGUF without the package ``gguf``.

    >>> import tempfile, torch, fmtsim
    >>> model = fmtsim.ptq(nn.Sequential(nn.Linear(64, 64)), "int4_g32", [torch.ones(8, 64)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = fmtsim.export(model, folder + "/model.safetensors", "torchao")
    ...     same = torch.equal(fmtsim.read_export(found.files[0])["0.weight"], model[0].weight)
    >>> found.coded, same
    ({'0': 'int4'}, True)
    """
    refuse_others(export, more, others)
    check_module("export", model)
    if layout not in (None, *get_args(FileLayout)) and path in get_args(FileLayout):
        path, layout = layout, path  # type: ignore[assignment]  # the other way round
    if layout is None or layout not in get_args(FileLayout):
        raise ArgumentError(f"layout={shown(layout)} is unknown; choose one of {', '.join(get_args(FileLayout))}")
    if names is not None and layout != "gguf":
        raise ArgumentError(f"names= with layout={layout!r}, whose names are the model's; leave names= out")
    if allow_rescale and layout != "compressed-tensors":
        raise ArgumentError(f"allow_rescale=True with layout={layout!r}, which rescales nothing; leave it out")
    coded, rest = weights_of(model)
    path, rescaled = Path(path).expanduser(), dict[str, str]()
    in_file = {name: (names or {}).get(name, name) for name in (*(f"{weight.layer}.weight" for weight in coded), *rest)}
    unknown = [name for name in names or () if name not in in_file]
    if unknown:
        raise ArgumentError(f"names= has {unknown[0]!r}, which the model has not; its state_dict lists its tensors")
    contents: dict[str, bytes | str | Path | None]
    # 1. the contents of the files, by their names in the folder, and what their tensors should be read back as
    if layout == "compressed-tensors":
        stored = _stored(coded, partial(compressed_tensors.tensors_of, allow_rescale=allow_rescale))
        rescaled = {layer: changes for layer, (_, _, changes) in stored.items() if changes}
        tensors = rest | {f"{layer}.{end}": t for layer, (own, *_) in stored.items() for end, t in own.items()}
        schemes = {layer: scheme for layer, (_, scheme, _) in stored.items()}
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        config = compressed_tensors.config_of(model, schemes, [name for name in linear if name not in schemes])
        in_files = {name: stored_tensor(t) for name, t in tensors.items()}
        contents = dict(zip(_FILES, (tensor_content(in_files, {"format": "pt"}), config), strict=True))
        for i, weight in enumerate(coded):
            if weight.layer in rescaled:
                reciprocal = stored[weight.layer][0]["weight_global_scale"].reshape(())
                coded[i] = replace(weight, tensor_scale=1 / reciprocal)
    elif layout == "torchao":
        stored = _stored(coded, torchao.tensors_of)
        tensors = rest | {torchao.named(name, key): t for name, (own, _) in stored.items() for key, t in own.items()}
        records = dict.fromkeys(rest, {"_type": "Tensor"}) | {f"{name}.weight": r for name, (_, r) in stored.items()}
        in_files = {name: stored_tensor(t) for name, t in tensors.items()}
        contents = {_FILES[0]: tensor_content(in_files, torchao.metadata_of(records))}
    else:
        architecture = getattr(getattr(model, "config", None), "model_type", "") or "fmtsim"
        stored = {in_file[f"{layer}.weight"]: t for layer, t in _stored(coded, gguf.blocks_of).items()}
        contents = {"model.gguf": gguf.content(stored, {in_file[n]: t for n, t in rest.items()}, architecture)}
    zero = 0.0 if layout == "gguf" else -0.0  # ggml's MXFP4 reads the code of -0 as 0
    values = ((f"{w.layer}.weight", w.values + zero if w.blocks is None else w.values) for w in coded)
    meant = {in_file[name]: digest(t) for name, t in chain(values, rest.items())}
    # 2. written beside their places, read back, and moved there
    folder = path if layout == "compressed-tensors" else path.parent
    beside = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    stage = beside / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        written = write_folder(stage, contents)
        check_written(written[0] if len(written) == 1 else stage, meant)
        files = write_folder(folder, {file.name if folder == path else path.name: file for file in written})
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    coverage = coverage_of_weights(model, {weight.layer for weight in coded})
    formats = {weight.layer: weight.element.name for weight in coded}
    return Export(
        layout=layout, files=tuple(files), coded=formats, values=tuple(rest), rescaled=rescaled, checked=len(meant),
        coverage=replace(coverage, simulated=sum(weight.elements.numel() for weight in coded)),
    )  # fmt: skip


def _stored(coded: list[CodedWeight], store: Callable[[CodedWeight], Any]) -> dict[str, Any]:
    """Return what a layout stores of each layer; one error names all layers that it has no place for."""
    stored, refusals = {}, dict[str, ArgumentError]()
    for weight in coded:
        try:
            stored[weight.layer] = store(weight)
        except ArgumentError as error:
            refusals[weight.layer] = error
    if refusals:
        first, *others = refusals
        raise ArgumentError(f"{refusals[first]}" + (f"; likewise {some(others)}" if others else ""))
    return stored


def digest(t: Tensor) -> bytes:
    """Return a digest of a tensor's dtype and bits."""
    content = t.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(str(t.dtype).encode() + content.view(torch.uint8).numpy().tobytes()).digest()


def check_written(path: Path, meant: Mapping[str, bytes]) -> None:
    """Read files back; raise DataError that names tensors with other bits than meant, weights being float32 values."""
    checkpoint, wrong = open_checkpoint(path), []
    for name, bits in meant.items():
        value = checkpoint[name] if name in checkpoint else torch.empty(0)
        wrong += [name] * (digest(value if isinstance(value, Tensor) else value.decode(torch.float32)) != bits)
    if wrong:
        raise DataError(
            f"what was written does not read back as it was meant: {some(wrong)}; the files are gone; please report it"
        )


def read_export(path: str | Path) -> dict[str, Tensor]:
    """Read what ``export`` wrote: every tensor by its name in the model, weights in codes as float32 values.

    Args:
        path: The folder, or the file. A GGUF file may be any, of ggml's blocks and ordinary numbers; its names are
            those in the file.

    Raises:
        DataError: There is no such file, it is another thing, or a field or a tensor is not what ``export`` writes;
            the message names the file and the field.
    """
    if not isinstance(path, str | os.PathLike):
        raise DataError(f"path={shown(path)} is not a path; pass what fmtsim.export wrote, a folder or a file")
    path = Path(path).expanduser()
    files, _ = _files(path)
    ggml = bool(files) and gguf.is_gguf(files[0])
    if not ggml:
        _, metadata = read_tensors(path / _FILES[0] if path.is_dir() else path)  # its checksum holds
        if "tensor_names" not in metadata and not path.is_dir():
            raise DataError(f"{path} has no tensors of torchao ('tensor_names'); pass what fmtsim.export wrote")
    checkpoint = open_checkpoint(path)
    return {
        name: value if isinstance(value := checkpoint[name], Tensor) else value.decode()
        for name in checkpoint
        if ggml or not name.endswith(_INPUTS)
    }
