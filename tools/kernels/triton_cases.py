# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
# ruff: noqa: E501 - kernels in strings, and a case a line
"""Triton kernels as their users write them, small, each with its operands."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from tools.kernels.cases import Case, integers, normal, patterns, special

_F32, _BF16, _FP16, _F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_CASES: list[Case] = []


def _case(name, kernel, grid, arguments, constexprs=None, **options):
    _CASES.append(
        Case(
            name=name, kernel=kernel, grid=grid, make_arguments=arguments, constexprs=constexprs or {}, options=options
        )
    )


def cases() -> list[Case]:
    """Return every case, in order."""
    return list(_CASES)


# --- products ---
@triton.jit
def _gelu_tanh(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1 + tl.exp(-2 * inner))


@triton.jit
def matmul(a, b, c, bias, residual, M, N, K, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           PREC: tl.constexpr, ACC: tl.constexpr, EPI: tl.constexpr):  # fmt: skip
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), ACC)
    for k in range(0, K, BK):
        x = tl.load(
            a + rm[:, None] * sam + (k + rk)[None, :] * sak, mask=(rm < M)[:, None] & (k + rk < K)[None, :], other=0.0
        )
        y = tl.load(
            b + (k + rk)[:, None] * sbk + rn[None, :] * sbn, mask=(k + rk < K)[:, None] & (rn < N)[None, :], other=0.0
        )
        acc = tl.dot(x, y, acc, input_precision=PREC, out_dtype=ACC)
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    place = rm[:, None] * N + rn[None, :]
    if EPI == 1:
        acc = acc + tl.load(bias + rn, mask=rn < N, other=0).to(tl.float32)[None, :]
        acc = _gelu_tanh(acc)
    if EPI == 2:
        acc = acc.to(tl.float32) * 0.5 + tl.load(residual + place, mask=inside, other=0).to(tl.float32)
    if EPI == 3:
        acc = tl.maximum(acc + tl.load(bias + rn, mask=rn < N, other=0).to(tl.float32)[None, :], 0.0)
    tl.store(c + place, acc.to(c.dtype.element_ty), mask=inside)


def _matmul(
    name,
    m,
    n,
    k,
    a_dtype,
    c_dtype,
    blocks,
    prec="tf32",
    acc=tl.float32,
    epi=0,
    b_dtype=None,
    transposed=False,
    **options,
):
    def draw(seed, shape, dtype):
        if dtype == torch.int8:
            return integers(seed, *shape, low=-128, high=128, dtype=dtype)
        return normal(seed, *shape, dtype=_F32).to(dtype)

    def arguments():
        a, b = draw(1, (m, k), a_dtype), draw(2, (k, n), b_dtype or a_dtype)
        strides = (n, 1) if not transposed else (1, k)
        c = torch.zeros(m, n, dtype=c_dtype)
        return [a, b, c, normal(3, n), normal(4, m, n), m, n, k, k, 1, *strides]

    grid = (-(-m // blocks[0]), -(-n // blocks[1]))
    constexprs = dict(BM=blocks[0], BN=blocks[1], BK=blocks[2], PREC=prec, ACC=acc, EPI=epi)
    _case(f"matmul_{name}", matmul, grid, arguments, constexprs, **options)


_matmul("gelu_bf16", 100, 72, 136, _BF16, _BF16, (64, 64, 32), epi=1, num_warps=4, num_stages=3)
_matmul("residual_fp16", 130, 136, 200, _FP16, _FP16, (128, 128, 64), epi=2, num_warps=8, num_stages=4)
_matmul("relu_fp8_out", 64, 64, 96, _BF16, _E4M3, (64, 64, 32), epi=3, num_warps=4, num_stages=2)
_matmul("e5m2", 64, 48, 128, _E5M2, _E5M2, (64, 16, 64), epi=0, transposed=True, num_warps=4, num_stages=3)
_matmul("e4m3_transposed", 64, 64, 256, _E4M3, _BF16, (64, 64, 128), transposed=True, num_warps=4, num_stages=3)
_matmul("e4m3_mma", 32, 32, 96, _E4M3, _F32, (16, 32, 32), num_warps=2, num_stages=2)
_matmul("tf32", 64, 64, 72, _F32, _F32, (64, 32, 32), prec="tf32", num_warps=4, num_stages=3)
_matmul("tf32_mma", 32, 32, 72, _F32, _F32, (32, 32, 16), prec="tf32", num_warps=1, num_stages=2)
_matmul("tf32x3", 64, 64, 72, _F32, _F32, (64, 32, 32), prec="tf32x3", num_warps=4, num_stages=2)
_matmul("tf32x3_mma", 32, 32, 40, _F32, _F32, (32, 32, 16), prec="tf32x3", num_warps=2, num_stages=2)
_matmul("ieee", 32, 48, 72, _F32, _F32, (32, 16, 16), prec="ieee", num_warps=4, num_stages=2)
_matmul("bf16x3", 64, 64, 64, _F32, _F32, (64, 32, 32), prec="bf16x3", num_warps=4, num_stages=2)
_matmul("bf16x6_mma", 32, 32, 40, _F32, _F32, (32, 32, 16), prec="bf16x6", num_warps=2, num_stages=2)
_matmul("fp16_acc", 64, 64, 128, _FP16, _FP16, (64, 64, 32), acc=tl.float16, num_warps=4, num_stages=3)
_matmul("fp16_acc_mma", 32, 32, 64, _FP16, _FP16, (16, 16, 32), acc=tl.float16, num_warps=1, num_stages=2)
_matmul("f64", 32, 32, 40, _F64, _F64, (16, 32, 16), acc=tl.float64, prec="ieee", num_warps=2, num_stages=2)
_matmul(
    "int8", 64, 64, 160, torch.int8, torch.int32, (64, 64, 32), acc=tl.int32, transposed=True, num_warps=4, num_stages=2
)
_matmul("int8_mma", 32, 32, 96, torch.int8, torch.int32, (16, 32, 32), acc=tl.int32, num_warps=2, num_stages=2)
_matmul("bf16_transposed", 128, 64, 128, _BF16, _F32, (64, 64, 64), transposed=True, num_warps=4, num_stages=4)
_matmul("bf16_wide", 64, 256, 64, _BF16, _BF16, (64, 256, 32), num_warps=8, num_stages=2)
_matmul("bf16_one_warp", 17, 24, 33, _BF16, _BF16, (16, 16, 16), num_warps=1, num_stages=1)


@triton.jit
def fp8_block_scaled(a, b, c, a_scale, b_scale, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    nk = tl.cdiv(K, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(nk):
        x = tl.load(a + rm[:, None] * K + (i * BK + rk)[None, :], mask=rm[:, None] < M, other=0.0)
        y = tl.load(b + rn[None, :] * K + (i * BK + rk)[:, None], mask=rn[None, :] < N, other=0.0)
        sx = tl.load(a_scale + rm * nk + i, mask=rm < M, other=0.0)
        sy = tl.load(b_scale + rn // 128 * nk + i, mask=rn < N, other=0.0)
        acc += tl.dot(x, y) * sx[:, None] * sy[None, :]
    tl.store(c + rm[:, None] * N + rn[None, :], acc.to(c.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :])


def _block_scaled():
    a, b = normal(1, 80, 384, dtype=_F32).to(_E4M3), normal(2, 144, 384, dtype=_F32).to(_E4M3)
    scales = normal(3, 80, 3, dtype=_F32).abs(), normal(4, 2, 3, dtype=_F32).abs()
    return [a, b, torch.zeros(80, 144, dtype=_BF16), *scales, 80, 144, 384]


_case(
    "fp8_block_scaled", fp8_block_scaled, (2, 3), _block_scaled, dict(BM=64, BN=64, BK=128), num_warps=4, num_stages=3
)


@triton.jit
def int8_dequant(a, b, c, a_scale, b_scale, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.int32)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * K + (k + rk)[None, :])
        y = tl.load(b + rn[None, :] * K + (k + rk)[:, None])
        acc += tl.dot(x, y, out_dtype=tl.int32)
    scaled = acc.to(tl.float32) * tl.load(a_scale + rm)[:, None] * tl.load(b_scale + rn)[None, :]
    tl.store(c + rm[:, None] * N + rn[None, :], scaled.to(tl.bfloat16))


def _int8_dequant():
    a, b = (integers(i, 64, 128, low=-127, high=128, dtype=torch.int8) for i in (1, 2))
    return [a, b, torch.zeros(64, 64, dtype=_BF16), normal(3, 64, dtype=_F32), normal(4, 64, dtype=_F32), 64, 64, 128]


_case("int8_dequant", int8_dequant, (1, 2), _int8_dequant, dict(BM=64, BN=32, BK=64), num_warps=4, num_stages=3)


@triton.jit
def w4a16(
    x, packed, scales, zeros, y, M, N, K, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        kk = k + rk
        act = tl.load(x + rm[:, None] * K + kk[None, :], mask=rm[:, None] < M, other=0.0)
        word = tl.load(packed + (kk // 8)[:, None] * N + rn[None, :])
        q = (word >> ((kk % 8) * 4)[:, None]) & 0xF
        group = k // GROUP
        zero = (tl.load(zeros + group * (N // 8) + rn // 8) >> ((rn % 8) * 4)) & 0xF
        scale = tl.load(scales + group * N + rn)
        weight = (q - zero[None, :]).to(tl.float16) * scale[None, :]
        acc = tl.dot(act, weight, acc)
    tl.store(y + rm[:, None] * N + rn[None, :], acc.to(tl.float16), mask=rm[:, None] < M)


def _w4a16():
    packed = patterns(2, 16, 64, dtype=torch.int32)
    scales, zeros = normal(3, 2, 64, dtype=_FP16, scale=2.0**-4), patterns(4, 2, 8, dtype=torch.int32)
    return [normal(1, 20, 128, dtype=_FP16), packed, scales, zeros, torch.zeros(20, 64, dtype=_FP16), 20, 64, 128]


_case("w4a16_mma", w4a16, (2, 2), _w4a16, dict(GROUP=64, BM=16, BN=32, BK=64), num_warps=4, num_stages=3)
_case("w4a16_wgmma", w4a16, (1, 1), _w4a16, dict(GROUP=64, BM=64, BN=64, BK=64), num_warps=4, num_stages=2)


@triton.jit
def batched(a, b, c, K, T: tl.constexpr, BK: tl.constexpr):
    batch = tl.arange(0, 2)[:, None, None] + tl.program_id(0) * 2
    r, k = tl.arange(0, T), tl.arange(0, BK)
    acc = tl.zeros((2, T, T), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + batch * T * K + r[None, :, None] * K + (start + k)[None, None, :])
        y = tl.load(b + batch * T * K + (start + k)[None, :, None] * T + r[None, None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + batch * T * T + r[None, :, None] * T + r[None, None, :], acc)


_case("batched_3d_dot", batched, (2,), lambda: [normal(1, 4, 16, 64), normal(2, 4, 64, 16), torch.zeros(4, 16, 16), 64],
      dict(T=16, BK=32), num_warps=2, num_stages=2)  # fmt: skip


@triton.jit
def grouped(x, w, y, offsets, N, K, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pid = tl.program_id(0)
    rn, rk = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    before = 0
    for g in range(G):
        start, end = tl.load(offsets + g), tl.load(offsets + g + 1)
        tiles = tl.cdiv(end - start, BM)
        if pid >= before and pid < before + tiles:
            rm = start + (pid - before) * BM + tl.arange(0, BM)
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(0, K, BK):
                left = tl.load(x + rm[:, None] * K + (k + rk)[None, :], mask=rm[:, None] < end, other=0.0)
                acc = tl.dot(left, tl.load(w + g * K * N + (k + rk)[:, None] * N + rn[None, :]), acc)
            tl.store(y + rm[:, None] * N + rn[None, :], acc.to(tl.bfloat16), mask=rm[:, None] < end)
        before += tiles


def _grouped():
    offsets = torch.tensor([0, 20, 20, 57, 70], dtype=torch.int32)
    return [normal(1, 70, 64), normal(2, 4, 64, 64), torch.zeros(70, 64, dtype=_BF16), offsets, 64, 64]


_case("grouped", grouped, (6, 2), _grouped, dict(G=4, BM=32, BN=32, BK=32), num_warps=4, num_stages=3)


@triton.jit
def split_k(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ATOMIC: tl.constexpr
):
    rm, rn = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    rk = part * BK + tl.arange(0, BK)
    acc = tl.zeros((BM, BN), c.dtype.element_ty)
    for _ in range(0, tl.cdiv(K, BK * SPLIT)):
        x = tl.load(a + rm[:, None] * K + rk[None, :])
        acc = tl.dot(x, tl.load(b + rk[:, None] * N + rn[None, :]), acc, out_dtype=c.dtype.element_ty)
        rk += BK * SPLIT
    if ATOMIC:
        tl.atomic_add(c + rm[:, None] * N + rn[None, :], acc, sem="relaxed")
    else:
        tl.store(c + part * M * N + rm[:, None] * N + rn[None, :], acc)


_case("split_k_int8_atomic", split_k, (2, 4), lambda: [integers(1, 32, 256, low=-128, high=128, dtype=torch.int8), integers(
    2, 256, 64, low=-128, high=128, dtype=torch.int8), torch.zeros(32, 64, dtype=torch.int32), 32, 64, 256],
      dict(BM=32, BN=32, BK=32, SPLIT=4, ATOMIC=True), num_warps=4)  # fmt: skip
_case("split_k_partial", split_k, (1, 2), lambda: [normal(1, 64, 256), normal(2, 256, 32), torch.zeros(2, 64, 32), 64, 32, 256],
      dict(BM=64, BN=32, BK=64, SPLIT=2, ATOMIC=False), num_warps=4, num_stages=2)  # fmt: skip
_case("split_k_float_one_place", split_k, (2, 1), lambda: [normal(1, 32, 64), normal(2, 64, 64), normal(3, 32, 64, dtype=_F32), 32, 64,
      64], dict(BM=32, BN=32, BK=32, SPLIT=1, ATOMIC=True), num_warps=4)  # fmt: skip


@triton.jit
def persistent(
    a, b, c, M, N, K, SMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLATTEN: tl.constexpr
):
    tiles_n, kt = tl.cdiv(N, BN), tl.cdiv(K, BK)
    rk = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, SMS, flatten=FLATTEN):
        rm = tile // tiles_n * BM + tl.arange(0, BM)
        rn = tile % tiles_n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(kt):
            x = tl.load(a + rm[:, None] * K + (k * BK + rk)[None, :], mask=rm[:, None] < M, other=0.0)
            y = tl.load(b + (k * BK + rk)[:, None] * N + rn[None, :], mask=rn[None, :] < N, other=0.0)
            acc = tl.dot(x, y, acc)
        tl.store(
            c + rm[:, None] * N + rn[None, :], acc.to(c.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :]
        )


for _flat in (False, True):
    _case(f"persistent{'_flat' * _flat}", persistent, (3,), lambda: [normal(1, 150, 128), normal(2, 128, 120), torch.zeros(
        150, 120, dtype=_BF16), 150, 120, 128], dict(SMS=3, BM=64, BN=64, BK=64, FLATTEN=_flat), num_warps=4, num_stages=3)  # fmt: skip


@triton.jit
def tma_host(
    a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TRANSPOSED: tl.constexpr, SPECIAL: tl.constexpr
):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=SPECIAL):
        x = a.load([m, k])
        if TRANSPOSED:  # noqa: SIM108 - no ternary of two layouts in Triton
            y = b.load([n, k]).T
        else:
            y = b.load([k, n])
        acc = tl.dot(x, y, acc)
    c.store([m, n], acc.to(c.dtype))


def _tma(name, m, n, k, dtype, c_dtype, blocks, transposed, special_warps=False, **options):
    def arguments():
        bm, bn, bk = blocks
        a, b = (
            normal(1, m, k, dtype=_F32).to(dtype),
            normal(2, *((n, k) if transposed else (k, n)), dtype=_F32).to(dtype),
        )
        c = torch.zeros(m, n, dtype=c_dtype)
        return [TensorDescriptor.from_tensor(a, [bm, bk]), TensorDescriptor.from_tensor(b, [bn, bk] if transposed else [bk, bn]),
                TensorDescriptor.from_tensor(c, [bm, bn]), k]  # fmt: skip

    _case(f"tma_{name}", tma_host, (-(-m // blocks[0]), -(-n // blocks[1])), arguments, dict(
        BM=blocks[0], BN=blocks[1], BK=blocks[2], TRANSPOSED=transposed, SPECIAL=special_warps), **options)  # fmt: skip


_tma("bf16_64x64x64", 100, 72, 200, _BF16, _BF16, (64, 64, 64), False, num_warps=4, num_stages=3)
_tma("bf16_128x128x64", 128, 136, 200, _BF16, _BF16, (128, 128, 64), True, num_warps=8, num_stages=4)
_tma("fp16_64x32x32", 64, 40, 96, _FP16, _F32, (64, 32, 32), True, num_warps=4, num_stages=3)
_tma("e4m3_64x64x128", 64, 64, 256, _E4M3, _BF16, (64, 64, 128), True, num_warps=4, num_stages=3)
_tma("f32_64x32x32", 64, 32, 72, _F32, _F32, (64, 32, 32), True, num_warps=4, num_stages=2)
_tma("int8_store_16", 16, 16, 64, _BF16, _E5M2, (16, 16, 16), False, num_warps=1, num_stages=2)


@triton.jit
def tma_specialized(a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=True):
        acc = tl.dot(a.load([m, k]), b.load([n, k]).T, acc)
    at = (m + tl.arange(0, BM))[:, None] * N + n + tl.arange(0, BN)[None, :]
    tl.store(c + at, acc.to(c.dtype.element_ty))


def _specialized(bm, bn, bk):
    return lambda: [TensorDescriptor.from_tensor(normal(1, 128, 256), [bm, bk]), TensorDescriptor.from_tensor(
        normal(2, 128, 256), [bn, bk]), torch.zeros(128, 128, dtype=_BF16), 128, 256]  # fmt: skip


for _bm, _warps in ((64, 4), (128, 4), (128, 8)):
    _case(f"tma_specialized_{_bm}_w{_warps}", tma_specialized, (128 // _bm, 1), _specialized(_bm, 128, 64), dict(BM=_bm, BN=128, BK=64),
          num_warps=_warps, num_stages=3)  # fmt: skip


@triton.jit
def tma_device(
    a, b, c, M, N, K, SMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPECIAL: tl.constexpr
):
    da = tl.make_tensor_descriptor(a, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    db = tl.make_tensor_descriptor(b, shape=[N, K], strides=[K, 1], block_shape=[BN, BK])
    dc = tl.make_tensor_descriptor(c, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, SMS, flatten=True, warp_specialize=SPECIAL):
        m, n = tile // tiles_n * BM, tile % tiles_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(da.load([m, k]), db.load([n, k]).T, acc)
        dc.store([m, n], acc.to(c.dtype.element_ty))


for _special in (False, True):
    _case(f"tma_device{'_specialized' * _special}", tma_device, (2,), lambda: [normal(1, 100, 136), normal(2, 72, 136), torch.zeros(
        100, 72, dtype=_BF16), 100, 72, 136], dict(SMS=2, BM=64, BN=64, BK=64, SPECIAL=_special), num_warps=4, num_stages=3)  # fmt: skip


@triton.jit
def tma_more(a, y, rows, M, N, BM: tl.constexpr, BN: tl.constexpr):
    d = tl.make_tensor_descriptor(a, shape=[M, N], strides=[N, 1], block_shape=[1, BN])
    out = tl.make_tensor_descriptor(y, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    r = tl.load(rows + tl.program_id(0) * BM + tl.arange(0, BM))
    block = d.load([tl.min(r, 0), 8]).to(tl.float32)
    out.atomic_add([tl.program_id(0) * BM, 0], tl.broadcast_to(block, (BM, BN)))


_case("tma_reduce", tma_more, (2,), lambda: [normal(1, 32, 32, dtype=_F32), normal(2, 32, 32, dtype=_F32), integers(3, 32, high=32),
      32, 32], dict(BM=16, BN=32), num_warps=4)  # fmt: skip


@triton.jit
def mx_matmul(a, b, c, a_scale, b_scale, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AF: tl.constexpr,
              BF: tl.constexpr):  # fmt: skip
    rm, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    a_pack: tl.constexpr = 2 if AF == "e2m1" else 1
    b_pack: tl.constexpr = 2 if BF == "e2m1" else 1
    ra, rb, rs = tl.arange(0, BK // a_pack), tl.arange(0, BK // b_pack), tl.arange(0, BK // 32)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * (K // a_pack) + (k // a_pack + ra)[None, :])
        y = tl.load(b + rn[None, :] * (K // b_pack) + (k // b_pack + rb)[:, None])
        sy = tl.load(b_scale + rn[:, None] * (K // 32) + (k // 32 + rs)[None, :])
        if AF == "bf16":
            acc = tl.dot_scaled(x, None, AF, y, sy, BF, acc)
        else:
            sx = tl.load(a_scale + rm[:, None] * (K // 32) + (k // 32 + rs)[None, :])
            acc = tl.dot_scaled(x, sx, AF, y, sy, BF, acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc)


def _mx(name, a_format, b_format, blocks, **options):
    def element(seed, rows, form):
        if form == "bf16":
            return normal(seed, rows, 128)
        if form == "e2m1":
            return patterns(seed, rows, 64, dtype=torch.uint8)
        return normal(seed, rows, 128, dtype=_F32).to(_E4M3 if form == "e4m3" else _E5M2)

    def arguments():
        scales = (
            integers(3, 64, 4, low=120, high=135, dtype=torch.uint8),
            integers(4, 64, 4, low=120, high=135, dtype=torch.uint8),
        )
        return [element(1, 64, a_format), element(2, 64, b_format), torch.zeros(64, 64), *scales, 64, 64, 128]

    constexprs = dict(BM=blocks[0], BN=blocks[1], BK=blocks[2], AF=a_format, BF=b_format)
    _case(f"dot_scaled_{name}", mx_matmul, (64 // blocks[0], 64 // blocks[1]), arguments, constexprs, **options)


_mx("mxfp8", "e4m3", "e5m2", (64, 64, 64), num_warps=4, num_stages=2)
_mx("bf16_mxfp4", "bf16", "e2m1", (64, 64, 64), num_warps=4, num_stages=2)
_mx("mxfp4", "e2m1", "e2m1", (32, 64, 64), num_warps=4, num_stages=2)
_mx("mxfp8_mxfp4", "e4m3", "e2m1", (64, 32, 128), num_warps=4, num_stages=1)


# --- attention ---
@triton.jit
def flash_forward(q, k, v, o, lse, T, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    base = tl.program_id(1) * T * D
    rm, rd = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    rn = tl.arange(0, BN)
    query = tl.load(q + base + rm[:, None] * D + rd[None, :], mask=rm[:, None] < T, other=0.0)
    m = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.full((BM,), 1.0, tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * BM, T) if CAUSAL else T
    for start in range(0, end, BN):
        n = start + rn
        key = tl.load(k + base + n[None, :] * D + rd[:, None], mask=n[None, :] < T, other=0.0)
        s = tl.dot(query, key) * (scale * 1.44269504)
        s = tl.where(n[None, :] < T, s, -float("inf"))
        if CAUSAL:
            s = tl.where(rm[:, None] >= n[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        value = tl.load(v + base + n[:, None] * D + rd[None, :], mask=n[:, None] < T, other=0.0)
        acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None])
        m = m_new
    tl.store(
        o + base + rm[:, None] * D + rd[None, :], (acc / total[:, None]).to(o.dtype.element_ty), mask=rm[:, None] < T
    )
    tl.store(lse + tl.program_id(1) * T + rm, m + tl.math.log2(total), mask=rm < T)


def _flash(name, t, d, bm, bn, causal, dtype=_BF16, **options):
    def arguments():
        q, k, v = (normal(i, 2, t, d, dtype=dtype) for i in (1, 2, 3))
        return [q, k, v, torch.zeros(2, t, d, dtype=dtype), torch.zeros(2, t), t, d**-0.5]

    constexprs = dict(D=d, BM=bm, BN=bn, CAUSAL=causal)
    _case(f"flash_{name}", flash_forward, (-(-t // bm), 2), arguments, constexprs, **options)


_flash("d64_causal", 100, 64, 64, 32, True, num_warps=4, num_stages=3)
_flash("d128", 128, 128, 128, 64, False, num_warps=8, num_stages=3)
_flash("d128_fp16_causal", 70, 128, 64, 64, True, _FP16, num_warps=4, num_stages=2)
_flash("d32_mma", 40, 32, 16, 16, False, num_warps=1, num_stages=2)


@triton.jit
def flash_backward_kv(q, k, v, do, lse, delta, dk, dv, T, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    base = tl.program_id(1) * T * D
    rn, rd, rm = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, D), tl.arange(0, BM)
    key = tl.load(k + base + rn[:, None] * D + rd[None, :])
    value = tl.load(v + base + rn[:, None] * D + rd[None, :])
    gk, gv = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for start in range(tl.program_id(0) * BN // BM * BM, T, BM):
        m = start + rm
        qt = tl.load(q + base + m[None, :] * D + rd[:, None])
        st = tl.dot(key, qt) * (scale * 1.44269504)
        pt = tl.math.exp2(st - tl.load(lse + tl.program_id(1) * T + m)[None, :])
        pt = tl.where(m[None, :] >= rn[:, None], pt, 0.0)
        grad = tl.load(do + base + m[:, None] * D + rd[None, :])
        gv += tl.dot(pt.to(grad.dtype), grad)
        dpt = tl.dot(value, tl.trans(grad))
        dst = pt * (dpt - tl.load(delta + tl.program_id(1) * T + m)[None, :])
        gk += tl.dot(dst.to(qt.dtype), tl.trans(qt))
    tl.store(dk + base + rn[:, None] * D + rd[None, :], (gk * scale).to(dk.dtype.element_ty))
    tl.store(dv + base + rn[:, None] * D + rd[None, :], gv.to(dv.dtype.element_ty))


@triton.jit
def flash_backward_q(q, k, v, do, lse, delta, dq, T, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    base = tl.program_id(1) * T * D
    rm, rd, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    query = tl.load(q + base + rm[:, None] * D + rd[None, :])
    grad = tl.load(do + base + rm[:, None] * D + rd[None, :])
    row, diff = tl.load(lse + tl.program_id(1) * T + rm), tl.load(delta + tl.program_id(1) * T + rm)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BM, BN):
        n = start + rn
        kt = tl.load(k + base + n[None, :] * D + rd[:, None])
        vt = tl.load(v + base + n[None, :] * D + rd[:, None])
        p = tl.math.exp2(tl.dot(query, kt) * (scale * 1.44269504) - row[:, None])
        p = tl.where(rm[:, None] >= n[None, :], p, 0.0)
        ds = p * (tl.dot(grad, vt).to(tl.float32) - diff[:, None])
        acc += tl.dot(ds.to(kt.dtype), tl.trans(kt))
    tl.store(dq + base + rm[:, None] * D + rd[None, :], (acc * scale).to(dq.dtype.element_ty))


def _flash_backward(outputs):
    def arguments():
        qkvo = [normal(i, 2, 128, 64) for i in (1, 2, 3, 4)]
        found = [torch.zeros(2, 128, 64, dtype=_BF16) for _ in range(outputs)]
        return [*qkvo, normal(5, 2, 128, dtype=_F32) + 8, normal(6, 2, 128, dtype=_F32), *found, 128, 0.125]

    return arguments


_case(
    "flash_backward_kv",
    flash_backward_kv,
    (2, 2),
    _flash_backward(2),
    dict(D=64, BM=32, BN=64),
    num_warps=4,
    num_stages=2,
)
_case(
    "flash_backward_kv_w8",
    flash_backward_kv,
    (1, 2),
    _flash_backward(2),
    dict(D=64, BM=64, BN=128),
    num_warps=8,
    num_stages=2,
)
_case(
    "flash_backward_q",
    flash_backward_q,
    (2, 2),
    _flash_backward(1),
    dict(D=64, BM=64, BN=32),
    num_warps=4,
    num_stages=3,
)


@triton.jit
def paged_decode(
    q,
    cache_k,
    cache_v,
    table,
    lengths,
    o,
    scale,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
):
    seq = tl.program_id(0)
    rh, rd, rp = tl.arange(0, H), tl.arange(0, D), tl.arange(0, PAGE)
    length = tl.load(lengths + seq)
    query = tl.load(q + seq * H * D + rh[:, None] * D + rd[None, :]).to(tl.float32)
    m, total = tl.full((H,), -float("inf"), tl.float32), tl.zeros((H,), tl.float32)
    acc = tl.zeros((H, D), tl.float32)
    for i in range(tl.cdiv(length, PAGE)):
        page = tl.load(table + seq * PAGES + i).to(tl.int64)
        at = page * PAGE * D + rp[:, None] * D + rd[None, :]
        inside = i * PAGE + rp < length
        key = tl.load(cache_k + at, mask=inside[:, None], other=0.0).to(tl.float32)
        s = tl.sum(query[:, None, :] * key[None, :, :], 2) * scale
        s = tl.where(inside[None, :], s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p, alpha = tl.exp(s - new[:, None]), tl.exp(m - new)
        value = tl.load(cache_v + at, mask=inside[:, None], other=0.0).to(tl.float32)
        acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * value[None, :, :], 1)
        total = total * alpha + tl.sum(p, 1)
        m = new
    tl.store(o + seq * H * D + rh[:, None] * D + rd[None, :], (acc / total[:, None]).to(tl.bfloat16))


def _paged():
    table = torch.tensor([[3, 1, 0], [2, 5, 4]], dtype=torch.int32)
    return [normal(1, 2, 8, 64), normal(2, 6, 16, 64), normal(3, 6, 16, 64), table, torch.tensor([37, 16], dtype=torch.int32), torch.zeros(
        2, 8, 64, dtype=_BF16), 0.125]  # fmt: skip


_case("paged_decode", paged_decode, (2,), _paged, dict(PAGES=3, PAGE=16, H=8, D=64), num_warps=4)


# --- norms, activations, optimizers, losses ---
@triton.jit
def _welford(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    delta = mean_b - mean_a
    n = n_a + n_b
    ratio = tl.where(n == 0, 0.0, n_b / n)
    return mean_a + delta * ratio, m2_a + m2_b + delta * delta * n_a * ratio, n


@triton.jit
def layernorm_welford(x, w, b, y, N, eps, B: tl.constexpr):
    row = tl.program_id(0)
    mean, m2, n = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32), tl.zeros((B,), tl.float32)
    for start in range(0, N, B):
        i = start + tl.arange(0, B)
        v = tl.load(x + row * N + i, mask=i < N, other=0.0).to(tl.float32)
        count = n + 1
        delta = v - mean
        new = mean + delta / count
        mean, m2, n = tl.where(i < N, new, mean), tl.where(i < N, m2 + delta * (v - new), m2), tl.where(i < N, count, n)
    mean, m2, n = tl.reduce((mean, m2, n), 0, _welford)
    rstd = libdevice.rsqrt(m2 / n + eps)
    for start in range(0, N, B):
        i = start + tl.arange(0, B)
        v = tl.load(x + row * N + i, mask=i < N, other=0.0).to(tl.float32)
        out = (v - mean) * rstd * tl.load(w + i, mask=i < N) + tl.load(b + i, mask=i < N)
        tl.store(y + row * N + i, out.to(y.dtype.element_ty), mask=i < N)


for _warps in (1, 2, 8, 16):
    _case(f"layernorm_welford_w{_warps}", layernorm_welford, (3,), lambda: [normal(1, 3, 777), normal(2, 777, dtype=_F32), normal(
        3, 777, dtype=_F32), torch.zeros(3, 777, dtype=_BF16), 777, 1e-5], dict(B=512), num_warps=_warps)  # fmt: skip


@triton.jit
def group_norm(x, w, b, y, C, HW, GROUP: tl.constexpr, B: tl.constexpr):
    group = tl.program_id(0)
    i = tl.arange(0, B)
    n = GROUP * HW
    v = tl.load(x + group * n + i, mask=i < n, other=0.0).to(tl.float32)
    mean = tl.sum(v, 0) / n
    centred = tl.where(i < n, v - mean, 0.0)
    var = tl.sum(centred * centred, 0) / n
    channel = group % (C // GROUP) * GROUP + i // HW
    scale = tl.load(w + channel, mask=i < n, other=0.0)
    out = centred * tl.rsqrt(var + 1e-5) * scale + tl.load(b + channel, mask=i < n, other=0.0)
    tl.store(y + group * n + i, (out * tl.sigmoid(out)).to(y.dtype.element_ty), mask=i < n)


_case("group_norm_silu", group_norm, (8,), lambda: [normal(1, 2, 16, 49, dtype=_FP16), normal(2, 16, dtype=_F32), normal(3, 16, dtype=_F32),
      torch.zeros(2, 16, 49, dtype=_FP16), 16, 49], dict(GROUP=4, B=256), num_warps=4)  # fmt: skip


@triton.jit
def rope(x, positions, y, theta, H: tl.constexpr, D: tl.constexpr):
    token = tl.program_id(0)
    h, i = tl.arange(0, H)[:, None], tl.arange(0, D // 2)[None, :]
    position = tl.load(positions + token).to(tl.float32)
    angle = position * tl.exp2(-(2 * i).to(tl.float32) / D * tl.log2(theta))
    cos, sin = tl.cos(angle), tl.sin(angle)
    at = token * H * D + h * D + i
    low, high = tl.load(x + at).to(tl.float32), tl.load(x + at + D // 2).to(tl.float32)
    tl.store(y + at, (low * cos - high * sin).to(y.dtype.element_ty))
    tl.store(y + at + D // 2, (high * cos + low * sin).to(y.dtype.element_ty))


_case("rope", rope, (6,), lambda: [normal(1, 6, 4, 64), torch.tensor([0, 1, 77, 4096, 131071, 1 << 24]), torch.zeros(6, 4, 64, dtype=_BF16),
      10000.0], dict(H=4, D=64), num_warps=2)  # fmt: skip


@triton.jit
def swiglu_forward(gate, up, y, n, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    g = tl.load(gate + i, mask=i < n, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < n, other=0.0)
    tl.store(y + i, (g * tl.sigmoid(g)).to(u.dtype) * u, mask=i < n)


@triton.jit
def swiglu_backward(dy, gate, up, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    grad = tl.load(dy + i, mask=i < n, other=0.0)
    g = tl.load(gate + i, mask=i < n, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < n, other=0.0)
    sig = tl.sigmoid(g)
    silu = g * sig
    tl.store(up + i, grad * silu.to(grad.dtype), mask=i < n)
    tl.store(gate + i, (grad * (silu * (1 - sig) + sig) * u).to(gate.dtype.element_ty), mask=i < n)


@triton.jit
def geglu_tanh(a, b, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(a + i, mask=i < n, other=0).to(tl.float32)
    t = libdevice.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    tl.store(y + i, (0.5 * x * (1 + t)).to(y.dtype.element_ty) * tl.load(b + i, mask=i < n, other=0), mask=i < n)


_case("swiglu_forward", swiglu_forward, (3,), lambda: [special(1, 1500, _BF16), normal(2, 1500), torch.zeros(1500, dtype=_BF16), 1500],
      dict(B=512))  # fmt: skip
_case("swiglu_backward", swiglu_backward, (3,), lambda: [normal(3, 1500), special(1, 1500, _BF16), normal(2, 1500), 1500], dict(B=512),
      num_warps=8)  # fmt: skip
_case("geglu_tanh", geglu_tanh, (2,), lambda: [special(1, 1500, _FP16), normal(2, 1500, dtype=_FP16), torch.zeros(1500, dtype=_FP16), 1500],
      dict(B=1024))  # fmt: skip


@triton.jit
def adamw(p, g, m, v, lr, beta1, beta2, eps, decay, step, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    ok = i < n
    grad, param = tl.load(g + i, mask=ok).to(tl.float32), tl.load(p + i, mask=ok)
    param *= 1 - lr * decay
    first = beta1 * tl.load(m + i, mask=ok) + (1 - beta1) * grad
    second = beta2 * tl.load(v + i, mask=ok) + (1 - beta2) * grad * grad
    c1 = 1 - libdevice.pow(beta1, step.to(tl.float32))
    c2 = 1 - libdevice.pow(beta2, step.to(tl.float32))
    denominator = tl.sqrt(second) / tl.sqrt(c2) + eps
    tl.store(p + i, param - lr / c1 * first / denominator, mask=ok)
    tl.store(m + i, first, mask=ok)
    tl.store(v + i, second, mask=ok)


_case("adamw", adamw, (3,), lambda: [normal(1, 1400, dtype=_F32), normal(2, 1400), normal(3, 1400, dtype=_F32), normal(
    4, 1400, dtype=_F32).square(), 1e-3, 0.9, 0.95, 1e-8, 0.1, 17, 1400], dict(B=512))  # fmt: skip


@triton.jit
def linear_cross_entropy(x, w, labels, loss, lse, V, K, BM: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    rm, rk = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BK)
    label = tl.load(labels + rm)
    m, total = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    picked = tl.zeros((BM,), tl.float32)
    for start in range(0, V, BV):
        rv = start + tl.arange(0, BV)
        acc = tl.zeros((BM, BV), tl.float32)
        for k in range(0, K, BK):
            a = tl.load(x + rm[:, None] * K + (k + rk)[None, :])
            acc = tl.dot(a, tl.load(w + rv[None, :] * K + (k + rk)[:, None], mask=rv[None, :] < V, other=0.0), acc)
        acc = tl.where(rv[None, :] < V, acc, -float("inf"))
        new = tl.maximum(m, tl.max(acc, 1))
        total = total * tl.exp(m - new) + tl.sum(tl.exp(acc - new[:, None]), 1)
        picked += tl.sum(tl.where(rv[None, :] == label[:, None], acc, 0.0), 1)
        m = new
    norm = m + tl.log(total)
    tl.store(lse + rm, norm)
    tl.store(loss + rm, tl.where(label >= 0, norm - picked, 0.0))


@triton.jit
def cross_entropy_backward(logits, labels, lse, scale, V, B: tl.constexpr):
    row = tl.program_id(0)
    i = tl.program_id(1) * B + tl.arange(0, B)
    label = tl.load(labels + row)
    x = tl.load(logits + row * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.load(lse + row))
    p = tl.where(i == label, p - 1.0, p)
    tl.store(logits + row * V + i, tl.where(label >= 0, p * scale, 0.0), mask=i < V)


_case("linear_cross_entropy", linear_cross_entropy, (2,), lambda: [normal(1, 128, 64), normal(2, 150, 64, scale=0.25), integers(
    3, 128, low=-5, high=150, dtype=torch.int64), torch.zeros(128), torch.zeros(128), 150, 64], dict(BM=64, BV=64, BK=32), num_stages=2)  # fmt: skip
_case("cross_entropy_backward", cross_entropy_backward, (4, 2), lambda: [normal(1, 4, 900), torch.tensor([0, -100, 899, 555]), normal(
    2, 4, dtype=_F32) + 6, 0.25, 900], dict(B=512), num_warps=8)  # fmt: skip


@triton.jit
def softmax_online(x, y, N, B: tl.constexpr):
    row = tl.program_id(0)
    m, total = tl.full((B,), -float("inf"), tl.float32), tl.zeros((B,), tl.float32)
    for start in range(0, N, B):
        i = start + tl.arange(0, B)
        v = tl.load(x + row * N + i, mask=i < N, other=-float("inf"))
        new = tl.maximum(m, v)
        total = total * tl.where(new == -float("inf"), 1.0, tl.exp(m - new)) + tl.where(i < N, tl.exp(v - new), 0.0)
        m = new
    top = tl.max(m, 0)
    norm = tl.sum(total * tl.exp(m - top), 0)
    for start in range(0, N, B):
        i = start + tl.arange(0, B)
        v = tl.load(x + row * N + i, mask=i < N, other=0.0, eviction_policy="evict_first")
        tl.store(y + row * N + i, tl.exp(v - top) / norm, mask=i < N, cache_modifier=".cs")


_case("softmax_online", softmax_online, (3,), lambda: [normal(1, 3, 1000, dtype=_F32, scale=4.0), torch.zeros(3, 1000), 1000], dict(B=256),
      num_warps=4)  # fmt: skip


# --- searching, sorting, scanning ---
@triton.jit
def search(x, values, indices, N, B: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    v = tl.load(x + row * N + i, mask=i < N, other=-float("inf"))
    top, at = tl.max(v, 0, return_indices=True)
    low, low_at = tl.min(tl.where(i < N, v, float("inf")), 0, return_indices=True)
    tl.store(values + row * 4, top)
    tl.store(values + row * 4 + 1, low)
    tl.store(values + row * 4 + 2, tl.max(v, 0))
    tl.store(values + row * 4 + 3, tl.xor_sum(v.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True))
    tl.store(indices + row * 4, at)
    tl.store(indices + row * 4 + 1, low_at)
    tl.store(indices + row * 4 + 2, tl.argmax(v, 0, tie_break_left=False))
    tl.store(indices + row * 4 + 3, tl.argmin(v, 0))


_case("argmax_argmin", search, (4,), lambda: [special(1, 2000).reshape(4, 500), torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.int32), 500],
      dict(B=512), num_warps=4)  # fmt: skip


@triton.jit
def sort_rows(x, y, z, t, R: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    at = tl.arange(0, R)[:, None] * B + tl.arange(0, B)[None, :]
    v = tl.load(x + at)
    tl.store(y + at, tl.sort(v, 1))
    tl.store(z + at, tl.flip(tl.sort(v, 1, descending=True), 1))
    tl.store(t + tl.arange(0, R)[:, None] * K + tl.arange(0, K)[None, :], tl.topk(v, K, 1))


_case("sort_topk", sort_rows, (1,), lambda: [normal(1, 4, 128, dtype=_F32), torch.zeros(4, 128), torch.zeros(4, 128), torch.zeros(4, 8)],
      dict(R=4, B=128, K=8), num_warps=2)  # fmt: skip
_case("sort_int", sort_rows, (1,), lambda: [patterns(1, 2, 64, dtype=torch.int32), *(torch.zeros(2, 64, dtype=torch.int32) for _ in "ab"),
      torch.zeros(2, 4, dtype=torch.int32)], dict(R=2, B=64, K=4), num_warps=4)  # fmt: skip


@triton.jit
def histogram_gather(x, index, h, g, B: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + i)
    tl.store(h + tl.arange(0, BINS), tl.histogram(v, BINS))
    tl.store(h + BINS + tl.arange(0, BINS), tl.histogram(v, BINS, mask=v % 3 == 0))
    tl.store(g + i, tl.gather(v, tl.load(index + i), 0))


_case("histogram_gather", histogram_gather, (1,), lambda: [integers(1, 512, high=64), integers(2, 512, high=512), torch.zeros(
    128, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)], dict(B=512, BINS=64), num_warps=4)  # fmt: skip


@triton.jit
def _recurrence(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def scans(a, b, y, R: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, R)[:, None] * B + tl.arange(0, B)[None, :]
    size: tl.constexpr = R * B
    x, z = tl.load(a + at), tl.load(b + at)
    tl.store(y + at, tl.cumsum(x, 1))
    tl.store(y + size + at, tl.cumprod(x, 1, reverse=True))
    decay, state = tl.associative_scan((x, z), 1, _recurrence)
    tl.store(y + 2 * size + at, state)
    tl.store(y + 3 * size + at, tl.associative_scan(z, 0, _larger))
    tl.store(y + 4 * size + at, tl.cumsum(z, 0, reverse=True) + decay)


for _warps in (1, 4):
    _case(f"scans_w{_warps}", scans, (1,), lambda: [normal(1, 8, 128, dtype=_F32), normal(2, 8, 128, dtype=_F32), torch.zeros(5, 8, 128)],
          dict(R=8, B=128), num_warps=_warps)  # fmt: skip


@triton.jit
def selective_scan(x, dt, a, b, c, y, T, D: tl.constexpr, S: tl.constexpr):
    d, s = tl.program_id(0) * D + tl.arange(0, D), tl.arange(0, S)
    width = D * tl.num_programs(0)
    decay = -tl.exp(tl.load(a + d[:, None] * S + s[None, :]))
    h = tl.zeros((D, S), tl.float32)
    for t in range(T):
        step = tl.load(dt + t * width + d).to(tl.float32)
        step = tl.where(step > 20.0, step, tl.log(1 + tl.exp(step)))
        v = tl.load(x + t * width + d).to(tl.float32)
        h = tl.exp(decay * step[:, None]) * h + (step * v)[:, None] * tl.load(b + t * S + s)[None, :]
        out = tl.sum(h * tl.load(c + t * S + s)[None, :], 1)
        tl.store(y + t * width + d, out.to(y.dtype.element_ty))


_case("selective_scan", selective_scan, (2,), lambda: [normal(1, 24, 64), normal(2, 24, 64), normal(3, 64, 16, dtype=_F32), normal(
    4, 24, 16, dtype=_F32), normal(5, 24, 16, dtype=_F32), torch.zeros(24, 64, dtype=_BF16), 24], dict(D=32, S=16), num_warps=4)  # fmt: skip


@triton.jit
def linear_attention(q, k, v, g, o, T, C: tl.constexpr, D: tl.constexpr):
    base = tl.program_id(0) * T * D
    r, d = tl.arange(0, C), tl.arange(0, D)
    state = tl.zeros((D, D), tl.float32)
    for start in range(0, T, C):
        at = base + (start + r)[:, None] * D + d[None, :]
        qc, kc, vc = tl.load(q + at), tl.load(k + at), tl.load(v + at)
        gate = tl.cumsum(tl.load(g + tl.program_id(0) * T + start + r), 0)
        last = tl.sum(tl.where(r == C - 1, gate, 0.0), 0)
        qg = (qc.to(tl.float32) * tl.exp(gate)[:, None]).to(qc.dtype)
        scores = tl.dot(qc, tl.trans(kc)) * tl.exp(gate[:, None] - gate[None, :])
        scores = tl.where(r[:, None] >= r[None, :], scores, 0.0)
        out = tl.dot(qg, state.to(qc.dtype)) + tl.dot(scores.to(vc.dtype), vc)
        kg = (kc.to(tl.float32) * tl.exp(last - gate)[:, None]).to(kc.dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(kg), vc)
        tl.store(o + at, out.to(o.dtype.element_ty))


_case("chunked_linear_attention", linear_attention, (2,), lambda: [*(normal(i, 2, 96, 64) for i in (1, 2, 3)), -normal(
    4, 2, 96, dtype=_F32, scale=0.125).abs(), torch.zeros(2, 96, 64, dtype=_BF16), 96], dict(C=32, D=64), num_warps=4)  # fmt: skip
_case("chunked_linear_attention_wgmma", linear_attention, (2,), lambda: [*(normal(i, 2, 128, 64) for i in (1, 2, 3)), -normal(
    4, 2, 128, dtype=_F32, scale=0.125).abs(), torch.zeros(2, 128, 64, dtype=_BF16), 128], dict(C=64, D=64), num_warps=4)  # fmt: skip


# --- integers, bits, random numbers ---
@triton.jit
def integer_arithmetic(x, z, y, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(z + i)
    b = tl.where(b == 0, 7, b)
    b = tl.where(b == -1, 3, b)  # the quotient of the lowest integer by -1 is undefined
    tl.store(y + i, a // b)
    tl.store(y + B + i, a % b)
    tl.store(y + 2 * B + i, a * b + (a ^ b))
    tl.store(y + 3 * B + i, (a >> 3) + (b << 5) - (~a & b))
    tl.store(y + 4 * B + i, tl.minimum(a, b) + tl.maximum(a, b) * 2)
    tl.store(y + 5 * B + i, tl.abs(a) // 7 + a % 10 + tl.cdiv(b, 13))
    tl.store(y + 6 * B + i, tl.where(a < b, a | b, a - b))
    tl.store(y + 7 * B + i, tl.clamp(a.to(tl.float32), -100.0, 100.0).to(a.dtype))


for _name in ("int32", "int64", "int16", "int8", "uint8"):
    _dtype = getattr(torch, _name)
    _case(f"integer_{_name}", integer_arithmetic, (1,), lambda d=_dtype: [patterns(1, 256, dtype=d), patterns(2, 256, dtype=d), torch.zeros(
        8, 256, dtype=d)], dict(B=256), num_warps=2)  # fmt: skip


@triton.jit
def unsigned_arithmetic(x, z, y, m, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i).to(tl.uint32, bitcast=True), tl.load(z + i).to(tl.uint32, bitcast=True) | 1
    tl.store(y + i, (a // b).to(tl.int32, bitcast=True))
    tl.store(y + B + i, (a % b).to(tl.int32, bitcast=True))
    tl.store(y + 2 * B + i, tl.umulhi(a, b).to(tl.int32, bitcast=True))
    tl.store(y + 3 * B + i, (a >> (b & 31)).to(tl.int32, bitcast=True))
    rotated = (a << 13) | (a >> 19)
    tl.store(y + 4 * B + i, rotated.to(tl.int32, bitcast=True))
    a = a ^ (a >> 16)
    a = a * 0x85EBCA6B
    a = a ^ (a >> 13)
    tl.store(y + 5 * B + i, a.to(tl.int32, bitcast=True))
    tl.store(
        y + 6 * B + i, libdevice.popc(a.to(tl.int32, bitcast=True)) + libdevice.clz(a.to(tl.int32, bitcast=True)) * 64
    )
    tl.store(y + 7 * B + i, libdevice.brev(a.to(tl.int32, bitcast=True)) ^ libdevice.ffs(a.to(tl.int32, bitcast=True)))
    tl.store(m + i, (a.to(tl.uint64) * b.to(tl.uint64) + (a.to(tl.uint64) << 32)).to(tl.int64, bitcast=True) // 1000003)
    tl.store(m + B + i, tl.umulhi(a.to(tl.uint64) << 20, b.to(tl.uint64) << 30).to(tl.int64, bitcast=True))


_case("unsigned_bits", unsigned_arithmetic, (1,), lambda: [patterns(1, 256, dtype=torch.int32), patterns(2, 256, dtype=torch.int32), torch.zeros(
    8, 256, dtype=torch.int32), torch.zeros(2, 256, dtype=torch.int64)], dict(B=256), num_warps=2)  # fmt: skip


@triton.jit
def random_numbers(y, z, seed, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.num_programs(0) * B
    tl.store(y + i, tl.rand(seed, i))
    tl.store(y + n + i, tl.randn(seed, i))
    a, b, c, d = tl.randn4x(seed, i)
    tl.store(y + 2 * n + i, a + b * c - d)
    tl.store(z + i, tl.randint(seed, i))
    tl.store(z + n + i, tl.randint(seed, i.to(tl.int64) + (1 << 33)))


_case(
    "random",
    random_numbers,
    (2,),
    lambda: [torch.zeros(3, 512), torch.zeros(2, 512, dtype=torch.int32), 123456789],
    dict(B=256),
    num_warps=4,
)


# --- casts and quantisation ---
@triton.jit
def quantize_rows(x, y, s, N, LIMIT: tl.constexpr, B: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    v = tl.load(x + row * N + i, mask=i < N, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(v), 0), 1e-12) / LIMIT
    tl.store(s + row, scale)
    tl.store(y + row * N + i, tl.clamp(v / scale, -LIMIT, LIMIT).to(y.dtype.element_ty), mask=i < N)


@triton.jit
def quantize_blocks(x, y, s, N, BM: tl.constexpr, BN: tl.constexpr):
    rm, rn = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    v = tl.load(x + rm[:, None] * N + rn[None, :]).to(tl.float32)
    amax = tl.max(tl.max(tl.abs(v), 1), 0)
    exponent = tl.ceil(tl.log2(amax / 448.0))
    scale = tl.exp2(exponent)
    tl.store(s + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)
    tl.store(y + rm[:, None] * N + rn[None, :], (v / scale).to(tl.float8e4nv))


_case("quantize_rows_e4m3", quantize_rows, (3,), lambda: [normal(1, 3, 500), torch.zeros(3, 500, dtype=_E4M3), torch.zeros(3), 500],
      dict(LIMIT=448.0, B=512), num_warps=4)  # fmt: skip
_case("quantize_rows_e5m2", quantize_rows, (3,), lambda: [normal(1, 3, 500, dtype=_FP16), torch.zeros(3, 500, dtype=_E5M2), torch.zeros(3), 500],
      dict(LIMIT=57344.0, B=512), num_warps=4)  # fmt: skip
_case("quantize_rows_int8", quantize_rows, (3,), lambda: [normal(1, 3, 500), torch.zeros(3, 500, dtype=torch.int8), torch.zeros(3), 500],
      dict(LIMIT=127.0, B=512), num_warps=4)  # fmt: skip
_case("quantize_blocks", quantize_blocks, (2, 2), lambda: [normal(1, 64, 128), torch.zeros(64, 128, dtype=_E4M3), torch.zeros(4), 128],
      dict(BM=32, BN=64), num_warps=4)  # fmt: skip


@triton.jit
def cast(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def cast_rtz(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(
        y + i, tl.load(x + i, mask=i < n, other=0.0).to(y.dtype.element_ty, fp_downcast_rounding="rtz"), mask=i < n
    )


_FLOATS = {"f64": _F64, "f32": _F32, "fp16": _FP16, "bf16": _BF16, "e4m3": _E4M3, "e5m2": _E5M2}
_INTEGERS = {
    "i8": torch.int8,
    "u8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}


def _cast(kernel, x, x_dtype, y, y_dtype, suffix=""):
    def arguments():
        if x_dtype.is_floating_point:
            values = patterns(7, 600, dtype=x_dtype) if x_dtype.itemsize == 1 else special(7, 600, x_dtype)
            if not y_dtype.is_floating_point:  # conversions outside the range of the integer are undefined in LLVM
                top = {1: 100, 2: 30000, 4: 2.0**31 - 256, 8: 2.0**62}[y_dtype.itemsize]
                values = values.double().nan_to_num(0.0).clamp(0 if y_dtype == torch.uint8 else -top, top).to(x_dtype)
        else:
            values = patterns(7, 600, dtype=torch.int8 if x_dtype == torch.bool else x_dtype)
            values = values % 2 == 1 if x_dtype == torch.bool else values
        return [values, torch.zeros(600, dtype=y_dtype), 600]

    _case(f"cast_{x}_{y}{suffix}", kernel, (3,), arguments, dict(B=256), num_warps=2)


for _x, _xd in _FLOATS.items():
    for _y, _yd in _FLOATS.items():
        # Triton 3.6 has no conversion between FP8 and float64 and none between the two FP8 formats
        if (
            _x != _y
            and not (_xd.itemsize == 1 and _yd.itemsize in (1, 8))
            and not (_xd.itemsize == 8 and _yd.itemsize == 1)
        ):
            _cast(cast, _x, _xd, _y, _yd)
for _x, _y in (
    ("f32", "i32"),
    ("f32", "i64"),
    ("f32", "i8"),
    ("f32", "u8"),
    ("f64", "i64"),
    ("bf16", "i32"),
    ("fp16", "i16"),
    ("f32", "bool"),
):
    _cast(cast, _x, _FLOATS[_x], _y, _INTEGERS[_y])
for _x, _y in (("i32", "f32"), ("i64", "f32"), ("i64", "f64"), ("i8", "bf16"), ("u8", "fp16"), ("i16", "f32"), ("bool", "f32"), ("i32", "bf16"),
               ("i64", "fp16")):  # fmt: skip
    _cast(cast, _x, _INTEGERS[_x], _y, _FLOATS[_y])
for _x, _y in (("f32", "fp16"), ("f32", "bf16"), ("f32", "e5m2")):
    _cast(cast_rtz, _x, _FLOATS[_x], _y, _FLOATS[_y], "_rtz")


# --- functions ---
@triton.jit
def one_operand(x, y, n, B: tl.constexpr, WHICH: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    v = tl.load(x + i, mask=m, other=1.0)
    if WHICH == 0:
        tl.store(y + i, tl.erf(v), mask=m)
        tl.store(y + n + i, libdevice.tanh(v), mask=m)
        tl.store(y + 2 * n + i, libdevice.log1p(v), mask=m)
        tl.store(y + 3 * n + i, libdevice.expm1(v), mask=m)
        tl.store(y + 4 * n + i, libdevice.sinh(v), mask=m)
        tl.store(y + 5 * n + i, libdevice.asin(v), mask=m)
    if WHICH == 1:
        tl.store(y + i, libdevice.lgamma(v), mask=m)
        tl.store(y + n + i, libdevice.rsqrt_rn(v), mask=m)
        tl.store(y + 2 * n + i, tl.floor(v), mask=m)
        tl.store(y + 3 * n + i, tl.ceil(v), mask=m)
        tl.store(y + 4 * n + i, tl.exp2(v), mask=m)
        tl.store(y + 5 * n + i, libdevice.atan(v), mask=m)
    if WHICH == 2:
        tl.store(y + i, libdevice.exp(v), mask=m)
        tl.store(y + n + i, libdevice.log(v), mask=m)
        tl.store(y + 2 * n + i, libdevice.cosh(v), mask=m)
        tl.store(y + 3 * n + i, libdevice.acosh(v), mask=m)
        tl.store(y + 4 * n + i, libdevice.cbrt(v), mask=m)
        tl.store(y + 5 * n + i, tl.sqrt_rn(v), mask=m)
    if WHICH == 3:
        tl.store(y + i, libdevice.tan(v), mask=m)
        tl.store(y + n + i, libdevice.erfinv(v), mask=m)
        tl.store(y + 2 * n + i, libdevice.rint(v), mask=m)
        tl.store(y + 3 * n + i, libdevice.trunc(v), mask=m)
        tl.store(y + 4 * n + i, libdevice.round(v), mask=m)
        tl.store(y + 5 * n + i, libdevice.log2(v) + libdevice.exp10(v), mask=m)
    if WHICH == 4:
        tl.store(y + i, libdevice.fast_sinf(v), mask=m)
        tl.store(y + n + i, libdevice.fast_expf(v), mask=m)
        tl.store(y + 2 * n + i, libdevice.fast_logf(v), mask=m)
        tl.store(y + 3 * n + i, libdevice.fast_cosf(v), mask=m)
        tl.store(y + 4 * n + i, libdevice.fast_log10f(v), mask=m)
        tl.store(y + 5 * n + i, libdevice.fast_tanf(v), mask=m)
    if WHICH == 5:
        tl.store(y + i, tl.exp(v), mask=m)
        tl.store(y + n + i, tl.log(v), mask=m)
        tl.store(y + 2 * n + i, tl.sigmoid(v), mask=m)
        tl.store(y + 3 * n + i, tl.rsqrt(v), mask=m)
        tl.store(y + 4 * n + i, tl.sqrt(v), mask=m)
        tl.store(y + 5 * n + i, tl.abs(-v), mask=m)


def _ordinary(seed, count, dtype):
    values = special(seed, count, dtype)
    values[100:] = normal(seed + 9, count - 100, dtype=dtype, scale=4.0)
    return values


for _which in range(6):
    _case(
        f"functions_{_which}",
        one_operand,
        (4,),
        lambda: [_ordinary(1, 900, _F32), torch.zeros(6, 900), 900],
        dict(B=256, WHICH=_which),
    )


@triton.jit
def two_operands(x, z, y, n, B: tl.constexpr, WHICH: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    a, b = tl.load(x + i, mask=m, other=1.0), tl.load(z + i, mask=m, other=1.0)
    if WHICH == 0:
        tl.store(y + i, libdevice.pow(a, b), mask=m)
        tl.store(y + n + i, libdevice.atan2(a, b), mask=m)
        tl.store(y + 2 * n + i, tl.div_rn(a, b), mask=m)
        tl.store(y + 3 * n + i, tl.fma(a, b, a), mask=m)
        tl.store(y + 4 * n + i, a / b, mask=m)
        tl.store(y + 5 * n + i, libdevice.hypot(a, b), mask=m)
    if WHICH == 1:
        tl.store(y + i, tl.fdiv(a, b, ieee_rounding=True), mask=m)
        tl.store(y + n + i, tl.maximum(a, b), mask=m)
        tl.store(y + 2 * n + i, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL), mask=m)
        tl.store(y + 3 * n + i, libdevice.copysign(a, b), mask=m)
        tl.store(y + 4 * n + i, tl.clamp(a, -1.5, b, propagate_nan=tl.PropagateNan.ALL), mask=m)
        tl.store(y + 5 * n + i, a % b, mask=m)
    if WHICH == 2:
        tl.store(y + i, libdevice.fmod(a, b), mask=m)
        tl.store(y + n + i, libdevice.fma_rz(a, b, a), mask=m)
        tl.store(y + 2 * n + i, libdevice.add_ru(a, b), mask=m)
        tl.store(y + 3 * n + i, libdevice.mul_rd(a, b), mask=m)
        tl.store(y + 4 * n + i, libdevice.nextafter(a, b), mask=m)
        tl.store(y + 5 * n + i, libdevice.fast_dividef(a, b), mask=m)
    if WHICH == 3:
        tl.store(y + i, tl.where(a == b, 1.0, tl.where(a < b, 2.0, tl.where(a > b, 3.0, 4.0))).to(a.dtype), mask=m)
        tl.store(y + n + i, tl.where((a != a) | (b >= a) | (a <= 0.0), a, b), mask=m)
        tl.store(y + 2 * n + i, a * b + a * 0.25 - b / a, mask=m)
        tl.store(y + 3 * n + i, tl.where(a != b, a - b, -a), mask=m)
        tl.store(y + 4 * n + i, tl.maximum(tl.minimum(a * b, 1.0), 0.0), mask=m)
        tl.store(y + 5 * n + i, a * a - b * b, mask=m)


for _which in range(4):
    _case(f"functions_two_{_which}", two_operands, (4,), lambda: [_ordinary(1, 900, _F32), _ordinary(2, 900, _F32).flip(0), torch.zeros(
        6, 900), 900], dict(B=256, WHICH=_which))  # fmt: skip
for _name, _dtype in (("bf16", _BF16), ("fp16", _FP16), ("f64", _F64)):
    _case(f"functions_two_3_{_name}", two_operands, (4,), lambda d=_dtype: [special(1, 900, d), special(2, 900, d).flip(0), torch.zeros(
        6, 900, dtype=d), 900], dict(B=256, WHICH=3))  # fmt: skip


@triton.jit
def float64(x, z, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    a, b = tl.load(x + i, mask=m, other=1.0), tl.load(z + i, mask=m, other=1.0)
    tl.store(y + i, a / b, mask=m)
    tl.store(y + n + i, libdevice.sqrt_rn(tl.abs(a)) + b, mask=m)
    tl.store(y + 2 * n + i, libdevice.exp(a), mask=m)
    tl.store(y + 3 * n + i, libdevice.log(tl.abs(b)), mask=m)
    tl.store(y + 4 * n + i, libdevice.rsqrt(tl.abs(a)), mask=m)
    tl.store(y + 5 * n + i, libdevice.floor(a) * b - tl.maximum(a, b), mask=m)


_case("float64", float64, (2,), lambda: [_ordinary(1, 400, _F64), _ordinary(2, 400, _F64).flip(0), torch.zeros(6, 400, dtype=_F64), 400],
      dict(B=256))  # fmt: skip


# --- atomics ---
@triton.jit
def atomics(x, counts, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    v = tl.load(x + i, mask=m, other=0)
    bin = v & 15
    tl.atomic_add(counts + bin, 1, mask=m)
    tl.atomic_max(counts + 16 + bin, v, mask=m)
    tl.atomic_min(counts + 32 + bin, v, mask=m, sem="release")
    tl.atomic_and(counts + 48 + bin, v | 15, mask=m)
    tl.atomic_or(counts + 64 + bin, v, mask=m)
    tl.atomic_xor(counts + 80 + bin, v, mask=m, sem="acquire")
    tl.store(y + i, tl.atomic_xchg(y + n + i, v, mask=m), mask=m)
    tl.store(y + 2 * n + i, tl.atomic_cas(y + 3 * n + i, tl.where(v % 2 == 0, 5, v), v), mask=m)


_case("atomics_int", atomics, (2,), lambda: [patterns(1, 512, dtype=torch.int32), patterns(2, 96, dtype=torch.int32), integers(
    3, 4, 512, high=9), 512], dict(B=256), num_warps=4)  # fmt: skip


@triton.jit
def atomics_float(x, y, old, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(old + i, tl.atomic_add(y + i, v, mask=i < n), mask=i < n)


@triton.jit
def atomics_float_top(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.atomic_max(y + i % 16, v, mask=i < n)
    tl.atomic_min(y + 16 + i % 16, v, mask=i < n)


for _name, _dtype in (("f32", _F32), ("fp16", _FP16), ("bf16", _BF16), ("f64", _F64), ("i64", torch.int64)):
    _case(f"atomics_{_name}", atomics_float, (2,), lambda d=_dtype: [patterns(1, 500, dtype=d) if d == torch.int64 else special(1, 500, d),
          patterns(2, 500, dtype=d) if d == torch.int64 else normal(2, 500, dtype=d), torch.zeros(500, dtype=d), 500], dict(B=256))  # fmt: skip
_case(
    "atomics_float_top",
    atomics_float_top,
    (2,),
    lambda: [normal(1, 500, dtype=_F32), normal(2, 32, dtype=_F32), 500],
    dict(B=256),
)


@triton.jit
def counter_loop(ticket, y, B: tl.constexpr):
    while tl.atomic_cas(ticket, 0, 1) == 1:
        pass
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(y + i) + i * 3)
    tl.debug_barrier()
    tl.atomic_xchg(ticket, 0)


_case(
    "spin_lock", counter_loop, (4,), lambda: [torch.zeros(1, dtype=torch.int32), integers(1, 128, high=99)], dict(B=128)
)


# --- shapes, control flow, calls ---
@triton.jit
def shapes(x, y, R: tl.constexpr, C: tl.constexpr):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    size: tl.constexpr = R * C
    flat = tl.arange(0, size)
    v = tl.load(x + at)
    tl.store(y + tl.arange(0, C)[:, None] * R + tl.arange(0, R)[None, :], tl.trans(v))
    cube = tl.reshape(v, (R // 2, 2, C))
    tl.store(y + size + flat, tl.ravel(tl.permute(cube, (2, 0, 1))))
    left, right = tl.split(tl.reshape(v, (R, C // 2, 2)))
    tl.store(y + 2 * size + flat, tl.ravel(tl.interleave(right, left)))
    tl.store(y + 3 * size + flat, tl.ravel(tl.join(left * 2, right)))
    tl.store(y + 4 * size + flat, tl.ravel(tl.flip(v, 0)))
    tl.store(
        y + 5 * size + flat, tl.ravel(tl.broadcast_to(tl.sum(v, 1, keep_dims=True), (R, C)) + tl.max(v, 0)[None, :])
    )
    tl.store(y + 6 * size + flat, tl.cat(tl.sum(cube, 1).reshape(size // 2), tl.ravel(left), can_reorder=True))


for _warps, _dtype in ((1, _F32), (4, _F32), (4, _BF16), (8, torch.int32)):
    _case(f"shapes_w{_warps}_{str(_dtype)[6:]}", shapes, (1,), lambda d=_dtype: [integers(1, 16, 32, low=-9, high=9, dtype=d), torch.zeros(
        7, 512, dtype=d)], dict(R=16, C=32), num_warps=_warps)  # fmt: skip


@triton.jit
def assembly(x, z, y, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(z + i)
    tl.store(
        y + i,
        tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        ),
    )
    low, high = tl.inline_asm_elementwise(
        "{ .reg .b64 %w; mul.wide.u32 %w, $2, $3; mov.b64 {$0, $1}, %w; }",
        "=r,=r,r,r",
        [a, b],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    tl.store(y + B + i, low)
    tl.store(y + 2 * B + i, high)
    tl.store(
        y + 3 * B + i,
        tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x55, 0x96;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        ),
    )
    tiny = tl.inline_asm_elementwise(
        "vadd4.u32.u32.u32 $0, $1, $1, $1;", "=r,r", [a.to(tl.int8)], dtype=tl.int8, is_pure=True, pack=4
    )
    tl.store(y + 4 * B + i, tiny.to(tl.int32))


_case("inline_assembly", assembly, (1,), lambda: [patterns(1, 256, dtype=torch.int32), patterns(2, 256, dtype=torch.int32), torch.zeros(
    5, 256, dtype=torch.int32)], dict(B=256), num_warps=2)  # fmt: skip


@triton.jit(noinline=True)
def _polynomial(x, scale):
    return (x * scale + 0.5) * x - 1.0


@triton.jit
def _nested(x, N: tl.constexpr):
    for i in tl.static_range(N):
        x = _gelu_tanh(x) + i * 0.125
    return x


@triton.jit
def control(x, steps, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.device_assert(i >= 0, "negative")
    v = tl.load(x + i, mask=i < n, other=0.0)
    count = tl.load(steps + tl.program_id(0))
    guess = tl.full((B,), 1.0, tl.float32)
    step = 0
    while step < count:
        guess = 0.5 * (guess + tl.abs(v) / guess)
        step += 1
    tl.store(y + i, guess, mask=i < n)
    shift = tl.load(x + tl.program_id(0))
    tl.store(y + n + i, v * _polynomial(shift, 1.25) + _polynomial(shift * 3, -0.5), mask=i < n)
    if count % 2 == 0:
        v = _nested(v, 3)
    elif count > 4:
        v = -v
    tl.store(y + 2 * n + i, v, mask=i < n)


_case("control_flow", control, (4,), lambda: [normal(1, 900, dtype=_F32), torch.tensor([0, 3, 6, 7], dtype=torch.int32), torch.zeros(
    3, 900), 900], dict(B=256), num_warps=4)  # fmt: skip


@triton.jit
def collatz(x, y, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i)
    count = tl.zeros((B,), tl.int32)
    while tl.max(tl.where(v > 1, 1, 0), 0) > 0:
        count += tl.where(v > 1, 1, 0)
        v = tl.where(v > 1, tl.where(v % 2 == 0, v // 2, 3 * v + 1), v)
    tl.store(y + i, count)


_case("while_loop", collatz, (2,), lambda: [integers(1, 128, low=1, high=999, dtype=torch.int64), torch.zeros(128, dtype=torch.int32)], dict(
    B=64), num_warps=1)  # fmt: skip


@triton.jit
def reductions(x, y, R: tl.constexpr, C: tl.constexpr):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    v = tl.load(x + at).to(tl.float32)
    r, c = tl.arange(0, R), tl.arange(0, C)
    tl.store(y + r, tl.sum(v, 1))
    tl.store(y + R + r, tl.max(v, 1) - tl.min(v, 1))
    tl.store(y + 2 * R + c, tl.sum(v, 0))
    tl.store(y + 2 * R + C + c, tl.reduce(v, 0, _larger))
    tl.store(y + 2 * R + 2 * C, tl.sum(v))
    tl.store(y + 2 * R + 2 * C + 1, tl.max(tl.sum(v * v, 1), 0))


for _warps in (1, 2, 4, 8, 16):
    _case(f"reductions_w{_warps}", reductions, (1,), lambda: [normal(1, 32, 64), torch.zeros(32 * 2 + 64 * 2 + 2)], dict(R=32, C=64),
          num_warps=_warps)  # fmt: skip


@triton.jit
def copies(x, index, y, T, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.load(index + i, mask=i < T, other=-1)
    v = tl.load(x + j, mask=(j >= 0) & (j % 3 != 0), other=-1)
    tl.store(y + i, v, mask=i < T)


for _name in ("bool", "int8", "int16", "float16", "float64"):
    _dtype = getattr(torch, _name)
    _case(f"gather_masked_{_name}", copies, (3,), lambda d=_dtype: [integers(1, 200, high=2 if d == torch.bool else 100, dtype=d), integers(
        2, 300, low=-20, high=200, dtype=torch.int64), torch.zeros(300, dtype=d), 300], dict(B=128), num_warps=1)  # fmt: skip
