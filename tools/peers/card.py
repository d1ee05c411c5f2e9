# SPDX-License-Identifier: Apache-2.0
"""Record what casts of torch and Triton give on this machine's GPU: ``python -m tools.peers.card FILE.json``.

The file holds a SHA-256 of the codes for each way (eager, compile, triton), dtype and list of inputs; ``lists`` makes
the inputs, so that a test makes them again without a GPU.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TARGETS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "bfloat16",
    "float16",
)
_BITS = {1: torch.uint8, 2: torch.int16}


def lists() -> Iterator[tuple[str, Tensor]]:
    """Yield all 16-bit numbers, float32 of every upper 20 bits with six lower parts, and float64 beside float32."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    yield "all_fp16", every.view(torch.float16)
    yield "all_bf16", every.view(torch.bfloat16)
    upper = torch.arange(1 << 20, dtype=torch.int64) << 12
    for lower in (0, 1, 0x7FF, 0x800, 0x801, 0xFFF):
        yield f"fp32_{lower:03x}", _float32(upper | lower)
    near = _float32(torch.arange(1 << 16, dtype=torch.int64) << 16).double()
    for name, times in (("exact", 1.0), ("above", 1 + 2**-40), ("below", 1 - 2**-40)):
        yield f"fp64_{name}", near * times


def _float32(patterns: Tensor) -> Tensor:
    return torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).to(torch.int32).view(torch.float32)


def digest(codes: Tensor) -> str:
    """Return the SHA-256 of codes of one or two bytes."""
    return hashlib.sha256(codes.cpu().numpy().tobytes()).hexdigest()


def triton_cast() -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return a cast by a Triton kernel, to the two float8 dtypes that Triton has."""
    import triton
    import triton.language as tl

    @triton.jit
    def cast(x_ptr, y_ptr, n, dtype: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0) * block + tl.arange(0, block)
        x = tl.load(x_ptr + i, mask=i < n)
        tl.store(y_ptr + i, x.to(dtype).to(tl.uint8, bitcast=True), mask=i < n)

    names = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}

    def run(x: Tensor, dtype: torch.dtype) -> Tensor:
        y = torch.empty(len(x), dtype=torch.uint8, device=x.device)
        cast[(triton.cdiv(len(x), 1024),)](x, y, len(x), names[dtype], 1024)
        return y

    return run


def main(path: Path) -> int:
    """Record every way, dtype and list that this machine can compute; others are named with their error."""
    compiled: dict[torch.dtype, Any] = {}

    def compile_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        compiled.setdefault(dtype, torch.compile(lambda x: x.to(dtype), dynamic=False))
        return compiled[dtype](x)  # type: ignore[no-any-return]

    ways = {"eager": lambda x, dtype: x.to(dtype), "compile": compile_cast, "triton": triton_cast()}
    record = {"versions": f"torch {torch.__version__}, {torch.cuda.get_device_name()}"}
    for way, cast in ways.items():
        for target in TARGETS[: 2 if way == "triton" else None]:
            dtype = getattr(torch, target)
            for name, x in lists():
                if x.dtype != dtype:
                    try:
                        codes = cast(x.cuda(), dtype)
                        record[f"{way}|{target}|{name}"] = digest(codes.view(_BITS[codes.element_size()]))
                    except Exception as error:  # what does not compile is an answer, too
                        record[f"{way}|{target}|{name}"] = f"error: {str(error).splitlines()[0][:80]}"
    path.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
