# pip: netCDF4==1.7.5.1.post1 cftime numpy
# SPDX-License-Identifier: Apache-2.0
"""netCDF4: variables with quantize_mode, written to a file and read back."""

import os
import tempfile

import numpy as np
from netCDF4 import Dataset
from peer import answer

KEEP = {"bf16": 7, "e8m3": 3, "e8m5": 5}


FILE = os.path.join(tempfile.mkdtemp(), "quantised.nc")


def cast(x, request):
    with Dataset(FILE, "w") as data:
        data.createDimension("n", x.size)
        how = {"quantize_mode": "BitRound", "significant_digits": KEEP[request["format"]]}
        variable = data.createVariable("x", "f4", ("n",), zlib=True, complevel=1, **how)
        variable.set_auto_mask(False)
        variable[:] = x.reshape(-1)
    with Dataset(FILE) as data:
        variable = data["x"]
        variable.set_auto_mask(False)
        return {"value": np.asarray(variable[:]).reshape(x.shape)}


answer(cast, "netCDF4", "numpy")
