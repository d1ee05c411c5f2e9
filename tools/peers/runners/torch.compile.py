# pip: torch==2.13.0 numpy==2.4.6
# SPDX-License-Identifier: Apache-2.0
"""torch.compile on a CPU (Inductor's C++): Tensor.to alone, and followed by float() in one kernel."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

DTYPES = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz, "e8m0": torch.float8_e8m0fnu, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
functions = {}
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    x = torch.from_numpy(np.load(folder / request["x"]))
    x = x.view(torch.int16).view(torch.bfloat16) if request["dtype"] == "bf16" else x
    key = request["profile"], DTYPES[request["format"]]
    if key not in functions:
        fused, dtype = key
        cast = (lambda x, dtype=dtype: x.to(dtype).float()) if fused else (lambda x, dtype=dtype: x.to(dtype))
        functions[key] = torch.compile(cast, dynamic=True)
    y = functions[key](x)
    np.savez(folder / request["out"], value=y.float().numpy())
(folder / "versions.json").write_text(json.dumps({"torch": torch.__version__.split("+")[0]}))
