# SPDX-License-Identifier: Apache-2.0
"""The tensor memory accelerator: tensor maps, and the copies of boxes between global and shared memory.

A GPU's tensor map is 128 bytes whose layout is not documented; here it is a layout of our own, written by ``encode`` or
by a kernel's ``tensormap.replace``, and read by the copies. Source: PTX ISA 8.7, sections 5.5 and 9.7.9.25 to 27.
"""

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fmtsim.machine.ptx import row_layout as b
from fmtsim.machine.ptx.block import mbarrier_settled
from fmtsim.machine.ptx.parse import Address, Instruction, Operand
from fmtsim.machine.ptx.values import bits
from fmtsim.support.errors import ArgumentError

if TYPE_CHECKING:
    from fmtsim.machine.ptx.execute import Block
    from fmtsim.machine.ptx.kernel_program import Builder

MAP = np.dtype(
    [
        ("global_address", "<u8"),
        ("global_dim", "<u4", 5),
        ("global_stride", "<u8", 4),
        ("box_dim", "<u2", 5),
        ("element_stride", "<u2", 5),
        ("rank", "u1"),
        ("elemtype", "u1"),
        ("interleave_layout", "u1"),
        ("swizzle_mode", "u1"),
        ("fill_mode", "u1"),
        ("rest", "u1", 43),
    ]
)
ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)  # of the field elemtype: u8, u16, u32, s32, u64, s64, f16 ...
_TYPES = {0: "u1", 1: "u2", 2: "u4", 3: "i4", 4: "u8", 5: "i8", 7: "f4", 9: "f8"}
_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
Handler = Callable[["Block", np.ndarray], None]


def encode(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element: int,
    swizzle: int,
    fill: int = 0,
) -> bytes:
    """Return a tensor map.

    Args:
        address: Of element 0.
        shape: Elements a dimension, the innermost first, up to 5.
        strides: Bytes between the elements of dimensions 1, 2 ...
        box: Elements a dimension of a copy.
        element: A number of the field ``elemtype``.
        swizzle: 0, or 1 to 3 for patterns of 32, 64 and 128 bytes.
        fill: What elements outside of the tensor read as: 0 zeros, 1 NaN.
    """
    record = np.zeros((), MAP)
    record["global_address"], record["rank"] = address, len(shape)
    record["global_dim"][: len(shape)], record["box_dim"][: len(box)] = shape, box
    record["global_stride"][: len(strides)], record["element_stride"][:] = strides, 1
    record["elemtype"], record["swizzle_mode"], record["fill_mode"] = element, swizzle, fill
    return record.tobytes()


def _bytes_at(block: "Block", address: int, count: int, what: str) -> np.ndarray:
    """Return memory at a generic or global address as bytes.

    Raises:
        ArgumentError: It is outside of what the launch was given.
    """
    if address >= b.SHARED_WINDOW:
        start = address - b.SHARED_WINDOW
        return block.shared[start : start + count]
    if not any(r.start <= address and address + count <= r.start + r.nbytes for r in block.memory.ranges):
        raise ArgumentError(f"{what} is out of range ({block.memory.describe(address)})")
    raw: Any = (ctypes.c_uint8 * count).from_address(address)
    return np.frombuffer(raw, np.uint8)


@functools.lru_cache(maxsize=256)
def _chunks(count: int, first: int, swizzle: int) -> np.ndarray:
    """Return where the 16-byte pieces of a box lie in shared memory, with bits exchanged by the pattern."""
    number = np.arange(first, first + count)
    return number ^ ((number >> 3) & (0, 1, 3, 7)[swizzle])


