# pip: gfloat==0.5.2 numpy==2.4.6
# SPDX-License-Identifier: Apache-2.0
"""gfloat: round_ndarray with sat False (its default) and True."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import gfloat
import numpy as np
from gfloat import formats

INFOS = {
    "e4m3": formats.format_info_ocp_e4m3, "e5m2": formats.format_info_ocp_e5m2, "e8m0": formats.format_info_ocp_e8m0,
    "e2m1": formats.format_info_ocp_e2m1, "e2m3": formats.format_info_ocp_e2m3, "e3m2": formats.format_info_ocp_e3m2,
    "bf16": formats.format_info_bfloat16, "fp16": formats.format_info_binary16, "int8_f6": formats.format_info_ocp_int8,
}  # fmt: skip
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    x = np.load(folder / request["x"])
    with np.errstate(all="ignore"):
        value = gfloat.round_ndarray(INFOS[request["format"]], x, sat=bool(request["profile"]))
    np.savez(folder / request["out"], value=value.astype(np.float64 if request["dtype"] == "fp64" else np.float32))
(folder / "versions.json").write_text(json.dumps({"gfloat": version("gfloat"), "numpy": np.__version__}))
