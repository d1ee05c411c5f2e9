# SPDX-License-Identifier: Apache-2.0
"""Units that fast paths of the CUDA engine take, and what they leave of a product."""

from dataclasses import replace
from typing import NamedTuple

from fmtsim import Datapath, get_unit
from fmtsim.cuda.gemm.engine import BLOCK_SCALED, FMA_CHAIN, FP64_FMA, FP64_MMA
from fmtsim.cuda.gemm.job import FastPath
from fmtsim.formats.element import FloatFormat
from fmtsim.rounding.modes import Rounding
from tests.support.gemm_engine import gemm_spec


def custom(exponent_bits: int, mantissa_bits: int) -> FloatFormat:
    name = f"e{exponent_bits}m{mantissa_bits}"
    return FloatFormat(name=name, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)


class Case(NamedTuple):
    """A unit that a path takes; left: tiles of SHAPE that it leaves of normal, sparse and special numbers."""

    path: FastPath
    unit: Datapath
    a: str
    b: str | None = None
    left: tuple[int, int, int] = (0, 0, 1)

    @property
    def spec(self):
        return gemm_spec(self.unit, self.a, self.b)


def unit(name: str, a: str, b: str | None = None) -> Datapath:
    return get_unit(name).mode(a, b or a, "fp32")


E8M13 = custom(8, 13)
FMA = Datapath(block=1, fraction_bits=None, rounding="nearest_even")
HALF = Datapath(block=16, fraction_bits=25, min_exponent=-133, rounding="nearest_even")
NEAREST = replace(HALF, term_rounding="nearest_even")
EIGHT = Datapath(block=32, fraction_bits=13, accumulator=E8M13)
NVF4 = Datapath(block=64, fraction_bits=35, group=16, scale="ue4m3", scale_block=16)
MXF4 = replace(NVF4, scale="e8m0", scale_block=32)
ALL = (0, 0, 0)


def chain(acc, fmt: str, *left, **fields) -> Case:
    return Case(FMA_CHAIN, replace(FMA, accumulator=acc, **fields), fmt, None, left or (0, 0, 1))


def drawn(bits: int, **options) -> Rounding:
    return Rounding(mode="stochastic", random_bits=bits, **options)


