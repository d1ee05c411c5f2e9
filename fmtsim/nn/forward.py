# SPDX-License-Identifier: Apache-2.0
"""A module's forward: run it on other tensors, run it to look at it, and read the names in its code.

``fmtsim.nn.conversion`` changes it. ``Substituted`` hands functions other tensors in place of a module's Parameters.
Only ``names_in_forward`` reads bytecode.
"""

import dis
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from fmtsim.nn.conversion import all_settings
from fmtsim.nn.operations import GROUPED_NAMES, ModelMode


# A mode, because the module's attributes have to stay its Parameters: sharding and tied weights go by those.
class Substituted(ModelMode):
    """Hand functions other tensors in place of a module's own Parameters.

    Args:
        module: The module.
        change: From a Parameter to what stands for it.
    """

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._stands_for = {p: change(p) for p in module.parameters(recurse=False)}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the function."""
        return func(*map(self._stand_in, args), **{name: self._stand_in(value) for name, value in kwargs.items()})

    def _stand_in(self, value: Any) -> Any:
        return self._stands_for.get(value, value) if isinstance(value, nn.Parameter) else value


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run something without gradients, by operators that can be counted; then put buffers and random states back."""
    buffers = [(b, b.clone()) for b in model.buffers()]  # delayed scales among them
    generators = [getattr(m.__dict__.get("emulation"), "generator", None) for m in model.modules()]
    generators += [attended.call.generator for attended in all_settings(model, "attention")]
    states = [(g, g.get_state()) for g in {id(g): g for g in generators if isinstance(g, torch.Generator)}.values()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)  # the fused kernel would hide its products
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for generator, state in states:
                generator.set_state(state)
            for buffer, value in buffers:
                buffer.resize_(value.shape).copy_(value)  # a delayed scale gets its shape in its first call


@contextmanager
def running_modules() -> Iterator[list[nn.Module]]:
    """Yield a list of the modules whose forward is running, the innermost last."""
    stack: list[nn.Module] = []

    def leave(*_: Any) -> None:
        if stack:
            stack.pop()

    before = hooks.register_module_forward_pre_hook(lambda module, _: stack.append(module))
    after = hooks.register_module_forward_hook(leave, always_call=True)
    try:
        yield stack
    finally:
        before.remove()
        after.remove()


def names_in_forward(cls: type[nn.Module]) -> frozenset[str]:
    """Return all names in the code of a class's forward and in the functions that it names, outside of torch.

    ``convert`` has to say which Parameters a model may multiply with (rules name them, reports list them) before the
    model has run; a ``ModelMode`` sees a product only when it runs. A batch as an argument of ``convert`` would make
    this reading of bytecode unnecessary. The operator ``@`` counts as the name ``matmul``, and so does a call through a
    table of functions, such as the experts of transformers, which also counts as ``grouped_mm`` where the table's
    functions are not known.
    """
    return _names(cls)  # type: ignore[arg-type]  # mypy takes nn.Module's __hash__ for its metaclass's


@lru_cache(maxsize=1024)
def _names(cls: type[nn.Module]) -> frozenset[str]:
    return _reached(cls, [vars(base).get("forward") for base in cls.__mro__ if base is not nn.Module])


def forward_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names in the code of a module's forward itself; none where the forward is not a Python function."""
    code = getattr(type(module).forward, "__code__", None)
    return () if code is None else code.co_names


def is_of_torch(value: Any) -> bool:
    """Return True if a value is defined by torch or Python."""
    return str(getattr(value, "__module__", "torch")).split(".")[0] in ("torch", "None", "builtins")


def _reached(cls: type[nn.Module], todo: list[Any]) -> frozenset[str]:
    """Return all names in the code of functions and in those that they name; ``cls`` has the methods."""
    names, seen = set[str](), set[CodeType]()
    while todo:
        function: Any = todo.pop()
        function = function.fget if isinstance(function, property) else function
        if isinstance(function, Mapping):  # a table of functions, to which others may be added
            held = [value for value in function.values() if callable(value) and not is_of_torch(value)]
            are_functions = all(isinstance(value, FunctionType) for value in held)
            names.update(("matmul",) if held else ())
            names.update(GROUPED_NAMES & _reached(cls, held) if are_functions else GROUPED_NAMES)
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)  # functions that call each other end here
        todo += [cell.cell_contents for cell in function.__closure__ or () if not _empty(cell)]
        todo.append(getattr(function, "__wrapped__", None))  # functools.wraps keeps the decorated function there
        for code in _codes(function.__code__):
            names.update(code.co_names)
            names.update("matmul" for step in dis.get_instructions(code) if step.argrepr in ("@", "@="))
            called = [getattr(cls, name, function.__globals__.get(name)) for name in code.co_names]
            todo += [used for used in called if isinstance(used, property | Mapping) or not is_of_torch(used)]
    return frozenset(names)


def _empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
