# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels of the CUDA engine on the host, without a GPU: their real source, compiled by g++, bit for bit.

How to use it::

    from tests.cuda.emulator import HostKernel, emulated

    HostKernel("quantize.cu", "quantize", (("BITS", "8"),))(grid, block, x, out, np.int64(x.numel()), shared=0)

    with emulated():                      # or the pytest fixture `emulated`; emulated((8, 0)) is an A100
        fmtsim.cuda.quantize(x, spec, None, out)   # x, out: tensors on the CPU

``emulated`` replaces ``kernel``, ``device_index``, ``capability``, ``architecture``, ``multiprocessors``,
``shared_limit``, ``available`` and ``why_unavailable`` of ``fmtsim.cuda.runtime``. Outside pytest, put the
repository's root on ``PYTHONPATH``.

What it does: every thread of a block is a fiber that runs until it meets a barrier, so ``__syncthreads``, shuffles,
votes and products of matrices work as on the device. Threads and blocks run in order, or backwards with
``reversed_order=True``: results that differ show a missing barrier. Asynchronous copies land when they are waited
for. Arguments are held to the kernel's signature: their number, width and kind (``bytes`` for a structure). A deadlock,
a lane missing from its own mask, a write behind dynamic shared memory and ``__trap()`` raise ``EmulatorError``.

What it does not: no bounds of global memory are checked (``FMTSIM_EMULATOR_FLAGS=-fsanitize=undefined`` adds flags);
plain casts of NaN or of values out of range are the host's (use ``__float2int_rz``); a NaN from a plain ``+`` has the
host's bits; ``hmma_bf16_16x8x16`` is exact and then truncated; ``exp2f`` and the like are the host's library.
"""

from tests.cuda.emulator.kernels import COMPILER, EmulatorError, HostKernel
from tests.cuda.emulator.patching import emulated

__all__ = ["COMPILER", "EmulatorError", "HostKernel", "emulated"]
