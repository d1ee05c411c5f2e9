# pip: ml_dtypes==0.6.0 numpy==2.4.6
# SPDX-License-Identifier: Apache-2.0
"""ml_dtypes: numpy's astype of arrays, and the constructor of a type on one number."""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

TYPES = {
    "bf16": "bfloat16", "e3m4": "float8_e3m4", "e4m3_ieee": "float8_e4m3", "e4m3b11fnuz": "float8_e4m3b11fnuz",
    "e4m3": "float8_e4m3fn", "e4m3fnuz": "float8_e4m3fnuz", "e5m2": "float8_e5m2", "e5m2fnuz": "float8_e5m2fnuz",
    "e8m0": "float8_e8m0fnu", "e2m1": "float4_e2m1fn", "e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn",
}  # fmt: skip
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    x = np.load(folder / request["x"])
    x = x.view(ml_dtypes.bfloat16) if request["dtype"] == "bf16" else x
    dtype = getattr(ml_dtypes, TYPES[request["format"]])
    with np.errstate(all="ignore"):
        if request["profile"] == "scalar":  # a Python float has float64
            numbers = x.tolist() if request["dtype"] == "fp64" else x
            result = np.array([dtype(number) for number in numbers], dtype=dtype)
        else:
            result = x.astype(dtype)
        code = result.view(f"u{dtype(0).nbytes}").astype(np.int64)
        np.savez(folder / request["out"], value=result.astype(np.float32), code=code)
versions = {"ml_dtypes": ml_dtypes.__version__, "numpy": np.__version__}
(folder / "versions.json").write_text(json.dumps(versions))
