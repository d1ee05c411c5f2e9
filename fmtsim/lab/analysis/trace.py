# SPDX-License-Identifier: Apache-2.0
"""The record of one step: every operation in order of execution, with hashes of the bits that went in and came out."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from fmtsim.formats.interop import dtype_name
from fmtsim.formats.packing import tensor_of_bytes
from fmtsim.formats.tensor_file import read_tensors, stored_tensor, write_tensors
from fmtsim.lab.analysis.fingerprint import has_bits
from fmtsim.support import table
from fmtsim.support.errors import ArgumentError, DataError
from fmtsim.support.records import check_types, parse_json, record_of

VERSION = 1
Level = Literal["modules", "aten"]
Direction = Literal["forward", "backward"]
AGAIN = "recomputed "  # what names of modules' calls begin with that activation checkpointing repeats
CALL = "stored call"  # heading of an operator's arguments, as JSON for audit, among the facts of an operation
GIVEN = -1  # the writer of what no operation of the trace wrote: parameters, inputs, constants

_SHOWN = 60  # operations in a text
_KEY = "fmtsim_trace"
_TAGGED = (  # dtypes that files hold by their tags; tensors of others are bytes there
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBits:
    """Hold what a trace keeps of a tensor.

    Args:
        name: What it is to its operation: ``"input 0"``, ``"weight"``, ``"output"``.
        shape: Its sizes.
        dtype: Its dtype, without ``torch.``.
        hash: 16 hexadecimal digits, of all bits in row-major order.
        parts: Hashes of the batch's members, in their order, where the first dimension is a multiple of the batch.
        amax: Largest magnitude of a floating-point tensor of 16 bits or more; None where that is not finite, and of
            other tensors.
        special: ``"nan"`` or ``"inf"`` where such a tensor holds one (``"nan"`` if both), else empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    hash: str
    parts: tuple[str, ...] = ()
    amax: float | None = None
    special: Literal["", "inf", "nan"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Describe one operation of a step.

    Args:
        index: Its place in the order in which operations ended, from 0.
        layer: Name of the module that ran it, empty for the model itself.
        direction: Of the pass.
        operation: The module's class (``"recomputed "`` before it under activation checkpointing);
            ``"gradient of weight"``; an operand (``"x_f"``) or product (``"fprop"``) of a converted layer; at level
            ``"aten"`` also torch's operators.
        call: How often the same operation of the layer ran before.
        inputs: Tensors that it read: arguments, parameters and buffers; of a backward operation the incoming gradient.
        outputs: Tensors that it returned.
        facts: Headings and texts: unit and accumulation order of a product, quantiser, random keys.
    """

    index: int
    layer: str
    direction: Direction
    operation: str
    call: int
    inputs: tuple[TensorBits, ...]
    outputs: tuple[TensorBits, ...]
    facts: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        again = f", call {self.call + 1}" if self.call else ""
        return f"{self.layer or '(model)'} {self.direction}: {self.operation}{again}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trace(table.Result):
    """Hold the operations of one step; ``print`` shows a table, ``save`` writes a file that any machine reads.

    Args:
        operations: In order of execution; an operation stands where it ended, a module behind what it called.
        level: ``"modules"`` or ``"aten"``.
        model: Class of the model.
        parameters: Name, shape and dtype of each.
        batch: Size of the first dimension of the first input.
        device: What it ran on.
        versions: Of fmtsim and torch; of a trace on a GPU of CUDA and cuDNN, too.
        loss: The loss as ``float.hex`` writes it, empty where no number was differentiated.
        gradients: Of parameters, at the end.
        recorded: Number of operations; 0 in files of older versions.
        version: Of the file's layout.

    Attributes:
        tensors: What was kept of operations by index: name (as in inputs and outputs) to tensor.
    """

    operations: tuple[Operation, ...]
    level: Level = "modules"
    model: str = ""
    parameters: tuple[tuple[str, str, str], ...] = ()
    batch: int = 0
    device: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    loss: str = ""
    gradients: tuple[TensorBits, ...] = ()
    recorded: int = 0
    version: int = VERSION
    tensors: dict[int, dict[str, Tensor]] = field(default_factory=dict, compare=False, init=False)

    def first_nonfinite(self) -> Operation | None:
        """Return the first operation that made a NaN of none or an Inf of finite inputs, or read a NaN, or None."""
        # A NaN that was read was given, or made by code between operations or by the loss. Infinities that were given,
        # as masks have them, do not count.
        reads_nan = lambda one: any(x.special == "nan" for x in one.inputs)  # noqa: E731
        return next((one for one in self.operations if _made(one) or reads_nan(one)), None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file that appears whole or not at all: the record as JSON, and the kept tensors.

        Raises:
            DataError: The file cannot be written.
        """
        stored, dtypes = {}, {}
        for index, outputs in self.tensors.items():
            for name, x in outputs.items():
                key = f"{index}.{name}"
                dtypes[key] = dtype_name(x.dtype)
                if x.dtype not in _TAGGED:  # as bytes
                    x = (x if x.dim() else x.view(1)).detach().contiguous().view(torch.uint8)
                stored[key] = stored_tensor(x)
        text = json.dumps({"trace": self.to_dict(), "dtypes": dtypes}, separators=(",", ":"), allow_nan=False)
        write_tensors(path, stored, {_KEY: text})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Trace":
        """Read what ``save`` wrote, on any machine.

        Raises:
            DataError: The file is missing, damaged, no trace, or of another version of the layout.
        """
        stored, metadata = read_tensors(path)
        if _KEY not in metadata:
            raise DataError(f"{path} is not a trace; write one with fmtsim trace, or with fmtsim.trace(...).save(path)")
        try:
            content = parse_json(metadata[_KEY])
            record, dtypes = content["trace"], content["dtypes"]
            version = record["version"]
            if version != VERSION:
                raise DataError(
                    f"{path} has version {version} of traces, and this fmtsim reads version {VERSION}; "
                    "trace again with one version of fmtsim on both sides"
                )
            trace: Trace = record_of(cls, record, "trace")
            check_types(trace)
            for one in trace.operations:
                check_types(one)
                for bits in (*one.inputs, *one.outputs):
                    check_types(bits)
            for key, saved in stored.items():
                index, _, name = key.partition(".")
                dtype = getattr(torch, dtypes[key])
                if not isinstance(dtype, torch.dtype):
                    raise ValueError(f"{dtypes[key]} is not a dtype")
                raw = tensor_of_bytes(bytearray(saved.data))  # a copy: a view keeps all tensors of the file in memory
                as_bytes = saved.tag == "U8" and dtype != torch.uint8
                x = raw.view(saved.shape).view(dtype) if as_bytes else raw.view(dtype).view(saved.shape)
                trace.tensors.setdefault(int(index), {})[name] = x
        except (ArgumentError, KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path} is a damaged trace: {error}; trace again") from None
        return trace

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, without tensors."""
        fields = (one.name for one in dataclasses.fields(self) if one.init)
        return {name: _plain(getattr(self, name)) for name in fields}  # the version, too

    def _content(self) -> Iterable[table.Rows | str]:
        more = len(self.operations) - _SHOWN
        rest = (f"... and {more:,} more",) if more > 0 else ()
        rows = [(one, x) for one in self.operations[:_SHOWN] for x in one.outputs or (None,)]
        return table.table_of(_COLUMNS, rows), *rest, self.summary

    @property
    def summary(self) -> str:
        """The trace in a line: operations, device, loss, and the first that is not finite."""
        loss = f", loss {float.fromhex(self.loss)!r}" if self.loss else ""
        bad, said = self.first_nonfinite(), ""
        if bad is not None:
            kind = "Inf" if "nan" not in {x.special for x in (*bad.inputs, *bad.outputs)} else "NaN"
            said = f"; the first {kind} is {'made' if _made(bad) else 'read'} by {bad}"
        return f"{len(self.operations):,} operations of {self.model} on {self.device}{loss}{said}"


def _of_output(get: Callable[[TensorBits], str | None]) -> Callable[[tuple[Operation, TensorBits | None]], str | None]:
    """Return a function of an operation and one of its outputs; an operation without outputs has empty cells."""
    return lambda row: None if row[1] is None else get(row[1])


_COLUMNS = (
    table.Column("", lambda row: row[0].index), table.Column("layer", lambda row: row[0].layer or "(model)"),
    table.Column("direction", lambda row: row[0].direction), table.Column("operation", lambda row: row[0].operation),
    table.Column("output", _of_output(lambda x: x.name)),
    table.Column("shape", _of_output(lambda x: "x".join(map(str, x.shape)) or "()")),
    table.Column("dtype", _of_output(lambda x: x.dtype)), table.Column("hash", _of_output(lambda x: x.hash)),
    table.Column("largest", _of_output(lambda x: x.special or ("" if x.amax is None else f"{x.amax:.4g}"))),
)  # fmt: skip


def _made(one: Operation) -> bool:
    """Return True if an operation returned a NaN without reading one, or an Inf from finite inputs."""
    before, after = ({x.special for x in tensors} - {""} for tensors in (one.inputs, one.outputs))
    return bool(after) and not before or ("nan" in after and "nan" not in before)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):  # without the fields that have their defaults
        default = {one.name: one.default for one in dataclasses.fields(value)}
        items = ((name, getattr(value, name)) for name in default)
        return {name: _plain(item) for name, item in items if item != default[name]}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


Facts = Callable[[], list[tuple[str, str]]]


class Storages:
    """Number the storages of tensors, and remember which operation wrote to each last: views share their base's."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}  # a reference keeps an address from being used again
        self._writers: dict[int, int] = {}
        self._fresh = count()

    def place(self, x: Tensor) -> list[int]:
        """Return [number of a tensor's storage, offset in it, index of the last operation that wrote to it or -1]."""
        if not has_bits(x) or x.is_neg() or x.is_conj():
            return []
        reference = StorageWeakRef(x.untyped_storage())
        if reference.cdata not in self._numbers:
            self._numbers[reference.cdata] = next(self._fresh), reference
        number, _ = self._numbers[reference.cdata]
        return [number, int(x.storage_offset()), self._writers.get(number, GIVEN)]

    def write(self, index: int, outputs: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
        """Take note of what an operation wrote, and return it: names, places and strides of its tensors."""
        places = [(name, self.place(x), x) for name, x in outputs]
        returned = {at[0] for name, at, _ in places if name and at}
        places = [one for one in places if one[1] and (one[0] or one[1][0] not in returned)]
        self._writers.update((at[0], index) for _, at, _ in places)
        return [{"tensor": name, "stride": list(x.stride()), "storage": at} for name, at, x in places]

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors for given ones from here on: what no trace names wrote to them."""
        for x in tensors:
            if self.place(x):
                self._numbers.pop(StorageWeakRef(x.untyped_storage()).cdata)


def written_by(func: Any, args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
    """Return the arguments that an operator writes to, each with an empty name: batch_norm's schema hides two."""
    arguments = func._schema.arguments
    values = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
    writes = (one.name for one in arguments if (one.alias_info and one.alias_info.is_write) or "running_" in one.name)
    return [("", x) for name in writes for x in tree_leaves(values.get(name)) if isinstance(x, Tensor)]


def stored_call(
    func: Any, args: Any, kwargs: Any, storages: Storages | None = None, writes: list[Any] | None = None
) -> tuple[dict[str, Tensor], Facts]:
    """Return copies of a call's tensors by name, and the fact that describes the call.

    Args:
        func: The operator, called with ``args`` and ``kwargs``.
        storages: Those of the trace.
        writes: What ``storages.write`` returns of the operation: it is read once the trace is complete.
    """
    tensors: dict[str, Tensor] = {}

    def plain(x: Any) -> Any:
        if isinstance(x, Tensor):
            name = f"argument {len(tensors)}"
            with torch._C._DisableTorchDispatch():  # a copy is no operation of the model
                tensors[name] = x.detach().clone()
            place = {} if storages is None else {"storage": storages.place(x)}
            return {"tensor": name, "stride": list(x.stride()), **place}
        if isinstance(x, list | tuple):
            return [plain(item) for item in x]
        if isinstance(x, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return {type(x).__name__: str(x).removeprefix("torch.")}
        return x

    record = {"overload": func._overloadname, "args": plain(args), "kwargs": {k: plain(x) for k, x in kwargs.items()}}
    try:
        json.dumps(record)
    except TypeError:  # a generator, or a symbol
        return {}, list
    return tensors, lambda: [(CALL, json.dumps(record if writes is None else {**record, "writes": writes}))]


def call_arguments(call: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a stored call says of its tensors, in order."""
    is_tensor = lambda x: isinstance(x, dict) and "tensor" in x  # noqa: E731
    return [x for x in tree_leaves([call["args"], call["kwargs"]], is_leaf=is_tensor) if is_tensor(x)]


def read_call(text: str, tensors: dict[str, Tensor]) -> tuple[str, list[Any], dict[str, Any]]:
    """Return overload, arguments and keywords of a stored call; tensors have the strides that they had."""

    def value(x: Any) -> Any:
        if isinstance(x, list):
            return [value(item) for item in x]
        if not isinstance(x, dict):
            return x
        if "tensor" in x:
            # Of a dimension with a stride of 0 one index has all numbers.
            tensor, shape = tensors[x["tensor"]], tensors[x["tensor"]].shape
            if list(tensor.stride()) == x["stride"] or not tensor.numel():
                return tensor
            for dim, stride in enumerate(x["stride"]):
                tensor = tensor if stride else tensor.narrow(dim, 0, 1)
            return torch.empty_strided(tensor.shape, x["stride"], dtype=tensor.dtype).copy_(tensor).expand(shape)
        ((kind, name),) = x.items()
        return torch.device("cpu") if kind == "device" else getattr(torch, name)  # audits run on a CPU

    record = json.loads(text)
    return record["overload"], value(record["args"]), {name: value(x) for name, x in record["kwargs"].items()}
