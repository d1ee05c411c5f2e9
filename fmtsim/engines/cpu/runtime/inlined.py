# SPDX-License-Identifier: Apache-2.0
"""How numba compiles a function that only kernels call: to LLVM's language, and no further.

numba optimises every function that it compiles, makes machine code of it and wraps it for Python. A helper needs none
of this: the kernel that calls it is optimised as a whole, helpers included. Leaving it out takes a third of the time
that the kernels of a product need.
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


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
