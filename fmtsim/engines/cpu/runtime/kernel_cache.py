# SPDX-License-Identifier: Apache-2.0
"""Machine code on disk: a file for each kernel and types of arguments, named by all that it was compiled from."""

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from fmtsim.engines.cpu.runtime.keys import key_of
from fmtsim.support.folder import kernel_folder, load, save, warn_damaged


@cache
def cache_folder() -> Path | None:
    """Return the folder of compiled kernels; None (with one warning) where there is none."""
    return kernel_folder("cpu")


def kernel_name(function: Callable) -> str:
    """Return the name of a kernel below the engine, ``cast.scalar.nearest_saturating``."""
    return f"{function.__module__.removeprefix('fmtsim.engines.cpu.')}.{function.__qualname__}"


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
