# SPDX-License-Identifier: Apache-2.0
"""The matrix units of GPUs and CPUs: the only table of their constants, each with what stands behind it.

Sources, by the short names used below:
    vectors: recorded dot products of the MATLAB-tensor-core project (V100, A100, A2, L40S, RTX 1000 Ada, H100, H200,
        B200), 5000 for each GPU and format, all reproduced; their data do not reach the lower bound of E.
    H200: library calls and probes recorded on an NVIDIA H200, docs/evidence.md.
    MMA-Sim: the model of arXiv:2511.10909, which its authors compared with hardware.
    K&M: Khattak and Mikaitis, arXiv:2512.07004.
    Arm ARM: DDI 0487 M.a.a, section J1.3, functions FP8DotAddFP and FPRound_FP8.
    SDM: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, pseudocode of the instruction.
    Bochs: bochs-emu/Bochs 783b58f, cpu/avx.
"""

from collections.abc import Iterator
from dataclasses import replace

from fmtsim.formats.element import FloatFormat
from fmtsim.formats.registry import get_format
from fmtsim.gemm.units.unit import Accumulate, Mode, Strength, Unit
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.datapath import (
    FP32,
    Arithmetic,
    Datapath,
    FmaDatapath,
    IntegerDatapath,
    PairwiseDatapath,
    TwoStageDatapath,
)


def _float(name: str) -> FloatFormat:
    fmt = get_format(name)
    assert isinstance(fmt, FloatFormat)
    return fmt


E8M13 = FloatFormat(name="e8m13", exponent_bits=8, mantissa_bits=13)  # what FP8 sums of Ada and Hopper keep
FP16 = _float("fp16")
NEAREST = Rounding(mode="nearest_even")

FP8 = ("e4m3", "e5m2")
F8F6F4 = (*FP8, "e3m2", "e2m3", "e2m1")  # kind::f8f6f4 of tcgen05
FNUZ = ("e4m3fnuz", "e5m2fnuz")  # FP8 of CDNA3: no Inf, no -0
INT8 = ("int8", "int8_full")

FMA32 = Datapath(block=1, fraction_bits=None, rounding=NEAREST, signed_zero=True)  # one rounding a product
FMA64 = replace(FMA32, accumulator=_float("fp64"))
_BOUND = "lower bound of E by K&M, MMA-Sim has -126"  # E: the maximum exponent that a block is aligned to
_CLAMPS = "PTX ISA, mma .satfinite; H200: torch._int_mm gives 2^31 - 1 for 2^18 products of 127^2"


def _mode(inputs: tuple[str, ...] | None, sums: Accumulate, path: Arithmetic, strength: Strength, why: str) -> Mode:
    return Mode(inputs=inputs, accumulate=sums, datapath=path, strength=strength, evidence=why)


def _half(path: Datapath, min_exponent: int | None = None) -> Datapath:
    """Return a path that sums in binary16 instead, with one round-to-nearest-even a block."""
    return replace(path, accumulator=FP16, rounding=NEAREST, min_exponent=min_exponent)


def _double(strength: Strength = "reported", why: str = "PTX ISA, mma.f64: one rounding a product") -> Mode:
    return _mode(("fp64",), "fp64", FMA64, strength, why)


def _integer(strength: Strength = "reported", why: str = "PTX ISA, mma: wraps unless .satfinite is given") -> Mode:
    return _mode(INT8, "int32", IntegerDatapath(), strength, why)


