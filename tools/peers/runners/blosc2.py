# pip: blosc2==4.14.1 numpy
# SPDX-License-Identifier: Apache-2.0
"""blosc2: the filter TRUNC_PREC, which keeps some bits of the mantissa."""

import blosc2
import numpy as np
from peer import answer

KEEP = {"bf16": 7, "e8m3": 3, "e8m5": 5}


def cast(x, request):
    filters = {"filters": [blosc2.Filter.TRUNC_PREC], "filters_meta": [KEEP[request["format"]]]}
    array = blosc2.asarray(x, cparams={"codec": blosc2.Codec.ZSTD, "clevel": 1, **filters})
    return {"value": np.asarray(array[:])}


answer(cast, "blosc2", "numpy")
