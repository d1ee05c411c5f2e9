# SPDX-License-Identifier: Apache-2.0
"""Vectors of bytes and of pairs of 16 bits in the lanes of simd.py."""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fmtsim.cpu.runtime.simd import LANES, WOVEN, Vector


@intrinsic
def pack_bytes(typing_context, numbers):  # type: ignore[no-untyped-def]
    """Return numbers of 0 to 255 in int32 lanes as bytes, in the order that ``bytes_shifted`` reads."""
    vector = Vector(types.int8, LANES)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind, undefined = ir.VectorType(ir.IntType(32), LANES // 4), ir.Constant(args[0].type, ir.Undefined)
        packed = None
        for part in range(4):
            lanes = ir.Constant(kind, [LANES // 4 * part + lane for lane in range(LANES // 4)])
            quarter = builder.shuffle_vector(args[0], undefined, lanes)
            quarter = builder.shl(quarter, ir.Constant(kind, [8 * part] * kind.count))
            packed = quarter if packed is None else builder.or_(packed, quarter)
        return builder.bitcast(packed, vector.llvm)

    return vector(numbers), generate


@intrinsic
def weave(typing_context, a):  # type: ignore[no-untyped-def]
    """Return int32 lanes, or bytes in the order of ``pack_bytes``, in the order of ``woven_high_words``."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        words = ir.VectorType(ir.IntType(32), LANES // 4 if a.dtype == types.int8 else LANES)
        order = ir.Constant(words, WOVEN[: words.count])  # the same in each 16 lanes, so of words of four bytes
        woven = builder.shuffle_vector(builder.bitcast(args[0], words), ir.Constant(words, ir.Undefined), order)
        return builder.bitcast(woven, a.llvm)

    return a(a), generate


def _bytes_shifted(shift: int) -> Callable:
    """Return what makes int32 lanes of packed bytes, unsigned and shifted to the left: two instructions a register."""

    @intrinsic
    def widen(typing_context, a):  # type: ignore[no-untyped-def]
        vector = Vector(types.int32, LANES)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            kind = ir.VectorType(ir.IntType(32), LANES // 4)
            words, quarters = builder.bitcast(args[0], kind), []
            for part in range(4):
                distance = shift - 8 * part
                by = ir.Constant(kind, [abs(distance)] * kind.count)
                moved = builder.shl(words, by) if distance >= 0 else builder.lshr(words, by)
                quarters.append(builder.and_(moved, ir.Constant(kind, [255 << shift] * kind.count)))
            return _joined(builder, quarters)

        return vector(a), generate

    return widen


def _joined(builder: Any, vectors: list) -> Any:
    """Return the lanes of a power of two of vectors, one after the other."""
    while len(vectors) > 1:
        lanes = ir.VectorType(ir.IntType(32), 2 * vectors[0].type.count)
        order = ir.Constant(lanes, list(range(lanes.count)))
        vectors = [builder.shuffle_vector(*vectors[i : i + 2], order) for i in range(0, len(vectors), 2)]
    return vectors[0]


bytes_shifted20, bytes_shifted23 = _bytes_shifted(20), _bytes_shifted(23)


@intrinsic
def add_products(typing_context, total, a, b):  # type: ignore[no-untyped-def]
    """Return int32 lanes plus the two products of the int16 halves of a and b, which are int32 lanes as well.

    Where the machine has an instruction for pairs of products, it is used.
    """

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        total, a, b = args
        features = context.codegen()._tm_features
        width, name = next((w, n) for feature, w, n in _PAIRS if feature in features)
        word, half = ir.IntType(32), ir.VectorType(ir.IntType(16), 2 * width)
        kind, sums = ir.VectorType(word, width), []
        for start in range(0, LANES, width):
            order = ir.Constant(kind, list(range(start, start + width)))
            x, y = (builder.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), order) for v in (a, b))
            if name:
                function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [half, half]), name)
                sums.append(builder.call(function, [builder.bitcast(x, half), builder.bitcast(y, half)]))
                continue
            by = ir.Constant(kind, [16] * width)
            high = builder.mul(builder.ashr(x, by), builder.ashr(y, by))
            low = builder.mul(builder.ashr(builder.shl(x, by), by), builder.ashr(builder.shl(y, by), by))
            sums.append(builder.add(low, high))
        return builder.add(total, _joined(builder, sums))

    return total(total, a, b), generate


# x86 instructions that add the products of pairs: the feature of the machine, lanes, the name; none takes any machine
_PAIRS = (
    ("+avx512bw", 16, "llvm.x86.avx512.pmaddw.d.512"),
    ("+avx2", 8, "llvm.x86.avx2.pmadd.wd"),
    ("", 16, ""),
)
