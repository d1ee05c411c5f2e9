# SPDX-License-Identifier: Apache-2.0
"""export and read_export: files of compressed-tensors, torchao and GGUF, with the codes that fmtsim rounded to."""

import hashlib
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import decode
from fmtsim.formats.tensor_file import DTYPES, TensorPlace, open_tensors, read_tensors, stored_tensor, tensor_content
from fmtsim.nn.coverage import Coverage
from fmtsim.ptq.export import compressed_tensors, gguf, torchao
from fmtsim.ptq.export.layouts import CODES, COMPRESSED_TENSORS, LAYOUTS, Layout, Reordered, read_config
from fmtsim.ptq.export.stored import StoredWeight, read_tensor, spread_over
from fmtsim.ptq.export.weights import CodedWeight, weights_of
from fmtsim.ptq.report import coverage_of_weights, share_of
from fmtsim.support.errors import ArgumentError, DataError, shown
from fmtsim.support.files import TEMPORARY, write_folder
from fmtsim.support.records import located, parse_json, read_json
from fmtsim.support.table import some

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
            of_torchao[name] = Reader(
                "torchao", partial(_read, f"{path}: {name!r}", torchao.encoded_of, weight, record)
            )
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
        lines += [share_of(self.coverage, "coded")] if self.coverage.raw else []
        return "\n".join([*lines, *(f"layer {name!r}: {change}" for name, change in self.rescaled.items())])


def export(
    model: nn.Module, path: str | Path, layout: FileLayout, *, names: Mapping[str, str] | None = None,
    allow_rescale: bool = False,
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
    if layout not in get_args(FileLayout):
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
        contents = dict(zip(_FILES, (_safetensors(tensors, {"format": "pt"}), config), strict=True))
        for i, weight in enumerate(coded):
            if weight.layer in rescaled:
                reciprocal = stored[weight.layer][0]["weight_global_scale"].reshape(())
                coded[i] = replace(weight, tensor_scale=1 / reciprocal)
    elif layout == "torchao":
        stored = _stored(coded, torchao.tensors_of)
        tensors = rest | {torchao.named(name, key): t for name, (own, _) in stored.items() for key, t in own.items()}
        records = dict.fromkeys(rest, {"_type": "Tensor"}) | {f"{name}.weight": r for name, (_, r) in stored.items()}
        contents = {_FILES[0]: _safetensors(tensors, torchao.metadata_of(records))}
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


def _safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    return tensor_content({name: stored_tensor(t) for name, t in tensors.items()}, metadata)


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
    if path.suffix != ".gguf":
        _, metadata = read_tensors(path / _FILES[0] if path.is_dir() else path)  # its checksum holds
        if "tensor_names" not in metadata and not path.is_dir():
            raise DataError(f"{path} has no tensors of torchao ('tensor_names'); pass what fmtsim.export wrote")
    checkpoint = open_checkpoint(path)
    return {
        name: value if isinstance(value := checkpoint[name], Tensor) else value.decode()
        for name in checkpoint
        if not name.endswith(_INPUTS)
    }
