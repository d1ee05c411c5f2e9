# SPDX-License-Identifier: Apache-2.0
"""Calls that reach a matrix unit through torch: their operands, drawn by seed, and what the unit makes of them."""

import hashlib
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmtsim.formats.packing import tensor_bytes
from fmtsim.gemm.products.matmul import int_mm, mm
from fmtsim.gemm.products.scaled_mm import scaled_mm
from fmtsim.gemm.targets.kernel import Kernel
from fmtsim.gemm.units.unit import Mode, Unit, get_unit, list_units
from fmtsim.spec.call import SCALE_KINDS, UNIT_SCALES, GemmCall, ScaleKind
from fmtsim.spec.datapath import Arithmetic
from fmtsim.spec.plan import GemmPlan
from tools.calibrate.evidence import Data
from tools.calibrate.recheck import make_operand, make_scales

# One block, tiles of a library, parts of tiles, odd rows, depth; K and N as torch takes them for FP8 and block scales.
SIZES = ((128, 128, 64), (128, 256, 512), (64, 96, 1024), (100, 80, 320), (33, 48, 2048), (17, 16, 192),
         (256, 128, 4096))  # fmt: skip
# How libraries cut K: tiles dealt to parts, or slices; what becomes of the sums of parts.
_TILES: tuple[dict[str, Any], ...] = (
    *({"k_tile": tile} for tile in (64, 128, 256, 32)),
    *({"k_tile": tile, "slices": True, "align": 8, "line": 64} for tile in (32, 64, 128)),
    {"k_tile": 32, "slices": True, "align": 4, "line": 32},
    {"k_tile": 64, "owner": "interleaved"},
)
_SPLITS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
_PARTIALS: tuple[dict[str, Any], ...] = ({}, {"partial": "out"}, {"partial": "out", "round_trip": True})
_FP8 = (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))
_FLOATS, _FP4 = (torch.float32, torch.bfloat16), ("e2m1", "e2m1")
DATA: tuple[Data, ...] = ("wide", "special")
# Codes of special scales: zero or the smallest, a small one, and NaN.
_SPECIAL = {"mx": (0, 1, 255), "nvfp4": (0, 1, 127)}
# Codes of usual, large and small scales, each from and to.
_SCALES = {"mx": ((120, 135), (137, 140), (117, 120)), "nvfp4": ((32, 96), (112, 127), (1, 32))}


class Kind(NamedTuple):
    """A kind of calls: the sizes take the pairs of operands' formats in turn, and the dtypes of the results."""

    name: str
    operation: str
    pairs: tuple[tuple[str, str], ...]
    outs: tuple[torch.dtype, ...] = _FLOATS
    scaling: ScaleKind = "none"
    accumulate: str = "fp32"
    fast_accum: bool = False
    tensor_scales: bool = False

    def calls(self) -> Iterator[GemmCall]:
        """Yield its calls, a size each."""
        for i, (m, n, k) in enumerate(SIZES):
            a, b = self.pairs[i % len(self.pairs)]
            yield GemmCall(
                operation=self.operation, m=m, n=n, k=k, a=a, b=b, out=self.outs[i % len(self.outs)],  # type: ignore[arg-type]
                scaling=self.scaling, accumulate=self.accumulate, fast_accum=self.fast_accum,
            )  # fmt: skip


KINDS = (
    Kind("bf16", "mm", (("bf16", "bf16"),)), Kind("fp16", "mm", (("fp16", "fp16"),), (torch.float32, torch.float16)),
    Kind("fp16, sums in fp16", "mm", (("fp16", "fp16"),), (torch.float16,), accumulate="fp16"),
    Kind("tf32", "mm", (("tf32", "tf32"),), (torch.float32,)),
    Kind("int8", "int_mm", (("int8", "int8"),), (torch.int32,), accumulate="int32"),
    Kind("fp8, tensor scales", "scaled_mm", _FP8, scaling="tensor"),
    Kind("fp8, tensor scales, fast", "scaled_mm", _FP8, scaling="tensor", fast_accum=True),
    Kind("fp8, row scales", "scaled_mm", _FP8, scaling="row"),
    Kind("fp8, row scales, fast", "scaled_mm", _FP8, scaling="row", fast_accum=True),
    Kind("mxfp8", "scaled_mm", _FP8, scaling="mx"), Kind("mxfp4", "scaled_mm", (_FP4,), scaling="mx"),
    Kind("nvfp4", "scaled_mm", (_FP4,), scaling="nvfp4"),
    Kind("nvfp4, tensor scales", "scaled_mm", (_FP4,), scaling="nvfp4", tensor_scales=True),
)  # fmt: skip


def kinds_of(unit: str | Unit) -> list[tuple[Kind, Unit]]:
    """Return the kinds of calls that reach a unit, or one of those named after it, and that one."""
    base = get_unit(unit)
    family = [base, *(get_unit(name) for name in list_units() if name.startswith(f"{base.name}."))]
    kinds = []
    for kind in KINDS:
        taking = [(len(mode.inputs or ()), one) for one in family for mode in one.modes if _takes(mode, kind)]
        if taking:
            kinds.append((kind, min(taking, key=lambda each: each[0])[1]))  # FP4 has a unit of its own
    return kinds


def _takes(mode: Mode, kind: Kind) -> bool:
    extent = SCALE_KINDS[kind.scaling] if kind.scaling in UNIT_SCALES else None
    scales = None if extent is None else (extent.unit_scale, extent.block)
    scaled_by = None if mode.scale is None else (mode.scale, getattr(mode.datapath, "scale_block", None))
    return scaled_by == scales and mode.accumulate == kind.accumulate and all(mode.takes(*pair) for pair in kind.pairs)


