# SPDX-License-Identifier: Apache-2.0
"""Record which kernels cuDNN runs by the shape of a convolution, and make the table that ``simulate`` has of them.

``python -m tools.record_convolutions RECORD --ask`` runs convolutions on a GPU, under a profiler, for ``--seconds``;
every pass of a third of the shapes has a digest of its bits. With ``--check`` these are computed by ``simulate`` as
well, by the table that comes with fmtsim, and RECORD then says which agree. Without either, the table of all records is written:
the order of sums that each kernel's name stands for (docs/evidence.md), "?" where none is known, "!" where bits differ.
"""

import argparse
import json
import lzma
import multiprocessing
import re
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

import fmtsim
from fmtsim.machine.convolution import SHAPES
from fmtsim.support.errors import ArgumentError
from tests.machine.cases import digest, numbers

PASSES: Final = ("forward", "dgrad", "wgrad")
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
KINDS: Final = ("normal", "wide", "cancelling", "subnormal", "special")
_COPIES: Final = re.compile(
    "nchwToNhwc|nhwcToNchw|nchwToFolded|[fF]oldedN|nhwcToFolded|direct_copy|convertTensor|scalePacked|"
    "init_device_workspace|tensorTransformGeneric|genericTranspose|nhwcAddPadding|nhwcSliceC|FillFunctor"
)
_CHAINS: Final = re.compile(
    "xmma_(fprop|dgrad|gemm).*ffma|implicit_convolve_sgemm|grouped_direct_kernel|convolve_common_engine_float_NHWC"
)


class Layer(NamedTuple):
    """A convolution in one dimension or two; ``memory`` is "l" where channels lie last."""

    batch: int
    channels: int
    size: tuple[int, ...]
    outputs: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    more: tuple[int, ...] = (0,)
    memory: str = "c"

    @property
    def options(self) -> list[Any]:
        """The arguments of torch.ops.aten.convolution after the bias."""
        return [self.stride, self.padding, self.dilation, self.transposed, self.more, self.groups]

    @property
    def filters(self) -> tuple[int, ...]:
        """The shape of the weight."""
        first, second = (self.channels, self.outputs) if self.transposed else (self.outputs, self.channels)
        return first, second // self.groups, *self.kernel

    @property
    def out(self) -> tuple[int, ...]:
        """Rows and columns of the result."""
        x, w = (torch.empty(shape, device="meta") for shape in ((self.batch, self.channels, *self.size), self.filters))
        return tuple(torch.ops.aten.convolution(x, w, None, *self.options).shape[2:])