def _box(
    block: "Block", tensor_map: int, coordinates: Sequence[int]
) -> tuple[np.void, np.ndarray | None, tuple[slice, ...], tuple[int, ...]]:
    """Return a map's record, what a box has of the tensor (a view of bytes), its place in the box, and the shape."""
    record = _bytes_at(block, tensor_map, 128, "a tensor map").view(MAP)[0]
    rank, size = int(record["rank"]), ELEMENT_BYTES[int(record["elemtype"])]
    if not 1 <= rank <= 5 or len(coordinates) != rank or record["interleave_layout"]:
        raise ArgumentError(f"a tensor map of rank {rank} is copied with {len(coordinates)} coordinates")
    dims, box = record["global_dim"][:rank].astype(np.int64), record["box_dim"][:rank].astype(np.int64)
    strides = np.array([size, *record["global_stride"][: rank - 1]], np.int64)
    shape = tuple(int(n) for n in box[::-1])
    # the part of the box that lies in the tensor
    first = np.array([max(0, -c) for c in coordinates])
    last = np.array([min(int(n), int(d) - c) for n, d, c in zip(box, dims, coordinates, strict=True)])
    if (last <= first).any():
        return record, None, (), shape
    start = int(record["global_address"]) + int(((np.array(coordinates) + first) * strides).sum())
    count = last - first
    reach = int(((count - 1) * strides).sum()) + size
    raw = _bytes_at(block, start, reach, "a box of a tensor map")
    view = np.ndarray((*(int(n) for n in count[::-1]), size), np.uint8, raw, 0, (*(int(s) for s in strides[::-1]), 1))
    return record, view, tuple(slice(int(f), int(e)) for f, e in zip(first[::-1], last[::-1], strict=True)), shape


