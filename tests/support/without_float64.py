# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a device without float64 and without kernels: the CPU, with torch operations, under a strict mode."""

import sys
from functools import _lru_cache_wrapper
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fmtsim import torch_engine
from fmtsim.casts import ops


class Float64Used(RuntimeError):
    """An operator met float64."""


class WithoutFloat64(TorchDispatchMode):
    """Fail at every operator with float64 among its operands, results or arguments, also inside fmtsim's operators.

    Python's own numbers are not tensors: torch holds one among the operands of ``torch.where`` as a 0-dimensional
    tensor of the CPU, which is let through there where the result has another dtype.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "fmtsim":
            with self:
                return function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        number, chosen = function is torch.ops.aten.scalar_tensor.default, function is torch.ops.aten.where.self
        for value in tree_leaves((args, kwargs)):
            wide = isinstance(value, torch.Tensor) and value.dtype == torch.float64
            if (wide and not (chosen and value.dim() == 0)) or (value is torch.float64 and not number):
                raise Float64Used(f"{function} takes float64")
        result = function(*args, **kwargs)
        if not number and any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in tree_leaves(result)):
            raise Float64Used(f"{function} returns float64")
        return result


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch operations serve the CPU, and empty the caches of modules, so that no table is brought along."""
    refuses = dict.fromkeys(("supports", "supports_gemm", "supports_optimizer"), lambda *args: False)
    refuses["optimizer_steps"] = lambda rule, steps, *rest: steps
    refuses["hadamard"] = lambda *args: None
    kernels = SimpleNamespace(**{name: getattr(torch_engine, name) for name in torch_engine.__all__}, **refuses)
    loads = ops.load_engine
    for name, module in list(sys.modules.items()):
        if not name.startswith("fmtsim.") or name.startswith(("fmtsim.cpu", "fmtsim.cuda")):
            continue
        for function in vars(module).values():
            if type(function) is _lru_cache_wrapper:
                function.cache_clear()
        if getattr(module, "load_engine", None) is loads:
            monkeypatch.setattr(module, "load_engine", lambda name: torch_engine if name == "torch_engine" else kernels)
