# SPDX-License-Identifier: Apache-2.0
"""Files of recorded matrix products: which there are, and what is in them, as tensors.

Three layouts are read, all ``.npz`` with raw codes (uint8 FP8, uint16 binary16 and bfloat16, uint32 float32 words):

* ``mtc_<GPU>_<format>_<accumulator>.npz``: dot products of one instruction each: ``a``, ``b`` [rows, K], ``c`` [rows]
  float32 words (rounded to binary16 where that accumulates), ``d`` [rows].
* ``probe_*.npz``: the same without results, but with those that each hypothesis predicts (``expect_*``) and a
  ``label`` for every row.
* any other file whose ``meta`` is a JSON list: library calls, with ``NNN.a`` [M, K], ``NNN.b`` [N, K], ``NNN.out``
  [M, N] and, where the call had them, ``NNN.scale_a``, ``NNN.scale_b``, ``NNN.bias``. The part of the name before the
  last underscore says on which target they were recorded (``h200_fp8.npz``).
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from fmtsim.casts.quantize import quantize
from fmtsim.formats.interop import dtype_name
from fmtsim.support.errors import DataError, shown

RecordingKind = Literal["dots", "probe", "calls"]

_UNITS = {
    "V100": "volta.mma", "A100": "ampere.mma", "A2": "ampere.mma", "L40S": "ada.mma", "Ada": "ada.mma",
    "H100": "hopper.mma", "H200": "hopper.mma", "B200": "blackwell.mma",
}  # fmt: skip
_OPERANDS = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "fp16": torch.float16, "bf16": torch.bfloat16,
    "tf32": torch.float32,
}  # fmt: skip
_RESULTS = {"fp32": torch.float32, "fp16": torch.float16}
OPTIONS: tuple[str, ...] = ("use_fast_accum", "fp16_accumulation", "tf32")
_DOTS = re.compile(r"mtc_([A-Za-z0-9]+)_(e4m3|e5m2|fp16|bf16|tf32)_(fp16|fp32)", re.IGNORECASE)

# The hypothesis that an H200 confirmed for each probe; docs/evidence.md.
_CONFIRMED = {("bf16", "fp32"): "expect_Hopper_clamp-133", ("tf32", "fp32"): "expect_Hopper_clamp-133",
              ("fp16", "fp16"): "expect_Hopper_clamp-21"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Name one file and say how it is laid out."""

    path: Path
    kind: RecordingKind

    @property
    def name(self) -> str:
        """Name without the suffix."""
        return self.path.stem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dots:
    """Hold dot products of one unit: what went in, and the bits that came out.

    Args:
        machine: The GPU.
        unit: Name of its unit in the catalogue.
        format: Format of a and b.
        accumulate: Format of c and d.
        a, b: [rows, K], in the operands' dtype.
        c: [rows] in the dtype of d, None where every addend is +0.
        d: [rows] float32 or float16.
    """

    machine: str
    unit: str
    format: str
    accumulate: str
    a: Tensor
    b: Tensor
    c: Tensor | None
    d: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """Hold one library call: the function, its arguments as the library got them, and the bits it returned.

    Args:
        function: ``"mm"``, ``"linear"``, ``"scaled_mm"`` or ``"int_mm"``.
        a: [M, K]; b: [N, K]; both in the strides of the call (the call multiplies a by the transpose of b).
        out: [M, N].
        scale_a, scale_b, bias: As the call got them, or None.
        options: ``use_fast_accum``, ``fp16_accumulation``, ``tf32`` where they were set.
        label: One line that names the call.
    """

    function: str
    a: Tensor
    b: Tensor
    out: Tensor
    scale_a: Tensor | None
    scale_b: Tensor | None
    bias: Tensor | None
    options: dict[str, bool]
    label: str

    @property
    def group(self) -> str:
        """Name what a table puts in one line: the function, the operands and the kind of scales."""
        a, b = (dtype_name(x.dtype).removeprefix("float8_").removesuffix("fn") for x in (self.a, self.b))
        rows = " by row" if self.scale_a is not None and self.scale_a.numel() > 1 else ""
        how = "tf32" if self.options.get("tf32") else f"{a} x {b}"
        half = ", fp16 sums" if self.options.get("fp16_accumulation") else ""
        return f"{self.function} {how}{rows}{half}"


