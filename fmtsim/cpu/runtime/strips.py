# SPDX-License-Identifier: Apache-2.0
"""Strips of 16 numbers of 32 bits, a cache line: stores that LLVM's own vectors of loops do not have, and maxima."""

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

_STRIP = 16


def _strip(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Return the address of array[index], of a contiguous array of 32-bit numbers, as that of a vector."""
    address = builder.gep(arrayobj.make_array(kind)(context, builder, array).data, [index])
    number = ir.FloatType() if kind.dtype == types.float32 else ir.IntType(32)
    return builder.bitcast(address, ir.VectorType(number, _STRIP).as_pointer())


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
        smax = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 2), "llvm.smax.v16i32")

        def folded(start: int, count: int) -> Any:
            """Return ``count`` strips folded to 16 lanes, 16 / count of each, in order."""
            if count == 1:
                bits = builder.load(builder.gep(source, [ir.IntType(64)(start)]), align=4)
                return builder.and_(bits, vector([0x7FFFFFFF] * _STRIP))
            both = folded(start, count // 2), folded(start + count // 2, count // 2)
            halves = (builder.shuffle_vector(*both, vector(list(range(odd, 2 * _STRIP, 2)))) for odd in (0, 1))
            return builder.call(smax, list(halves))

        builder.store(folded(0, _STRIP), _strip(context, builder, signature.args[2], *args[2:]), align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64, amaxes, types.int64), generate


@intrinsic
def fence(typing_context):  # type: ignore[no-untyped-def]
    """Let no thread see what follows before streamed stores."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