CASES = {
    "chain fp16": chain("fp16", "fp16", *ALL),
    "chain bf16": chain("bf16", "bf16", *ALL),
    "chain fp32": chain("fp32", "bf16", *ALL),
    "chain fp64": chain("fp64", "fp64", *ALL),
    "chain e6m9 in float32": chain(custom(6, 9), "e4m3"),
    "chain e8m10 in float64": chain(custom(8, 10), "bf16"),
    "chain fp16 of bf16": chain("fp16", "bf16"),
    "chain of blocks of 4": chain("fp32", "e4m3", block=4),
    "chain of blocks of 16": chain("fp32", "e4m3", block=16),
    "fp64 bfloat16 sums": Case(FP64_FMA, replace(HALF, accumulator="bf16"), "bf16"),
    "fp64 float16 sums": Case(FP64_FMA, replace(HALF, accumulator="fp16"), "fp16"),
    "fp64 truncated": Case(
        FP64_FMA, replace(HALF, accumulator="fp16", fraction_bits=13, rounding="toward_zero"), "bf16"
    ),
    "fp64 stochastic": Case(FP64_FMA, replace(HALF, accumulator="bf16", rounding="stochastic"), "bf16"),
    "fp64 down": Case(
        FP64_FMA, replace(HALF, term_rounding="down", block=32, fraction_bits=13, accumulator=E8M13), "e4m3"
    ),
    "fp64 terms to nearest": Case(FP64_FMA, replace(NEAREST, min_exponent=None), "bf16"),
    "fp64 terms to nearest, few bits": Case(FP64_FMA, replace(NEAREST, fraction_bits=3, accumulator="fp16"), "fp16"),
    "fp64 terms away from zero": Case(FP64_FMA, replace(HALF, term_rounding="nearest_away", rounding="up"), "bf16"),
    "fp64 several records": Case(FP64_FMA, replace(HALF, block=40, fraction_bits=13, min_exponent=3), "bf16"),
    "fp64 scales": Case(FP64_FMA, replace(HALF, block=32, fraction_bits=20, scale="ue4m3", scale_block=16), "e4m3"),
    "tensor core e4m3": Case(FP64_MMA, unit("hopper.wgmma", "e4m3"), "e4m3"),
    "tensor core e5m2": Case(FP64_MMA, unit("hopper.wgmma", "e5m2"), "e5m2"),
    "tensor core bf16": Case(FP64_MMA, unit("hopper.wgmma", "bf16"), "bf16"),
    "tensor core fp16": Case(FP64_MMA, unit("hopper.wgmma", "fp16"), "fp16"),
    "tensor core mx": Case(FP64_MMA, get_unit("blackwell.tcgen05.mxf8f6f4").mode("e4m3", "e4m3"), "e4m3"),
    "fp64 e4m3 e5m2": Case(FP64_FMA, EIGHT, "e4m3", "e5m2"),
    "fp64 blocks of 5": Case(FP64_FMA, replace(EIGHT, block=5, fraction_bits=10), "e4m3"),
    "block scaled nvf4": Case(BLOCK_SCALED, NVF4, "e2m1", None, ALL),
    "block scaled mxf4": Case(BLOCK_SCALED, MXF4, "e2m1", None, ALL),
}
RARER = {
    "chain fp16 of e5m2": chain("fp16", "e5m2", *ALL),
    "chain bf16 of e4m3": chain("bf16", "e4m3", *ALL),
    "chain fp32 of fp32": chain("fp32", "fp32", *ALL),
    "chain e5m8": chain(custom(5, 8), "e4m3"),
    "chain e8m13": chain(E8M13, "fp16"),
    "chain e4m7": chain(custom(4, 7), "e4m3"),
    **{
        f"chain of blocks of {block}, {fmt}, {acc}": chain(acc, fmt, block=block)
        for block in (2, 3, 24, None)
        for fmt in ("e4m3", "bf16", "fp16")
        for acc in ("fp32", "bf16", "fp16", E8M13)
    },
    "fp64 terms to nearest, longest integers": Case(
        FP64_FMA, replace(NEAREST, block=32, fraction_bits=24), "fp16"
    ),
    "fp64 terms to nearest, truncated": Case(
        FP64_FMA, replace(NEAREST, block=5, fraction_bits=0, rounding="toward_zero"), "e4m3"
    ),
    "fp64 terms to nearest, high alignment": Case(
        FP64_FMA, replace(NEAREST, min_exponent=10, fraction_bits=8, block=4), "e5m2"
    ),
    "fp64 terms to nearest, stochastic": Case(
        FP64_FMA, replace(NEAREST, fraction_bits=6, accumulator="bf16", rounding="stochastic"), "bf16"
    ),
    "fp64 terms to nearest, another format": Case(
        FP64_FMA, replace(NEAREST, operand="fp16", fraction_bits=10), "bf16"
    ),
    "fp64 terms away from zero, several records": Case(
        FP64_FMA, replace(NEAREST, term_rounding="nearest_away", block=64, fraction_bits=9), "fp16"
    ),
    "fp64 to odd": Case(FP64_FMA, replace(HALF, accumulator="bf16", rounding="to_odd"), "fp16"),
    "fp64 sums away from zero": Case(
        FP64_FMA, replace(HALF, accumulator="fp16", rounding="nearest_away", block=1), "e5m2"
    ),
    "fp64 sums down": Case(FP64_FMA, replace(HALF, rounding="down", block=3), "tf32"),
    "fp64 ties toward zero": Case(
        FP64_FMA, replace(HALF, accumulator="bf16", rounding="nearest_toward_zero"), "e4m3"
    ),
    "fp64 float32 sums": Case(FP64_FMA, HALF, "tf32"),
    "fp64 truncated float32 sums": Case(FP64_FMA, replace(HALF, rounding="toward_zero"), "bf16"),
    "fp64 any alignment": Case(FP64_FMA, replace(HALF, min_exponent=None, block=5), "fp16"),
    "fp64 high alignment": Case(FP64_FMA, replace(HALF, min_exponent=10, fraction_bits=13), "bf16"),
    "fp64 few exponents": Case(
        FP64_FMA, replace(HALF, block=4, accumulator=custom(5, 9), rounding="toward_zero"), "e5m2"
    ),
    "fp64 operands of another format": Case(FP64_FMA, replace(HALF, operand="fp16"), "bf16"),
    "fp64 power-of-two scales": Case(
        FP64_FMA, replace(HALF, block=32, fraction_bits=20, scale="e8m0", scale_block=32), "bf16"
    ),
    "fp64 13 bits": Case(FP64_FMA, replace(HALF, rounding=drawn(13)), "bf16"),
    "fp64 variant b": Case(FP64_FMA, replace(HALF, accumulator="fp16", rounding=drawn(8, variant="b")), "fp16"),
    "fp64 variant c": Case(FP64_FMA, replace(HALF, rounding=drawn(8, variant="c")), "bf16"),
    "fp64 shared words": Case(FP64_FMA, replace(HALF, rounding=drawn(8, layout="cvt_rs")), "bf16"),
    **{
        f"tensor core {name} {fmt}": Case(FP64_MMA, unit(name, fmt), fmt)
        for name, fmt in (
            ("hopper.wgmma", "tf32"), ("hopper.mma", "e4m3"), ("blackwell.tcgen05", "e4m3"), ("ampere.mma", "fp16"),
            ("blackwell.tcgen05", "e2m1"), ("ampere.mma", "tf32"), ("ada.mma", "e5m2"), ("volta.mma", "fp16"),
        )
    },
    **{
        f"tensor core, blocks of {block}, {bits} bits, {term}": Case(
            FP64_MMA, Datapath(block=block, fraction_bits=bits, term_rounding=term), "bf16", "e4m3"
        )
        for block in (1, 2, 4, 5, 7, 8, 12, 16, 20, 24, 32, 40, 48, 64)
        for bits, accumulator in ((9, E8M13), (25, "fp32"), (33, "fp32"))
        for term in ("toward_zero", "down")
    },
    "tensor core, fractional scales": Case(
        FP64_MMA, Datapath(block=16, fraction_bits=20, scale="ue4m3", scale_block=16), "e2m1"
    ),
}  # fmt: skip
PATHS = {  # a case of each path
    name: CASES[case]
    for name, case in (
        ("chain", "chain e8m10 in float64"), ("fp64", "fp64 bfloat16 sums"), ("tensor core", "tensor core e4m3"),
        ("block scaled", "block scaled nvf4"),
    )
}  # fmt: skip
