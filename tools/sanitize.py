# SPDX-License-Identifier: Apache-2.0
"""Small calls of every kernel, to be run from the repository's root under NVIDIA's compute-sanitizer, on a GPU::

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # every tensor has memory of its own, or overruns go unseen
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 3 python -m tools.sanitize
    compute-sanitizer --tool racecheck --report-api-errors no --error-exitcode 3 python -m tools.sanitize --few

The driver is asked for functions that it may lack when its bindings are loaded; that is not an error of a kernel.
Nothing is compared here: that is what the tests do. Calls run in an order that does not change; sizes are such that
rows, vectors, tiles and warps are cut off in their middle, and operands begin where no vector does. At the end the
script names the kernels that no call has reached and exits with status 1 where there are any. ``--few`` leaves out
repetitions (racecheck is slow), ``--host`` runs on the emulator, ``--only casts,blocks`` some parts.
"""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch

import fmtsim
from fmtsim.cuda import runtime
from fmtsim.cuda.gemm import self_test
from fmtsim.cuda.gemm.job import FastPath
from fmtsim.cuda.runtime.program import variants
from fmtsim.formats.packing import code_dtype
from fmtsim.formats.scaling import Scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import CastSpec, RandomKey
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Hadamard, Quantizer
from tests.cuda.emulator import emulated
from tests.cuda.emulator.patching import replaced
from tests.support.gemm_engine import addend, gemm_spec, operand, unit_scales

CASTS = importlib.import_module("fmtsim.cuda.cast.casts")
REDUCTION = importlib.import_module("fmtsim.cuda.cast.reduction_stages")
DISPATCH = importlib.import_module("fmtsim.cuda.gemm.engine")