class Operands(NamedTuple):
    """Operands [M, K] and [N, K] as torch holds them, FP4 two in a byte, and their scales.

    Scales of a tensor or of rows are float32, in the shapes of torch._scaled_mm; those inside a unit are codes, uint8
    [rows, blocks], and float32 ``tensor_a`` and ``tensor_b`` scale the tensors.
    """

    a: Tensor
    b: Tensor
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    tensor_a: Tensor | None = None
    tensor_b: Tensor | None = None


def draw(call: GemmCall, data: Data, seed: int, tensor_scales: bool = False) -> Operands:
    """Return the operands of a call: ``"wide"`` numbers, or with ``"special"`` ones among them."""
    generator = torch.Generator().manual_seed(seed)
    sides = ((call.m, call.a, -1), (call.n, call.b, 1))
    a, b = (_matrix(call, *side, data, generator) for side in sides)
    if call.scaling in UNIT_SCALES:
        codes = [_codes(call, rows, fmt, data, generator) for rows, fmt, _ in sides]
        both = [torch.rand((), generator=generator) + 0.3 for _ in range(2)] if tensor_scales else [None, None]
        return Operands(a, b, *codes, *both)
    if call.operation != "scaled_mm":
        return Operands(a, b)
    return Operands(a, b, *make_scales(call, lambda *shape: torch.rand(*shape, generator=generator) + 0.3))


def _matrix(call: GemmCall, rows: int, fmt: str, sign: int, data: Data, generator: torch.Generator) -> Tensor:
    """Return an operand; of FP4 in every other row the first 16 of 64 numbers cancel the next in its products."""
    if fmt != "e2m1":
        return make_operand(call, rows, fmt, "row", data, generator)
    packed = torch.randint(0, 256, (rows, call.k // 64, 32), generator=generator, dtype=torch.uint8)
    packed[1::2, :, 8:16] = packed[1::2, :, :8] ^ (0x88 if sign < 0 else 0)
    return packed.view(rows, -1).view(torch.float4_e2m1fn_x2)


def _codes(call: GemmCall, rows: int, fmt: str, data: Data, generator: torch.Generator) -> Tensor:
    """Return scales: where FP4 numbers cancel large ones, so that the others show the bits that a unit keeps."""
    block = SCALE_KINDS[call.scaling].block
    assert block is not None
    size = (rows, call.k // 64, 64 // block)
    usual, large, small = (
        torch.randint(*ends, size, generator=generator, dtype=torch.uint8) for ends in _SCALES[call.scaling]
    )
    if fmt == "e2m1":
        half = 32 // block
        usual[1::2, :, :half], usual[1::2, :, half:] = large[1::2, :, :1], small[1::2, :, half:]
    codes = usual.view(rows, -1)
    if data == "special":
        for i, code in enumerate(_SPECIAL[call.scaling]):
            codes[i * 5 % rows, i % codes.shape[1]] = code
    return codes


def emulate(call: GemmCall, operands: Operands, unit: str | Arithmetic, plan: GemmPlan) -> Tensor:
    """Return what a unit makes of a call, its products added in the order of a plan."""
    a, b, scale_a, scale_b, tensor_a, tensor_b = operands
    if call.operation == "int_mm":
        return int_mm(a, b.mT, target=unit)
    if call.operation == "mm":
        return mm(a, b.mT, target=unit, plan=plan, out_dtype=call.out, accumulate=call.accumulate,
                  allow="tf32" if call.a == "tf32" else None)  # fmt: skip
    assert scale_a is not None and scale_b is not None
    options: dict[str, Any] = {"target": unit, "plan": plan, "out_dtype": call.out}
    if call.scaling not in UNIT_SCALES:
        return scaled_mm(a, b.mT, scale_a, scale_b, **options)
    extent = SCALE_KINDS[call.scaling]
    lists = [[scale.view(extent.dtype), *([] if whole is None else [whole])]
             for scale, whole in ((scale_a, tensor_a), (scale_b, tensor_b))]  # fmt: skip
    options["scale_recipes"] = tuple([*extent.recipes, "TensorWise"][: len(scales)] for scales in lists)
    options["swizzles"] = tuple(["NO_SWIZZLE"] * len(scales) for scales in lists)
    return scaled_mm(a, b.mT, lists[0], lists[1], **options)


def orders(call: GemmCall, known: GemmPlan | None) -> Iterator[GemmPlan]:
    """Yield orders in which a library may add the products of a call, likely ones first, ``known`` before all."""
    if known is not None:
        yield known
    chains: list[dict[str, Any]] = [{}]
    if call.a in ("bf16", "fp16"):
        chains = [{}, {"instruction_k": 8}]
    if call.operation == "scaled_mm" and call.scaling not in UNIT_SCALES:
        chains = [{}, {"promote_every": 128}] if call.fast_accum else [{"promote_every": 128}, {}]
    if call.scaling == "row":
        chains = [{**chain, "epilogue": how} for chain, how in product(chains, ("column_row", "scale", "row_column"))]
    yield from (GemmPlan(**chain) for chain in chains)
    partials = _PARTIALS if call.out.itemsize == 2 else _PARTIALS[:1]
    for split, tiles, chain, partial in product(_SPLITS, _TILES, chains, partials):
        if split * tiles["k_tile"] <= call.k:
            yield Kernel.from_dict(tiles | chain | partial).split_plan(call, split)


def digest(*tensors: Tensor | None) -> str:
    """Return the SHA-256 of the bits of tensors."""
    sha = hashlib.sha256()
    for t in tensors:
        if t is not None:
            sha.update(tensor_bytes(t))
    return sha.hexdigest()
