# pip: softposit==0.3.4.4 numpy
# SPDX-License-Identifier: Apache-2.0
"""SoftPosit: posit8 of one number after another."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import softposit

folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    posits = [softposit.posit8(number) for number in np.load(folder / request["x"]).tolist()]
    value = np.array([float(posit) for posit in posits], np.float32)
    np.savez(folder / request["out"], value=value, code=np.array([posit.v.v for posit in posits], np.int64))
(folder / "versions.json").write_text(json.dumps({"softposit": version("softposit")}))
