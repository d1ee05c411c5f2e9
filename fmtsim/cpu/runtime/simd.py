# SPDX-License-Identifier: Apache-2.0
"""Vectors as values inside numba kernels: lanes that LLVM keeps in registers of whatever width the machine has.

numba's own loops over small arrays keep sums in memory. A value of type ``Vector`` is an LLVM vector instead, so
running sums stay in registers from the first product to the last, and every operation below is one LLVM instruction,
which the compiler splits into as many machine instructions as the registers ask for. A vector has as many lanes as two
or four of which the registers hold beside what else a loop needs: 64 where there are 32 registers of 512 bits, else 16.

The lanes also hold vectors of bytes and of pairs of 16 bits.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model
from numba.np import arrayobj

LANES = 64 if "+avx512bw" in cpu_target.target_context.codegen()._tm_features else 16
COLUMNS = 64  # of a panel of a product
PARTS = COLUMNS // LANES  # vectors of a row of a panel
TOWARD_ZERO, NEAREST_EVEN = 0, 1  # what set_rounding takes

_LLVM = {
    types.int8: ir.IntType(8),
    types.int16: ir.IntType(16),
    types.int32: ir.IntType(32),
    types.int64: ir.IntType(64),
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
}


class Vector(types.Type):
    """The numba type of a vector of numbers."""

    def __init__(self, dtype: types.Type, lanes: int) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        """The LLVM type."""
        return ir.VectorType(_LLVM[self.dtype], self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


def address_of(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Return the address of array[index], as numbers lie in memory."""
    return builder.gep(arrayobj.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def load(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Return the numbers from array[index] on, as they lie in memory; those without a sign as with one, unchecked."""
    signed = {types.uint8: types.int8, types.uint16: types.int16}
    vector = Vector(signed.get(array.dtype, array.dtype), LANES)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        address = address_of(context, builder, signature.args[0], *args)
        return builder.load(builder.bitcast(address, vector.llvm.as_pointer()), align=1)

    return vector(array, types.int64), generate


@intrinsic
def store(typing_context, array, index, vector):  # type: ignore[no-untyped-def]
    """Write a vector to array[index] and on."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(address, signature.args[2].llvm.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


@intrinsic
def gather(typing_context, array, indices):  # type: ignore[no-untyped-def]
    """Return array[index] for non-negative int32 indices; nothing is checked."""
    vector = Vector(array.dtype, LANES)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = arrayobj.make_array(signature.args[0])(context, builder, args[0]).data
        pointers = builder.gep(data, [args[1]], source_etype=vector.llvm.element)
        pointers.type = ir.VectorType(data.type, LANES)  # llvmlite takes indices for scalars
        flags = ir.VectorType(ir.IntType(1), LANES)
        kind = ir.FunctionType(vector.llvm, [pointers.type, ir.IntType(32), flags, vector.llvm])
        letter = "f" if isinstance(vector.llvm.element, ir.FloatType) else "i"
        name = f"llvm.masked.gather.v{LANES}{letter}32.v{LANES}p0"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        size = ir.Constant(ir.IntType(32), 4)
        return builder.call(function, [pointers, size, ir.Constant(flags, [1] * LANES), ir.Constant(vector.llvm, None)])

    return vector(array, indices), generate


def _splat(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, zeros)


@intrinsic
def splat(typing_context, number):  # type: ignore[no-untyped-def]
    """Return a number in all lanes."""
    vector = Vector(number, LANES)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _splat(builder, args[0], vector.llvm)

    return vector(number), generate


@intrinsic
def broadcast(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Return array[index] in all lanes; unlike ``splat(array[index])`` it does not look for negative indices."""
    vector = Vector(array.dtype, LANES)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        address = address_of(context, builder, signature.args[0], *args)
        return _splat(builder, builder.load(address), vector.llvm)

    return vector(array, types.int64), generate


def _broadcast_word(dtype: types.Type, words: int) -> Callable:
    @intrinsic
    def broadcast_word(typing_context, array, index):  # type: ignore[no-untyped-def]
        vector = Vector(dtype, LANES)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            address = address_of(context, builder, signature.args[0], *args)
            wide = _splat(builder, builder.load(address), ir.VectorType(ir.IntType(32), words))
            return builder.bitcast(wide, vector.llvm)

        return vector(array, types.int64), generate

    return broadcast_word


# A 32-bit word in all lanes is a plain load on x86, a byte or a half is not: arrays hold 4 or 2 copies in a word.
broadcast_bytes = _broadcast_word(types.int8, LANES // 4)
broadcast_halves = _broadcast_word(types.int16, LANES // 2)


def _instruction(name: str) -> Callable:
    @intrinsic
    def operation(typing_context, a, b):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return getattr(builder, name)(*args)

        return a(a, b), generate

    return operation


iadd, isub = _instruction("add"), _instruction("sub")
fadd, fsub, fmul, fdiv = (_instruction(name) for name in ("fadd", "fsub", "fmul", "fdiv"))
and_, or_, xor = _instruction("and_"), _instruction("or_"), _instruction("xor")
shl, lshr, ashr = _instruction("shl"), _instruction("lshr"), _instruction("ashr")


def _function(name: str, count: int) -> Callable:
    """Return an LLVM intrinsic of ``count`` vectors of one type."""

    def emit(builder: Any, args: Any) -> Any:
        vector = args[0].type
        letter, width = ("f", 32) if isinstance(vector.element, ir.FloatType) else ("f", 64)
        if isinstance(vector.element, ir.IntType):
            letter, width = "i", vector.element.width
        kind = ir.FunctionType(vector, [vector] * count)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{vector.count}{letter}{width}")
        return builder.call(function, args)

    if count == 1:

        @intrinsic
        def unary(typing_context, a):  # type: ignore[no-untyped-def]
            return a(a), lambda context, builder, signature, args: emit(builder, args)

        return unary
    if count == 2:

        @intrinsic
        def binary(typing_context, a, b):  # type: ignore[no-untyped-def]
            return a(a, b), lambda context, builder, signature, args: emit(builder, args)

        return binary

    @intrinsic
    def ternary(typing_context, a, b, c):  # type: ignore[no-untyped-def]
        return a(a, b, c), lambda context, builder, signature, args: emit(builder, args)

    return ternary


fma = _function("fma", 3)
popcount = _function("ctpop", 1)
smax, umax, smin = _function("smax", 2), _function("umax", 2), _function("smin", 2)
fabs = _function("fabs", 1)
floor, sqrt, rint = _function("floor", 1), _function("sqrt", 1), _function("rint", 1)


def _conversion(name: str, dtype: types.Type) -> Callable:
    @intrinsic
    def convert(typing_context, a):  # type: ignore[no-untyped-def]
        vector = Vector(dtype, a.lanes)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return getattr(builder, name)(args[0], vector.llvm)

        return vector(a), generate

    return convert


zext32, sext32 = _conversion("zext", types.int32), _conversion("sext", types.int32)
sext64, zext64 = _conversion("sext", types.int64), _conversion("zext", types.int64)
trunc8, trunc16 = _conversion("trunc", types.int8), _conversion("trunc", types.int16)
to_f64, to_f32 = _conversion("fpext", types.float64), _conversion("fptrunc", types.float32)
int_to_f64, int_to_f32 = _conversion("sitofp", types.float64), _conversion("sitofp", types.float32)
to_i32 = _conversion("fptosi", types.int32)  # of numbers within its range
as_i32, as_f32 = _conversion("bitcast", types.int32), _conversion("bitcast", types.float32)
as_i64, as_f64 = _conversion("bitcast", types.int64), _conversion("bitcast", types.float64)


def _selection(kind: str, sign: str) -> Callable:
    @intrinsic
    def choose(typing_context, a, b, then, otherwise):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.select(getattr(builder, kind)(sign, args[0], args[1]), args[2], args[3])

        return then(a, b, then, otherwise), generate

    return choose


# where_x(a, b, then, otherwise): lane by lane; comparisons with NaN are false
where_less, where_equal = _selection("fcmp_ordered", "<"), _selection("fcmp_ordered", "==")
where_same, where_below = _selection("icmp_signed", "=="), _selection("icmp_signed", "<")


def _reduction(name: str) -> Callable:
    """Return an LLVM intrinsic that makes one number of the lanes of an integer vector."""

    @intrinsic
    def reduce(typing_context, a):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            vector = args[0].type
            kind = ir.FunctionType(vector.element, [vector])
            full = f"llvm.vector.reduce.{name}.v{vector.count}i{vector.element.width}"
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, full), args)

        return a.dtype(a), generate

    return reduce


largest, smallest, any_bits = _reduction("smax"), _reduction("smin"), _reduction("or")


@intrinsic
def sign_bits(typing_context, a):  # type: ignore[no-untyped-def]
    """Return the signs of integer lanes as the lower bits of a uint64, the first lane lowest."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        zeros = ir.Constant(args[0].type, [0] * LANES)
        signs = builder.bitcast(builder.icmp_signed("<", args[0], zeros), ir.IntType(LANES))
        return signs if LANES == 64 else builder.zext(signs, ir.IntType(64))

    return types.uint64(a), generate


# The order of 32-bit lanes beside float64 lanes in which a half of every 64-bit lane needs no move across 128 bits:
# lanes of a register of columns and of the next one, in turns of two.
_TWO = 16 if LANES == 64 else 8  # float64 in two registers
WOVEN = [_TWO * (i // _TWO) + i % _TWO // 4 * 2 + i % 2 + i % 4 // 2 * (_TWO // 2) for i in range(LANES)]


def _halves(columns: list[int]) -> tuple[Callable, Callable]:
    """Return what takes upper halves of float64 lanes to lanes of these columns, and what joins halves from there."""

    @intrinsic
    def upper(typing_context, a):  # type: ignore[no-untyped-def]
        vector = Vector(types.int32, LANES)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            words = builder.bitcast(args[0], ir.VectorType(ir.IntType(32), 2 * LANES))
            odd = ir.Constant(vector.llvm, [2 * column + 1 for column in columns])
            return builder.shuffle_vector(words, ir.Constant(words.type, ir.Undefined), odd)

        return vector(a), generate

    @intrinsic
    def join(typing_context, low, high):  # type: ignore[no-untyped-def]
        vector = Vector(types.float64, LANES)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            order = [columns.index(half // 2) + half % 2 * LANES for half in range(2 * LANES)]
            words = builder.shuffle_vector(*args, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order))
            return builder.bitcast(words, vector.llvm)

        return vector(low, high), generate

    return upper, join


# high_words: sign, exponent and the top of the significand of a float64; join_words: float64 of lower and upper halves
high_words, join_words = _halves(list(range(LANES)))
woven_high_words, woven_join_words = _halves(WOVEN)


def _swapping(distance: int) -> Callable:
    """Return what exchanges the lanes whose numbers differ by a power of two."""

    @intrinsic
    def swap(typing_context, a):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            order = [(lane ^ distance) % a.lanes for lane in range(a.lanes)]
            undefined = ir.Constant(args[0].type, ir.Undefined)
            return builder.shuffle_vector(
                args[0], undefined, ir.Constant(ir.VectorType(ir.IntType(32), a.lanes), order)
            )

        return a(a), generate

    return swap


swap1, swap2, swap4, swap8, swap16, swap32 = (_swapping(1 << step) for step in range(6))


@intrinsic
def set_rounding(typing_context, mode):  # type: ignore[no-untyped-def]
    """Set the rounding of this thread's floating-point operations: TOWARD_ZERO or NEAREST_EVEN.

    Kernels that set TOWARD_ZERO set NEAREST_EVEN again before they return or call anything.
    """

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.set.rounding")
        builder.call(function, [builder.trunc(args[0], ir.IntType(32))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


# The columns of a panel whose bytes ``pack_bytes`` puts side by side
PACKED = [i % 4 * 16 + i // 4 for i in range(COLUMNS)] if LANES == 64 else list(range(COLUMNS))


@intrinsic
def pack_bytes(typing_context, numbers):  # type: ignore[no-untyped-def]
    """Return numbers of 0 to 255 in int32 lanes as bytes, in the order that ``bytes_shifted`` reads."""
    vector = Vector(types.int8, LANES)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if LANES == 16:
            return builder.trunc(args[0], vector.llvm)
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
        packed = a.dtype == types.int8 and LANES == 64
        words = ir.VectorType(ir.IntType(32), LANES // 4) if packed else a.llvm
        # the same in each 16 lanes, so of words of four bytes
        order = ir.Constant(ir.VectorType(ir.IntType(32), words.count), WOVEN[: words.count])
        woven = builder.shuffle_vector(builder.bitcast(args[0], words), ir.Constant(words, ir.Undefined), order)
        return builder.bitcast(woven, a.llvm)

    return a(a), generate


def _bytes_shifted(shift: int) -> Callable:
    """Return what makes int32 lanes of packed bytes, unsigned and shifted to the left: two instructions a register.

    16 bytes lie in order; 64 lie so that words shifted by 0, 8, 16 and 24 have them in order, four registers of words.
    """

    @intrinsic
    def widen(typing_context, a):  # type: ignore[no-untyped-def]
        vector = Vector(types.int32, LANES)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            if LANES == 16:
                wide = builder.zext(args[0], vector.llvm)
                return builder.shl(wide, ir.Constant(vector.llvm, [shift] * LANES))
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
