#!/usr/bin/env bash
# numcodecs 0.16.6: BitRound turns R's missing value NA into Inf, and other NaN into -0.
#
# Expected: a NaN stays a NaN, as a conversion to a shorter format keeps it.
# Seen: half a step is added to the bits of any number, and the lower bits are cut off. R's NA is the NaN
# 0x7FF00000000007A2, whose only bits are low ones: with up to 40 bits kept it becomes Inf; the NaN with all bits set becomes -0.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q numcodecs==0.16.6 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from numcodecs import BitRound

print("numcodecs", version("numcodecs"))
numbers = np.array([0x7FF00000000007A2, 0x7FFFFFFFFFFFFFFF, 0x7FF8000000000000], np.uint64).view(np.float64)
assert np.isnan(numbers).all()
for keep in (10, 23, 40):
    codec = BitRound(keepbits=keep)
    decoded = codec.decode(codec.encode(numbers))
    print("keepbits", keep, "NA, NaN of all bits, NaN ->", decoded.tolist())
    assert decoded[0] == np.inf and np.isnan(decoded[2]), "another behaviour"
    assert decoded[1] == 0 and np.signbit(decoded[1]), "another behaviour"
PYTHON
echo "as described"