def _volta_to_ada() -> Iterator[Unit]:
    """Yield the units whose blocks hold 8 (Volta) or 16 bytes of each operand."""
    volta = Datapath(block=4, fraction_bits=23)  # terms keep the fraction bits of float32
    turing = Datapath(block=8, fraction_bits=24)  # one bit more
    yield Unit(
        name="volta.mma",
        description="NVIDIA V100 (sm_70): mma.sync, HMMA.884.",
        modes=(
            _mode(("fp16",), "fp32", volta, "recorded", "vectors of V100"),
            _mode(("fp16",), "fp16", _half(volta, -19), "recorded", "vectors of V100; lower bound of E by K&M"),
        ),
    )
    yield Unit(
        name="turing.mma",
        description="NVIDIA Turing (sm_75): mma.sync.",
        modes=(
            _mode(("fp16",), "fp32", turing, "compared", "MMA-Sim"),
            _mode(("fp16",), "fp16", _half(turing, -20), "compared", "MMA-Sim; lower bound of E by K&M"),
            _integer(),
        ),
    )
    yield Unit(
        name="ampere.mma",
        description="NVIDIA Ampere (sm_80, sm_86): mma.sync, HMMA.",
        modes=(*_ampere("A100 and A2"), _double(), _integer()),
    )
    fp8 = Datapath(block=16, fraction_bits=13, accumulator=E8M13)  # the sum itself is truncated to 13 bits, too
    yield Unit(
        name="ada.mma",
        description="NVIDIA Ada (sm_89): mma.sync; FP8 keeps 13 bits (QMMA).",
        modes=(
            *_ampere("L40S and RTX 1000 Ada"),
            _mode(FP8, "fp32", fp8, "recorded", "vectors of L40S and RTX 1000 Ada"),
            _mode(FP8, "fp16", _half(fp8), "recorded", "vectors of RTX 1000 Ada"),
            _double(),
            _integer(),
        ),
    )


def _ampere(cards: str) -> tuple[Mode, ...]:
    path = Datapath(block=8, fraction_bits=24, min_exponent=-132)  # 8 products of 16 bits: 16 bytes an operand
    return (
        _mode(("fp16",), "fp32", path, "recorded", f"vectors of {cards}"),
        _mode(("bf16",), "fp32", path, "recorded", f"vectors of {cards}; {_BOUND}"),
        _mode(("tf32",), "fp32", replace(path, block=4), "recorded", f"vectors of {cards}; {_BOUND}"),  # of 32 bits
        _mode(("fp16",), "fp16", _half(path, -20), "recorded", f"vectors of {cards}; lower bound of E by K&M"),
    )


def _wide(strength: Strength, fp16: str, bf16: str, tf32: str, half: str) -> tuple[Mode, ...]:
    """Return the 16-bit and TF32 modes of Hopper and later."""
    path = Datapath(block=16, fraction_bits=25, min_exponent=-133)  # 16 products of 16 bits: 32 bytes an operand
    return (
        _mode(("fp16",), "fp32", path, strength, fp16),
        _mode(("bf16",), "fp32", path, strength, bf16),
        _mode(("tf32",), "fp32", replace(path, block=8), strength, tf32),  # of 32 bits: the same 32 bytes
        _mode(("fp16",), "fp16", _half(path, -21), strength, half),
    )


def _fp8_by_halves(fp32: str, fp16: str) -> tuple[Mode, Mode]:
    """Return FP8 on a unit of 16-bit inputs: two instructions on pairs of k, the addend added last."""
    # operand: ptxas converts FP8 to binary16, so that subnormals become normal. promote_every: both instructions of 16
    # products start at zero, and the addend follows.
    path = Datapath(block=16, fraction_bits=25, min_exponent=-133, paired=True, operand=FP16, promote_every=32)
    return (
        _mode(FP8, "fp32", path, "recorded", fp32),
        _mode(FP8, "fp16", _half(path, -21), "recorded", fp16),
    )


