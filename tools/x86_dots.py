# SPDX-License-Identifier: Apache-2.0
"""Run VDPBF16PS on this processor and compare its bits with ``x86.vdp``: ``python -m tools.x86_dots [--record FILE]``.

It needs gcc and a processor with AVX512_BF16. Fused multiply-adds of the processor (MXCSR: DAZ, FTZ) also run the
pseudocode of VDPPHPS, TDPBF16PS and TDPFP16PS.
"""

import argparse
import ctypes
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import fmtsim

SOURCE = r"""
#include <immintrin.h>
void pairs(const float *c, const void *a, const void *b, float *out, long n) {
  for (long i = 0; i < n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_dpbf16_ps(_mm512_loadu_ps(c + i),
      (__m512bh)_mm512_loadu_si512((const int *)a + i), (__m512bh)_mm512_loadu_si512((const int *)b + i)));
}
void fused(const float *c, const float *a, const float *b, float *out, long n) {
  unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // denormals are zeros, flush to zero, no traps, to nearest even
  for (long i = 0; i < n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), _mm512_loadu_ps(c + i)));
  _mm_setcsr(before);
}
"""
# exponent fields; sums of "border" are 2^-126 and less, by a part of the last place of numbers below it
KINDS = {"bits": None, "finite": (1, 254), "near": (120, 136), "tiny": (50, 76), "edge": (0, 130), "border": (51, 53)}
CS = {"tiny": (0, 8), "edge": (0, 8), "border": (1, 2)}  # of c, where they are others
M, N = 64, 128


def library() -> ctypes.CDLL:
    """Return both functions, compiled."""
    folder = Path(tempfile.mkdtemp())
    (folder / "dots.c").write_text(SOURCE)
    command = ["gcc", "-O2", "-mavx512f", "-mavx512bf16", "-shared", "-fPIC", "dots.c", "-o", "dots.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "dots.so"))


def run(function, *arrays: np.ndarray) -> np.ndarray:
    """Return what a function of the library makes of c, a and b."""
    arrays = tuple(map(np.ascontiguousarray, arrays))
    out = np.empty_like(arrays[0])
    function(*(x.ctypes.data_as(ctypes.c_void_p) for x in (*arrays, out)), ctypes.c_long(out.size))
    return out


def drawn(rng: np.random.Generator, fmt: str, kind: str, k: int) -> tuple[np.ndarray, ...]:
    """Return codes of a [M, K], b [N, K] and bits of c [M, N]; binary16 takes any bits where bfloat16 has a range."""
    shapes = (M, k), (N, k), (M, N)
    fields = KINDS[kind]
    if fields is None or fmt == "fp16":
        a, b = (rng.integers(0, 1 << 16, shape).astype(np.uint16) for shape in shapes[:2])
        a, b = (x if fields is None else x & 0x8FFF | 0x1000 for x in (a, b))
    else:
        a, b = ((rng.integers(*fields, shape) << 7 | rng.integers(0, 128, shape) | rng.integers(0, 2, shape) << 15)
                .astype(np.uint16) for shape in shapes[:2])  # fmt: skip
    low, high = (0, 256) if fields is None else CS.get(kind, fields)
    words = (
        rng.integers(low, high, shapes[2]) << 23
        | rng.integers(0, 2 if kind == "border" else 1 << 23, shapes[2])
        | rng.integers(0, 2, shapes[2]) << 31
    )
    return a, b, words.astype(np.uint32)


def wide(codes: np.ndarray, fmt: str) -> np.ndarray:
    return (
        codes.view(np.float16).astype(np.float32) if fmt == "fp16" else (codes.astype(np.uint32) << 16).view(np.float32)
    )


def on_processor(lib, name: str, fmt: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the sums as bits: by VDPBF16PS for bfloat16 pairs, by fused multiply-adds for the rest."""
    running, k = c.view(np.float32).reshape(-1), a.shape[1]
    a, b = (np.broadcast_to(x, (M, N, k)).reshape(M * N, k) for x in (a[:, None], b[None]))
    if name == "x86.vdp" and fmt == "bf16":
        for i in range(0, k, 2):
            running = run(lib.pairs, running, a[:, i : i + 2], b[:, i : i + 2])
        return running.view(np.uint32).reshape(M, N)
    x, y, one = wide(a, fmt), wide(b, fmt), np.ones(M * N, np.float32)
    for start in range(0, k, 2 if name == "x86.vdp" else 32):
        if name == "x86.vdp":
            for i in (start + 1, start):
                running = run(lib.fused, running, x[:, i], y[:, i])
            continue
        sums = [np.zeros(M * N, np.float32)] * 2
        for i in range(start, start + 32):
            sums[i % 2] = run(lib.fused, sums[i % 2], x[:, i], y[:, i])
        running = run(lib.fused, running, run(lib.fused, sums[1], sums[0], one), one)
    return running.view(np.uint32).reshape(M, N)


def main(arguments: list[str] | None = None) -> int:
    """Compare, and with ``--record`` write 3,072 dot products; return 1 where bits differ."""
    parser = argparse.ArgumentParser(prog="python -m tools.x86_dots", description=__doc__)
    parser.add_argument("--record", type=Path, help="write a, b, c and d of VDPBF16PS, an npz file")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(arguments)
    lib, rng, wrong = library(), np.random.default_rng(0), 0
    info = Path("/proc/cpuinfo").read_text().splitlines()
    print(
        *(line for line in info[:8] if line.startswith(("model", "cpu family", "stepping"))),
        platform.platform(),
        sep="\n",
    )
    if options.record:
        a, b, c = (np.concatenate(x) for x in zip(*(
            (a.reshape(-1, 2)[:512], b.reshape(-1, 2)[:512], c.reshape(-1)[:512])
            for a, b, c in (drawn(rng, "bf16", kind, 16) for kind in tuple(KINDS))
        ), strict=True))  # fmt: skip
        d = run(lib.pairs, c.view(np.float32), a, b).view(np.uint32)
        np.savez_compressed(options.record, a=a, b=b, c=c, d=d)
    for name, lengths in (("x86.vdp", (2, 64)), ("x86.amx", (32, 64))):
        for fmt, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            count = different = 0
            for i, kind in enumerate(tuple(KINDS) * options.rounds):
                a, b, c = drawn(rng, fmt, kind, lengths[i % 2])
                d = on_processor(lib, name, fmt, a, b, c)
                x, y = (torch.from_numpy(codes.view(np.int16)).view(dtype) for codes in (a, b))
                z = torch.from_numpy(c.view(np.int32)).view(torch.float32)
                mine = fmtsim.mma(x, y, z, target=name).view(torch.int32).numpy().view(np.uint32)
                nan = [(bits & 0x7FFFFFFF) > 0x7F800000 for bits in (d, mine)]
                count, different = count + d.size, different + int(((d != mine) & ~(nan[0] & nan[1])).sum())
            print(f"{name} {fmt}: {count:,} results, {different:,} differ")
            wrong += different
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
