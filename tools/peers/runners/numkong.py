# pip: numkong==7.8.6 numpy
# SPDX-License-Identifier: Apache-2.0
"""NumKong: astype of a float32 array, on the fastest code that the processor has."""

import json
import sys
from pathlib import Path

import numkong
import numpy as np

TYPES = {
    "e4m3": "float8_e4m3", "e5m2": "float8_e5m2", "e2m3": "float6_e2m3", "e3m2": "float6_e3m2",
    "bf16": "bfloat16", "fp16": "float16",
}  # fmt: skip
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    codes = numkong.astype(np.load(folder / request["x"]), TYPES[request["format"]])
    np.savez(folder / request["out"], value=np.asarray(numkong.astype(codes, "float32")))
(folder / "versions.json").write_text(json.dumps({"numkong": numkong.__version__}))
