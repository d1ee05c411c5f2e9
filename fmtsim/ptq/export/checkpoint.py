# SPDX-License-Identifier: Apache-2.0
"""open_checkpoint: the tensors of a checkpoint by name, quantised ones as Encoded, each read when it is asked for."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import decode
from fmtsim.formats.tensor_file import DTYPES, TensorPlace, open_tensors
from fmtsim.ptq.export import gguf, torchao
from fmtsim.ptq.export.layouts import CODES, COMPRESSED_TENSORS, LAYOUTS, Layout, Reordered, read_config
from fmtsim.ptq.export.stored import StoredWeight, read_tensor, spread_over
from fmtsim.support.errors import DataError, shown
from fmtsim.support.records import located, parse_json, read_json

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class Reader(NamedTuple):
    """What reads a tensor, the name of the layout that stores it ("" of one that is not quantised), and in what."""

    name: str
    read: Callable[[], Any]
    weight: StoredWeight | None = None
    layout: Layout | None = None


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
        value, (_, _, weight, layout) = self[name], self._readers[name]
        if isinstance(value, Tensor) or weight is None or layout is None:
            return value if isinstance(value, Tensor) else value.decode()
        if isinstance(value, Encoded) and value.tensor_scale is not None:
            codes, scale, *_ = value.parts()
            assert scale is not None
            divides = bool(layout.divisor) and layout.divisor in weight.places
            scale = scale / weight.number(layout.divisor) if divides else scale * value.tensor_scale
            values = spread_over(decode(codes, value.format.element).flatten(0, -2), scale).reshape(value.shape)  # type: ignore[union-attr]
            return values.bfloat16() if divides else values
        dtype = DTYPES[weight.places[weight.scale].tag]
        dtype = layout.mx_dtype if dtype == torch.uint8 else dtype
        return value.decode(dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32)

    def __repr__(self) -> str:
        counts = Counter(reader.name for reader in self._readers.values())
        plain = counts.pop("", 0)
        coded = "".join(f"{count} weights of {layout}, " for layout, count in counts.items())
        return f"Checkpoint({str(self.path)!r}: {coded}{plain} other tensors)"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of quantised weights; only the headers of its files are read.

    Known by the names of their tensors are the layouts of DeepSeek V3 and V4, gpt-oss, compressed-tensors (Kimi-K2's
    INT4 among them), ModelOpt, Quark, AWQ, GPTQ, torchao's single files, and GGUF (docs/ptq.md lists them).

    Args:
        path: A folder with safetensors files (``model.safetensors``, or the shards that
            ``model.safetensors.index.json`` lists) and the JSON files beside them, or one file: ``.safetensors`` or
            ``.gguf``.

    Returns:
        A mapping of names to Encoded, Reordered or Tensor. The weight of ``x.weight_packed``, ``x.qweight`` and so
        on is ``x.weight``, that of ``x_blocks`` is ``x``; scales of inputs and caches are tensors of their own.

    Raises:
        DataError: A file is missing, truncated or corrupt, or tensors look quantised in a way that no layout has; the
            message names the file, the keys and the layouts that they resemble. A weight whose tensors do not fit
            each other is named, with both sizes, when it is asked for.

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
    if path.suffix == ".gguf":
        return Checkpoint(path, {name: Reader(kind, read) for name, (kind, read) in gguf.readers(path).items()})
    places, metadata = _places(path)
    if "tensor_names" in metadata:
        # a file of torchao's tensors, whose metadata has a record of each
        of_torchao: dict[str, Reader] = {}
        for name in _json(path, metadata, "tensor_names", list):
            record = _json(path, metadata, name, dict)
            if record == {"_type": "Tensor"} and name in places:
                of_torchao[name] = Reader("", partial(read_tensor, name, places[name]))
                continue
            prefix = torchao.named(name.removesuffix(".weight"), "")
            parts = {key.removeprefix(prefix): place for key, place in places.items() if key.startswith(prefix)}
            weight = StoredWeight(prefix, parts, "qdata", "scale")
            of_torchao[name] = Reader("torchao", partial(_read, f"{path}: {name!r}", torchao.encoded_of, weight, record))
        return Checkpoint(path, of_torchao)
    config = read_config(path if path.is_dir() else path.parent)
    weights, taken = _weights(places)
    _refuse_unknown({name: place for name, place in places.items() if name not in taken})
    readers: dict[str, Reader] = {}
    for name, place in places.items():
        if name in weights:
            layout, weight = weights[name]
            read = partial(_read, str(place.path), layout.read, weight, config)
            full = f"{weight.prefix}{layout.weight}"
            layout = COMPRESSED_TENSORS if config.groups else layout
            readers[full] = Reader(layout.name, read, weight, layout)
        elif name not in taken:
            readers[name] = Reader("", partial(read_tensor, name, place))
    return Checkpoint(path, readers)


def _places(path: Path) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Return where the tensors of a file, or of a folder's files, lie, and the metadata of a single file."""
    if not path.is_dir():
        return open_tensors(path)
    if not (path / _INDEX).exists():
        alone = [path / _SINGLE] if (path / _SINGLE).exists() else sorted(path.glob("*.safetensors"))
        return {name: place for file in alone or [path / _SINGLE] for name, place in open_tensors(file)[0].items()}, {}
    index = read_json(path / _INDEX, DataError, _INDEX)
    shards: Any = index.get("weight_map") if isinstance(index, dict) else None
    names = shards.values() if isinstance(shards, dict) else (None,)
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError(f"{path / _INDEX}: 'weight_map' is {shown(shards)}; it should be names of files by tensors")
    files = {name: open_tensors(path / name)[0] for name in dict.fromkeys(names)}
    absent = next((name for name, file in shards.items() if name not in files[file]), None)
    if absent is not None:
        raise DataError(f"{path / _INDEX}: tensor {absent!r} is not in {shards[absent]}, as 'weight_map' says")
    return {name: files[file][name] for name, file in shards.items()}, {}


