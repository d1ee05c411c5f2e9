#!/usr/bin/env bash
# torch 2.13.0 (CPU): a Python number divided by a tensor is rounded twice, so that n / torch.tensor(n) is not always 1.
#
# Expected: 448 / amax is the quotient, rounded once, as torch.div of two tensors, x / 448 and numpy give it.
# Seen: Tensor.__rtruediv__ multiplies the rounded reciprocal by the number: 41 / torch.tensor(41.0) is 0.99999994, and
# a quarter of all quotients are off by one ulp. Scales of quantisers are written this way in many libraries.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q torch==2.13.0 numpy
"$room/env/bin/python" - <<'PYTHON'
import torch

print("torch", torch.__version__)
numbers = [n for n in range(1, 1000) if (n / torch.tensor(float(n))).item() != 1]
print("n / torch.tensor(n) is not 1 for", len(numbers), "of 999 integers:", numbers[:5])
torch.manual_seed(0)
amax = torch.rand(100_000) + 0.5
quotient = torch.tensor(448.0) / amax
assert torch.equal(quotient, torch.from_numpy(448 / amax.numpy())), "another behaviour"
share = (448 / amax != quotient).float().mean().item()
print("448 / amax differs from torch.tensor(448.0) / amax in", f"{share:.1%}")
assert numbers[0] == 41 and (41 / torch.tensor(41.0)).item() < 1 and 0.1 < share < 0.5, "another behaviour"
assert torch.equal(448 / amax, amax.reciprocal() * 448), "another behaviour"
PYTHON
echo "as described"
