# SPDX-License-Identifier: Apache-2.0
"""Compile ``fmtsim/machine/elementwise.cu`` by NVRTC 13.0 to ``elementwise.zip``: ``python -m tools.elementwise``.

Each function becomes PTX of its own; one that rounds between its steps becomes one for each of three dtypes.
"""

import re
import zipfile
from pathlib import Path

from fmtsim.machine.ptx.nvrtc import compiled

SOURCE = Path(__file__).parents[1] / "fmtsim" / "machine" / "elementwise.cu"
_PRELUDE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define NAN __int_as_float(0x7fffffff)
#define INFINITY __int_as_float(0x7f800000)
#define MAX(a, b) ((a) < (b) ? (b) : (a))
#define MIN(a, b) ((b) < (a) ? (b) : (a))
"""
_ROUNDINGS = {
    "float32": "x",
    "bfloat16": "__bfloat162float(__float2bfloat16_rn(x))",
    "float16": "__half2float(__float2half_rn(x))",
}
_KERNEL = """
__device__ __forceinline__ float R(float x) { return %s; }
__device__ __forceinline__ float value(float x, float y, float z, float p, float q, float s) { %s return %s; }
extern "C" __global__ void kernel(const float *a, const float *b, const float *c, float *out, float p, float q, float s,
                                  int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = value(a[i], b[i], c[i], p, q, s);
}
"""


def functions() -> dict[str, str]:
    """Return the body of each function by its name."""
    pattern = re.compile(r"^OP\((\w+), (.*?)\)$(?=\n(?:OP|\n|//)|\Z)", re.DOTALL | re.MULTILINE)
    return dict(pattern.findall(SOURCE.read_text("utf-8").rstrip()))


def ptx(name: str, body: str) -> dict[str, str]:
    """Return a function's PTX by the name of its member."""
    *statements, result = re.split(r"(?<=;)", body)
    texts = {}
    for dtype, rounding in _ROUNDINGS.items():
        text, _ = compiled(_PRELUDE + _KERNEL % (rounding, "".join(statements), result), None, {})
        # without line numbers and comments
        lines = text.split(".section")[0].splitlines()
        lines = [line for line in lines if not re.match(r"\s*(\.loc\s|\.file|//|$)", line)]
        texts[f"{name}.{dtype}"] = "\n".join(lines) + "\n"
    return texts if len(set(texts.values())) > 1 else {name: texts[f"{name}.float32"]}


def main() -> None:
    """Write the file."""
    with zipfile.ZipFile(SOURCE.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, body in functions().items():
            for member, text in ptx(name, body).items():
                archive.writestr(zipfile.ZipInfo(member, (1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    main()