def _hopper() -> Iterator[Unit]:
    probes = "probes on H200 give the lower bound of E"
    yield Unit(
        name="hopper.mma",
        description="NVIDIA Hopper (sm_90): mma.sync; FP8 becomes two instructions of 16-bit inputs.",
        modes=(
            *_wide("recorded", "vectors of H100 and H200", f"vectors of H100 and H200; {probes}",
                   f"vectors of H100 and H200 (K = 4), blocks of 8 as in wgmma; {probes}",  # K = 4 fills half a block
                   f"vectors of H100 and H200; {probes}"),
            *_fp8_by_halves("vectors of H100 and H200; the order by the fp16 sums", "vectors of H100 and H200"),
            _double("recorded", "H200: a probe of mma.sync.m16n8k16.f64 .rz and .rn"),
            _integer(),
        ),
    )  # fmt: skip
    fp8 = Datapath(block=32, fraction_bits=13, accumulator=E8M13)  # 32 bytes an operand; F=13 as on Ada
    yield Unit(
        name="hopper.wgmma",
        description="NVIDIA Hopper (sm_90a): wgmma, which cuBLAS and CUTLASS use; FP8 keeps 13 bits (QGMMA).",
        modes=(
            *_wide("recorded", "H200: torch.mm", f"H200: torch.mm; {probes}", f"H200: torch.mm; {probes}",
                   f"H200: torch.mm with fp16 accumulation (mma.sync); {probes}"),
            _mode(FP8, "fp32", fp8, "recorded", "H200: torch._scaled_mm; vectors of H100 and H200"),
            _mode(FP8, "fp16", _half(fp8), "compared", "MMA-Sim"),
            _integer(  # wraps where torch._int_mm clamps: the instruction, not the library
                why="PTX ISA, wgmma: wraps unless .satfinite is given. cuBLASLt's torch._int_mm clamps on an H200: "
                "target h200 has int8.satfinite"
            ),
        ),
    )  # fmt: skip


def _blackwell() -> Iterator[Unit]:
    same = "equal to the model of Hopper"
    yield Unit(
        name="blackwell.mma",
        description="NVIDIA Blackwell B200 (sm_100): mma.sync; FP8 becomes two instructions of 16-bit inputs.",
        modes=(
            *_wide("recorded", "vectors of B200", f"vectors of B200; {_BOUND}",
                   f"vectors of B200 (K = 4), blocks of 8 by MMA-Sim; {_BOUND}",  # K = 4 fills half a block
                   "vectors of B200; lower bound of E by K&M"),
            *_fp8_by_halves("vectors of B200; the order by the fp16 sums", "vectors of B200"),
            _double(),
            _integer(),
        ),
    )  # fmt: skip
    f8f6f4 = Datapath(block=32, fraction_bits=25)  # no lower bound of E: their products lie far above it
    narrow = (
        _mode(F8F6F4, "fp32", f8f6f4, "compared", "MMA-Sim; 25 bits also measured in DeepGEMM issue 176"),
        _mode(F8F6F4, "fp16", _half(f8f6f4), "compared", "MMA-Sim"),
    )
    bounded = f"MMA-Sim, {same}; {_BOUND}"
    yield Unit(
        name="blackwell.tcgen05",
        description="NVIDIA Blackwell B200 (sm_100a): tcgen05.mma of kinds f16, tf32, f8f6f4 and i8.",
        modes=(*_wide("compared", f"MMA-Sim, {same}", bounded, bounded, bounded), *narrow, _integer()),
    )
    yield Unit(
        name="rtx_blackwell.mma",
        description="NVIDIA RTX Blackwell (sm_120): mma.sync, HMMA and QMMA.",
        modes=(*_wide("compared", f"MMA-Sim, {same}", bounded, bounded, bounded), *narrow, _double(), _integer()),
    )