def _weights(places: Mapping[str, TensorPlace]) -> tuple[dict[str, tuple[Layout, StoredWeight]], set[str]]:
    """Return the weights that layouts know by the names of their codes, and the names of all their tensors."""
    weights: dict[str, tuple[Layout, StoredWeight]] = {}
    taken: set[str] = set()
    for layout in LAYOUTS:
        for name in places:
            if not name.endswith(layout.scale) or name in taken:
                continue
            prefix = name.removesuffix(layout.scale)
            codes = places.get(prefix + layout.codes)
            fits = codes is not None and (not layout.tags or codes.tag in layout.tags)
            if fits and all(prefix + end in places for end in layout.needs):
                parts = {end: places[prefix + end] for end in layout.ends if prefix + end in places}
                weights[prefix + layout.codes] = layout, StoredWeight(prefix, parts, layout.codes, layout.scale)
                taken.update(prefix + end for end in parts)
    return weights, taken


def _refuse_unknown(places: Mapping[str, TensorPlace]) -> None:
    """Raise DataError where tensors that no layout took have names, or dtypes, of codes or their scales."""
    ends = {end for layout in LAYOUTS for end in layout.ends if end not in ("", ".weight", ".scale", ".scales")}
    for name, place in places.items():
        end = next((end for end in ends if name.endswith(end)), None)
        layer = name.removesuffix(end or ".weight")
        packed = place.tag in (CODES if end else ("U8", "I32", "F4"))  # other tensors may have such names
        if not packed or not (end or name.endswith(".weight")):
            continue
        codes = places.get(f"{layer}.weight") or places.get(layer)
        if codes is not None and codes.tag in ("F64", "F32", "F16", "BF16"):
            continue  # an ordinary weight, which is quantised when the model runs
        keys = sorted(key.removeprefix(layer) for key in places if key.startswith(layer)) if layer else [name]
        likest = max(LAYOUTS, key=lambda layout: len(set(layout.ends) & set(keys)))
        missing = [end for end in (likest.codes, likest.scale, *likest.needs) if end not in keys]
        resembles = (
            f"they resemble {likest.name}, which has {' and '.join(missing) or 'codes of another dtype'} as well"
            if set(likest.ends) & set(keys)
            else f"known are {', '.join(dict.fromkeys(layout.name for layout in LAYOUTS))}"
        )
        raise DataError(
            f"{place.path}: tensor {name!r} ({place.tag} {list(place.shape)}) is quantised in a way that is not known; "
            f"{layer!r} has {', '.join(keys[:8])}; {resembles}"
        )


def _read(place: str, read: Callable[..., Encoded | Reordered], *arguments: Any) -> Encoded | Reordered:
    with located(place, DataError):
        return read(*arguments)


def _json(path: Path, metadata: Mapping[str, str], name: Any, kind: type) -> Any:
    """Return what an entry of a torchao file's metadata says."""
    try:
        value = parse_json(metadata[name])
    except (KeyError, TypeError, ValueError):
        value = None
    if not isinstance(value, kind):
        raise DataError(f"{path} has no tensors of torchao ({shown(name)}); pass what fmtsim.export wrote")
    return value
