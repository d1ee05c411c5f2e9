# SPDX-License-Identifier: Apache-2.0
"""Whether a row's bits change with its batch where ``batch_invariance`` says so, on the GPU itself::

    python -m tools.batch_rows --target h200 --layers 200 --seed 7

Random layers of published models, and others of random sizes, multiply one row in batches of random sizes. Its sums
cancel exactly, so that a result is nothing but roundings: another order shows. Every pair of sizes is compared. It ends
with status 1 where bits and ``batch_invariance`` contradict each other; sizes that are not known contradict nothing.
"""

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import replace

import torch

import fmtsim
from fmtsim.gemm.model_layers import DTYPES, models
from fmtsim.lab.analysis import batch_invariance
from fmtsim.lab.explain.samples import STORED, Extras
from fmtsim.spec.call import GemmCall
from tools.calibrate.gpu import GPU, open_gpu

COLUMNS = 512  # of a result that are looked at
FP8 = ("e4m3", "e5m2")
FEW, SHORT = 16, 4096  # columns and products, of which 16 rows are tried
MOST, LEAST = 1 << 28, 64  # elements of a weight; products of a sum, or nothing is rounded
WORDS = {
    (True, True): "said equal, are equal", (False, False): "said to differ, differ",
    (True, False): "SAID EQUAL, DIFFER", (False, True): "SAID TO DIFFER, ARE EQUAL",
    ("weak", True): "said to differ, are equal in short sums of FP8",
    (None, True): "not known, are equal", (None, False): "not known, differ",
}  # fmt: skip
WRONG = {(True, False), (False, True)}


def operands(call: GemmCall, seed: int):
    """Return a row [1, K] and columns [C, K] whose products cancel, every one with another.

    FP8 has few bits: its products cancel in runs of 128, each of another magnitude, or sums in float32 were exact.
    """
    generator = torch.Generator().manual_seed(seed)
    fp8 = call.a in FP8
    width = 128 if fp8 and call.k >= 512 else 1
    runs, columns = call.k // width // 2, min(call.n, COLUMNS)
    x, w = (torch.randn(rows, runs, width, generator=generator) for rows in (1, columns))
    if fp8:
        x, w = (t * torch.exp2(torch.randint(-6, 7, (1, runs, 1), generator=generator)) for t in (x, w))
    order = torch.randperm(2 * runs, generator=generator)
    a, b = torch.zeros(1, call.k), torch.zeros(columns, call.k)  # what is left over is 0
    for whole, pair in ((a, (x, x)), (b, (w, -w))):
        whole[:, : 2 * runs * width] = torch.cat(pair, 1)[:, order].flatten(1)
    if call.a == "tf32":  # numbers that are not rounded on their way
        a, b = fmtsim.quantize(a, "tf32"), fmtsim.quantize(b, "tf32")
    bias = (torch.randn(columns, generator=generator) * 2.0**-18).to(call.out) if call.bias else None
    return a.to(STORED[call.a]), b.to(STORED[call.b]), Extras(bias=bias)


def compared(gpu: GPU, product, sizes, seed: int):
    """Yield for each pair of sizes the sizes, what is said of them, and whether a row's bits are equal."""
    like = product.bands[0].call.facts()
    bits = {size: [] for size in sizes}
    for number in range(1 if like.n >= FEW and like.k >= SHORT else FEW):  # few roundings are often equal by chance
        a, b, extras = operands(like, seed + number)
        for size in sizes:
            y = gpu.ask(replace(like, m=size), a, b, extras)
            bits[size] += y.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[y.element_size()]).flatten().tolist()
    weak = like.a in FP8 and like.k < SHORT  # sums of few promoted chains are exact
    for first, second in itertools.combinations(sizes, 2):
        said, equal = product.same(first, second), bits[first] == bits[second]
        yield first, second, "weak" if weak and equal and said is False else said, equal


def random_layer(draw: random.Random, largest: int):
    """Return outputs, inputs and bias of a layer, of a published model or of random sizes, and the pass that runs."""
    which = draw.choice(("forward", "dgrad"))
    if draw.random() < 0.6:
        shapes = [x for model in models().values() for x in model.layers if max(x[:2]) <= largest]
        shapes = [x for x in shapes if x[0] * x[1] <= MOST and min(x[:2]) >= LEAST]
        return draw.choice(shapes or [(LEAST, LEAST, False)]), which
    step = draw.choice((64, 16, 8, 1))
    n, k = (-(-LEAST // step) * step + step * draw.randint(0, largest // step // 4) for _ in "nk")
    if draw.random() < 0.2:
        n, which = draw.randint(1, 16), "forward"
    return (n, k, draw.random() < 0.5), which


def run(
    gpu: GPU, target, layers: int, seed: int, *, dtypes=DTYPES, count: int = 12, most_rows: int = 2048,
    largest: int = 32768,
):  # fmt: skip
    """Return how often each outcome came up, by operands, and the contradictions."""
    draw, found, wrong = random.Random(seed), {}, []
    for number in range(layers):
        dtype = draw.choice(dtypes)
        shape, which = random_layer(draw, largest)
        if dtype.startswith("fp8") and (shape[0] % 16 or shape[1] % 16):
            dtype = "bf16"
        sizes = sorted({round(most_rows ** draw.random()) for _ in range(count)} | {1, 2})
        product = batch_invariance([shape], target, sizes, dtypes=[dtype], passes=[which]).products[0]
        for first, second, said, equal in compared(gpu, product, sizes, seed + number):
            found.setdefault(dtype, Counter())[said, equal] += 1
            if (said, equal) in WRONG:
                wrong.append((product.layer, product.product, dtype, first, second, WORDS[said, equal]))
    return found, wrong


def main() -> int:
    """Run, print a table and the first contradictions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("::")[0])
    parser.add_argument("--target", default="h200")
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    found, wrong = run(open_gpu(), arguments.target, arguments.layers, arguments.seed)
    for dtype, counts in found.items():
        print(f"{dtype:9}", ", ".join(f"{counts[key]:,} {words}" for key, words in WORDS.items() if counts[key]))
    for line in wrong[:20]:
        print(*line)
    pairs = sum(sum(counts.values()) for counts in found.values())
    took = time.perf_counter() - start
    print(f"{arguments.layers} layers, {pairs:,} pairs of batch sizes, {len(wrong):,} contradictions, {took:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
