# SPDX-License-Identifier: Apache-2.0
"""Record which kernels cuDNN runs by the shape of a convolution, and make the table that ``simulate`` has of them.

``python -m tools.record_convolutions RECORD --ask`` runs the shapes of the present table, or rows "image3/1+1,channels,
outputs,batch,side" of another file, on a GPU under a profiler. A third has digests of bits, which ``--check`` compares
with ``simulate``'s by the present table, and RECORD then says which differ. Else the table of all records is written:
the order of sums that a kernel's name stands for (docs/evidence.md), "?" where it is not known, "!" where bits differ.
"""

import argparse
import itertools
import json
import lzma
import multiprocessing
import re
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import fmtsim
from fmtsim.machine.convolution import SHAPES
from fmtsim.support.errors import ArgumentError
from tests.machine.cases import DTYPES, KINDS, digest, numbers

SECONDS: Final = 100  # on the GPU
PASSES: Final = ("forward", "dgrad", "wgrad")
_COPIES: Final = re.compile(
    "nchwToNhwc|nhwcToNchw|nchwToFolded|[fF]oldedN|nhwcToFolded|direct_copy|convertTensor|scalePacked|"
    "init_device_workspace|tensorTransformGeneric|genericTranspose|nhwcAddPadding|nhwcSliceC|FillFunctor"
)
_CHAINS: Final = "xmma_(fprop|dgrad|gemm).*ffma|implicit_convolve_sgemm|grouped_direct_kernel|common_engine_float_NHWC"
_DIRECT: Final = "conv2d_c1_k1|conv1D_NCHW_general|dgrad2d_c1_k1_(nhwc_specialized|nchw)"
_FORM: Final = re.compile(r"(line|image)(\d+)/(\d+)\+(\d+)(?:x(\d+))?(?:~\d+)?(?:(d)|g(\d+))?(l?)")


class Layer(NamedTuple):
    """A convolution in one dimension or two, of equal sides; ``memory`` is "l" where channels lie last."""

    dims: int
    batch: int
    channels: int
    outputs: int
    side: int
    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    more: int = 0
    memory: str = "c"

    @property
    def out(self) -> int:
        """Rows, and columns, of the result."""
        reach = self.dilation * (self.kernel - 1) + 1 - 2 * self.padding
        up = (self.side - 1) * self.stride + reach + self.more
        return up if self.transposed else (self.side - reach) // self.stride + 1

    @property
    def form(self) -> str:
        """What layers have in common besides channels, batch and side."""
        rest = (self.side + 2 * self.padding - self.dilation * (self.kernel - 1) - 1) % self.stride
        name = f"{('line', 'image')[self.dims - 1]}{self.kernel}/{self.stride}+{self.padding}"
        name += f"x{self.dilation}" * (self.dilation > 1) + f"~{rest}" * (rest > 0)
        group = "d" if self.groups == self.channels == self.outputs else f"g{self.groups}"
        return name + group * (self.groups > 1) + "l" * (self.memory == "l" and self.dims == 2)


def operands(seed: int, layer: Layer, number: int, device: str) -> tuple[str, list[torch.Tensor]]:
    """Return a kind of numbers, and the input, the weight and the result's gradient of a layer."""
    kind, c, k = KINDS[(seed + number) % 5] if seed % 2 else "normal", layer.channels, layer.outputs
    filters = (c, k // layer.groups) if layer.transposed else (k, c // layer.groups)
    shapes = ((layer.batch, c, layer.side), (*filters, layer.kernel), (layer.batch, k, layer.out))
    x, w, g = (numbers(300000 + 8 * seed + place, (*shape, *shape[2:] * (layer.dims - 1)),
                       "normal" if place == 2 else kind, DTYPES[number]).to(device)
               for place, shape in zip((0, 2, 1), shapes, strict=True))  # fmt: skip
    if layer.memory == "l":
        x, g = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, g))
    return kind, [x, w, g]


