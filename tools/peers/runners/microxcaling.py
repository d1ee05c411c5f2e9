# pip: torch==2.13.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""microxcaling on the CPU: quantize_mx_op without custom_cuda. Not on PyPI: its folder ``mx`` (commit 7bc41952 of
microsoft/microxcaling) belongs into the environment's site-packages."""

from mx.mx_ops import quantize_mx_op
from mx.specs import MxSpecs
from peer import answer, arrays, torch_tensor

ELEMENTS = {"mxfp8_e4m3": "fp8_e4m3", "mxfp8_e5m2": "fp8_e5m2", "mxfp6_e2m3": "fp6_e2m3", "mxfp6_e3m2": "fp6_e3m2",
            "mxfp4": "fp4_e2m1", "mxint8": "int8"}  # fmt: skip
SPECS = MxSpecs({"scale_bits": 8, "block_size": 32, "shared_exp_method": "max", "custom_cuda": False})


def cast(x, request):
    x = torch_tensor(x, request["dtype"])
    how = {"elem_format": ELEMENTS[request["format"]], "axes": [-1], "round": request["profile"] or "nearest"}
    return arrays(value=quantize_mx_op(x, SPECS, block_size=32, **how))


answer(cast, "torch")