ELEMENTS = (
    "e4m3", "e2m1", "bf16", "e5m2fnuz", "int8", "int5", "uint3", "nf4", "lns8_g8", "e8m0", "p3109_k8p3se", "fp32",
)  # fmt: skip
BLOCKS = (
    "mxfp8_e4m3", "mxfp6_e3m2", "mxfp4", "mxint8", "nvfp4", "nvfp4_16x16", "e4m3_1x128", "e4m3_128x128_pow2",
    "e4m3_tensor", "e4m3_channel", "int4_g32", "uint4_g32_zp", "nf4_g64", "lns8_channel",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROUNDINGS = ("nearest_even", "toward_zero", "nearest_away", "up", "stochastic")
PLANS = (
    {}, {"k_tile": 32, "split": 3, "reduce": "pairwise"}, {"k_tile": 16, "split": 2, "partial": "bf16"},
    {"k_tile": 16, "split": 2, "partial": "bf16", "reduce": "in_place"}, {"promote_every": 32},
    {"k_tile": 64, "lanes": 4, "lane_reduce": "tree", "split": 2, "owner": "interleaved", "reduce": "folded"},
)  # fmt: skip


def specs(name: str, dim: int = -1, few: bool = False) -> Iterator[CastSpec]:
    """Yield casts to a format with several roundings and both overflows."""
    fmt = fmtsim.get_format(name)
    for place, mode in enumerate(ROUNDINGS[:: 4 if few else 1]):
        overflow = ("saturate", "ieee")[place % 2]
        yield CastSpec(format=fmt, rounding=Rounding(mode=mode), overflow=overflow, dim=dim)


def layouts(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield tensors of a shape: whole, beginning behind a vector's first element, and transposed."""
    generator = torch.Generator().manual_seed(shape[-1])
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 8
    x.view(-1)[::17] = torch.tensor([0.0, -0.0, float("inf"), float("nan")]).repeat(x.numel())[: len(x.view(-1)[::17])]
    x = x.to(dtype).to(device)
    yield x
    late = torch.empty(x.numel() + 1, dtype=dtype, device=device)[1:].view(shape)
    yield late.copy_(x)
    if x.dim() == 2:
        yield x.T.contiguous().T


def cast(x: torch.Tensor, spec: CastSpec) -> None:
    """Call every verb of casts on one tensor."""
    random = RandomKey(3, 5) if spec.rounding.mode == "stochastic" else None
    for dtype in {x.dtype, torch.float32, torch.float64}:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        if CASTS.supports("quantize", spec, x, out):
            CASTS.quantize(x, spec, random, out)
    if CASTS.supports("encode", spec, x):
        parts = CASTS.encode(x, spec, random)
        assert parts.codes.dtype == code_dtype(spec.format.bits)
        for dtype in {torch.float32, x.dtype}:
            out = torch.empty(x.shape, dtype=dtype, device=x.device)
            if CASTS.supports("decode", spec, out):
                CASTS.decode(parts, spec, out)
    if CASTS.supports("encode_packed", spec, x):
        CASTS.encode_packed(x, spec, random)


def casts(device: torch.device, few: bool) -> None:
    shapes = ((37, 129),) if few else ((1,), (1031,), (37, 129))
    for name, dtype, shape in itertools.product(ELEMENTS, DTYPES, shapes):
        if few and name != "e4m3" and dtype in (torch.float16, torch.float64):
            continue
        for x, spec in itertools.product(layouts(shape, dtype, device), specs(name, few=few or len(shape) == 1)):
            cast(x, spec)
    x = next(layouts((37, 129), torch.float32, device))
    for name in ("nf4", "lns8_g8"):  # enough elements for a table
        cast(next(layouts(((1 << 16) + 5,), torch.float32, device)), next(specs(name)))
    words = torch.randint(0, 1 << 8, x.shape, generator=torch.Generator().manual_seed(0)).to(device)
    rounding = Rounding(mode="stochastic", random_bits=8)
    spec = CastSpec(format=fmtsim.get_format("e4m3"), rounding=rounding, overflow="saturate")
    CASTS.quantize(x, spec, words, torch.empty_like(x))
    CASTS.encode(x, spec, words)


def blocks(device: torch.device, few: bool) -> None:
    shapes = ((33, 257), (64, 128)) if few else ((1, 1), (7, 96), (33, 257), (128, 256))
    for name, dtype, shape, dim in itertools.product(BLOCKS, DTYPES, shapes, (-1, -2)):
        if few and name != "nvfp4" and dtype in (torch.float16, torch.float64):
            continue
        for x, spec in itertools.product(layouts(shape, dtype, device), specs(name, dim, few=True)):
            cast(x, spec)
    transforms(device)
    rotations(device)
    both = importlib.import_module("fmtsim.cuda.cast.block_casts")
    for name, shape in itertools.product(("mxfp8_e4m3", "nvfp4", "e4m3_1x128"), ((64, 256), (33, 257))):
        spec = next(specs(name, -2))
        for x in layouts(shape, torch.bfloat16, device):
            both.quantize_both_dims(x, spec, without_tensor_scale=False)
            if both.holds_without_tensor_scale(spec):
                both.quantize_both_dims(x, spec, without_tensor_scale=True)
                both.quantize_without_tensor_scale(x, spec, None)


def transforms(device: torch.device) -> None:
    """Call what casts of blocks have beside them: Hadamard transforms and scaled results."""
    hadamard = importlib.import_module("fmtsim.cuda.cast.warp_hadamard")
    finish = importlib.import_module("fmtsim.cuda.gemm.scaled_product")
    for size, dtype in itertools.product((16, 128), DTYPES):
        for x in layouts((33, 384), dtype, device):
            flips = torch.arange(size, device=device) % 3 == 0
            for signs, inverse in ((None, False), (flips, False), (flips, True)):
                hadamard.hadamard(x, size, signs, inverse)
    y, scale = torch.ones(5, 36, device=device), torch.ones((), device=device)
    for dtype, bias in itertools.product((torch.float32, torch.bfloat16, torch.float16), (None, y[0])):
        finish.finish_sums(y, scale.view(1, 1), None, bias, dtype)
        finish.finish_sums(y, scale.expand(36, 1), scale.expand(5, 1), bias, dtype)


def rotations(device: torch.device) -> None:
    """Rotate and cast operands of products along either axis, and rotate gradients back."""
    names = ("hadamard", "rotated", "kernel_variants")
    hadamard, rotated, variant = (importlib.import_module(f"fmtsim.cuda.cast.{name}") for name in names)
    keys = RandomKey(1, 2), None
    for (quantizer, turned), shape in itertools.product(variant.rotated_quantizers(), ((64, 192), (192, 64))):
        for x in layouts(shape, torch.bfloat16, device):
            x = x.mT if turned else x
            rotated.cast_rotated(x, quantizer, keys, 5)
            rotated.cast_rotated(x.float(), quantizer, keys, 5, narrow=True)
    y = torch.ones(5, 192, device=device)
    for dtype, size in itertools.product((torch.float32, torch.bfloat16, torch.float16), (16, 32)):
        hadamard.finish_rotated(y, y > 0, (Hadamard(size=size),), dtype, (None, y[:1, :1]))


def groups(device: torch.device) -> None:
    """Multiply operands whose groups have scales, whole sums and parts, in every layout."""
    scaled = importlib.import_module("fmtsim.cuda.gemm.scaled_product")
    for (m, n, k), first, second in itertools.product(((136, 72, 392), (8, 264, 2056)), (False, True), (False, True)):
        operands = []
        for rows, turned in ((m, first), (n, second)):
            x = torch.ones((k, rows) if turned else (rows, k), dtype=torch.bfloat16, device=device)
            scale = torch.ones(rows, -(-k // 128), device=device)
            operands.append(Operand(x.mT if turned else x, Quantizer(), scale, block=(1, 128)))
        for dtype in (torch.float32, torch.bfloat16):
            scaled.multiply_groups(*operands, None, dtype)


def products(device: torch.device, few: bool) -> None:
    """Multiply on every unit, by every path that takes the product and by the general one."""
    groups(device)
    shapes = ((5, 3, 40), (130, 70, 96)) if few else ((1, 1, 1), (5, 3, 40), (130, 70, 96), (64, 129, 67))
    paths = (DISPATCH.FAST, (DISPATCH.FP64_FMA,), ())
    for unit in fmtsim.list_units():
        for mode in fmtsim.get_unit(unit).modes[:: 2 if few else 1]:
            names = mode.inputs or ("bf16", "fp32")
            for (m, n, k), plan in itertools.product(shapes, PLANS[: 2 if few else None]):
                spec = gemm_spec(mode.datapath, names[0], names[-1], fmtsim.GemmPlan(**plan))
                for place, path in enumerate(paths):
                    multiply(spec, (m, n, k), device, path, kind=("normal", "special", "wide")[place])


def multiply(spec, shape: tuple[int, int, int], device: torch.device, path: tuple[FastPath, ...], kind: str) -> None:
    """Multiply once, with an addend and scales wherever there are some."""
    m, n, k = shape
    kind = "normal" if "fp64" in (spec.a.name, spec.b.name) else kind
    a, b = (operand(fmt.name, rows, k, kind, rows).to(device) for fmt, rows in ((spec.a, m), (spec.b, n)))
    if not DISPATCH.supports_gemm(spec, a, b):
        return
    scales = [unit_scales(spec, rows, k, kind, 1) for rows in (m, n)]
    scales = [None if scale is None else scale.to(device) for scale in scales]
    for c in (None, addend(spec, m, n, "normal", 2).to(device)):
        out = torch.empty(m, n, dtype=addend(spec, 1, 1, "normal", 0).dtype, device=device)
        saved, DISPATCH.FAST = DISPATCH.FAST, path
        try:
            DISPATCH.gemm(a, b, c, *scales, spec, RandomKey(1, 2), out)
        finally:
            DISPATCH.FAST = saved


def steps(device: torch.device, few: bool) -> None:
    """Do steps of optimizers whose states have kernels, on parameters that end within blocks and vectors."""
    engines = importlib.import_module("fmtsim.optim.stepping")
    usual = fmtsim.optim.AdamW
    schemes = ("bnb8", "ao_4bit", "coat_fixed", "fp8lm", "intel_2t", "coat_plain", "bf16_sr", "fp32", "int8_weights")
    cases = [(name, usual, {}) for name in schemes]
    cases += [("lns_madam", fmtsim.optim.Madam, {}), ("bnb8", fmtsim.optim.Lion, {})]
    cases += [("coat_fixed", fmtsim.optim.SGD, {}), ("bnb8", usual, {"capturable": True})]
    for (name, rule, options), dtype in itertools.product(cases, DTYPES[: 1 if few else 3]):
        scheme = dataclasses.replace(fmtsim.optim.get_scheme(name), minimum=0, whole_blocks=False, matrices=False)
        parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device)) for size in (1, 3, 2049, 5000)]
        optimizer = rule(parameters, state=scheme, **options)
        for p in parameters:
            p.grad = torch.full_like(p, 0.1)
            p.grad[::7] = float("nan")
        with mock.patch.object(engines, "on_cuda", lambda p: True):  # the emulator's tensors are a CPU's
            optimizer.step()
            optimizer.step()


def counts(device: torch.device, few: bool) -> None:
    """Take fingerprints of tensors, and count what casts did to them."""
    engine = importlib.import_module("fmtsim.cuda")
    multipliers = torch.arange(1 << 16, device=device) | 1
    for shape, dtype in itertools.product(((1,), (37, 129), (8, 3, 520), (3, 66000)), (*DTYPES[:3], torch.int64)):
        for x in layouts(shape, dtype, device):
            members = shape[0] if len(shape) == 3 else 1
            counters = torch.zeros(2 + members, dtype=torch.int64, device=device)
            if x.is_contiguous():
                launch = engine.fingerprint(x, shape[-1], members, x.data_ptr())
            if x.is_contiguous() and launch is not None:  # words lie between words
                launch(x.data_ptr(), counters.data_ptr(), multipliers.data_ptr())
    blocks = (None, (1, 1)), ("mxfp8_e4m3", (1, 32)), ("mxfp4", (32, 1)), ("nvfp4", (1, 16)), ("e4m3_1x128", (128, 1))
    for (name, block), dtype in itertools.product(blocks, DTYPES[:3]):
        for q in {dtype, torch.bfloat16, torch.float32}:
            x = next(layouts((256, 1032) if name != "e4m3_1x128" else (256, 72), dtype, device))
            fmt = None if name is None else fmtsim.get_format(name)
            assert engine.count_cast(x, x.to(q), fmt, block, (-448.0, 448.0)) is not None


def reductions(device: torch.device, few: bool) -> None:
    """Run the stages of a reduction on the last of its ranks, which all have the same casts."""
    for name, ranks, mode, tree in (("e4m3", 2, "nearest_even", False), ("e5m2", 3, "stochastic", True)):
        spec = CastSpec(format=fmtsim.get_format(name), rounding=Rounding(mode=mode), overflow="saturate")
        for sizes in ((2048 * ranks,), (1030, 0, 7)):
            for x in itertools.islice(layouts((1, sum(sizes)), DTYPES[few], device), 2):
                key = RandomKey(3, 5 << 32) if mode == "stochastic" else None
                out = torch.empty(x.numel(), device=device)
                stages = REDUCTION.ReductionStages(
                    x, sizes, spec, Scaling(), ranks - 1, ranks, key, out,
                    tree=tree, propagates=True, average=True, factor=1.0,
                )  # fmt: skip
                encode, decode = stages.factors(stages.amaxes(), None)
                stages.finish(stages.sum(stages.cast(encode)).expand(ranks, -1).contiguous(), decode)


PARTS = {part.__name__: part for part in (casts, blocks, products, steps, reductions, counts)}


@contextlib.contextmanager
def recorded() -> Iterator[set[tuple[str, str]]]:
    """Collect the files and names of the kernels that are fetched."""
    fetched: set[tuple[str, str]] = set()
    fetch = runtime.kernel

    def kernel(file, name, index, defines=()):
        fetched.add((file, name))
        return fetch(file, name, index, defines)

    with replaced({"kernel": kernel}):
        yield fetched


def run(device: torch.device, parts: tuple[str, ...], few: bool) -> set[tuple[str, str]]:
    cpu = importlib.import_module("fmtsim.cpu")  # whose kernels need not be compiled for operands
    no_kernels = mock.patch.object(cpu, "supports", lambda *_: False)
    no_tests = mock.patch.object(self_test, "passes", lambda *_: True)  # self-tests would be the larger part
    with recorded() as fetched, no_kernels, no_tests:
        for part in parts:
            start = time.perf_counter()
            PARTS[part](device, few)
            if device.type == "cuda":
                torch.cuda.synchronize()
            print(f"{part}: {time.perf_counter() - start:.1f} s, {len(fetched)} kernels", flush=True)
    return fetched


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS))
    arguments = parser.parse_args()
    parts = tuple(arguments.only.split(","))
    if arguments.host:
        with emulated():
            capability, fetched = runtime.capability(0), run(torch.device("cpu"), parts, arguments.few)
    else:
        arch = runtime.architecture(0)
        with ThreadPoolExecutor() as pool:  # compiled at once, so that the disk has it: one by one takes minutes
            list(pool.map(lambda v: runtime.compiled(v[0], arch, v[2]), variants(runtime.capability(0))))
        capability, fetched = runtime.capability(0), run(torch.device("cuda"), parts, arguments.few)
    missed = sorted({(file, name) for file, name, _ in variants(capability)} - fetched)
    print("".join(f"not reached: {name} of {file}\n" for file, name in missed), end="")
    return 1 if missed and len(parts) == len(PARTS) else 0


if __name__ == "__main__":
    sys.exit(main())