def called(which: str, layer: Layer, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return the result of a pass."""
    stride, padding, dilation, more = ([n] * layer.dims for n in (*layer[6:9], layer.more))
    options = (stride, padding, dilation, layer.transposed, more, layer.groups)
    if which == "forward":
        return torch.ops.aten.convolution(x, w, None, *options)
    mask = [which == "dgrad", which == "wgrad", False]
    return torch.ops.aten.convolution_backward(g, x, w, None, *options, mask)[which == "wgrad"]


def ask(path: Path, share: int, shares: int, until: float) -> list[dict[str, Any]]:
    """Return a call for each pass and dtype of every so many-th shape: its kernels' names, and a digest of its bits."""
    rows = (lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()).decode().splitlines()
    calls: list[dict[str, Any]] = []
    for seed, row in list(enumerate(rows))[share::shares]:
        # 1. the layer
        form, *point = row.split(",")[:5]
        shape, *window, depthwise, groups, last = _FORM.fullmatch(form).groups()  # type: ignore[union-attr]
        channels, outputs, batch, side, kernel, stride, padding, dilation = (int(size or 1) for size in point + window)
        groups = channels if depthwise else int(groups or 1)
        layer = Layer(1 + (shape == "image"), batch, channels, outputs, side, kernel, stride, padding, dilation, groups,
                      memory=last or "c")  # fmt: skip
        # 2. its passes, each under a profiler
        for number, which in itertools.product(range(len(DTYPES)), PASSES):
            if time.time() > until:
                return calls
            kind, tensors = operands(seed, layer, number, "cuda")
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                result = called(which, layer, *tensors)
                torch.cuda.synchronize()
            with tempfile.NamedTemporaryFile(suffix=".json") as trace:
                profile.export_chrome_trace(trace.name)
                events = sorted(json.loads(Path(trace.name).read_text())["traceEvents"], key=lambda e: e.get("ts", 0))
            # 3. names in order, those of CUTLASS with the slices of their grid
            names = [e["name"] + f"|z{e['args']['grid'][2]}" * ("cutlass" in e["name"])
                     for e in events if e.get("cat") == "kernel"]  # fmt: skip
            digests = {"seed": seed, "kind": kind, "digest": digest(result)} if seed % 3 == 0 else {}
            calls.append({"layer": layer, "dtype": number, "pass": which, "kernels": names, **digests})
    return calls


def order_of(names: list[str], layer: Layer, which: str, number: int) -> str | None:
    """Return the order of a pass by its kernels' names, None where it is not known; "risky" ones need a digest."""
    # 1. the kernel that multiplies, and what comes after it; several of one name share groups or images
    work = [name.rsplit("|z", 1) for name in names if not _COPIES.search(name)]
    if not work:
        return None
    main, *others = (name for name, *_ in work)
    slices = int(work[0][1]) if len(work[0]) > 1 else None
    others = [] if all(name.split("(")[0] == main.split("(")[0] for name in others) else others
    taps, half, out = layer.kernel**layer.dims, number > 0, layer.out
    tf32 = "" if half else "a"  # kernels of sm_80 round float32 to TF32 with ties away from zero
    lost = half and "tf32" in main or "segment_k_on" in str(names)  # float32 kernels of 16-bit operands, parts of K
    gemm = re.search(r"gemm_(?:bf16_|f16_)?\d+x\d+_(\d+)x\d+_", main)
    tile = re.search(r"tilesize\d+x\d+x(\d+)_", main)
    by_k = re.search(r"warpsize\dx\dx[^1]", main)  # warps that share K
    if "conv_depthwise2d" in main:
        return "depthwise"
    if which == "wgrad":
        # 2. the weight's gradient
        if "wgrad2d_shmem_tiling" in main:
            wide = (taps == 1 and out <= 16) or (out == 16 and layer.stride == 1)
            certain = "blocks8" if out <= 8 and taps > 1 else f"risky blocks{12 if wide else 8}"
            return certain if layer.batch <= 4 and layer.dims == 2 else None
        if "conv1D_NCHW_wgrad" in main:
            return "trees" if out <= 128 and layer.stride == 1 else None
        images = ("" if out <= 96 else "risky ") + "images" if layer.batch <= 2 else "atomic"
        engines = {"wgrad2d_grouped_direct": "lanes", "wgrad_alg0_engine": images, "wgrad_alg1_engine": "fma"}
        if (engine := next((order for name, order in engines.items() if name in main), None)) is not None:
            return engine
        if len(others) == 1 and "reduce_wgrad_nchw_helper" in others[0]:
            whole = re.search("sm80_xmma_gemm_f32f32_tf32f32|sm90_xmma_gemm|nvjet", main)
            width = 4096 if whole else gemm[1] if gemm else None
            return "images" if "ffma" in main else f"products{width}" if width else None
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
        width = re.search(r"GemmShapeILi\d+ELi\d+ELi(\d+)" if mangled else r"wgrad_\w*?_\d+x\d+_(\d+)x\d+_nhwc", main)
        if not width or slices is None or len(others) > 1 or (others and "educ" not in others[0]):
            return None
        deep = "cutlass" if half else "cutlass16a"
        return deep if slices == 1 else f"cutlass{width[1]}{tf32}{'+' if others else '/'}{slices}"
    # 3. the result and the input's gradient: kernels without tensor cores
    if re.search(_CHAINS, main) and not others:
        return "taps" if "float_NHWC" in main else "fma"
    if re.search(_DIRECT, main):
        return "taps" if which == "forward" else "taps-"
    if "dgrad2d_alg1" in main:
        certain = "risky sums" if layer.dims == 1 and 1 in (layer.channels, layer.outputs) else "sums"
        return certain if layer.kernel == layer.stride or out <= (128, 9)[layer.dims - 1] else None
    if "dgrad_engine" in main:
        apart = (-(-layer.kernel // layer.stride)) ** layer.dims
        return "sums" if (apart if layer.dilation == 1 else taps) <= 2 else "atomic"
    # 4. with tensor cores
    if tile and "wo_smem" in main and not others:
        packed = "fprop" in main and int(tile[1]) >= 32 and not (half and "tf32" in main)
        return f"packed{int(tile[1]) // (8 if half else 16)}{tf32}" if packed else None
    if lost or others or "wo_smem" in main:
        return None
    if tile and re.search(r"xmma_(fprop|dgrad)_implicit_gemm.*tilesize", main):
        dgrad, sm80 = "xmma_dgrad" in main, "sm80" in main
        reduced = (layer.channels if which == "forward" else layer.outputs) // layer.groups
        if sm80 and "indexed" in main and reduced > 64:
            return "mma4096" if reduced <= 128 and not dgrad and half and not by_k else None
        short = not sm80 or half or reduced * taps <= 1152
        name = f"mma{tile[1]}{'' if 'sm90' in main else tf32}{'-' if 'sm90' in main and dgrad else ''}"
        return name if short and not by_k else None
    if grouped := re.search(r"cutlass_tensorop_\w*?(fprop|dgrad)_\w*?_\d+x\d+_(\d+)x\d+_", main):
        return f"cutlass{grouped[2]}{tf32}"
    if taps > 1 or not (gemm or re.search("nvjet|xmma_gemm", main)):
        return None
    return f"gemm{gemm[1]}" if gemm and "cutlass" in main else "mma4096" if "cutlass" not in main else None


def table(calls: list[dict[str, Any]]) -> bytes:
    """Return the file of ``SHAPES``: for each form and shape the orders of all passes and dtypes."""
    orders: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(lambda: ["-"] * 9)
    for call in calls:
        # 1. a transposed convolution is the input's gradient of another
        layer, which, number, same = Layer(*call["layer"]), call["pass"], call["dtype"], call.get("same")
        if layer.transposed:
            which = {"forward": "dgrad", "dgrad": "forward"}.get(which, which)
            layer = layer._replace(channels=layer.outputs, outputs=layer.channels, side=layer.out, transposed=False)
        # 2. its order by kernels' names, else by its numbers; not one whose digest is another
        order = None if same is False else order_of(call["kernels"], layer, which, number)
        safe = order is not None and (same or not order.startswith("risky"))
        order = order.removeprefix("risky ") if order and safe else call.get("probed")
        if order != "depthwise" and (not Layer(*call["layer"]).transposed or layer.groups == 1):
            row = orders[layer.form, (layer.channels, layer.outputs, layer.batch, layer.side)]
            place = PASSES.index(which) * len(DTYPES) + number
            row[place] = "!" if same is False else order or "?" if row[place] in "-?" else row[place]
    lines = [f"{form},{','.join(map(str, point))},{' '.join(row)}\n" for (form, point), row in sorted(orders.items())]
    return lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)


def check(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with ``same``: whether ``simulate`` has its bits; without, where its order is not known."""
    if "digest" not in call:
        return call
    layer = Layer(*call["layer"])
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
    parser.add_argument("--shapes", type=Path, default=SHAPES, help="what to ask about")
    parser.add_argument("--out", type=Path, default=SHAPES, help="the table to write")
    options = parser.parse_args(arguments)
    if options.ask:
        until, shares = time.time() + SECONDS, max((multiprocessing.cpu_count() or 1) - 3, 1)
        with ProcessPoolExecutor(shares, multiprocessing.get_context("spawn")) as pool:
            parts = pool.map(ask, [options.shapes] * shares, range(shares), [shares] * shares, [until] * shares)
            calls = list(itertools.chain(*parts))
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                 "cudnn": torch.backends.cudnn.version()}  # fmt: skip
    else:
        facts, *_ = records = [json.loads(lzma.decompress(file.read_bytes())) for file in options.records]
        calls = [check(call) if options.check else call for record in records for call in record["calls"]]
    written = options.records[0] if options.ask or options.check else options.out
    text = json.dumps(facts | {"calls": calls}, separators=(",", ":"))
    written.write_bytes(table(calls) if written == options.out else lzma.compress(text.encode()))
    print(f"{written}: {len(calls):,} calls, {sum(call.get('same') is False for call in calls)} differ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
