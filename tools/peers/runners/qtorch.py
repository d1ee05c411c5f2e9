# pip: qtorch==0.3.0 torch==2.13.0 numpy
# SPDX-License-Identifier: Apache-2.0
"""QPyTorch: float_quantize with rounding="nearest"."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from qtorch.quant import float_quantize

FLOATS = {"e4m3": (4, 3), "e5m2": (5, 2)}  # exponent and mantissa bits
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    x = torch.from_numpy(np.load(folder / request["x"]))
    value = float_quantize(x, *FLOATS[request["format"]], rounding="nearest")
    np.savez(folder / request["out"], value=value.numpy())
(folder / "versions.json").write_text(json.dumps({"qtorch": version("qtorch")}))
