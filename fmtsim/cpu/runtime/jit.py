# SPDX-License-Identifier: Apache-2.0
"""How kernels are compiled: decorators for numba, and instructions that it lacks."""

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numba
from numba import extending, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering
from numba.extending import intrinsic
from numba.np import arrayobj

from fmtsim.cpu.runtime.kernel_cache import KernelCache, cache_folder, kernel_name
from fmtsim.support.compilation import compiling


class _Library(JITCodeLibrary):
    """Code that others link, and that is never run by itself."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):
    _name = "inlined_lowering"

    def run_pass(self, state: Any) -> bool:
        """Write a function in LLVM's language, and name it for those that call it."""
        if not state.flags.nrt and "array(" in str(state.return_type):
            raise TypeError(f"{state.func_id.func_name} returns an array, and does not count references to it")
        state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        super().run_pass(state)
        # numba finds a compiled function by a built-in method of its own; called from Python, this one raises KeyError
        name = f"{{{state.func_id.func_name} is compiled for kernels, and only they call it}}".format
        state.targetctx.insert_user_function(name, state.cr.fndesc, [state.library])
        state.cr = state.cr._replace(cfunc=name)
        return True


class Inlined(CompilerBase):
    """numba's passes, the last ones left out."""

    def define_pipelines(self) -> list[Any]:
        """Return the passes."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state, "inlined")
        passes.add_pass_after(_Lowering, NativeLowering)
        passes.passes = [step for step in passes.passes if step[0] is not NativeLowering]
        passes.finalize()
        return [passes]


def kernel(function: Callable) -> Callable:
    """Compile a function at its first call for each signature, without the GIL, and keep the machine code on disk."""
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    dispatcher._cache = KernelCache(function)  # type: ignore[attr-defined]
    compiler = dispatcher._compiler  # type: ignore[attr-defined]
    compile_, name = compiler.compile, kernel_name(function)

    @functools.wraps(compile_)
    def compiled(*arguments):  # type: ignore[no-untyped-def]
        with compiling(name, cache_folder()):  # a line says so where it takes long
            return compile_(*arguments)

    compiler.compile = compiled
    return dispatcher


def device(function: Callable) -> Callable:
    """Compile a helper that is inlined into the kernels that call it."""
    return numba.njit(nogil=True, error_model="numpy", forceinline=True, pipeline_class=Inlined)(function)


def borrowing(function: Callable) -> Callable:
    """Compile a helper as ``device`` does that neither makes nor returns arrays, so that it counts no references.

    Each count is an atomic operation, which waits for all stores before it: one for a few hundred elements takes as
    long as their cast.
    """
    options: Any = {"_nrt": False}
    return numba.njit(nogil=True, error_model="numpy", forceinline=True, pipeline_class=Inlined, **options)(function)


def subroutine(function: Callable) -> Callable:
    """Compile a helper that kernels call: long branching code, whose copies would cost more to compile than to call."""
    return numba.njit(nogil=True, error_model="numpy", pipeline_class=Inlined)(function)


def overload(choose: Callable) -> Callable:
    """Return a function for compiled code whose body ``choose`` returns, given the types of the arguments.

    Keys of the cache find ``choose`` by the function's attribute ``overload``.
    """

    @functools.wraps(choose)
    def stub(*arguments):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    options: Any = {"error_model": "numpy", "pipeline_class": Inlined}
    stub.overload = choose  # type: ignore[attr-defined]
    extending.overload(stub, jit_options=options)(choose)
    return stub


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


def _choice(name: str) -> Callable:
    """Return LLVM's minimum or maximum of two int32; Python's, in compiled code, computes in 64 bits."""

    @intrinsic
    def choose(typing_context, a, b):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)] * 2)
            return builder.call(builder.module.declare_intrinsic(f"llvm.{name}", [ir.IntType(32)], kind), args)

        return types.int32(types.int32, types.int32), generate

    return choose


min32, max32 = _choice("smin"), _choice("smax")


@intrinsic
def whole_part(typing_context, x):  # type: ignore[no-untyped-def]
    """Return the integer part of a float32 of 0 to below 2**32 as uint32, in 32 bits."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.fptoui(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def fma32(typing_context, x, y, z):  # type: ignore[no-untyped-def]
    """Return x y + z of float32, rounded once."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fma", [ir.FloatType()], kind), args)

    return types.float32(types.float32, types.float32, types.float32), generate


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
