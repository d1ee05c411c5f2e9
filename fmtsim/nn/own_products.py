# SPDX-License-Identifier: Apache-2.0
"""Which products a model writes itself, with Parameters that no converted layer multiplies: found before it runs.

A forward that says ``F.linear(x, self.weight)``, ``x @ self.experts[e]`` or ``F.linear(h, self.embedding.weight)`` is
known by its code: by the names of functions and attributes in it and in the functions that it calls.
"""

import dis
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from fmtsim.nn.modules import EmulatedModule, emulated_class
from fmtsim.support.dispatch import constant_in_graphs

_GROUPED: Final = frozenset({"grouped_mm", "_grouped_mm"})
_VERBS: Final = _GROUPED | frozenset(
    {"linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "multi_head_attention_forward"}
)
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LISTS: Final = (nn.ParameterList, nn.ParameterDict)
_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Own(NamedTuple):
    """Name a Parameter that a model multiplies with in code of its own.

    Attributes:
        owner: Name of the module that holds it.
        module: The module.
        parameter: The Parameter's name in the module.
        head: Whether it is the weight of an embedding, so that a product with it makes logits.
    """

    owner: str
    module: nn.Module
    parameter: str
    head: bool


def own_matrices(model: nn.Module) -> dict[str, Own]:
    """Return the matrices that a model multiplies with in code of its own, by the names that rules see.

    That is the module's name, or where it has several ``module.parameter``.
    """
    modules = dict(model.named_modules())
    embeddings = {id(m.weight) for m in modules.values() if isinstance(m, nn.Embedding)}
    found: dict[str, Own] = {}
    for name, module in modules.items():
        parameters = own_parameters(module)
        if isinstance(module, _LISTS) and _matrices(module) and _writes(_holder(modules, name)[1]):
            parameters = tuple(_matrices(module))
        elif _multiplied_elsewhere(modules, name):
            parameters = ("weight",)
        for parameter in parameters:
            head = id(module._parameters[parameter]) in embeddings
            own = ".".join(filter(None, (name, parameter))) if len(parameters) > 1 else name
            found[own] = Own(name, module, parameter, head)
    return found


def own_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's own matrices, or stacks of them, where its code multiplies with some."""
    cls = type(module)
    if cls.__module__.startswith("torch.") or isinstance(module, (EmulatedModule, nn.Embedding, *_CONTAINERS)):
        return ()
    if emulated_class(cls) is not None or parametrize.is_parametrized(module):
        return ()
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
        return ()
    names = _matrices(module)
    return tuple(names) if names and _writes(module) else ()


def writers(model: nn.Module, owned: list[Own]) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return the modules whose forward may multiply with Parameters itself, each with owners and names of these.

    Args:
        model: The converted model.
        owned: Those of ``own_matrices`` that are emulated. Weights of converted layers that other modules read are
            found beside them.
    """
    modules = dict(model.named_modules())
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for own in owned:
        at = [own.module]
        if isinstance(own.module, _LISTS):
            at = [_holder(modules, own.owner)[1]]
        elif isinstance(own.module, nn.Embedding):
            at = [above for above in _above(modules, own.owner) if _reads(above, "weight")]
        for module in at:
            found.setdefault(module, []).append((own.module, own.parameter))
    by_module: dict[nn.Module, list[Own]] = {}
    for own in owned:
        by_module.setdefault(own.module, []).append(own)
    for module in modules.values():
        if isinstance(module, EmulatedModule) or not _writes(module):
            continue
        known = found.get(module, [])
        for part in module.modules():
            names = [own.parameter for own in by_module.get(part, ())]
            names += _matrices(part) if isinstance(part, EmulatedModule) and part.emulation is not None else []
            read = [(part, name) for name in names if _reads(module, name) and (part, name) not in known]
            if read:
                found.setdefault(module, []).extend(read)
    return found


def _multiplied_elsewhere(modules: dict[str, nn.Module], name: str) -> bool:
    """Say whether the code of modules around another one multiplies by its weight."""
    if isinstance(modules[name], nn.Embedding):
        return any(_reads(above, "weight") for above in _above(modules, name))
    around = modules[name.rpartition(".")[0]]
    return name.endswith("out_proj") and isinstance(around, nn.MultiheadAttention) and bool(own_parameters(around))


def _matrices(module: nn.Module) -> list[str]:
    return [
        name
        for name, p in module._parameters.items()
        if p is not None and p.dim() in (2, 3) and p.dtype in _FLOATS and type(p).__name__ != "UninitializedParameter"
    ]


def _holder(modules: dict[str, nn.Module], name: str) -> tuple[str, nn.Module]:
    """Return the nearest module around another whose forward can be called."""
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            break
    return name, modules[name]


def _above(modules: dict[str, nn.Module], name: str) -> Iterator[nn.Module]:
    """Yield a module and those around it."""
    yield modules[name]
    while name:
        name = name.rpartition(".")[0]
        yield modules[name]


def _writes(module: nn.Module) -> bool:
    """Say whether a module's own code names a product, or calls what its code does not tell."""
    cls = type(module)
    if cls.__module__.startswith("torch."):
        return False
    names = _names(cls)  # type: ignore[arg-type]  # mypy takes nn.Module's __hash__ for its metaclass's
    return not _VERBS.isdisjoint(names) or any(
        callable(value) and (getattr(value, "__name__", "") in _VERBS or not _of_torch(value))
        for name, value in vars(module).items()
        if name in names
    )


@constant_in_graphs
def names_groups(cls: type[nn.Module]) -> bool:
    """Say whether the code of a class of modules names ``grouped_mm``."""
    return not _names(cls).isdisjoint(_GROUPED)  # type: ignore[arg-type]


def _of_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", "torch")).split(".")[0] in ("torch", "None", "builtins")


def _reads(module: nn.Module, attribute: str) -> bool:
    return _writes(module) and attribute in _names(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _names(cls: type[nn.Module]) -> frozenset[str]:
    """Return all names in the code of a class's forward and in the functions that it names, outside of torch."""
    return _reached(cls, [vars(base).get("forward") for base in cls.__mro__ if base is not nn.Module])


def _reached(cls: type[nn.Module], todo: list[Any]) -> frozenset[str]:
    """Return all names in the code of functions and in those that they name; ``cls`` has the methods."""
    names, seen = set[str](), set[CodeType]()
    while todo:
        function: Any = todo.pop()
        function = function.fget if isinstance(function, property) else function
        if isinstance(function, Mapping):  # a table of functions, to which others may be added
            held = [value for value in function.values() if callable(value) and not _of_torch(value)]
            known = all(isinstance(value, FunctionType) for value in held)
            names.update(("matmul",) if held else ())
            names.update(_GROUPED & _reached(cls, held) if known else _GROUPED)
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        todo += [cell.cell_contents for cell in function.__closure__ or () if not _empty(cell)]
        todo.append(getattr(function, "__wrapped__", None))
        for code in _codes(function.__code__):
            names.update(code.co_names)
            names.update("matmul" for step in dis.get_instructions(code) if step.argrepr in ("@", "@="))
            called = [getattr(cls, name, function.__globals__.get(name)) for name in code.co_names]
            todo += [each for each in called if isinstance(each, property | Mapping) or not _of_torch(each)]
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
