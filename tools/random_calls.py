# SPDX-License-Identifier: Apache-2.0
"""Random realistic calls: recorded on a GPU, and held to a target's emulation, on any machine::

    python -m tools.random_calls record calls.npz --seed 7 --calls 20000
    python -m tools.random_calls compare calls.npz --target h200

Half of the calls are layers of published models (forward, dgrad, wgrad, slices of tensor parallelism) with 1 to 4096
tokens, half have random sizes and layouts, ragged ones too. What is compared are results of data made to show rounding
(``calibration/check.py``), bit for bit. The table says by kinds of calls how many are equal, how many are equal without
a warning, and how many differ without one; status 1 where one does.
"""

import argparse
import json
import math
import multiprocessing
import random
import sys
import zlib
from collections import Counter, defaultdict
from dataclasses import asdict, replace

import numpy as np
import torch

from fmtsim.cuda.torch_calls import NativeCall, NativeScales, run
from fmtsim.gemm.model_layers import models
from fmtsim.gemm.targets.target import get_target
from fmtsim.gemm.units.unit import get_unit
from fmtsim.lab.cli.output import format_table
from fmtsim.lab.explain.samples import Data, Extras, make_data, question
from fmtsim.spec.call import LARGE_BLOCKS, GemmCall
from fmtsim.support.errors import DeviceError
from tools.calibrate.campaign import multiply
from tools.calibrate.gpu import TorchGPU
from tools.calibrate.layers import parallel_layers

SIDE = 8  # rows and columns that are kept of a result
SEED = 20261122  # of the data
WEIGHTS = {"mm": 30, "bias": 14, "vector": 10, "tf32": 14, "fp16 sums": 8, "bmm": 12, "fp8": 18}
TOKENS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 33, 64, 77, 100, 128, 197, 256, 500, 512, 777, 1024, 2048, 4096)
BATCHES = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
LAYOUTS = (("row", "row"), ("row", "row"), ("row", "column"), ("column", "column"), ("column", "row"))
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MOST = 1 << 29  # elements of an operand or a result


