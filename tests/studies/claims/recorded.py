# SPDX-License-Identifier: Apache-2.0
"""What experiments of claims give: a change is meant, or it is an error; that a number is right is not shown by it.

``data/numbers.json`` has the numbers and the curves of each claim, of its first seed and, where that is slow, of a run
that is much too short to show anything. Who means to change one writes the file anew::

    python -m tests.studies.claims.recorded
"""

import contextlib
import json
import math
import tempfile
from pathlib import Path
from unittest import mock

from fmtsim.lab.training.corpus import load_corpus
from studies.claims import optimizers, served, sweeps
from studies.claims.claim import Claim, Measured
from studies.claims.run import CLAIMS
from studies.claims.widths import text

FILE = Path(__file__).with_name("data") / "numbers.json"
_GPT = {"steps": 2, "batch": 1, "layers": 4}
SHORT = {  # the settings that make a slow claim short
    "flash_attention_3": {"heads": 2, "queries": 64, "keys": 256, "features": 64},
    "lns_training": {"steps": 3, "tables": (8, 1)},
    "mus_transfer": {"widths": (32, 64), "exponents": (-4, -3), "steps": 12, "batch": 2, "layers": 1},
    "nvfp4_loss": _GPT,
    "nvfp4_ablation": _GPT,
    "deepseek_v3_loss": _GPT,
    "fp4_ms_loss": _GPT,
    "eight_bit_losses": _GPT | {"recipes": ("te_current", "fp8lm")},
    "unit_scaling_loss": _GPT,
    "swiglu_divergence": _GPT | {"steps": 10, "layers": 1},
    "mantissa_bits": _GPT | {"recipes": ("amp_bf16", "e8m3"), "rates": (0.003, 0.009), "failed": 5.6},
    "coverage": {"workloads": 2, "outliers": (1.0, 64.0), "width": 16},
    "gaudi_text": {"steps": 2, "width": 32, "schemes": ("gaudi2_hw",)},
    "fp8_to_int8": {"steps": 2, "width": 32, "schemes": ("w4a4",)},
    "minifloat_fpga": {"steps": 20, "widths": (4,)},
    "e3m4_vision": {"steps": 20},
    "fliqs": {"steps": 8},
    "madam_logarithms": {"steps": 3},
    "optimizer_parity": {"steps": 3, "schemes": ("bnb8", "coat"), "seeds": (0, 1), "width": 32, "batch": 2},
    "qat": {"steps": 4, "tuned": 3, "width": 32, "batch": 2},
    "fp8_tasks": {"steps": 12, "width": 16, "batch": 2, "seeds": (0, 1)},
    "fewer_bits": {"steps": 10, "width": 16, "seeds": (0, 1), "schemes": ("bf16", "e5m7")},
}


def measured(claim: Claim) -> Measured:
    """Run a claim once, a slow one in short, on a text of our own: that of the standard library has versions."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "text.txt"
        path.write_bytes(bytes((text(400, 256, 9).flatten() + 32).tolist()))
        for module in (optimizers, served, sweeps):
            stack.enter_context(mock.patch.object(module, "load_corpus", lambda _, context: load_corpus(path, context)))
        return claim.measure(lambda part: None, **dict(claim.settings) | SHORT.get(claim.name, {}))


def summary(result: Measured) -> dict[str, float]:
    """Return the numbers of an experiment, and of each curve the sums of its places and values."""
    sums = [(label, [math.fsum(axis) for axis in zip(*curve, strict=True)]) for label, curve in result.curves.items()]
    return {
        **result.numbers,
        **{f"curve {label}, {axis}": s for label, pair in sums for axis, s in zip("xy", pair, strict=True)},
    }


def recorded() -> dict[str, dict[str, float]]:
    """Return the recorded numbers by claim."""
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    rows = {claim.name: summary(measured(claim)) for claim in CLAIMS if claim.name in SHORT or not claim.slow}
    short = {name: {key: float(f"{value:.6g}") for key, value in numbers.items()} for name, numbers in rows.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in short.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
