# SPDX-License-Identifier: Apache-2.0
"""The names in the code of a module's forward: the only place of fmtsim.nn that reads Python bytecode."""

import dis
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from fmtsim.nn.operations import GROUPED_NAMES


@lru_cache(maxsize=1024)
def names_in_forward(cls: Any) -> frozenset[str]:
    """Return all names in the code of a class's forward and in the functions that it names, outside of torch.

    ``convert`` has to say which Parameters a model may multiply with (rules name them, reports list them) before the
    model has run; a ``ModelMode`` sees a product only when it runs. A batch as an argument of ``convert`` would make
    this reading of bytecode unnecessary. The operator ``@`` counts as the name ``matmul``, and so does a call through a
    table of functions, such as the experts of transformers, which also counts as ``grouped_mm`` where the table's
    functions are not known.
    """
    return _reached(cls, [vars(base).get("forward") for base in cls.__mro__ if base is not nn.Module])


def own_names(module: nn.Module) -> tuple[str, ...]:
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
            known = all(isinstance(value, FunctionType) for value in held)
            names.update(("matmul",) if held else ())
            names.update(GROUPED_NAMES & _reached(cls, held) if known else GROUPED_NAMES)
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        todo += [cell.cell_contents for cell in function.__closure__ or () if not _empty(cell)]
        todo.append(getattr(function, "__wrapped__", None))
        for code in _codes(function.__code__):
            names.update(code.co_names)
            names.update("matmul" for step in dis.get_instructions(code) if step.argrepr in ("@", "@="))
            called = [getattr(cls, name, function.__globals__.get(name)) for name in code.co_names]
            todo += [each for each in called if isinstance(each, property | Mapping) or not is_of_torch(each)]
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