def layers(seed: int) -> list[Layer]:
    """Return random layers of small vision models, sounds and sequences, each once."""
    rng = np.random.Generator(np.random.Philox(seed))
    pick = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    widths, drawn = (8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 144, 160, 192, 256, 320, 384, 512), []
    for _ in range(8000):
        n, c, side = pick(1, 2, 2, 4, 4, 8, 3), pick(*widths), pick(1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 5, 12, 10)
        k, r = pick(c, 2 * c, 4 * c, c // 2, *widths), pick(2, 4, 7, 8, 14, 16, 32)
        kernel, stride, padding = pick((3, 1, 1), (3, 1, 1), (3, 2, 1), (1, 1, 0), (1, 1, 0), (1, 2, 0))
        form, groups, dims, transposed, memory = int(rng.integers(8)), 1, 2, False, pick("c", "c", "l")
        if form == 0:  # patches
            c, side, kernel, stride, padding = pick(3, 3, 1, c), r * pick(1, 2, 4, 7, 8), r, r, 0
        elif form == 1:  # the first layer
            c, side = 3, pick(28, 32, 48, 64, 96, 224, 33, 65)
            kernel, stride, padding = pick((3, 1, 1), (3, 2, 1), (7, 2, 3), (7, 4, 3), (3, 2, 0), (5, 1, 2))
        elif form == 2:  # sound and sequences
            c, side, dims, memory = pick(40, 80, c), pick(50, 64, 100, 128, 200, 256), 1, "c"
        elif form == 3:  # a group for each channel
            k, groups, kernel, stride = c, c, pick(3, 5, 7), pick(1, 1, 2)
            padding = kernel // 2
        elif form == 4:
            groups, transposed = pick((2, False), (4, False), (1, True))
            kernel, stride, padding = pick((2, 2, 0), (4, 2, 1), (3, 1, 1))
        fields = [(value,) * dims for value in (side, kernel, stride, padding, 1, 0)]
        layer = Layer(n, c, fields[0], k, *fields[1:5], groups, transposed, fields[5], memory)
        if c % groups == k % groups == 0 and side + 2 * padding >= kernel:
            drawn.append(layer)
    return list(dict.fromkeys(drawn))


def operands(seed: int, layer: Layer, number: int, device: str) -> tuple[str, list[torch.Tensor]]:
    """Return a kind of numbers, and the input, the weight and the result's gradient of a layer."""
    kind = KINDS[(seed + number) % 5] if seed % 2 else "normal"
    shapes = ((layer.batch, layer.channels, *layer.size), layer.filters, (layer.batch, layer.outputs, *layer.out))
    x, w, g = (numbers(300000 + 8 * seed + place, shape, "normal" if place == 2 else kind, DTYPES[number]).to(device)
               for place, shape in zip((0, 2, 1), shapes, strict=True))  # fmt: skip
    if layer.memory == "l":
        x, g = (t.contiguous(memory_format=torch.channels_last) for t in (x, g))
    return kind, [x, w, g]


def called(which: str, layer: Layer, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return the result of a pass."""
    if which == "forward":
        return torch.ops.aten.convolution(x, w, None, *layer.options)
    mask = [which == "dgrad", which == "wgrad", False]
    return torch.ops.aten.convolution_backward(g, x, w, None, *layer.options, mask)[which == "wgrad"]


def ask(share: int, shares: int, until: float) -> list[dict[str, Any]]:
    """Return a call for each pass and dtype of every so many-th layer: its kernels' names, and a digest of its bits."""
    calls = []
    for seed, layer in list(enumerate(layers(6502)))[share::shares]:
        if time.time() > until:
            break
        for number in range(len(DTYPES)):
            kind, tensors = operands(seed, layer, number, "cuda")
            for which in PASSES:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    result = called(which, layer, *tensors)
                    torch.cuda.synchronize()
                call = {"layer": layer, "dtype": number, "pass": which, "kernels": kernels_of(profile)}
                if seed % 3 == 0 and prod(tensors[0].shape) < 400_000:
                    call |= {"seed": seed, "kind": kind, "digest": digest(result)}
                calls.append(call)
    return calls


def kernels_of(profile: Any) -> list[str]:
    """Return the names of kernels in order, those of CUTLASS with the slices of their grid."""
    path = Path(f"/tmp/{multiprocessing.current_process().pid}.trace")
    profile.export_chrome_trace(str(path))
    events = (event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel")
    path.unlink()
    return [event["name"] + f"|z{event['args']['grid'][2]}" * ("cutlass" in event["name"])
            for event in sorted(events, key=lambda event: event["ts"])]  # fmt: skip


def order_of(names: list[str], layer: Layer, which: str, number: int) -> str | None:
    """Return the order of a pass by its kernels' names, as ``Order.parse`` reads it; None where it is not known.

    Layers are not transposed. ``risky`` are orders of kernels of which some have others: they need a digest.
    """
    # 1. the kernel that multiplies, and what comes after it; several of one name share groups or images
    work = [name.rsplit("|z", 1) for name in names if not _COPIES.search(name)]
    if not work:
        return None
    main, *others = (name for name, *_ in work)
    slices = int(work[0][1]) if len(work[0]) > 1 else None
    if all(name.split("(")[0] == main.split("(")[0] for name in others):
        others = []
    taps, half = prod(layer.kernel), number > 0
    lost = half and "tf32" in main or "segment_k_on" in str(names)  # float32 kernels of 16-bit operands, parts of K
    gemm = re.search(r"gemm_(?:bf16_|f16_)?\d+x\d+_(\d+)x\d+_", main)
    tile = re.search(r"tilesize\d+x\d+x(\d+)_", main)
    warps = re.search(r"warpsize\dx\dx(\d)", main)
    by_k = warps is not None and warps[1] != "1"  # warps that share K
    if "conv_depthwise2d" in main:
        return "depthwise"
    if which == "wgrad":
        # 2. the weight's gradient
        out = layer.out
        if "wgrad2d_grouped_direct" in main:
            return "lanes"
        if "wgrad2d_shmem_tiling" in main:
            if layer.batch > 4 or len(out) != 2:
                return None
            if max(out) <= 8 and taps > 1:
                return "blocks8"
            wide = (taps == 1 and max(out) <= 16) or (max(out) == 16 and layer.stride[0] == 1)
            return f"risky blocks{12 if wide else 8}"
        if "wgrad_alg0_engine" in main:
            return "images" if layer.batch <= 2 else "atomic"
        if "conv1D_NCHW_wgrad" in main:
            return "trees" if out[0] <= 128 and layer.stride[0] == 1 else None
        if "wgrad_alg1_engine" in main:
            return "fma"
        if len(others) == 1 and "reduce_wgrad_nchw_helper" in others[0]:
            whole = re.search("sm80_xmma_gemm_f32f32_tf32f32|sm90_xmma_gemm|nvjet", main)
            return "images" if "ffma" in main else f"products{4096 if whole else gemm[1]}" if whole or gemm else None
        if lost:
            return None
        if "xmma_wgrad" in main and not others:
            chain = "mma" if half else "mma16t" if "sm90" in main else "mma16a"
            return "fma" if "ffma" in main else None if "wo_smem" in main or by_k else chain
        if "cutlass" in main and "Kernel2" in main and not others:
            return f"gemm{gemm[1]}" if gemm and "splitK" not in str(names) else None
        if "nvjet" in main and not others:
            return "mma"
        mangled = "_ZN" in main or "ImplicitGemm" in main
        pattern = r"GemmShapeILi\d+ELi\d+ELi(\d+)" if mangled else r"wgrad_\w*?_\d+x\d+_(\d+)x\d+_nhwc"
        shape = re.search(pattern, main)
        if not shape or slices is None or len(others) > 1 or (others and "educ" not in others[0]):
            return None
        tf32 = "" if half else "a"
        if slices == 1:
            return "cutlass" if half else "cutlass16a"
        return f"cutlass{shape[1]}{tf32}{'+' if others else '/'}{slices}"
    # 3. the result and the input's gradient: kernels without tensor cores
    reduced = (layer.channels if which == "forward" else layer.outputs) // layer.groups
    if _CHAINS.search(main) and not others:
        return "taps" if "float_NHWC" in main else "fma"
    if re.search("conv2d_c1_k1|conv1D_NCHW_general|dgrad2d_c1_k1_(nhwc_specialized|nchw)", main):
        return "taps" if which == "forward" else "taps-"
    if "dgrad2d_alg1" in main:
        return "sums" if layer.kernel == layer.stride or prod(layer.out) <= (81, 128)[len(layer.out) == 1] else None
    if "dgrad_engine" in main:
        apart = prod(-(-k // s) for k, s in zip(layer.kernel, layer.stride, strict=True))
        return "sums" if (apart if prod(layer.dilation) == 1 else taps) <= 2 else "atomic"
    if others:
        return None
    # 4. with tensor cores; those of sm_80 round float32 to TF32 with ties away from zero
    tf32 = "" if half else "a"
    if "wo_smem" in main:
        packed = tile and "fprop" in main and int(tile[1]) >= 32 and not (half and "tf32" in main)
        return f"packed{int(tile[1]) // (8 if half else 16)}{tf32}" if tile and packed else None
    if lost:
        return None
    if tile and re.search(r"xmma_(fprop|dgrad)_implicit_gemm.*tilesize", main):
        dgrad, sm80 = "xmma_dgrad" in main, "sm80" in main
        if by_k:
            return None
        if sm80 and "indexed" in main and reduced > 64:
            return None if reduced > 128 or dgrad or not half else "mma4096"
        if sm80 and not half and reduced * taps > 1152:
            return None
        return f"mma{tile[1]}{'' if 'sm90' in main else tf32}{'-' if 'sm90' in main and dgrad else ''}"
    grouped = re.search(r"cutlass_tensorop_\w*?(fprop|dgrad)_\w*?_\d+x\d+_(\d+)x\d+_", main)
    if grouped:
        return f"cutlass{grouped[2]}{tf32}"
    if taps > 1:
        return None
    return f"gemm{gemm[1]}" if "cutlass" in main and gemm else "mma4096" if re.search("nvjet|xmma_gemm", main) else None


def table(calls: list[dict[str, Any]]) -> bytes:
    """Return the file of ``SHAPES``: for each form and shape the orders of all passes and dtypes."""
    orders: dict[tuple[str, tuple[int, ...]], list[str | None]] = defaultdict(lambda: ["-"] * 9)
    for call in calls:
        # 1. a transposed convolution is the input's gradient of another
        layer, which, number, same = Layer(*map(_whole, call["layer"])), call["pass"], call["dtype"], call.get("same")
        seen = layer
        if layer.transposed:
            seen = layer._replace(channels=layer.outputs, outputs=layer.channels, size=layer.out, transposed=False)
            which = {"forward": "dgrad", "dgrad": "forward"}.get(which, which)
        # 2. its order by kernels' names, else by its numbers; not one whose digest is another
        order = None if same is False else order_of(call["kernels"], seen, which, number)
        if order is not None and order.startswith("risky"):
            order = order.removeprefix("risky ") if same else None
        order = order or call.get("probed")
        form = form_of(seen)
        if order == "depthwise" or (layer.transposed and layer.groups > 1) or form is None:
            continue
        # 3. its place; "!" is an order that is not the kernels'
        point = seen.channels, seen.outputs, seen.batch, seen.size[-1]
        place = PASSES.index(which) * len(DTYPES) + number
        row = orders[form, point]
        row[place] = "!" if same is False else order or "?" if row[place] in ("-", "?") else row[place]
    lines = [
        f"{form},{','.join(map(str, point))},{' '.join(map(str, row))}\n"
        for (form, point), row in sorted(orders.items())
    ]
    return lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)


def _whole(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def form_of(layer: Layer) -> str | None:
    """Return the name of what layers have in common besides channels, batch and size; None for unequal sides."""
    sides = (layer.size, layer.kernel, layer.stride, layer.padding, layer.dilation)
    if any(len(set(side)) > 1 for side in sides):
        return None
    size, kernel, stride, padding, dilation = (side[-1] for side in sides)
    rest = (size + 2 * padding - dilation * (kernel - 1) - 1) % stride
    line, depthwise = len(layer.size) == 1, layer.groups == layer.channels == layer.outputs
    name = f"{'line' if line else 'image'}{kernel}/{stride}+{padding}"
    name += (f"x{dilation}" if dilation > 1 else "") + (f"~{rest}" if rest else "")
    name += "" if layer.groups == 1 else "d" if depthwise else f"g{layer.groups}"
    return name + ("l" if layer.memory == "l" and not line else "")


def check(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with ``same``: whether ``simulate`` has its bits; without, where its order is not known."""
    layer = Layer(*map(_whole, call["layer"]))
    _, tensors = operands(call["seed"], layer, call["dtype"], "cpu")
    try:
        with fmtsim.simulate(target="h200", strict=True):
            same = digest(called(call["pass"], layer, *tensors)) == call["digest"]
    except ArgumentError:
        return call
    # the GPU's kernels take subnormal and special numbers otherwise in places that no shape tells
    return call | {"same": same} if same or call["kind"] not in ("subnormal", "special") else call


def main(arguments: list[str] | None = None) -> int:
    """Record, check, or write the table of records."""
    parser = argparse.ArgumentParser(prog="python -m tools.record_convolutions", description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--ask", action="store_true", help="write the record on a GPU")
    parser.add_argument("--check", action="store_true", help="compute what has a digest, and write which bits differ")
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--out", type=Path, default=SHAPES, help="the table to write")
    options = parser.parse_args(arguments)
    path = options.records[0]
    record: dict[str, Any] = {"device": "", "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    if options.ask:
        until, shares = time.time() + options.seconds, max((multiprocessing.cpu_count() or 1) - 3, 1)
        with ProcessPoolExecutor(shares, multiprocessing.get_context("spawn")) as pool:
            parts = pool.map(ask, range(shares), [shares] * shares, [until] * shares)
            record |= {"device": torch.cuda.get_device_name(), "calls": [call for part in parts for call in part]}
    else:
        loaded = [json.loads(lzma.decompress(file.read_bytes())) for file in options.records]
        record = loaded[0]
        if not options.check:
            content = table([call for each in loaded for call in each["calls"]])
            options.out.write_bytes(content)
            print(f"{options.out}: {len(content):,} bytes")
            return 0
        record["calls"] = [check(call) if "digest" in call else call for call in record["calls"]]
    path.write_bytes(lzma.compress(json.dumps(record, separators=(",", ":")).encode()))
    print(
        f"{path}: {len(record['calls']):,} calls, {sum(call.get('same') is False for call in record['calls'])} differ"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
