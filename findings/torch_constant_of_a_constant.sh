#!/usr/bin/env bash
# PyTorch 2.13.0, torch.compiler.assume_constant_result: what one marked function returns cannot be passed to another.
#
# Expected: the result of a marked function is a constant of the graph, so that another marked function takes it.
# Seen: attributes of the result can be read, but passing the object on ends in InternalTorchDynamoError with an empty
# NotImplementedError, with fullgraph=True and without: there is no graph break. A number passes.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$room/env/bin/python" - <<'PYTHON'
import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Format:
    bits: int


find = torch.compiler.assume_constant_result(lambda bits: Format(bits))
scale = torch.compiler.assume_constant_result(lambda fmt: 2.0**fmt.bits)
scale_of_number = torch.compiler.assume_constant_result(lambda bits: 2.0**bits)
x = torch.ones(2)
print("torch", torch.__version__)
assert torch.compile(lambda x: x * find(3).bits, backend="eager", fullgraph=True)(x).tolist() == [3.0, 3.0]
assert torch.compile(lambda x: x * scale_of_number(find(3).bits), backend="eager", fullgraph=True)(x).tolist() == [8.0, 8.0]
for whole in (True, False):
    try:
        y = torch.compile(lambda x: x * scale(find(3)), backend="eager", fullgraph=whole)(x)
    except torch._dynamo.exc.InternalTorchDynamoError as error:
        print("fullgraph", whole, "->", str(error).splitlines()[0])
        assert str(error).startswith("NotImplementedError"), "another behaviour"
    else:
        raise SystemExit(f"another behaviour: {y.tolist()}")
PYTHON
echo "as described"
