# pip: faiss-cpu==1.15.1 numpy
# SPDX-License-Identifier: Apache-2.0
"""faiss: ScalarQuantizer, trained on the tensor that it encodes; a row of the tensor is a dimension of the vectors."""

import faiss
import numpy as np
from peer import answer

TYPES = {"uint8": "QT_8bit", "uint8_channel_zp": "QT_8bit", "uint6": "QT_6bit", "uint4": "QT_4bit", "fp16": "QT_fp16",
         "bf16": "QT_bf16", "int8_full": "QT_8bit_direct_signed"}  # fmt: skip


def cast(x, request):
    name = "QT_8bit_direct" if request["profile"] == "direct" else TYPES[request["format"]]
    vectors = np.ascontiguousarray(x.T) if x.ndim == 2 and request["block"] == "row" else x.reshape(-1)
    if vectors.ndim == 1:  # vectors of 16 dimensions
        vectors = np.concatenate([vectors, np.zeros(-vectors.size % 16, np.float32)]).reshape(-1, 16)
    count = vectors.shape[1]  # other counts than multiples of 8 are decoded without fused multiply-adds
    vectors = np.pad(vectors, ((0, 0), (0, -count % 8)))
    quantizer = faiss.ScalarQuantizer(vectors.shape[1], getattr(faiss.ScalarQuantizer, name))
    quantizer.train(vectors)
    value = quantizer.decode(quantizer.compute_codes(vectors))
    value = value[:, :count]
    return {"value": np.ascontiguousarray(value.T) if request["block"] == "row" else value.reshape(-1)[: x.size]}


answer(cast, "faiss-cpu", "numpy")