def _block_scaled() -> Iterator[Unit]:
    """Yield the block-scaled kinds of tcgen05.mma, whose scales the unit itself multiplies with."""
    e8m0, ue4m3 = _float("e8m0"), _float("ue4m3")
    # The scales take part in E, which reaches its lower bound with them.
    mx = Datapath(block=32, fraction_bits=25, min_exponent=-133, scale=e8m0, scale_block=32)
    yield Unit(
        name="blackwell.tcgen05.mxf8f6f4",
        description="NVIDIA Blackwell B200 (sm_100a): tcgen05.mma kind::mxf8f6f4, one E8M0 scale every 32.",
        modes=(_mode(F8F6F4, "fp32", mx, "compared", f"MMA-Sim; {_BOUND}"),),
    )
    # group: 16 products are added exactly, then aligned by the exponents of their scales alone, to 35 bits.
    four = Datapath(block=64, fraction_bits=35, group=16, scale=e8m0, scale_block=32)
    yield Unit(
        name="blackwell.tcgen05.mxf4",
        description="NVIDIA Blackwell B200 (sm_100a): tcgen05.mma kind::mxf4, one E8M0 scale every 32.",
        modes=(_mode(("e2m1",), "fp32", four, "compared", "MMA-Sim"),),
    )
    yield Unit(
        name="blackwell.tcgen05.nvf4",
        description="NVIDIA Blackwell B200 (sm_100a): tcgen05.mma kind::mxf4nvf4, one UE4M3 or E8M0 scale every 16.",
        modes=(
            _mode(("e2m1",), "fp32", replace(four, scale=ue4m3, scale_block=16), "compared", "MMA-Sim"),
            _mode(("e2m1",), "fp32", replace(four, scale_block=16), "compared", "MMA-Sim"),
        ),
    )


def _cdna() -> Iterator[Unit]:
    fma = "AMD matrix instruction calculator: fused multiply-adds in order"
    plain = (_mode(("fp32",), "fp32", FMA32, "reported", fma), _integer("reported", "AMD CDNA ISA"))
    double = _mode(("fp64",), "fp64", FMA64, "reported", fma)
    dot4 = Datapath(block=4, fraction_bits=None, rounding=NEAREST)  # None: exact, one rounding a block
    yield Unit(
        name="cdna1.mfma",
        description="AMD MI100 (gfx908): v_mfma; exact dot products, rounded once.",
        modes=(
            _mode(("fp16",), "fp32", dot4, "reported", "K&M and arXiv:2511.10909v2; MMA-Sim's code adds in pairs"),
            _mode(("bf16",), "fp32", replace(dot4, block=2), "reported", "K&M and arXiv:2511.10909v2"),
            *plain,
        ),
    )
    flushed = "MMA-Sim; subnormal inputs and results become zero"
    yield Unit(
        name="cdna2.mfma",
        description="AMD MI200 (gfx90a): v_mfma with fp16 and bf16_1k.",
        modes=(_mode(("fp16",), "fp32", PairwiseDatapath(block=4), "compared", flushed),
               _mode(("bf16",), "fp32", PairwiseDatapath(block=4), "compared", flushed), *plain, double),
    )  # fmt: skip
    yield Unit(
        name="cdna2.mfma.bf16",
        description="AMD MI200 (gfx90a): v_mfma of the older bf16 form, without _1k.",
        modes=(_mode(("bf16",), "fp32", PairwiseDatapath(block=2), "compared", flushed),),
    )
    finite = "MMA-Sim, finite data; Inf and NaN across blocks are unverified"
    eight = TwoStageDatapath(block=8)  # the products of a block first, then their sum and the addend
    yield Unit(
        name="cdna3.mfma",
        description="AMD MI300 (gfx942): v_mfma; FP8 is of the fnuz kind, xf32 stands for TF32.",
        modes=(
            _mode(("fp16",), "fp32", eight, "compared", finite),
            _mode(("bf16",), "fp32", eight, "compared", finite),
            _mode(("tf32",), "fp32", replace(eight, block=4), "compared", finite),
            _mode(FNUZ, "fp32", TwoStageDatapath(block=16, parity=True), "compared", finite),  # even and odd k apart
            *plain,
            double,
        ),
    )


