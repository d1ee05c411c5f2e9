# SPDX-License-Identifier: Apache-2.0
"""Functions of the user's that return a model, named as FILE.py:function or package.module:function."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fmtsim.support.errors import ArgumentError, FmtsimError

FORMS = "FILE.py:function or package.module:function"


def is_function(name: str) -> bool:
    """Say whether a name has the form of a function's."""
    return ":" in name


def returned(name: str, seed: int, offered: Mapping[str, Any]) -> Any:
    """Return what a function returns.

    Args:
        name: ``FILE.py:function``, or ``package.module:function``, where the package may lie in the current folder.
        seed: Of what it draws from torch's generator, which is afterwards as it was.
        offered: Arguments by name; it gets those that it takes.

    Raises:
        ArgumentError: There is no such function, it needs other arguments, or it raises: the message has the line.
    """
    place, _, word = name.rpartition(":")
    function = getattr(_module(name), word, None)
    if not callable(function):
        raise ArgumentError(f"--model {name}: {place} has no function {word!r}; write one that returns a module")
    with torch.random.fork_rng(devices=[]), told(name):
        torch.manual_seed(seed)
        taken = inspect.signature(function).parameters.values()
        needed = [one.name for one in taken if one.default is one.empty and one.kind not in (2, 4)]  # * and **
        absent = [one for one in needed if one not in offered]
        if absent:
            raise ArgumentError(
                f"--model {name}: {word} needs arguments that it does not get ({', '.join(absent)}); give them defaults"
            )
        everything = any(one.kind is one.VAR_KEYWORD for one in taken)
        names = {one.name for one in taken}
        return function(**{key: value for key, value in offered.items() if everything or key in names})


def source_of(name: str) -> Path | None:
    """Return the file that a function is looked for in, None where its module has none."""
    place = name.rpartition(":")[0]
    if not place.endswith(".py"):
        with _found_in(Path.cwd()), contextlib.suppress(Exception):  # of packages around it, which this imports
            spec = importlib.util.find_spec(place)
            return None if spec is None or spec.origin is None else Path(spec.origin)
        return None
    path = Path(place).expanduser()
    if not path.is_file():
        raise ArgumentError(f"--model {name}: there is no file {path}; pass FILE.py:function")
    return path.resolve()


@contextlib.contextmanager
def told(name: str) -> Iterator[None]:
    """Turn what a user's code raises into one line, with the place in its file."""
    try:
        yield
    except FmtsimError:
        raise
    except (Exception, SystemExit) as error:
        file = str(source_of(name)) if is_function(name) else ""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" (line {lines[-1]})" if lines else ""
        raise ArgumentError(f"--model {name}{where}: {type(error).__name__}: {error}") from error


def _module(name: str) -> ModuleType:
    """Return the module of a function's file or package; what it imports may lie beside it, or in this folder."""
    place = name.rpartition(":")[0]
    file = source_of(name) if place.endswith(".py") else None
    if file is not None:
        return _loaded(file, name)
    with _found_in(Path.cwd()), told(name):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # of what it imports
            raise ArgumentError(
                f"--model {name}: there is no module {error.name}, installed or in {Path.cwd()}; pass {FORMS}"
            ) from None


@lru_cache(maxsize=8)
def _loaded(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fmtsim_model_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _found_in(file.parent), told(name):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _found_in(folder: Path) -> Iterator[None]:
    """Let imports inside find what lies in a folder."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
