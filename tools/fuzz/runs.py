# SPDX-License-Identifier: Apache-2.0
"""Targets that read what runs left: recordings of products, checkpoints of a training."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fmtsim
from fmtsim.lab.training.decoders import GPTConfig
from fmtsim.lab.training.run import Checkpoint, Parts, begin
from fmtsim.lab.training.schemes import Scheme, TrainConfig
from tools.calibrate.replay import gemm_tasks
from tools.fuzz.corrupt import corrupted, junk, mutated, safetensors_file
from tools.fuzz.target import ROOM, file_target

SETTINGS = {"steps": 3, "model": {"width": 16}}
SCHEME = Scheme(format="e4m3", rounding="stochastic", recipe=fmtsim.get_recipe("te_delayed"))
CONFIG = TrainConfig(
    simulated=SCHEME, baseline=Scheme(format="fp32"), model=GPTConfig(context=16, width=16, layers=1, heads=2), steps=3,
    batch_size=2, lr=1e-2, seed=0,
)  # fmt: skip


def _codes(x: torch.Tensor) -> Any:
    return x.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[x.element_size()]).numpy()


def _calls() -> dict[str, Any]:
    a, b = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(5, 8, dtype=torch.bfloat16)
    x, y = (t.to(torch.float8_e4m3fn) for t in (torch.ones(16, 32), torch.ones(16, 32)))
    one, about = torch.tensor(1.0), {"call": "mm", "a": "bfloat16", "b": "bfloat16", "out": "bfloat16", "kind": "ones"}
    scaled = {
        "call": "scaled_mm", "a": "float8_e4m3fn", "b": "float8_e4m3fn", "out": "float32", "a_layout": "col",
        "scale_a_dtype": "float32", "scale_b_dtype": "float32", "use_fast_accum": True,
    }  # fmt: skip
    arrays = {"000.a": a, "000.b": b, "000.out": (a @ b.t()), "001.a": x, "001.b": y, "001.out": torch.ones(16, 16),
              "001.scale_a": one, "001.scale_b": one}  # fmt: skip
    return {"meta": [about, scaled], **{name: _codes(x) for name, x in arrays.items()}}


def _dots() -> dict[str, Any]:
    a, d = torch.ones(5, 4, dtype=torch.float16), torch.full((5,), 4.0)
    return {"a": _codes(a), "b": _codes(a), "c": _codes(torch.zeros(5)), "d": _codes(d), "meta": {"k": 4}}


def _archive(arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    meta = arrays.get("meta")
    text = meta if isinstance(meta, str) else json.dumps(meta)
    np.savez(file, **{name: x for name, x in arrays.items() if name != "meta"}, meta=np.array(text))
    return file.getvalue()


def _recording(good: dict[str, Any]) -> Callable[[random.Random], bytes]:
    """Return what makes archives of which a few things are other than they should be."""

    def make(rng: random.Random) -> bytes:
        arrays, kind = dict(good), rng.randrange(4)
        if kind == 0:
            return corrupted(rng, _archive(arrays))
        try:
            if kind == 1:
                arrays["meta"] = mutated(rng, arrays["meta"])
            else:
                name, x = rng.choice(list(arrays)), next(x for x in arrays.values() if isinstance(x, np.ndarray))
                arrays[name] = rng.choice((
                    junk(rng) if name == "meta" else np.array(["a"]), x, x.reshape(-1), x[:0], x[None], np.array(3),
                    x.astype(np.float64), x.astype(np.int8), x.astype(np.uint16), np.asfortranarray(x),
                ))  # fmt: skip
                if rng.random() < 0.3:
                    del arrays[rng.choice(list(arrays))]
            return _archive(arrays)
        except (ValueError, TypeError):  # an int of too many digits
            return corrupted(rng, _archive(good))

    return make


def _replay(path: Path) -> None:
    for task in gemm_tasks([path.parent], limit=4):
        task.run(lambda done: None)


def _begun() -> Parts:
    parts = begin(SCHEME, CONFIG)
    for p in parts.learner.model.parameters():
        p.grad = torch.ones_like(p)
    parts.learner.step(taken=True)
    parts.run.losses.append(1.0)
    return parts


def _checkpoint() -> bytes:
    Checkpoint(ROOM / "good.checkpoint", SETTINGS, 1).save(_begun())
    return (ROOM / "good.checkpoint").read_bytes()


def _resume(path: Path) -> None:
    again = Checkpoint(path, SETTINGS, 1)
    again.read()
    again.restore(begin(SCHEME, CONFIG))


_GOOD = _checkpoint()
TARGETS = [
    file_target("recording.calls", "calls/h200_small.npz", _replay, _recording(_calls()), count=60),
    file_target("recording.dots", "dots/mtc_V100_fp16_fp32.npz", _replay, _recording(_dots()), count=60),
    file_target("checkpoint", "x.checkpoint", _resume, lambda rng: safetensors_file(rng, _GOOD, "state"), count=60),
]
