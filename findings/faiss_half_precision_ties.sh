#!/usr/bin/env bash
# faiss-cpu 1.15.1: ScalarQuantizer's float16 and bfloat16 round ties away from zero, and make -0 or Inf of some NaN.
#
# Expected: the nearest-even rounding of numpy's astype(float16), of F16C and of torch.
# Seen: 1 + 2**-11 becomes 1 + 2**-10 in QT_fp16 (numpy: 1); 1 + 2**-8 becomes 1 + 2**-7 in QT_bf16. QT_bf16 adds half a
# step to the bits of any number, so that the NaN 0x7FFFFFFF decodes as -0 and 0x7F800001 as Inf.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q faiss-cpu==1.15.1 numpy
"$room/env/bin/python" - <<'PYTHON'
import faiss
import numpy as np

print("faiss", faiss.__version__)
bits = np.array([0x7FFFFFFF, 0x7F800001], np.uint32)
x = np.concatenate([np.array([1 + 2**-11, -1 - 2**-11, 1 + 2**-8, -1 - 2**-8], np.float32), bits.view(np.float32)])
vectors = np.zeros((1, 8), np.float32)
vectors[0, :6] = x
decoded = {}
for name in ("QT_fp16", "QT_bf16"):
    quantizer = faiss.ScalarQuantizer(8, getattr(faiss.ScalarQuantizer, name))
    quantizer.train(vectors)
    decoded[name] = quantizer.decode(quantizer.compute_codes(vectors))[0]
    print(name, decoded[name][:6].tolist())
with np.errstate(invalid="ignore"):
    print("numpy's float16", x.astype(np.float16).tolist())
assert decoded["QT_fp16"][:2].tolist() == [1 + 2**-10, -1 - 2**-10] and np.float16(x[0]) == 1, "another behaviour"
short = decoded["QT_bf16"]
assert short[2:4].tolist() == [1 + 2**-7, -1 - 2**-7], "another behaviour"
assert short[4] == 0 and np.signbit(short[4]) and short[5] == np.inf, "another behaviour"
PYTHON
echo "as described"
