# SPDX-License-Identifier: Apache-2.0
"""An operator's call as a trace stores it: tensors by name, and a JSON of its arguments that points to them."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmtsim.lab.analysis.trace import CALL

Facts = Callable[[], list[tuple[str, str]]]


def stored_call(func: Any, args: Any, kwargs: Any) -> tuple[dict[str, Tensor], Facts]:
    """Return copies of a call's tensors by name, and the fact that describes the call."""
    tensors: dict[str, Tensor] = {}

    def plain(x: Any) -> Any:
        if isinstance(x, Tensor):
            name = f"argument {len(tensors)}"
            with torch._C._DisableTorchDispatch():
                tensors[name] = x.detach().clone()
            return {"tensor": name, "stride": list(x.stride())}
        if isinstance(x, list | tuple):
            return [plain(item) for item in x]
        if isinstance(x, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return {type(x).__name__: str(x).removeprefix("torch.")}
        return x

    record = {"overload": func._overloadname, "args": plain(args), "kwargs": {k: plain(x) for k, x in kwargs.items()}}
    try:
        text = json.dumps(record)
    except TypeError:  # a generator, or a symbol
        return {}, list
    return tensors, lambda: [(CALL, text)]


def read_call(text: str, tensors: dict[str, Tensor]) -> tuple[str, list[Any], dict[str, Any]]:
    """Return overload, arguments and keywords of a stored call; tensors have the strides that they had."""

    def value(x: Any) -> Any:
        if isinstance(x, list):
            return [value(item) for item in x]
        if not isinstance(x, dict):
            return x
        if "tensor" in x:
            tensor = tensors[x["tensor"]]
            if min(x["stride"], default=1) == 0 or list(tensor.stride()) == x["stride"]:
                return tensor
            return torch.empty_strided(tensor.shape, x["stride"], dtype=tensor.dtype).copy_(tensor)
        ((kind, name),) = x.items()
        return torch.device("cpu") if kind == "device" else getattr(torch, name)

    record = json.loads(text)
    return record["overload"], value(record["args"]), {name: value(x) for name, x in record["kwargs"].items()}
