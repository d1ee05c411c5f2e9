# SPDX-License-Identifier: Apache-2.0
"""Strips inside numba kernels: 16 numbers of 32 bits, a cache line, which LLVM's own vectors of loops do not know.

Stores that pass the caches, maxima of strips, and 16 lines of memory that become strips.
"""

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fmtsim.cpu.runtime.simd import LANES, address_of

_STRIP = 16
# Which lanes of two vectors of 8 meet where 2, 4 or 8 strips are folded, so that all but the last stay in 128 bits
_PAIRINGS = {
    2: [[0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]],
    4: [[0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]],
    8: [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
}


def _strip(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Return the address of array[index], of a contiguous array of 32-bit numbers, as that of a vector."""
    number = ir.FloatType() if kind.dtype == types.float32 else ir.IntType(32)
    vector = ir.VectorType(number, _STRIP)
    return builder.bitcast(address_of(context, builder, kind, array, index), vector.as_pointer())


@intrinsic
def put(typing_context, values, first, array, index, streams):  # type: ignore[no-untyped-def]
    """Copy 16 float32 from values[first] on to array[index] and on; ``streams`` sends them past the caches.

    Streamed ones go to a whole cache line, and need a ``fence`` in the end. Before it no atomic operation should run,
    such as counting references to a slice of an array: each waits for the stores.
    """

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        numbers = builder.load(_strip(context, builder, signature.args[0], *args[:2]), align=4)
        target = _strip(context, builder, signature.args[2], *args[2:4])
        with builder.if_else(args[4]) as (streamed, plain):
            with streamed:
                once = builder.module.add_metadata([ir.IntType(32)(1)])
                builder.store(numbers, target, align=64).set_metadata("nontemporal", once)
            with plain:
                builder.store(numbers, target, align=4)
        return context.get_dummy_value()

    return types.void(values, types.int64, array, types.int64, types.boolean), generate


@intrinsic
def repeat(typing_context, number, array, index):  # type: ignore[no-untyped-def]
    """Write a number to array[index] and the 15 places behind it."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target = _strip(context, builder, signature.args[1], *args[1:])
        whole = ir.Constant(target.type.pointee, ir.Undefined)
        for lane in range(_STRIP):
            whole = builder.insert_element(whole, args[0], ir.IntType(32)(lane))
        builder.store(whole, target, align=4)
        return context.get_dummy_value()

    return types.void(number, array, types.int64), generate


@intrinsic
def strip_amaxes(typing_context, x, first, amaxes, strip):  # type: ignore[no-untyped-def]
    """Write the largest magnitudes, as bits, of 16 strips of float32 from x[first] on to amaxes[strip] and on."""
    vector = ir.VectorType(ir.IntType(32), _STRIP)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        source = builder.bitcast(_strip(context, builder, signature.args[0], *args[:2]), vector.as_pointer())

        def largest_of(both: tuple, orders: list) -> Any:
            """Return the larger lanes of two selections of lanes from two vectors."""
            kind = ir.VectorType(ir.IntType(32), len(orders[0]))
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(kind, [kind] * 2), f"llvm.smax.v{kind.count}i32"
            )
            return builder.call(function, [builder.shuffle_vector(*both, kind(order)) for order in orders])

        def magnitudes(strip: int) -> Any:
            bits = builder.load(builder.gep(source, [ir.IntType(64)(strip)]), align=4)
            return builder.and_(bits, vector([0x7FFFFFFF] * _STRIP))

        def folded(start: int, count: int) -> Any:
            """Return ``count`` strips folded to 16 lanes, 16 / count of each, in order."""
            if count == 1:
                return magnitudes(start)
            both = folded(start, count // 2), folded(start + count // 2, count // 2)
            return largest_of(both, [list(range(odd, 2 * _STRIP, 2)) for odd in (0, 1)])

        def folded_within_128_bits(start: int, count: int) -> Any:
            """Return 8 strips folded to 8 lanes: a strip to halves, pairs within 128 bits, then the two of these."""
            if count == 1:
                return largest_of((magnitudes(start),) * 2, [list(range(8)), list(range(8, 16))])
            both = (folded_within_128_bits(first, count // 2) for first in (start, start + count // 2))
            return largest_of(tuple(both), _PAIRINGS[count])

        target = _strip(context, builder, signature.args[2], *args[2:])
        if LANES == 64:
            builder.store(folded(0, _STRIP), target, align=4)
        else:
            parts = [folded_within_128_bits(first, 8) for first in (0, 8)]
            builder.store(builder.shuffle_vector(*parts, vector(list(range(16)))), target, align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64, amaxes, types.int64), generate


@intrinsic
def fence(typing_context):  # type: ignore[no-untyped-def]
    """Let no thread see what follows before streamed stores."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def transpose_lines(typing_context, array, index, pitch, out, place, step):  # type: ignore[no-untyped-def]
    """Write the 16 words of 32 bits from array[index] on, and of 15 more lines ``pitch`` numbers apart, to float32 out.

    Word w of the lines is a strip at out[place + w * step]. ``index`` counts numbers in memory; nothing is checked.
    """
    vector = ir.VectorType(ir.IntType(32), _STRIP)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        at, lines = args[1], []
        for _ in range(_STRIP):
            address = address_of(context, builder, signature.args[0], args[0], at)
            lines.append(builder.load(builder.bitcast(address, vector.as_pointer()), align=1))
            at = builder.add(at, args[2])
        # squares of 8 words of 8 lines that lie beside the diagonal change places, then those of 4, 2 and 1
        for side in (8, 4, 2, 1):
            upper = [lane if not lane & side else lane - side + _STRIP for lane in range(_STRIP)]
            lower = [lane + side for lane in upper]
            for one in (line for line in range(_STRIP) if not line & side):
                both = lines[one], lines[one + side]
                lines[one], lines[one + side] = (builder.shuffle_vector(*both, vector(x)) for x in (upper, lower))
        at = args[4]
        for line in lines:
            address = address_of(context, builder, signature.args[3], args[3], at)
            builder.store(line, builder.bitcast(address, vector.as_pointer()), align=4)
            at = builder.add(at, args[5])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, out, types.int64, types.int64), generate
