# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ to PTX of sm_90a by NVRTC, which needs neither a GPU nor a driver."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fmtsim.support.errors import ArgumentError, DeviceError, shown

_SWITCHES = ("fmad", "ftz", "prec_div", "prec_sqrt")  # options that take true or false


def compiled(source: str, entry: str | None, options: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the PTX of a CUDA C++ source, and the name that a kernel has there.

    Args:
        source: A translation unit; ``cuda_fp8.h``, ``cuda_bf16.h`` and others are found where CUDA's headers are
            installed, or Triton, which brings them.
        entry: The kernel in C++: ``"softmax"``, or ``"ns::softmax<float, 4>"``, which is instantiated.
        options: The compiler's, by name: ``use_fast_math=True``, ``fmad=False``, ``std="c++20"``, ``include_path=...``,
            ``define_macro=["N=4"]``.

    Raises:
        ArgumentError: NVRTC refuses the source or an option, with its log.
        DeviceError: NVRTC is missing.
    """
    flags = ["--gpu-architecture=sm_90a", "--device-as-default-execution-space", "--generate-line-info"]
    for name, value in ({"std": "c++17"} | dict(options)).items():
        option = f"--{name if name == 'use_fast_math' else name.replace('_', '-')}"
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, bool) and name not in _SWITCHES:
                flags += [option] * one
            else:
                flags.append(f"{option}={str(one).lower() if isinstance(one, bool) else one}")
    return _compiled(source, entry, tuple(flags))


@cache
def _compiled(source: str, entry: str | None, flags: tuple[str, ...]) -> tuple[str, str | None]:
    """Return what NVRTC makes of a source under its own flags."""
    try:
        from cuda.bindings import nvrtc

        _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    except (ImportError, RuntimeError) as error:  # the bindings look for the library at the first call
        raise DeviceError(
            f'CUDA C++ needs its compiler (no GPU): pip install "fmtsim[nvrtc]" ({str(error).splitlines()[0]})'
        ) from None
    flags = (*flags, *(f"--include-path={folder}" for folder in _headers()))
    name = entry and entry.encode()
    if name:  # also of a template, or in a namespace
        nvrtc.nvrtcAddNameExpression(program, name)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    try:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            reason = bytes(log).decode(errors="replace").strip("\0 \n") or nvrtc.nvrtcGetErrorString(status)[1].decode()
            missing = "could not open source file" in reason
            hint = '; CUDA\'s headers come with pip install "fmtsim[nvrtc]", others by include_path=' if missing else ""
            raise ArgumentError(f"NVRTC cannot compile {shown(entry or 'the source')}{hint}:\n{reason}")
        text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
        nvrtc.nvrtcGetPTX(program, text)
        lowered = nvrtc.nvrtcGetLoweredName(program, name)[1].decode() if name else None
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(text).decode().rstrip("\0"), lowered


@cache
def _headers() -> list[str]:
    """Return the folders with CUDA's headers: the toolkit's or the wheels', else those in Triton's wheel."""
    from importlib.util import find_spec

    from cuda.pathfinder import locate_nvidia_header_directory

    found = [locate_nvidia_header_directory(name) for name in ("cudart", "cccl")]
    folders = [place.abs_path for place in found if place is not None and place.abs_path]
    spec = None if folders else find_spec("triton")
    beside = Path(spec.origin).parent / "backends/nvidia/include" if spec is not None and spec.origin else None
    return [*folders, str(beside)] if beside is not None and beside.is_dir() else folders
