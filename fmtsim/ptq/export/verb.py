# SPDX-License-Identifier: Apache-2.0
"""export and read_export: files of compressed-tensors, torchao and GGUF, with the codes that fmtsim rounded to."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from fmtsim.formats.tensor_file import read_tensors, stored_tensor, tensor_content
from fmtsim.ptq.export import compressed_tensors, gguf, torchao
from fmtsim.ptq.export.checkpoint import open_checkpoint
from fmtsim.ptq.export.weights import CodedWeight, weights_of
from fmtsim.support.errors import ArgumentError, DataError, shown
from fmtsim.support.files import write_file, write_folder

Layout = Literal["compressed-tensors", "torchao", "gguf"]
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
    """

    layout: str
    files: tuple[Path, ...]
    coded: dict[str, str]
    values: tuple[str, ...]
    rescaled: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        formats: dict[str, int] = {}
        for name in self.coded.values():
            formats[name] = formats.get(name, 0) + 1
        counts = ", ".join(f"{count} in {name}" for name, count in formats.items())
        where = " and ".join(map(str, self.files))
        text = f"{where}: {self.layout}, weights of {counts}, {len(self.values)} tensors as values"
        return "\n".join([text, *(f"layer {name!r}: {change}" for name, change in self.rescaled.items())])


def export(
    model: nn.Module, path: str | Path, layout: Layout, *, names: Mapping[str, str] | None = None,
    allow_rescale: bool = False,
) -> Export:  # fmt: skip
    """Write a quantised model for another library: the codes and scales that its linear weights were rounded to.

    The model is one that ``fmtsim.ptq`` or ``fmtsim.load_state`` made, or one in training under a recipe that casts its
    weights (``ao_int4_qat``): those are rounded as its next forward pass would round them. Other tensors, quantised
    convolutions among them, are written as values. No number is rounded: what a layout cannot hold is an error.

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
        DataError: The files cannot be written.
        FmtsimError: GGUF without the package ``gguf``.

    >>> import tempfile, torch, fmtsim
    >>> model = fmtsim.ptq(nn.Sequential(nn.Linear(64, 64)), "int4_g32", [torch.ones(8, 64)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = fmtsim.export(model, folder + "/model.safetensors", "torchao")
    ...     same = torch.equal(fmtsim.read_export(found.files[0])["0.weight"], model[0].weight)
    >>> found.coded, same
    ({'0': 'int4'}, True)
    """
    if layout not in get_args(Layout):
        raise ArgumentError(f"layout={shown(layout)} is unknown; choose one of {', '.join(get_args(Layout))}")
    if names is not None and layout != "gguf":
        raise ArgumentError(f"names= with layout={layout!r}, whose names are the model's; leave names= out")
    if allow_rescale and layout != "compressed-tensors":
        raise ArgumentError(f"allow_rescale=True with layout={layout!r}, which rescales nothing; leave it out")
    coded, rest = weights_of(model)
    write = {"compressed-tensors": _compressed, "torchao": _torchao, "gguf": _gguf}[layout]
    rescaled: dict[str, str] = {}
    files = write(model, Path(path).expanduser(), coded, rest, names or {}, rescaled if allow_rescale else None)
    formats = {weight.layer: weight.element.name for weight in coded}
    return Export(layout=layout, files=tuple(files), coded=formats, values=tuple(rest), rescaled=rescaled)


Names = Mapping[str, str]
Coded = list[CodedWeight]


def _compressed(
    model: nn.Module, path: Path, coded: Coded, rest: dict[str, Tensor], names: Names, rescaled: dict[str, str] | None
) -> list[Path]:
    tensors, schemes = dict(rest), {}
    for weight in coded:
        own = compressed_tensors.tensors_of(weight, allow_rescale=rescaled is not None)
        weight_tensors, schemes[weight.layer], changes = own
        if rescaled is not None and changes:
            rescaled[weight.layer] = changes
        tensors |= {f"{weight.layer}.{name}": t for name, t in weight_tensors.items()}
    ignored = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in schemes]
    config = compressed_tensors.config_of(model, schemes, ignored)
    return write_folder(path, dict(zip(_FILES, (_safetensors(tensors, {"format": "pt"}), config), strict=True)))


def _torchao(
    model: nn.Module, path: Path, coded: Coded, rest: dict[str, Tensor], names: Names, rescaled: dict[str, str] | None
) -> list[Path]:
    records: dict[str, Any] = {name: {"_type": "Tensor"} for name in rest}
    tensors = dict(rest)
    for weight in coded:
        weight_tensors, records[f"{weight.layer}.weight"] = torchao.tensors_of(weight)
        tensors |= {torchao.named(weight.layer, name): t for name, t in weight_tensors.items()}
    write_file(path, _safetensors(tensors, torchao.metadata_of(records)))
    return [path]


def _gguf(
    model: nn.Module, path: Path, coded: Coded, rest: dict[str, Tensor], names: Names, rescaled: dict[str, str] | None
) -> list[Path]:
    weights = {f"{weight.layer}.weight": weight for weight in coded}
    unknown = [name for name in names if name not in weights and name not in rest]
    if unknown:
        raise ArgumentError(f"names= has {unknown[0]!r}, which the model has not; its state_dict lists its tensors")
    architecture = getattr(getattr(model, "config", None), "model_type", "") or "fmtsim"
    coded_by_name = {names.get(name, name): weight for name, weight in weights.items()}
    write_file(path, gguf.content(coded_by_name, {names.get(name, name): t for name, t in rest.items()}, architecture))
    return [path]


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
