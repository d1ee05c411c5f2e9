# SPDX-License-Identifier: Apache-2.0
"""Machine code on disk: a file for each kernel and types of arguments, named by a hash of all that it depends on.

numba's own cache looks at the file of the compiled function alone, so an edited helper in another file would leave
stale machine code behind. A key here covers everything that is compiled into a kernel, wherever it is written: the code
of the functions that it reaches, the constants that they name and the fields of tuples that it takes. An edit changes
the keys of the kernels that it reaches, and no other.
"""

import dis
import hashlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import types
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.serialize import dumps

from fmtsim.support.folder import kernel_folder, load, save, warn_damaged


@cache
def cache_folder() -> Path | None:
    """Return the folder of compiled kernels; None (with one warning) where there is none."""
    return kernel_folder("cpu")


def kernel_name(function: Callable) -> str:
    """Return the name of a kernel below the engine, ``cast.elements.directed_flat``."""
    name = f"{function.__module__.removeprefix('fmtsim.cpu.')}.{function.__qualname__}"
    return name.replace("<locals>.", "")


class KernelCache(NullCache):
    """Keep what numba compiles of one function; a kernel has no index, so that processes cannot mix their entries up.

    Args:
        function: The kernel as a Python function.
    """

    def __init__(self, function: Callable) -> None:
        self._function = function

    def _path(self, signature: Any, codegen: Any) -> Path | None:
        folder = cache_folder()
        key = key_of(self._function, signature, codegen.magic_tuple())
        return folder and folder / f"{kernel_name(self._function)}-{key}.bin"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return what was compiled for a signature, None where nothing was."""
        target_context.refresh()
        path = self._path(signature, target_context.codegen())
        content = path and load(path)
        if not path or not content:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        except Exception as error:  # of numba, LLVM or an import: whatever it is, compiling helps
            warn_damaged(path, f"cannot be loaded ({type(error).__name__}: {error})")
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep what was compiled for a signature."""
        path = self._path(signature, result.codegen)
        if path is not None and not result.library.has_dynamic_globals:
            save(path, dumps(result._reduce()))


_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, np.generic, np.dtype, types.Type)
_VERSIONS = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)


def key_of(function: Callable, signature: tuple[types.Type, ...], machine: tuple[str, ...]) -> str:
    """Return the key of a kernel for the types of its arguments on a machine (numba's ``magic_tuple``)."""
    fields = [_fields(kind) for kind in signature]
    name = f"{function.__module__}.{function.__qualname__}"  # machine code names it, and is loaded by it
    return _hash(name, reached(function), str(signature), *map(str, fields), str(machine), *_VERSIONS)


@cache
def reached(function: FunctionType) -> str:
    """Return the hash of a function's code and of all that it reaches; positions in its file do not count."""
    cells = {name: cell.cell_contents for name, cell in _cells(function)}
    named = [f"{name}={_described(value)}" for name, value in sorted([*cells.items(), *_globals(function)])]
    defaults = _described(function.__defaults__), _described(tuple((function.__kwdefaults__ or {}).values()))
    return _hash(_code(function.__code__), *defaults, *named)


def _cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the global names of a function with their values, and what it may take from our modules by a dot."""
    codes = list(_codes(function.__code__))
    names = {step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, ModuleType) and value.__name__.startswith("fmtsim."):
            attributes = {attribute for code in codes for attribute in code.co_names} & vars(value).keys()
            yield from ((f"{name}.{attribute}", vars(value)[attribute]) for attribute in attributes)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _code(code: CodeType) -> str:
    """Return a code object as text, without the places of its lines."""
    constants = [_code(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return repr((code.co_code, constants, names, counts, code.co_exceptiontable))


def _described(value: Any) -> str:
    """Return what a named value brings into machine code.

    Raises:
        TypeError: Nothing is known about values of its kind.
    """
    if isinstance(value, Dispatcher):  # a kept kernel names the modules of the functions that it calls
        name = f"{value.py_func.__module__}.{value.py_func.__qualname__}"
        return _hash(name, reached(value.py_func), repr(sorted(value.targetoptions.items())))
    if isinstance(value, _Intrinsic):  # writes LLVM, with whatever its file has
        return _hash(value._name, _text(inspect.getmodule(inspect.unwrap(value))))
    if isinstance(value, FunctionType) and value.__module__.startswith("fmtsim."):
        return _hash(value.__module__, reached(value), reached(getattr(value, "overload", value)))
    if isinstance(value, tuple):
        return repr([type(value).__name__, *map(_described, value)])
    if isinstance(value, np.ndarray):
        return repr((value.dtype, value.shape, value.tobytes()))
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}.{value.__qualname__}{getattr(value, '_fields', '')}"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, _PLAIN):
        return repr(value)
    raise TypeError(f"no rule says what a kernel takes from {value!r}; add one")


def _fields(kind: types.Type) -> Any:
    """Return the fields of a named tuple, and of those inside it: types name them by class alone."""
    if not isinstance(kind, types.BaseTuple):
        return ()
    return getattr(getattr(kind, "instance_class", None), "_fields", ()), [
        _fields(item) for item in getattr(kind, "types", ())
    ]


@cache
def _text(module: ModuleType) -> str:
    return inspect.getsource(module)


def _hash(*parts: str) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
