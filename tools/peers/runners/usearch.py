# pip: usearch==2.26.6 numpy
# SPDX-License-Identifier: Apache-2.0
"""USearch: vectors that are added to an index of a narrow dtype and read back as float32."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from usearch.index import Index

TYPES = {"fp16": "f16", "bf16": "bf16", "e5m2": "e5m2", "e4m3": "e4m3", "e3m2": "e3m2", "e2m3": "e2m3"}
WIDTH = 4096
folder = Path(sys.argv[1])
for request in json.loads((folder / "requests.json").read_text()):
    x = np.load(folder / request["x"])
    vectors = np.resize(x, (-(-len(x) // WIDTH), WIDTH))
    # one vector an index: no graph is built
    value = np.empty_like(vectors)
    for vector, row in zip(vectors, value, strict=True):
        index = Index(ndim=WIDTH, metric="ip", dtype=TYPES[request["format"]])
        index.add(0, vector)
        row[:] = index.get(0, dtype="f32").reshape(-1)
    np.savez(folder / request["out"], value=value.reshape(-1)[: len(x)])
(folder / "versions.json").write_text(json.dumps({"usearch": version("usearch")}))