def _load_box(block: "Block", tensor_map: int, coordinates: Sequence[int], target: int) -> int:
    """Copy a box to shared memory; return its bytes."""
    record, view, inside, shape = _box(block, tensor_map, coordinates)
    size = ELEMENT_BYTES[int(record["elemtype"])]
    data = np.zeros((*shape, size), np.uint8)
    if record["fill_mode"]:
        raise ArgumentError("a tensor map that fills with NaN is not supported")
    if view is not None:
        data[inside] = view
    pieces = data.reshape(-1, 16)
    places = _chunks(len(pieces), target // 16, int(record["swizzle_mode"]))
    block.shared.reshape(-1, 16)[places] = pieces
    block.note_copy(places)
    return data.size


def _store_box(block: "Block", tensor_map: int, coordinates: Sequence[int], source: int, combine: Any = None) -> None:
    """Copy a box from shared memory to what of it lies in the tensor, or combine the two.

    Raises:
        ArgumentError: Elements that cannot be combined.
    """
    record, view, inside, shape = _box(block, tensor_map, coordinates)
    size = ELEMENT_BYTES[int(record["elemtype"])]
    count = int(np.prod(shape)) * size // 16
    pieces = block.shared.reshape(-1, 16)[_chunks(count, source // 16, int(record["swizzle_mode"]))]
    if view is None:
        return
    new = np.ascontiguousarray(pieces.reshape(*shape, size)[inside])
    if combine is not None:
        kind = _TYPES.get(int(record["elemtype"]))
        if kind is None or (kind[0] == "f" and combine is not np.add):
            raise ArgumentError(
                f"a tensor map of element type {record['elemtype']} is not combined by {combine.__name__} here"
            )
        old = np.ascontiguousarray(view).view(kind)
        with np.errstate(all="ignore"):
            total = combine(old, new.view(kind))
        new = total.view(np.uint8)
    view[...] = new


def complete(block: "Block", mbarrier: int, nbytes: int) -> None:
    """Tell an mbarrier that bytes have arrived."""
    word = block.shared[mbarrier : mbarrier + 8].view(np.uint64)
    value = (int(word[0]) - (nbytes << 40)) & ((1 << 64) - 1)
    word[0] = mbarrier_settled.py_func(  # type: ignore[attr-defined]
        np.uint64(value)
    )
    block.wake()


def prepare_bulk_copy(instruction: Instruction, builder: "Builder") -> Handler:
    """Return what the host does for cp.async.bulk and cp.async.bulk.tensor."""
    text = re.sub(r"\.L2::cache_hint|\.tile\b", "", ".".join(instruction.opcode))
    operands = [_reader(builder, operand) for operand in instruction.operands]
    shape = re.fullmatch(r"cp\.async\.bulk\.tensor\.[1-5]d\.(.*)", text)
    if shape and shape[1] in (
        "shared::cluster.global.mbarrier::complete_tx::bytes", "shared::cta.global.mbarrier::complete_tx::bytes",
    ):  # fmt: skip

        def load(block: "Block", running: np.ndarray) -> None:
            target, (source, coordinates), mbarrier = operands[0](block)[0], operands[1](block), operands[2](block)[0]
            for t in np.flatnonzero(running):
                nbytes = _load_box(
                    block, int(source[t]), [_signed(c[t]) for c in coordinates], int(target[t]) & 0xFFFFFFFF
                )
                complete(block, int(mbarrier[t]) & 0xFFFFFFFF, nbytes)

        return load
    if shape and shape[1] == "global.shared::cta.bulk_group":

        def store(block: "Block", running: np.ndarray) -> None:
            (target, coordinates), source = operands[0](block), operands[1](block)[0]
            for t in np.flatnonzero(running):
                _store_box(block, int(target[t]), [_signed(c[t]) for c in coordinates], int(source[t]) & 0xFFFFFFFF)

        return store
    reduction = re.fullmatch(r"cp\.reduce\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta\.(\w+)\.bulk_group", text)
    if reduction and reduction[1] in _REDUCTIONS:

        def reduce(block: "Block", running: np.ndarray) -> None:
            (target, coordinates), source = operands[0](block), operands[1](block)[0]
            for t in np.flatnonzero(running):
                place = [_signed(c[t]) for c in coordinates]
                _store_box(block, int(target[t]), place, int(source[t]) & 0xFFFFFFFF, _REDUCTIONS[reduction[1]])

        return reduce
    to_shared = text in (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes",
    )
    if not to_shared and text != "cp.async.bulk.global.shared::cta.bulk_group":
        raise ArgumentError(f"{'.'.join(instruction.opcode)} is not an instruction that fmtsim runs")

    def bulk(block: "Block", running: np.ndarray) -> None:
        target, source, size = (operand(block)[0] for operand in operands[:3])
        for t in np.flatnonzero(running):
            count = int(size[t])
            outer, inner = (int(source[t]), int(target[t])) if to_shared else (int(target[t]), int(source[t]))
            inner &= 0xFFFFFFFF
            outside, inside = _bytes_at(block, outer, count, "a bulk copy"), block.shared[inner : inner + count]
            if to_shared:
                inside[:] = outside
                block.note_copy(slice(inner // 16, -(-(inner + count) // 16)))
                complete(block, int(operands[3](block)[0][t]) & 0xFFFFFFFF, count)
            else:
                outside[:] = inside

    return bulk


def _signed(value: Any) -> int:
    return int(np.uint32(value).view(np.int32))


def _reader(builder: "Builder", operand: Operand) -> Callable[["Block"], tuple[np.ndarray, list[np.ndarray]]]:
    """Return what reads an operand of all threads: an address or a number, and the coordinates behind it."""
    base = operand.base if isinstance(operand, Address) else operand
    offset = operand.offset if isinstance(operand, Address) else 0
    place, kind = builder.operand(base, "b64")
    size = bits(kind) // 8
    coordinates = [builder.operand(c, "b32")[0] for c in (operand.coordinates if isinstance(operand, Address) else ())]

    def read(block: "Block") -> tuple[np.ndarray, list[np.ndarray]]:
        values = block.array(place, size).astype(np.int64) + offset
        return values, [block.array(at, 4) for at in coordinates]

    return read


def prepare_replace(instruction: Instruction, builder: "Builder") -> Handler:
    """Return what the host does for tensormap.replace, which writes one field of a map."""
    field = instruction.opcode[3]
    if instruction.opcode[2] != "tile" or field not in (MAP.names or ()) or "b1024" not in instruction.opcode:
        raise ArgumentError(f"{'.'.join(instruction.opcode)} is not an instruction that fmtsim runs")
    where, *given = [_reader(builder, operand) for operand in instruction.operands]
    shared = "shared::cta" in instruction.opcode

    def change(block: "Block", running: np.ndarray) -> None:
        addresses, values = where(block)[0], [value(block)[0] for value in given]
        for t in np.flatnonzero(running):
            address = int(addresses[t]) + (b.SHARED_WINDOW if shared and addresses[t] < b.SHARED_WINDOW else 0)
            record = _bytes_at(block, address, 128, "a tensor map").view(MAP)
            number = int(values[-1][t])
            if field == "rank":
                number += 1  # the field holds one less
            if len(values) == 2:
                record[field][0][int(values[0][t])] = number
            else:
                record[field] = number

    return change


def prepare_fence_copy(instruction: Instruction, builder: "Builder") -> Handler:
    """Return what the host does for tensormap.cp_fenceproxy: copy a map from shared to global memory."""
    target, source = (_reader(builder, operand) for operand in instruction.operands[:2])

    def copy(block: "Block", running: np.ndarray) -> None:
        t = int(np.flatnonzero(running)[0])
        start = int(source(block)[0][t]) & 0xFFFFFFFF
        _bytes_at(block, int(target(block)[0][t]), 128, "a tensor map")[:] = block.shared[start : start + 128]

    return copy
