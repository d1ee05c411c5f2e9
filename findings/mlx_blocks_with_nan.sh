#!/usr/bin/env bash
# MLX 0.32.4 (CPU build): one NaN or Inf among the weights makes a whole block finite when it is quantised.
#
# Expected: NaN stays visible, as an E4M3 NaN (MXFP8) or as a NaN scale (all three formats have one).
# Seen: mode "mxfp8" decodes such a block of 32 as 896 and -896, zeros among them as -896; "mxfp4" and "nvfp4" decode
# it as zeros. No error, no warning; the next block is right. 896 is 448, the largest E4M3, times the scale 2.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
import sys

import mlx.core as mx
import numpy as np

print("mlx", mx.__version__, "python", sys.version.split()[0])
expected = {"mxfp8": [896.0, 896.0, -896.0], "mxfp4": [0.0, 0.0, 0.0], "nvfp4": [0.0, 0.0, 0.0]}
for mode, group, bits in (("mxfp8", 32, 8), ("mxfp4", 32, 4), ("nvfp4", 16, 4)):
    for bad in (float("nan"), float("inf")):
        weights = np.zeros((1, 64), np.float32)
        weights[0, :2] = bad, 1.0  # the rest of the block is 0
        weights[0, 40] = 2.0  # another block
        how = {"group_size": group, "bits": bits, "mode": mode}
        decoded = np.array(mx.dequantize(*mx.quantize(mx.array(weights), **how), **how).astype(mx.float32))[0]
        print(mode, bad, "->", decoded[:3].tolist(), "next block", decoded[40])
        assert decoded[:3].tolist() == expected[mode] and 1.9 < decoded[40] < 2.1, "another behaviour"
PYTHON
echo "as described"
