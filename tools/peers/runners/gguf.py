# pip: gguf==0.19.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""gguf-py: quants.quantize and quants.dequantize."""

import numpy as np
from gguf import GGMLQuantizationType, quants
from peer import answer

TYPES = {"bf16": "BF16", "fp16": "F16", "mxfp4_ggml": "MXFP4"}


def cast(x, request):
    name = TYPES.get(request["format"], request["format"].upper())
    kind = GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        q = quants.quantize(x if name == "F16" else np.ascontiguousarray(x.astype(np.float32)), kind)
        return {"value": quants.dequantize(q, kind).reshape(x.shape)}


answer(cast, "gguf", "numpy")