def find_recordings(folder: str | Path) -> list[Recording]:
    """Return the files of a folder that hold recorded products, in the order of their names.

    Raises:
        DataError: there is no such folder, it holds no recording, or a file cannot be read.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; pass one that holds mtc_*.npz, probe_*.npz or recorded calls")
    recordings = []
    for path in sorted(folder.glob("*.npz")):
        kind = _kind(path)
        if kind is not None:
            recordings.append(Recording(path=path, kind=kind))
    if not recordings:
        raise DataError(f"{folder} holds no recording; expected mtc_*.npz, probe_*.npz or .npz files of recorded calls")
    return recordings


def read_dots(recording: Recording) -> Dots:
    """Read a file of dot products, or a probe with the results of the hypothesis that hardware confirmed.

    Raises:
        DataError: the file is damaged, or of a GPU or format that no unit is known for.
    """
    path = recording.path
    with _content(path) as file:
        if recording.kind == "dots":
            gpu, name, accumulate = _DOTS.fullmatch(path.stem).groups()  # type: ignore[union-attr]  # _kind matched it
            results = file["d"]
        else:
            meta = json.loads(str(file["meta"]))
            gpu, name, accumulate = "H200", str(meta["fmt"]), str(meta["out"])
            results = file[_confirmed(path, name, accumulate, file.files)]
        name = name.lower()
        if gpu not in _UNITS or name not in _OPERANDS or accumulate not in _RESULTS:
            gpus = ", ".join(_UNITS)
            raise DataError(f"{path}: no unit is known for {name} on {gpu}; GPUs are {gpus}")
        a, b = (_tensor(path, file[key], _OPERANDS[name]) for key in ("a", "b"))
        d = _tensor(path, results, _RESULTS[accumulate])
        c = file["c"]
        addends = _tensor(path, c, torch.float32 if c.dtype.itemsize == 4 else d.dtype)
        if addends.dtype != d.dtype:  # the GPU was given binary16
            addends = quantize(addends, d.dtype, overflow="ieee", out_dtype=d.dtype)
    if not (a.shape == b.shape and a.dim() == 2 and d.shape == addends.shape == a.shape[:1]):
        shapes = [list(x.shape) for x in (a, b, addends, d)]
        raise DataError(f"{path}: a, b, c, d have shapes {shapes}; expected [rows, K] twice and [rows] twice")
    # FP8 with float32 sums was recorded through wgmma there, which began at zero whatever c says.
    by_wgmma = (
        recording.kind == "dots" and gpu in ("H100", "H200") and name in ("e4m3", "e5m2") and accumulate == "fp32"
    )
    unit = "hopper.wgmma" if by_wgmma else _UNITS[gpu]
    return Dots(
        machine=gpu, unit=unit, format=name, accumulate=accumulate, a=a, b=b, c=None if by_wgmma else addends, d=d
    )


def read_calls(recording: Recording) -> list[Call]:
    """Read a file of library calls.

    Raises:
        DataError: the file is damaged or a call lacks a field.
    """
    path = recording.path
    with _content(path) as file:
        return [_call(path, file, f"{index:03d}", meta) for index, meta in enumerate(json.loads(str(file["meta"])))]


def _call(path: Path, file: Any, index: str, meta: dict[str, Any]) -> Call:
    def tensor(key: str, dtype: str | None) -> Tensor | None:
        present = f"{index}.{key}" in file.files
        return _tensor(path, file[f"{index}.{key}"], getattr(torch, str(dtype))) if present else None

    parts = {key: tensor(key, meta.get(key, meta.get(f"{key}_dtype"))) for key in ("a", "b", "out")}
    extra = {key: tensor(key, meta.get(f"{key}_dtype")) for key in ("scale_a", "scale_b", "bias")}
    a, b, out = parts["a"], parts["b"], parts["out"]
    if a is None or b is None or out is None or out.shape != (a.shape[0], b.shape[0]):
        raise DataError(f"{path}: call {index} lacks a, b or out, or their shapes do not fit")
    scaled = extra["scale_a"] is not None and extra["scale_b"] is not None
    if meta["call"] not in ("mm", "linear", "int_mm", *(["scaled_mm"] if scaled else [])):
        raise DataError(
            f"{path}: no verb replays call {index}, {shown(meta['call'])}; "
            "known are mm, linear, int_mm and, with scales, scaled_mm"
        )
    # "col": K was not contiguous.
    a, b = (x.t().contiguous().t() if meta.get(key) == "col" else x for x, key in ((a, "a_layout"), (b, "b_layout")))
    options = {name: bool(meta[name]) for name in OPTIONS if name in meta}
    said = "".join(f", {name}={value}" for name, value in options.items())
    what = f"call {index}, {meta['call']} {list(a.shape)} x {list(b.shape)}, {meta.get('kind', 'no')} data{said}"
    return Call(function=meta["call"], a=a, b=b, out=out, options=options, label=what, **extra)


def _kind(path: Path) -> RecordingKind | None:
    if _DOTS.fullmatch(path.stem):
        return "dots"
    if path.stem.startswith("mtc_"):
        raise DataError(f"{path} is not named mtc_<GPU>_<format>_<accumulator>.npz; rename or move it")
    with _content(path) as file:
        if path.stem.startswith("probe_"):
            return "probe"
        if "meta" not in file.files or "000.a" not in file.files:
            return None
        return "calls" if isinstance(json.loads(str(file["meta"])), list) else None


def _confirmed(path: Path, name: str, accumulate: str, keys: list[str]) -> str:
    key = _CONFIRMED.get((name, accumulate))
    if key not in keys:
        names = ", ".join(sorted(k for k in keys if k.startswith("expect_")))
        raise DataError(f"{path}: no hypothesis for {name} -> {accumulate} is confirmed on hardware; it has {names}")
    return str(key)


def _tensor(path: Path, codes: Any, dtype: torch.dtype) -> Tensor:
    if codes.dtype.itemsize != dtype.itemsize or codes.dtype.kind not in "ui":
        raise DataError(f"{path}: codes of {dtype} are stored as {codes.dtype}; expected {dtype.itemsize} bytes each")
    signed = numpy.ascontiguousarray(codes).view(f"i{codes.dtype.itemsize}").reshape(codes.shape)
    return torch.from_numpy(signed).view(dtype)


@contextmanager
def _content(path: Path) -> Iterator[Any]:
    """Open an .npz file; what is wrong with it becomes a DataError."""
    try:
        with open(path, "rb") as content, numpy.load(content, allow_pickle=False) as file:  # numpy may leave it open
            yield file
    except DataError:
        raise
    except Exception as error:  # of numpy, zipfile, zlib and json, which name no few
        raise DataError(f"cannot read {path}: {error}; record it again") from error