def _arm() -> Iterator[Unit]:
    """Yield Arm's FP8 dot products: exact blocks of products and the addend, float32 or binary16, rounded once."""
    lscale = "Arm ARM; a scale is 2^-LSCALE, 2^0 to 2^-127 (binary16: 2^-15), the same for all products"
    saturated = _float("e8m23_saturate"), _float("e5m10_saturate")
    variants = (  # FPMR.OSM makes two units of each
        ("", "sums overflow to Inf (FPMR.OSM = 0)", (FP32, FP16)),
        (".osm", "finite sums saturate (FPMR.OSM = 1)", saturated),
    )
    for name, instructions, blocks in (("arm.fdot", "FDOT and FMOPA", (4, 2)), ("arm.fmmla", "FMMLA", (8, 4))):
        text = f"Arm A-profile: {instructions} of FP8, {blocks[0]} products to float32, {blocks[1]} to binary16"
        for suffix, overflow, sums in variants:
            modes = []
            for scale, why in ((None, "Arm ARM"), (_float("e8m0"), lscale)):  # FPMR.LSCALE: a scale inside the unit
                wide, half = (
                    replace(FMA32, block=block, accumulator=fmt, scale=scale, scale_block=32 if scale else 0)
                    for block, fmt in zip(blocks, sums, strict=True)
                )
                modes += [_mode(FP8, "fp32", wide, "reported", why), _mode(FP8, "fp16", half, "reported", why)]
            yield Unit(name=f"{name}{suffix}", description=f"{text}; {overflow}.", modes=tuple(modes))


def _x86() -> Iterator[Unit]:
    pairs = FmaDatapath()  # of two products that of the odd k first
    tiles = FmaDatapath(block=32, parity=True)  # a row of a tile: 64 bytes; sums of even and of odd k apart
    yield Unit(
        name="x86.vdp",
        description="x86: VDPBF16PS (AVX512_BF16) and VDPPHPS (AVX10.2), two products an instruction.",
        modes=(
            _mode(("bf16",), "fp32", pairs, "recorded", "AMD EPYC (Zen 4), VDPBF16PS; SDM"),
            _mode(("fp16",), "fp32", pairs, "compared", "Bochs; that binary16 subnormals are no zeros is unverified"),
        ),
    )
    yield Unit(
        name="x86.amx",
        description="Intel AMX: TDPBF16PS and TDPFP16PS, 32 products an instruction.",
        modes=(
            _mode(("bf16",), "fp32", tiles, "compared", "Bochs; SDM"),
            _mode(("fp16",), "fp32", tiles, "compared", "Bochs; SDM"),
        ),
    )


def _plain() -> Iterator[Unit]:
    """Yield arithmetic that is given by its definition."""
    exact = Datapath(block=None, fraction_bits=None, rounding=NEAREST)  # all of K at once, all bits
    yield Unit(
        name="exact",
        description="The exact sum of all products and the addend, rounded once to float32, or to float64 (fp64).",
        modes=(
            _mode(None, "fp32", exact, "defined", "no unit is better"),
            _mode(None, "fp64", replace(exact, accumulator=_float("fp64")), "defined", "no unit is better"),
        ),
    )
    yield Unit(
        name="fp32_fma",
        description="A chain of IEEE 754 fused multiply-adds in float32, k in order.",
        modes=(_mode(None, "fp32", FMA32, "defined", "IEEE 754, fusedMultiplyAdd"),),
    )
    yield Unit(
        name="fp64_fma",
        description="A chain of IEEE 754 fused multiply-adds in float64, k in order.",
        modes=(_mode(None, "fp64", FMA64, "defined", "IEEE 754, fusedMultiplyAdd"),),
    )
    yield Unit(
        name="int8",
        description="Exact products of 8-bit integers, an int32 sum modulo 2^32.",
        modes=(_integer("recorded", "H200: torch._int_mm within int32, where nothing wraps; beyond it by definition"),),
    )
    yield Unit(
        name="int8.satfinite",
        description="Exact products of 8-bit integers, an int32 sum clamped after each instruction of 32 products.",
        modes=(_mode(INT8, "int32", IntegerDatapath(saturate=True), "reported", _CLAMPS),),
    )


def units() -> Iterator[Unit]:
    """Yield the catalogue, oldest machine of each vendor first, then the units that no machine claims."""
    for group in (_volta_to_ada, _hopper, _blackwell, _block_scaled, _cdna, _arm, _x86, _plain):
        yield from group()
