#!/usr/bin/env bash
# Paddle 3.3.1 (CPU): astype("float16") of float32 numbers from 2**-89 to below 2**-77 is 2**64 times too large.
#
# Expected: 0, as for all numbers below 2**-25.
# Seen: 2**-80 (8e-25) becomes 2**-16, and 1.5 * 2**-78 becomes 9.2e-5, a normal float16; 2**-70 and 2**-100 become 0.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q paddlepaddle==3.3.1 numpy
"$room/env/bin/python" - <<'PYTHON'
import numpy as np
import paddle

print("paddle", paddle.__version__)
for number, expected in ((2.0**-70, 0.0), (1.5 * 2.0**-78, 1.5 * 2.0**-14), (2.0**-80, 2.0**-16), (2.0**-100, 0.0)):
    half = paddle.to_tensor(np.array([number], np.float32)).astype("float16").numpy()[0]
    print(number, "->", half, "numpy", np.float32(number).astype(np.float16))
    assert float(half) == expected, "another behaviour"
PYTHON
echo "as described"
