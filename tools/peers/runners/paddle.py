# pip: paddlepaddle==3.3.1 numpy
# SPDX-License-Identifier: Apache-2.0
"""Paddle on a CPU: Tensor.astype."""

import json
import sys
from pathlib import Path

import numpy as np
import paddle

TYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "bf16": "bfloat16", "fp16": "float16"}
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    x = paddle.to_tensor(np.load(folder / request["x"]))
    value = x.astype(TYPES[request["format"]]).astype("float32").numpy()
    np.savez(folder / request["out"], value=value)
(folder / "versions.json").write_text(json.dumps({"paddlepaddle": paddle.__version__}))
