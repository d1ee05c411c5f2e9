# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
# ruff: noqa: E501 - kernels in strings, and a case a line
"""The product units from PTX: each type and form of wgmma and mma.sync on operands as they lie, and other PTX by hand."""

import torch

from tools.kernels.cases import Case, normal, patterns, special
from tools.kernels.instruction_cases import _HEAD

_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
          "f64": torch.float64}  # fmt: skip
_CASES: list[Case] = []


def cases() -> list[Case]:
    """Return every case, in order."""
    return list(_CASES)


def _case(name, ptx, arguments, block=(128,), grid=(1,), **options):
    _CASES.append(Case(name=f"unit_{name}", kernel=_HEAD + ptx, grid=grid, make_arguments=arguments, options=dict(block=block, **options),
                       kind="ptx", entry="unit"))  # fmt: skip


def _operands(seed: int, nbytes: int, kind: str, wild: bool) -> torch.Tensor:
    if wild or kind not in _TYPES:
        return patterns(seed, nbytes // 4, dtype=torch.int32)
    dtype = _TYPES[kind]
    size = nbytes // dtype.itemsize
    return (
        normal(seed, size, dtype=dtype) if dtype == torch.float64 else normal(seed, size, dtype=torch.float32).to(dtype)
    ).view(torch.int32)


def _accumulators(seed: int, count: int, kind: str, wild: bool) -> torch.Tensor:
    if kind == "s32":
        return patterns(seed, count, dtype=torch.int32) >> (0 if wild else 12)
    if kind == "f16":
        return (special(seed, 2 * count, torch.float16) if wild else normal(seed, 2 * count, dtype=torch.float16)).view(
            torch.int32
        )
    if kind == "f64":
        return normal(seed, count, dtype=torch.float64)
    return special(seed, count) if wild else normal(seed, count, dtype=torch.float32)


# swizzle: (bits 62-63, leading, stride) of K-major operands; of MN-major operands of 16 bits
_K_MAJOR = {0: (128, 256), 32: (16, 256), 64: (16, 512), 128: (16, 1024)}
_MN_MAJOR = {32: (512, 256), 64: (1024, 512), 128: (2048, 1024)}
_SWIZZLE = {0: 0, 128: 1, 64: 2, 32: 3}
_TILE = 49152  # bytes of shared memory; A begins at 0, B at 8192


def _wgmma(
    n, d, a, b, swizzle=128, registers=False, trans=(0, 0), scale=(1, 1), fresh=False, satfinite=False, wild=False
):
    k = {"tf32": 8, "bf16": 16, "f16": 16}.get(a, 32)
    count = n // 2 if d != "f16" else n // 4
    unit = "r" if d in ("s32", "f16") else "f"
    kind = f"m64n{n}k{k}{'.satfinite' * satfinite}.{d}.{a}.{b}"
    tail = "" if d == "s32" else f", {scale[0]}, {scale[1]}"
    if k == 16:
        tail += f", {trans[1]}" if registers else f", {trans[0]}, {trans[1]}"
    constants = []
    for at, across in ((0, trans[0]), (8192, trans[1])):
        leading, stride = (_MN_MAJOR if across else _K_MAJOR)[swizzle]
        constants.append(at >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | _SWIZZLE[swizzle] << 62)
    lines = [f"ld.global.b32 %{unit}d{i}, [%q2+{i * 512}];" for i in range(count)]
    stores = [f"st.global.b32 [%q3+{i * 512}], %{unit}d{i};" for i in range(count)]
    left = "{%ra0, %ra1, %ra2, %ra3}" if registers else "%q4"
    ptx = f"""
.shared .align 1024 .b8 tile[{_TILE}];
.visible .entry unit(.param .u64 x, .param .u64 c, .param .u64 y)
{{
.reg .pred %p<4>; .reg .b32 %r<12>; .reg .b32 %ra<4>; .reg .b64 %q<8>; .reg .b32 %rd<{count}>; .reg .f32 %fd<{count}>;
mov.u32 %r0, %tid.x; ld.param.u64 %q1, [x]; ld.param.u64 %q2, [c]; ld.param.u64 %q3, [y];
mul.wide.u32 %q0, %r0, 4; add.s64 %q2, %q2, %q0; add.s64 %q3, %q3, %q0; mul.wide.u32 %q0, %r0, 16; add.s64 %q1, %q1, %q0;
ld.global.v4.b32 {{%ra0, %ra1, %ra2, %ra3}}, [%q1+40960];
mov.u32 %r1, tile; shl.b32 %r2, %r0, 4; add.s32 %r2, %r2, %r1; mov.u32 %r3, 0;
fill:
ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%q1]; st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}};
add.s64 %q1, %q1, 2048; add.s32 %r2, %r2, 2048; add.s32 %r3, %r3, 1; setp.lt.s32 %p1, %r3, {_TILE // 2048}; @%p1 bra fill;
{chr(10).join(lines)}
fence.proxy.async.shared::cta; bar.sync 0;
shr.u32 %r1, %r1, 4; cvt.u64.u32 %q0, %r1; add.s64 %q4, %q0, {constants[0] - (constants[0] >> 63 << 64)};
add.s64 %q5, %q0, {constants[1] - (constants[1] >> 63 << 64)};
setp.ne.b32 %p2, {int(not fresh)}, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.{kind} {{{", ".join(f"%{unit}d{i}" for i in range(count))}}}, {left}, %q5, %p2{tail};
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
{chr(10).join(stores)}
ret;
}}
"""
    words = (
        [f"n{n}", d, a, b, f"s{swizzle}"] + ["registers"] * registers + [f"t{trans[0]}{trans[1]}"] * (trans != (0, 0))
    )
    words += (
        [f"scale{scale[0]}{scale[1]}".replace("-", "m")] * (scale != (1, 1))
        + ["fresh"] * fresh
        + ["satfinite"] * satfinite
        + ["wild"] * wild
    )

    def arguments():
        x = _operands(1, _TILE, a, wild)
        if a != b:
            x[2048:10240] = _operands(2, 32768, b, wild)
        return [x, _accumulators(3, 128 * count, d, wild), torch.zeros(128 * count, dtype=torch.int32)]

    _case("_".join(["wgmma", *words]), ptx, arguments)


for _a in ("bf16", "f16"):
    for _n in (8, 40, 64, 256):
        _wgmma(_n, "f32", _a, _a)
    for _s in (0, 32, 64):
        _wgmma(32, "f32", _a, _a, swizzle=_s)
    for _s in (32, 64, 128):
        _wgmma(64, "f32", _a, _a, swizzle=_s, trans=(1, 1))
    _wgmma(128, "f32", _a, _a, trans=(0, 1))
    _wgmma(32, "f32", _a, _a, registers=True)
    _wgmma(32, "f32", _a, _a, registers=True, trans=(0, 1))
    _wgmma(16, "f32", _a, _a, scale=(-1, 1))
    _wgmma(16, "f32", _a, _a, scale=(1, -1), fresh=True)
    _wgmma(64, "f32", _a, _a, wild=True)
for _n in (8, 64, 128):
    _wgmma(_n, "f16", "f16", "f16")
_wgmma(32, "f16", "f16", "f16", registers=True, scale=(-1, -1))
_wgmma(32, "f16", "f16", "f16", wild=True)
for _n, _s in ((8, 128), (64, 64), (96, 32), (24, 0)):
    _wgmma(_n, "f32", "tf32", "tf32", swizzle=_s)
_wgmma(16, "f32", "tf32", "tf32", registers=True)
_wgmma(64, "f32", "tf32", "tf32", wild=True)
for _a in ("e4m3", "e5m2"):
    for _b in ("e4m3", "e5m2"):
        for _d in ("f32", "f16"):
            _wgmma(32, _d, _a, _b)
            _wgmma(64, _d, _a, _b, swizzle=64, wild=True)
            _wgmma(16, _d, _a, _b, registers=True)
for _a in ("s8", "u8"):
    for _b in ("s8", "u8"):
        _wgmma(32, "s32", _a, _b)
        _wgmma(16, "s32", _a, _b, registers=True, satfinite=True, wild=True)


def _mma(shape, d, a, b, counts, rest="", wild=False, code=None):
    """Write mma.sync on one warp; ``counts`` are the registers of A, B and the accumulator of a thread."""
    na, nb, nd = counts
    wide = d == "f64"
    bits, size = ("b64", 8) if wide else ("b32", 4)
    unit, entry = ("d", "b64") if wide else (("f" if d == "f32" else "r"), "b32")
    kinds = f".reg .{'f64' if wide else 'b32'} %ra<{na}>; .reg .{'f64' if wide else 'b32'} %rb<{nb}>; .reg .{dict(f='f32', r='b32', d='f64')[unit]} %c<{nd}>, %d<{nd}>;"
    loads = [f"ld.global.{bits} %ra{i}, [%q1+{i * 32 * size}];" for i in range(na)]
    loads += [f"ld.global.{bits} %rb{i}, [%q2+{i * 32 * size}];" for i in range(nb)]
    loads += [f"ld.global.{entry} %c{i}, [%q3+{i * 32 * size}];" for i in range(nd)]
    stores = [f"st.global.{entry} [%q4+{i * 32 * size}], %d{i};" for i in range(nd)]
    listed = [
        ", ".join(f"%{n}{i}" for i in range(count)) for n, count in (("d", nd), ("ra", na), ("rb", nb), ("c", nd))
    ]
    ptx = f"""
.visible .entry unit(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 y)
{{
.reg .b32 %r<4>; .reg .b64 %q<8>; {kinds}
mov.u32 %r0, %tid.x; mul.wide.u32 %q0, %r0, {size};
ld.param.u64 %q1, [a]; ld.param.u64 %q2, [b]; ld.param.u64 %q3, [c]; ld.param.u64 %q4, [y];
add.s64 %q1, %q1, %q0; add.s64 %q2, %q2, %q0; add.s64 %q3, %q3, %q0; add.s64 %q4, %q4, %q0;
{chr(10).join(loads)}
mma.sync.aligned.{shape}.row.col{rest}.{d}.{a}.{b}.{d}{code or ""} {{{listed[0]}}}, {{{listed[1]}}}, {{{listed[2]}}}, {{{listed[3]}}};
{chr(10).join(stores)}
ret;
}}
"""

    def arguments():
        left, right = _operands(1, na * 32 * size, a, wild), _operands(2, nb * 32 * size, b, wild)
        return [
            left,
            right,
            _accumulators(3, nd * 32, d, wild),
            torch.zeros(nd * 32, dtype=torch.int64 if wide else torch.int32),
        ]

    name = "_".join(["mma", shape, d, a, b, *rest.split(".")[1:], *(code or "").split(".")[1:]] + ["wild"] * wild)
    _case(name, ptx, arguments, block=(32,))


for _w in (False, True):
    for _a in ("f16", "bf16"):
        _mma("m16n8k16", "f32", _a, _a, (4, 2, 4), wild=_w)
        _mma("m16n8k8", "f32", _a, _a, (2, 1, 4), wild=_w)
    _mma("m16n8k16", "f16", "f16", "f16", (4, 2, 2), wild=_w)
    _mma("m16n8k8", "f16", "f16", "f16", (2, 1, 2), wild=_w)
    _mma("m16n8k8", "f32", "tf32", "tf32", (4, 2, 4), wild=_w)
    _mma("m16n8k4", "f32", "tf32", "tf32", (2, 1, 4), wild=_w)
    for _a in ("e4m3", "e5m2"):
        for _b in ("e4m3", "e5m2"):
            _mma("m16n8k32", "f32", _a, _b, (4, 2, 4), wild=_w)
            _mma("m16n8k32", "f16", _a, _b, (4, 2, 2), wild=_w)
            _mma("m16n8k16", "f32", _a, _b, (2, 1, 4), wild=_w)
for _rest in ("", ".satfinite"):
    for _a in "su":
        for _b in "su":
            _mma("m16n8k32", "s32", f"{_a}8", f"{_b}8", (4, 2, 4), _rest)
            _mma("m16n8k16", "s32", f"{_a}8", f"{_b}8", (2, 1, 4), _rest)
            _mma("m16n8k64", "s32", f"{_a}4", f"{_b}4", (4, 2, 4), _rest)
_mma("m16n8k256", "s32", "b1", "b1", (4, 2, 4), code=".and.popc")
_mma("m8n8k4", "f64", "f64", "f64", (1, 1, 2))
_mma("m16n8k4", "f64", "f64", "f64", (2, 1, 4))
_mma("m16n8k8", "f64", "f64", "f64", (4, 2, 4))
_mma("m16n8k16", "f64", "f64", "f64", (8, 4, 4))

_case("brx_idx", """
.visible .entry unit(.param .u64 x, .param .u64 y)
{
.reg .pred %p<2>; .reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b64 %q<4>;
mov.u32 %r0, %tid.x; ld.param.u64 %q0, [x]; ld.param.u64 %q1, [y]; mul.wide.u32 %q2, %r0, 4; add.s64 %q0, %q0, %q2; add.s64 %q1, %q1, %q2;
ld.global.b32 %r1, [%q0]; cvt.rn.f32.u32 %f0, %r0; mov.u32 %r2, 0;
again:
and.b32 %r3, %r1, 3;
targets: .branchtargets one, two, three, four;
brx.idx %r3, targets;
one: add.f32 %f0, %f0, 0f3FC00000; bra.uni join;
two: mul.f32 %f0, %f0, 0f3F400000; bra.uni join;
three: sub.f32 %f0, 0f40000000, %f0;
four: fma.rn.f32 %f0, %f0, %f0, 0fBF800000; min.f32 %f0, %f0, 0f42C80000;
join:
shr.u32 %r1, %r1, 2; add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, 12; @%p1 bra again;
st.global.f32 [%q1], %f0;
ret;
}
""", lambda: [patterns(1, 128, dtype=torch.int32), torch.zeros(128)])  # fmt: skip

_case("bulk_copy_mbarrier", """
.shared .align 128 .b8 tile[4096];
.shared .align 8 .b64 full;
.visible .entry unit(.param .u64 x, .param .u64 y)
{
.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %q<6>; .reg .f32 %f<4>;
mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; ld.param.u64 %q0, [x]; ld.param.u64 %q1, [y]; mov.u32 %r1, tile; mov.u32 %r2, full; mov.u32 %r5, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster; bar.sync 0;
next:
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%q0], 2048, [%r2];
and.b32 %r6, %r5, 1;
wait:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r6; @!%p2 bra wait;
shl.b32 %r3, %r0, 4; add.s32 %r3, %r3, %r1; ld.shared.v4.f32 {%f0, %f1, %f2, %f3}, [%r3];
add.f32 %f0, %f0, %f3; mul.f32 %f1, %f1, %f2; st.shared.v4.f32 [%r3+2048], {%f1, %f0, %f3, %f2};
fence.proxy.async.shared::cta; bar.sync 0;
add.s32 %r4, %r1, 2048;
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%q1], [%r4], 2048;
@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group.read 0;
bar.sync 0;
add.s64 %q0, %q0, 2048; add.s64 %q1, %q1, 2048; add.s32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 4; @%p3 bra next;
@%p1 cp.async.bulk.wait_group 0;
ret;
}
""", lambda: [normal(
    1, 2048, dtype=torch.float32), torch.zeros(2048)])  # fmt: skip

_case("vector_reductions", """
.visible .entry unit(.param .u64 x, .param .u64 y)
{
.reg .b32 %r<8>; .reg .b64 %q<6>; .reg .f32 %f<8>;
mov.u32 %r0, %tid.x; ld.param.u64 %q0, [x]; ld.param.u64 %q1, [y]; mul.wide.u32 %q2, %r0, 16; add.s64 %q0, %q0, %q2; add.s64 %q1, %q1, %q2;
ld.global.nc.L1::no_allocate.v4.b32 {%r1, %r2, %r3, %r4}, [%q0];
red.global.add.noftz.f16x2 [%q1], %r1;
red.relaxed.gpu.global.add.noftz.bf16x2 [%q1+4], %r2;
atom.global.add.f32 %f0, [%q1+8], 0f3F400000;
red.global.add.f32 [%q1+2048], %f0;
atom.global.add.noftz.f16x2 %r5, [%q1+2056], %r3;
xor.b32 %r5, %r5, %r4; st.global.cg.b32 [%q1+12], %r5;
ret;
}
""", lambda: [special(1, 1024, torch.bfloat16).view(torch.int32), torch.cat([special(2, 2048, torch.float16)]).view(torch.int32)])  # fmt: skip
