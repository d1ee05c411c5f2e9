# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions, mma.sync and wgmma: fragments and descriptors as matrices, products by the exact engine.

An instruction is collected when it runs and computed when its result is asked for: instructions that add to the same
registers one after the other become one product with a longer K, which the unit's chain computes with the same bits,
and those of all warps one batch. Source: PTX ISA 8.7, sections 9.7.14 (mma) and 9.7.15 (wgmma).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fmtsim.casts.ops import load_engine
from fmtsim.formats.registry import get_format
from fmtsim.gemm.products.operator import run_gemm
from fmtsim.gemm.products.resolver import gemm_call, resolve
from fmtsim.machine.ptx.parse import Group, Immediate, Instruction, Operand, Register, register_names
from fmtsim.spec.call import Operands
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.support.errors import ArgumentError

if TYPE_CHECKING:
    from fmtsim.machine.ptx.execute import Block

_FORMATS = {"f16": "fp16", "bf16": "bf16", "tf32": "tf32", "e4m3": "e4m3", "e5m2": "e5m2", "f64": "fp64"}
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f64": 64}
_TENSORS = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
            "e5m2": torch.float8_e5m2, "f64": torch.float64}  # fmt: skip
_SUMS = {"f32": ("fp32", torch.float32, torch.int32), "f16": ("fp16", torch.float16, torch.int16),
         "f64": ("fp64", torch.float64, torch.int64)}  # fmt: skip
_WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SHAPES = {  # M, N, K of mma.sync for operands of so many bits
    16: ("m16n8k8", "m16n8k16"), 32: ("m16n8k4", "m16n8k8"), 8: ("m16n8k16", "m16n8k32"),
    64: ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What an opcode says of a product."""

    unit: str  # "hopper.mma" or "hopper.wgmma"
    m: int
    n: int
    k: int
    a: str  # type of the first operand
    b: str
    sums: str  # "f32", "f16", "s32" or "f64"
    satfinite: bool = False

    @property
    def per(self) -> int:
        """Elements of a register of 32 bits (of 64 bits for f64)."""
        return max(32 // _BITS[self.a], 1)


@functools.cache
def form(opcode: tuple[str, ...]) -> Form:
    """Return what an opcode says.

    Raises:
        ArgumentError: A product that Hopper has not, or whose layout is not known here.
    """
    parts = [p for p in opcode if p not in ("sync", "aligned", "row", "col", "rn")]
    satfinite = "satfinite" in parts
    parts = [p for p in parts if p != "satfinite"]
    refused = ArgumentError(f"{'.'.join(opcode)} is not an instruction that fmtsim runs")
    wide = parts[0] == "wgmma"
    types = parts[3:] if wide else parts[2:]
    if (
        len(types) != (3 if wide else 4)
        or (not wide and types[0] != types[3])
        or "col" in opcode[:3]
        or opcode[-1] == "pred"
    ):
        raise refused
    sums, a, b = types[:3]
    shape = parts[2] if wide else parts[1]
    if a not in _BITS or b not in _BITS or _BITS[a] != _BITS[b] or not shape.startswith("m"):
        raise refused
    mixed = {a, b} <= {"e4m3", "e5m2"} or {a, b} <= {"s8", "u8"} or a == b
    allowed = (
        {"s32"}
        if a in ("s8", "u8")
        else {"f64"}
        if a == "f64"
        else {"f32", "f16"}
        if a in ("f16", "e4m3", "e5m2")
        else {"f32"}
    )
    m, n, k = (int(x) for x in shape[1:].replace("n", "k").split("k"))
    fits = (
        (m == 64 and k == 256 // _BITS[a] and n % 8 == 0 and 8 <= n <= 256 and a != "f64")
        if wide
        else shape in _SHAPES[_BITS[a]]
    )
    if not mixed or sums not in allowed or not fits or (satfinite and sums != "s32"):
        raise refused
    return Form(unit="hopper.wgmma" if wide else "hopper.mma", m=m, n=n, k=k, a=a, b=b, sums=sums, satfinite=satfinite)


@functools.cache
def _spec(unit: str, a: str, b: str, sums: str, k: int) -> GemmSpec:
    """Return the chain of a unit's instructions of k products."""
    accumulate, dtype, _ = _SUMS[sums]
    formats = get_format(_FORMATS[a]), get_format(_FORMATS[b])
    spec = resolve(gemm_call("mm", formats, (0, 0, 0), dtype, target=unit, accumulate=accumulate))  # type: ignore[arg-type]
    return replace(spec, plan=replace(spec.plan, instruction_k=k))


@dataclass(slots=True)
class Chain:
    """Instructions that add to the same registers one after the other, for each warp (or warpgroup) that runs."""

    form: Form
    result: tuple[str, ...]  # registers
    groups: np.ndarray  # int: numbers of the warps or warpgroups
    c: np.ndarray  # codes [groups, M, N]
    a: list[np.ndarray] = field(default_factory=list)  # codes [groups, M, K], one an instruction
    b: list[np.ndarray] = field(default_factory=list)  # codes [groups, N, K]


# Fragments: lane l holds row l // 4, and of each register the elements from ``per`` (l % 4) on


def _gather(block: "Block", names: tuple[str, ...], groups: np.ndarray, lanes: int) -> np.ndarray:
    """Return registers as [groups, 32-thread warps of a group, lanes of a warp, registers]."""
    words = block.fragment(names)
    words = np.stack([block.register(name) for name in names]) if words is None else words
    split = words.reshape(len(names), -1, lanes)
    split = split if len(groups) == split.shape[1] else split[:, groups]
    return split.reshape(len(names), -1, 32).transpose(1, 2, 0)


def _a_fragment(words: np.ndarray, shape: Form) -> np.ndarray:
    """Return operand A of warps, [warps, M, K]: register = 2 * half of K + half of the rows."""
    warps, per = len(words), shape.per
    halves = min(shape.m // 8, 2)
    codes = np.ascontiguousarray(words).view(_WORDS[_BITS[shape.a]]).reshape(warps, 8, 4, -1, halves, per)
    # warp, row, lane % 4, half of K, half of the rows, element -> warp, half, row, half of K, lane % 4, element
    return np.ascontiguousarray(codes.transpose(0, 4, 1, 3, 2, 5)).reshape(warps, 8 * halves, -1)


def _b_fragment(words: np.ndarray, shape: Form) -> np.ndarray:
    """Return operand B of warps, [warps, 8, K]."""
    codes = np.ascontiguousarray(words).view(_WORDS[_BITS[shape.b]]).reshape(len(words), 8, 4, -1, shape.per)
    return np.ascontiguousarray(codes.transpose(0, 1, 3, 2, 4)).reshape(len(words), 8, -1)


def _c_matrix(words: np.ndarray, shape: Form) -> np.ndarray:
    """Return sums of warps as codes [warps, 8 or 16, N]: registers run over columns, halves of rows, tiles."""
    warps, halves = len(words), min(shape.m // 8, 2)
    kind = np.uint16 if shape.sums == "f16" else words.dtype
    codes = np.ascontiguousarray(words).view(kind).reshape(warps, 8, 4, shape.n // 8, halves, 2)
    return np.ascontiguousarray(codes.transpose(0, 4, 1, 3, 2, 5)).reshape(warps, 8 * halves, shape.n)


def _c_words(matrix: np.ndarray, shape: Form) -> np.ndarray:
    """Return [warps, M', N] codes as registers [warps, 32, registers]."""
    warps, halves = len(matrix), min(shape.m // 8, 2)
    codes = matrix.reshape(warps, halves, 8, shape.n // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    words = np.ascontiguousarray(codes).reshape(warps, 32, -1)
    return words.view(np.uint32) if shape.sums == "f16" else words


# Descriptors of wgmma's operands in shared memory


@functools.lru_cache(maxsize=8192)
def _places(descriptor: int, rows: int, columns: int, size: int, transposed: bool) -> tuple[np.ndarray, int]:
    """Return where a matrix [rows, columns] lies in shared memory, in elements of ``size`` bytes, and the last place.

    Bits 0 to 13 of a descriptor are the address, 16 to 29 the leading and 32 to 45 the stride offset, all in 16 bytes;
    62 and 63 the pattern by which address bits 4 to 6 are exchanged with bits 7 to 9.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    mode = descriptor >> 62
    if descriptor >> 49 & 7:
        raise ArgumentError(f"a wgmma descriptor with a base offset ({descriptor:#x}) is not supported")
    line = (16, 128, 64, 32)[mode]
    r, k = np.arange(rows)[:, None], np.arange(columns)[None]
    if transposed and mode == 0:
        raise ArgumentError(
            f"a wgmma descriptor of a transposed matrix without a pattern ({descriptor:#x}) is not supported"
        )
    if transposed:  # lines run along the rows
        per = line // size
        place = start + r // per * leading + k // 8 * stride + k % 8 * line + r % per * size
    else:
        along = k * size
        place = start + r // 8 * stride + r % 8 * line + (along if mode else along // 16 * leading + along % 16)
    place = place ^ ((place >> 3) & (0, 0x70, 0x30, 0x10)[mode])
    return place // size, int(place.max()) // size


def _described(block: "Block", name: str, groups: np.ndarray, rows: int, shape: Form, transposed: bool) -> np.ndarray:
    """Return operands that lie in shared memory, [warpgroups, rows, K], by the descriptors of a register."""
    size = _BITS[shape.a] // 8
    memory = block.shared.view(_WORDS[8 * size])
    descriptors = block.register(name).reshape(-1, 128)[groups, 0].tolist()
    found = []
    for descriptor in descriptors:
        places, last = _places(descriptor, rows, shape.k, size, transposed)
        if last >= len(memory):
            raise ArgumentError(f"a wgmma descriptor ({descriptor:#x}) is out of shared memory")
        found.append(memory[places])
    return np.stack(found) if len(found) > 1 else found[0][None]


# Collecting and computing


def prepare_product(instruction: Instruction) -> Callable[["Block", np.ndarray], None]:
    """Return what notes a product when it runs; its result is written by ``flush``.

    Raises:
        ArgumentError: A product that is not known.
    """
    shape = form(instruction.opcode)
    operands = instruction.operands
    wide = shape.unit == "hopper.wgmma"
    lanes = 128 if wide else 32
    result = tuple(register_names((operands[0],)))
    sums = result if wide else tuple(register_names((operands[3],)))
    constant = not wide and [item.value for item in getattr(operands[3], "items", ()) if isinstance(item, Immediate)]
    if not sums and not constant:
        raise ArgumentError("a product's sums are registers")
    read = _prepare_wide(operands, shape) if wide else _prepare_warp(operands, shape)

    def collect(block: "Block", running: np.ndarray) -> None:
        by_group = running.reshape(-1, lanes)
        groups = np.flatnonzero(by_group[:, 0])
        if not by_group[groups].all():
            raise ArgumentError(f"not all threads of a {'warpgroup' if wide else 'warp'} run {instruction}")
        keeps = not wide or _keeps(block, operands[3], groups)
        chain = next((p for p in block.pending if p.result == result), None)
        follows = chain is not None and chain.form == shape and sums == result and np.array_equal(chain.groups, groups)
        if chain is not None and not (follows and keeps and not shape.satfinite):
            flush(block)  # another product of the same registers
            chain = None
        elif chain is None and not wide and any(set(p.result) & set(sums) for p in block.pending):
            flush(block)  # it adds to another's result
        if chain is None:
            m = 64 if wide else shape.m
            if keeps and sums:
                c = _c_matrix(_gather(block, sums, groups, lanes), shape).reshape(len(groups), m, shape.n)
            else:
                word = {"f16": np.uint16, "f64": np.uint64}.get(shape.sums, np.uint32)
                c = np.zeros((len(groups), m, shape.n), word)
            chain = Chain(shape, result, groups, c)
            block.pending.append(chain)
        a, b = read(block, groups)
        chain.a.append(a)
        chain.b.append(b)

    return collect


def _keeps(block: "Block", scale_d: Operand, groups: np.ndarray) -> bool:
    """Return True if a wgmma adds to its sums (scale-d)."""
    if isinstance(scale_d, Immediate):
        return scale_d.value != 0
    assert isinstance(scale_d, Register)
    values = block.register(scale_d.name).reshape(-1, 128)[groups]
    if (values != values[0, 0]).any():
        raise ArgumentError("scale-d of a wgmma differs between threads")
    return bool(values[0, 0]) ^ scale_d.negated


Reader = Callable[["Block", np.ndarray], tuple[np.ndarray, np.ndarray]]


def _prepare_warp(operands: tuple[Operand, ...], shape: Form) -> Reader:
    """Return what reads the operands of mma.sync: [warps, M, K] and [warps, 8, K]."""
    first, second = tuple(register_names((operands[1],))), tuple(register_names((operands[2],)))

    def read(block: "Block", groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _a_fragment(_gather(block, first, groups, 32), shape), _b_fragment(
            _gather(block, second, groups, 32), shape
        )

    return read


def _prepare_wide(operands: tuple[Operand, ...], shape: Form) -> Reader:
    """Return what reads the operands of wgmma: [warpgroups, 64, K] and [warpgroups, N, K]."""
    _, first, second, _, *flags = operands
    numbers = [flag.value for flag in flags if isinstance(flag, Immediate)]
    signs = numbers[:2] if shape.sums != "s32" else [1, 1]
    turns = numbers[2:] if _BITS[shape.a] == 16 else []
    in_registers = isinstance(first, Group)
    turn_a, turn_b = (0, *(turns or [0])) if in_registers else tuple(turns) or (0, 0)
    warps, names = replace(shape, m=16), tuple(register_names((first,)))
    assert isinstance(second, Register)
    second_name = second.name

    def read(block: "Block", groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if in_registers:
            a = _a_fragment(_gather(block, names, groups, 128), warps).reshape(len(groups), 64, shape.k)
        else:
            a = _described(block, names[0], groups, 64, shape, bool(turn_a))
        b = _described(block, second_name, groups, shape.n, shape, bool(turn_b))
        if signs[0] * signs[1] == -1:
            a = a ^ a.dtype.type(1 << (_BITS[shape.a] - 1))
        return a, b

    return read


def flush(block: "Block", running: Any = None) -> None:
    """Compute all products that were collected, and write their registers."""
    pending, block.pending = block.pending, []
    same: dict[Any, list[Chain]] = {}
    for chain in pending:  # those of one form, length and warps are one batch
        same.setdefault((chain.form, len(chain.a), chain.groups.tobytes()), []).append(chain)
    for chains in same.values():
        shape, count, warps = chains[0].form, len(chains), len(chains[0].groups)
        a = np.stack([np.concatenate(chain.a, -1) for chain in chains]).reshape(
            count * warps, -1, shape.k * len(chains[0].a)
        )
        b = np.stack([np.concatenate(chain.b, -1) for chain in chains]).reshape(count * warps, shape.n, -1)
        c = np.stack([chain.c for chain in chains]).reshape(count * warps, -1, shape.n)
        d = _product(a, b, c, shape).reshape(count, warps, -1, shape.n)
        for chain, matrix in zip(chains, d, strict=True):
            wide = shape.unit == "hopper.wgmma"
            words = _c_words(matrix.reshape(-1, 16, shape.n) if wide else matrix, shape)
            words = words.reshape(-1, words.shape[-1]).T  # [registers, threads that run]
            lanes = 128 if wide else 32
            target = block.fragment(chain.result)
            if target is not None and words.shape[1] == block.threads:
                target[...] = words
                continue
            for name, column in zip(chain.result, words, strict=True):
                block.register(name).reshape(-1, lanes)[chain.groups] = column.reshape(-1, lanes)


def _product(a: np.ndarray, b: np.ndarray, c: np.ndarray, shape: Form) -> np.ndarray:
    """Return the codes of a b^T + c for a batch of products: [products, M, K], [products, N, K], [products, M, N]."""
    if shape.sums == "s32":
        signed = [x.view(np.int8) if kind == "s8" else x for x, kind in ((a, shape.a), (b, shape.b))]
        sums = np.matmul(signed[0].astype(np.float64), signed[1].astype(np.float64).transpose(0, 2, 1)).astype(np.int64)
        total = sums + c.view(np.int32)
        return (total.clip(-(2**31), 2**31 - 1) if shape.satfinite else total).astype(np.uint32)
    if shape.sums == "f32":
        nan = (c & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        if shape.unit == "hopper.wgmma" and shape.a in ("e4m3", "e5m2"):
            # the unit reads 13 bits of the addend's fraction (H100, tests/machine/ptx/test_records.py)
            c = c & np.uint32(0xFFFFFC00)
        c = np.where(nan, np.uint32(0x7FFFFFFF), c)  # which NaN is added changes nothing
    if shape.a == "tf32":  # the unit reads 19 bits of 32
        a, b = a & np.uint32(0xFFFFE000), b & np.uint32(0xFFFFE000)
    spec = _spec(shape.unit, shape.a, shape.b, shape.sums, shape.k)
    x, y = (torch.from_numpy(codes).view(_TENSORS[kind]) for codes, kind in ((a, shape.a), (b, shape.b)))
    _, dtype, bits = _SUMS[shape.sums]
    addend = torch.from_numpy(c).view(dtype)
    out = torch.empty(c.shape, dtype=dtype)
    left: Sequence[int] = range(len(a))
    if shape.sums == "f32":
        left = load_engine("cpu").gemm_batch(x, y, spec, None, out, addend)
    for i in left:
        out[i] = run_gemm(Operands(x[i], y[i], c=addend[i]), spec, dtype, validated=True, bare=True)
    return out.view(bits).numpy().view(c.dtype)
