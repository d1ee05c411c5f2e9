# SPDX-License-Identifier: Apache-2.0
"""What every runner does: read the requests of a folder, hand each array to the library, write what it returned."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np


def answer(cast, *packages):
    """Answer all requests: ``cast(x, request)`` takes an array (bfloat16: uint16) and returns a dict of arrays."""
    folder = Path(sys.argv[1])
    for request in json.loads((folder / "requests.json").read_text()):
        results = cast(np.load(folder / request["x"]), request)
        np.savez(folder / request["out"], **results)
    (folder / "versions.json").write_text(json.dumps({package: version(package) for package in packages}))


def torch_tensor(x, dtype):
    """Return an array of a request as a torch tensor of its dtype."""
    import torch

    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype == "bf16" else torch.from_numpy(x)


def arrays(nan_code=None, **results):
    """Return torch tensors as arrays: float32 (float64 stays), codes and zero points as integers; None is left out.

    Codes of float8 tensors are their bits, every NaN 127: its sign is the processor's choice. ``nan_code`` is the code
    of whatever has the value NaN, in formats without NaN.
    """
    import torch

    if nan_code is not None:
        results["code"] = torch.where(results["value"].isnan(), nan_code, results["code"].long())

    def array(name, t):
        t = t.detach()
        if name == "code" and t.itemsize == 1 and t.is_floating_point():
            t = torch.where(t.float().isnan(), 127, t.view(torch.uint8).long())
        if name in ("code", "zero") and not t.is_floating_point():
            return t.to(torch.int64).numpy()
        return (t if t.dtype == torch.float64 else t.float()).numpy()

    return {name: array(name, t) for name, t in results.items() if t is not None}
