#!/usr/bin/env bash
# mlx 0.32.4 (CPU): MXFP4 and MXFP8 blocks of very small numbers decode as very large ones.
#
# Expected: a scale below 2**-127 becomes 2**-127 (or the block zeros): E8M0 holds 2**-127 to 2**127.
# Seen: the exponent plus 127 is negative and goes to a byte modulo 256: a block whose largest number is 1e-40 decodes
# as numbers above 1e34 in both modes. No error, no warning; with 1e-30 all is well.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import mlx.core as mx
import numpy as np

print("mlx", version("mlx"))
for amax in (1e-30, 1e-40):
    weights = np.zeros((1, 32), np.float32)
    weights[0, :2] = amax, -amax / 2
    for mode, bits in (("mxfp4", 4), ("mxfp8", 8)):
        how = {"group_size": 32, "bits": bits, "mode": mode}
        decoded = np.array(mx.dequantize(*mx.quantize(mx.array(weights), **how), **how, dtype=mx.float32))[0, 0]
        print(mode, f"{amax:.0e} decodes as {decoded:.1e}")
        assert decoded > 1e34 if amax < 1e-38 else 0.5 * amax < decoded < 2 * amax, "another behaviour"
PYTHON
echo "as described"
