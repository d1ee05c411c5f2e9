# pip: numpy==2.4.6
# SPDX-License-Identifier: Apache-2.0
"""numpy: astype to float16."""

import json
import sys
from pathlib import Path

import numpy as np

folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    x = np.load(folder / request["x"])
    with np.errstate(all="ignore"):
        half = x.astype(np.float16)
    np.savez(folder / request["out"], value=half.astype(np.float32), code=half.view(np.uint16).astype(np.int64))
(folder / "versions.json").write_text(json.dumps({"numpy": np.__version__}))
