"""How kernels are compiled and kept: numba with a disk cache that notices edits in any kernel file.

numba's own cache looks at the file of the compiled function alone, so an edited helper in another file would leave
stale machine code behind. The folder used here is named after a hash of all kernel sources instead.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import llvmlite.ir as ir
import numba
from numba import types
from numba.core import caching
from numba.extending import intrinsic
from numba.np import arrayobj

from fmtsim.folder import kernel_folder


@cache
def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, named by their sources; None (with one warning) where there is none."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    return kernel_folder(f"cpu-{digest}")


class _Locator(caching._CacheLocator):
    """Point numba's cache at ``cache_folder``; the folder's name stands for the state of the sources."""

    def __init__(self, function: Callable, folder: Path) -> None:
        self._folder = folder
        self._line = function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._folder.name

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, function: Callable, path: str) -> "_Locator":
        folder = cache_folder()
        assert folder is not None  # kernel() asks first
        return cls(function, folder)


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]


class _KernelCache(caching.FunctionCache):
    _impl_class = _Implementation


def kernel(function: Callable) -> Callable:
    """Compile a function at its first call for each signature, without the GIL, and keep the machine code on disk."""
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    if cache_folder() is not None:
        dispatcher._cache = _KernelCache(function)  # type: ignore[attr-defined]
    return dispatcher


def device(function: Callable) -> Callable:
    """Compile a helper that is inlined into the kernels that call it."""
    return numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)


def subroutine(function: Callable) -> Callable:
    """Compile a helper that kernels call: long branching code, whose copies would cost more to compile than to call."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def _bitcast(source: types.Type, target: types.Type, llvm: ir.Type) -> Callable:
    @intrinsic
    def cast(typing_context, value):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.bitcast(args[0], llvm)

        return target(source), generate

    return cast


bits32 = _bitcast(types.float32, types.int32, ir.IntType(32))
float32_of = _bitcast(types.int32, types.float32, ir.FloatType())
bits64 = _bitcast(types.float64, types.int64, ir.IntType(64))
float64_of = _bitcast(types.int64, types.float64, ir.DoubleType())


@intrinsic
def prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line of array[index], which may lie behind the array's end."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = arrayobj.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(function, [address, word(0), word(3), word(1)])  # a read, into all levels, of data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