def size(rng: random.Random, low: int, high: int) -> int:
    """Return a size, evenly over powers of two, in part a multiple of 8 to 64."""
    value, share = int(2 ** rng.uniform(math.log2(low), math.log2(high))), rng.random()
    step = 64 if share < 0.3 else 16 if share < 0.45 else 8 if share < 0.6 else 1
    return max(low, value // step * step if value >= step else value)


def sizes(rng: random.Random, shapes: list[tuple[int, int]]) -> tuple[tuple[int, int, int], tuple[str, str]]:
    """Return m, n and k, and layouts."""
    if rng.random() < 0.5:
        return (size(rng, 1, 4096), size(rng, 1, 16384), size(rng, 1, 16384)), rng.choice(LAYOUTS)
    (n, k), tokens = rng.choice(shapes), rng.choice(TOKENS) if rng.random() < 0.6 else size(rng, 1, 4096)
    passes = (
        ((tokens, n, k), ("row", "row")), ((tokens, n, k), ("row", "row")),
        ((tokens, k, n), ("row", "column")), ((n, k, tokens), ("column", "column")),
    )  # fmt: skip
    return rng.choice(passes)


def attention(rng: random.Random) -> tuple[tuple[int, int, int], tuple[str, str]]:
    """Return sizes and layouts of a batched product: scores, values, a gradient, or any."""
    tokens, head = rng.choice((1, 7, *TOKENS[11:22])), rng.choice((32, 40, 64, 64, 80, 96, 128, 128, 192, 256))
    others = tokens if rng.random() < 0.6 else size(rng, 1, 2048)
    return rng.choice((
        ((tokens, others, head), ("row", "row")), ((tokens, head, others), ("row", "column")),
        ((others, head, tokens), ("column", "column")),
        ((size(rng, 1, 1024), size(rng, 1, 2048), size(rng, 1, 4096)), rng.choice(LAYOUTS)),
    ))  # fmt: skip


def random_call(rng: random.Random, shapes: list[tuple[int, int]]) -> GemmCall:
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    (m, n, k), (first, second) = attention(rng) if kind == "bmm" else sizes(rng, shapes)
    if kind == "vector":
        m, n = (1, n) if rng.random() < 0.5 else (m, 1)
        kind = rng.choice(("mm", "mm", "bias", "tf32", "fp16 sums"))
    name, dtype = rng.choice(list(HALVES.items()))
    bias = kind == "bias" or (kind in ("tf32", "fp16 sums") and rng.random() < 0.2)
    call = GemmCall(operation="linear" if bias else "mm", m=m, n=n, k=k, a=name, b=name, out=dtype, bias=bias,
                    a_layout="row" if m == 1 or bias else first, b_layout="row" if bias else second)  # fmt: skip
    if kind == "mm" and rng.random() < 0.3:
        return replace(call, out=torch.float32)
    if kind == "tf32":
        return replace(call, a="tf32", b="tf32", out=torch.float32)
    if kind == "fp16 sums":
        return replace(call, a="fp16", b="fp16", out=torch.float16, accumulate="fp16")
    if kind == "bmm":
        batch = rng.choice(BATCHES)
        largest = batch * max(m * n, m * k, n * k)
        call = replace(call, operation="bmm", batch=batch if largest <= MOST else 2, a_layout=first)
        return call if rng.random() < 0.75 else replace(call, a="tf32", b="tf32", out=torch.float32)
    if kind == "fp8":
        a, b = rng.choice((("e4m3", "e4m3"),) * 4 + (("e5m2", "e4m3"), ("e4m3", "e5m2")))
        scaling = rng.choice(("tensor", "tensor", "row", "block_128", "row_block_128"))
        narrow = scaling != "tensor"
        out = torch.bfloat16 if narrow else rng.choice((torch.bfloat16, torch.float16, torch.float32))
        call = replace(call, operation="scaled_mm", a=a, b=b, out=out, scaling=scaling, bias=False, a_layout="row",
                       n=max(16, n // 16 * 16), k=max(16, k // 16 * 16), b_layout="row",
                       fast_accum=rng.random() < 0.5)  # fmt: skip
        if scaling in LARGE_BLOCKS:  # the library refuses other rows, and fast sums
            call = replace(call, a="e4m3", b="e4m3", m=-(-m // 4) * 4, fast_accum=False)
        return call
    return call


def random_calls(seed: int, count: int) -> list[GemmCall]:
    """Return calls; the same for a seed and the models that fmtsim knows."""
    shapes = sorted({shape for model in models().values() for shape in parallel_layers(model)}
                    | {(n, k) for model in models().values() for n, k, *_ in model.layers})  # fmt: skip
    rng = random.Random(seed)
    return [random_call(rng, shapes) for _ in range(count)]


class Batched(TorchGPU):
    """A GPU that multiplies batches, too: the rows lie in the middle one; and operands with scales of blocks."""

    def _call(self, call, a, b, extras, rows, columns):
        if call.scaling in LARGE_BLOCKS:
            left = self._matrix("a", a, rows, call.m, "row")
            right = self._matrix("b", b, columns, call.n, "row")
            per_scale = 128 if call.scaling == "block_128" else 1
            scales = [
                x.to(self.device).expand(-(-size // each), -1)
                for x, size, each in ((extras.row, call.m, 1), (extras.column, call.n, per_scale))
            ]
            native = NativeCall(function="scaled_mm", out_dtype=call.out, scaling=call.scaling,
                                fast_accum=call.fast_accum, rows_per_scale_b=per_scale)  # fmt: skip
            return run(native, left, right.t(), scales=NativeScales(*scales))
        if call.operation != "bmm":
            return super()._call(call, a, b, extras, rows, columns)
        operands = []
        for which, values, places, count, layout in (
            ("a", a, rows, call.m, call.a_layout), ("b", b, columns, call.n, call.b_layout)
        ):  # fmt: skip
            flat = self._buffer(which, call.batch * count * call.k * values.element_size()).view(values.dtype)
            row = layout == "row"
            whole = flat.view(call.batch, *((count, call.k) if row else (call.k, count)))
            whole = whole if row else whole.mT
            whole[call.batch // 2][places] = values.to(self.device)
            operands.append(whole)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = call.a == "tf32"
        try:
            return torch.bmm(operands[0], operands[1].mT)[call.batch // 2]
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def plain(call: GemmCall) -> GemmCall:
    """Return what data and emulation of a call depend on."""
    return question(replace(call, operation="mm", batch=1) if call.operation == "bmm" else call)


def kept(x: torch.Tensor) -> torch.Tensor:
    """Return the rows that are kept: some of all parts of the matrix, the first and the last among them."""
    return x[torch.linspace(0, len(x) - 1, min(SIDE, len(x)), dtype=torch.float64).round().long()]


def bits(x: torch.Tensor) -> bytes:
    return x.flatten().view(torch.uint8).numpy().tobytes()


def record_some(calls: list[GemmCall]) -> list[bytes]:
    """Return the GPU's bits; empty where it refuses a call."""
    torch.set_num_threads(1)
    gpu, found = Batched(torch.device("cuda")), []
    for call in calls:
        try:
            found.append(bits(kept(kept(gpu.ask(call, *make_data(plain(call), SEED))).t()).t()))
        except DeviceError:
            found.append(b"")
    return found


def record(path: str, seed: int, count: int, workers: int) -> None:
    """Run calls on the GPU, and write seed, count and bits."""
    calls = random_calls(seed, count)
    parts = [calls[i::workers] for i in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        answers = pool.map(record_some, parts, chunksize=1)
    found = [answers[i % workers][i // workers] for i in range(count)]
    about = {"seed": seed, "calls": count, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
             "sizes": [len(x) for x in found], "digest": digest(calls)}  # fmt: skip
    np.savez_compressed(path, about=json.dumps(about), bits=np.frombuffer(b"".join(found), np.uint8))
    print(f"{count:,} calls, {sum(not x for x in found)} refused; written: {path}")


def digest(calls: list[GemmCall]) -> int:
    """Return a checksum of calls: other models in a later fmtsim make other ones of the same seed."""
    return zlib.crc32(repr([asdict(call) for call in calls]).encode())


def emulated(call: GemmCall, target) -> tuple[bytes, str, str]:
    """Return a target's bits, what stands behind its plan, and where that is from."""
    found = target.find(call)
    unit = get_unit(found.unit or target.takes(call.a, call.b, call.accumulate, call.scaling))
    a, b = (found.operands or name for name in (call.a, call.b))
    arithmetic = unit.find(a, b, call.accumulate, None).datapath
    asked = plain(call)
    left, right, extras = make_data(asked, SEED)
    if call.scaling not in LARGE_BLOCKS:  # whose scales are for all rows
        extras = Extras(*(None if x is None else kept(x) for x in extras))
    data = Data(kept(left), kept(right), extras)
    few = replace(asked, m=len(data.a), n=len(data.b))
    where = "book" if " in the book " in found.plan.source else "tree" if "a tree " in found.plan.source else "rule"
    return bits(multiply(few, data, arithmetic, found.plan)), found.basis, where


def name_of(call: GemmCall) -> str:
    """Return the kind of a call in the table."""
    if call.operation == "scaled_mm":
        return f"fp8, scales of {call.scaling}"
    words = "bmm" if call.operation == "bmm" else "vector" if 1 in (call.m, call.n) else "bias" if call.bias else "mm"
    return f"{words}, {'fp16 sums' if call.accumulate == 'fp16' else 'tf32' if call.a == 'tf32' else '16 bits'}"


def compare(path: str, target_name: str) -> int:
    """Print how a target's emulation compares, and return how many calls differ without a warning."""
    target, stored = get_target(target_name), np.load(path)
    about, content = json.loads(str(stored["about"])), stored["bits"].tobytes()
    calls = random_calls(about["seed"], about["calls"])
    if digest(calls) != about["digest"]:
        sys.exit(f"{path} was recorded by an fmtsim with other models; record it again")
    table: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    begin = 0
    for call, length in zip(calls, about["sizes"], strict=True):
        given, begin = content[begin : begin + length], begin + length
        if not given:
            continue
        answer, basis, where = emulated(call, target)
        equal, known = answer == given, basis != "guess"
        if known and not equal:
            print(f"differs without a warning: {call}; {target.find(call).plan.source}")
        for row in ((name_of(call), "in the book" if where == "book" else "outside"), ("all", "")):
            table[row].update(calls=1, equal=equal, known=known, sure=equal and known, silent=known and not equal)
    rows = [
        (*row, f"{c['calls']:,}", *(f"{c[x] / c['calls']:.2%}" for x in ("equal", "known", "sure")), str(c["silent"]))
        for row, c in sorted(table.items())
    ]  # fmt: skip
    head = ("calls of", "", "calls", "equal", "known", "equal and known", "differ, known")
    print(f"{about['gpu']}, torch {about['torch']}, seed {about['seed']}\n{format_table(head, rows, left=(0, 1))}")
    return table["all", ""]["silent"]


def main(words: list[str] | None = None) -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(prog="python -m tools.random_calls", description=__doc__.partition("::")[0])
    parser.add_argument("job", choices=("record", "compare"))
    parser.add_argument("file")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--target", default="h200")
    given = parser.parse_args(words)
    if given.job == "record":
        record(given.file, given.seed, given.calls, given.workers)
        return 0
    return int(compare(given.file, given.target) > 0)


if __name__ == "__main__":
    sys.exit(main())
