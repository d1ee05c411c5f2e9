// SPDX-License-Identifier: Apache-2.0
// What every kernel shares: integer types, bit views, and the instructions that CUDA C++ has no intrinsic for. No CUDA
// header is included (NVRTC needs none). A host compiler that defines FMTSIM_HOST supplies these instructions itself
// (tests/cuda/emulator).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define UNROLLED _Pragma("unroll")

struct alignas(16) Words4 { u32 x, y, z, w; };
struct alignas(8) Words2 { u32 x, y; };

// Floating-point dtypes of tensors; fmtsim.cuda.cast.parameters.DTYPES has the same numbers.
#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2
#define FLOAT64 3

#define BYTES_OF(type) ((type) == FLOAT64 ? 8 : (type) == FLOAT32 ? 4 : 2)

#ifndef FMTSIM_HOST

// Shared memory whose size the launch decides, as bytes aligned to 128.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

#if __CUDA_ARCH__ >= 900
// d += a b on the fp64 tensor core, 16 x 8 x 16 (compute capability 9.0 and later): per output a chain of sixteen
// fused multiply-adds in the order of k, each rounded toward zero. Fragments are those of the PTX manual.
DEVICE void dmma_rz_16x8x16(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64.rz {%0,%1,%2,%3},{%4,%5,%6,%7,%8,%9,%10,%11},"
      "{%12,%13,%14,%15},{%0,%1,%2,%3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
        "d"(b[2]), "d"(b[3]));
}

// The same, 16 x 8 x 8.
DEVICE void dmma_rz_16x8x8(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64.rz {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}

#endif

// The same, 8 x 8 x 4 (compute capability 8.0 and later).
DEVICE void dmma_rz_8x8x4(double (&d)[2], double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64.rz {%0,%1},{%2},{%3},{%0,%1};"
               : "+d"(d[0]), "+d"(d[1])
               : "d"(a), "d"(b));
}

// d += a b with bfloat16 operands on the tensor core, 16 x 8 x 16; exact wherever nothing needs more than 24 bits.
DEVICE void hmma_bf16_16x8x16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Copy 16 bytes from global to shared memory without waiting; wait_copies<N> leaves the last N groups under way.
DEVICE void copy16_async(void* shared, const void* global) {
  u32 place = (u32)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(global) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Instructions of one operand.
#define INSTRUCTION(name, ptx, To, to, From, from) \
  DEVICE To name(From x) {                         \
    To y;                                          \
    asm(ptx " %0, %1;" : "=" to(y) : from(x));     \
    return y;                                      \
  }
INSTRUCTION(float_of_half, "cvt.f32.f16", float, "f", u16, "h")
INSTRUCTION(half_of_float, "cvt.rn.f16.f32", u16, "h", float, "f")  // to nearest even; NaN is 0x7FFF
INSTRUCTION(bfloat_of_float, "cvt.rn.bf16.f32", u16, "h", float, "f")
// Approximations; subnormal operands and results are zero. Relative errors: below 2^-20 of 1 / x and the root, 2^-22 of
// log2 x and 2^x (PTX: of the logarithm absolute from 0.5 to 2).
INSTRUCTION(short_inverse, "rcp.approx.ftz.f32", float, "f", float, "f")
INSTRUCTION(short_root, "sqrt.approx.ftz.f32", float, "f", float, "f")
INSTRUCTION(short_log2, "lg2.approx.ftz.f32", float, "f", float, "f")
INSTRUCTION(short_exp2, "ex2.approx.ftz.f32", float, "f", float, "f")

// The larger of two numbers, NaN where one is.
DEVICE float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Fused multiply-adds of two float16 or bfloat16 side by side, each rounded once, subnormals kept.
DEVICE u32 fma_half2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEVICE u32 fma_bfloat2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Two neighbours of 16 bits, float16 or bfloat16, in a word. clamp_pair: |x| or, Positive, x from 0 to the limit, NaN
// kept; add_pairs: a sum which becomes NaN with an addend; rounded_pair: float32 numbers to nearest even.
template <int Type, bool Positive>
DEVICE u32 clamp_pair(u32 pair, u32 limit) {
  u32 out;
  if (Type == FLOAT16 && Positive) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(0));
  else if (Type == FLOAT16) asm("abs.f16x2 %0, %1;" : "=r"(out) : "r"(pair));
  else if (Positive) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(0));
  else asm("abs.bf16x2 %0, %1;" : "=r"(out) : "r"(pair));
  if (Type == FLOAT16) asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(out) : "r"(limit));
  else asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(out) : "r"(limit));
  return out;
}
template <int Type>
DEVICE u32 add_pairs(u32 sum, u32 pair) {
  u32 out;
  if (Type == FLOAT16) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(0x3C003C00u), "r"(sum));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(0x3F803F80u), "r"(sum));
  return out;
}
template <int Type>
DEVICE u32 rounded_pair(float low, float high) {
  u32 out;
  if (Type == FLOAT16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// y + (x >> Shift) and ~(x ^ y ^ z), each one step where the compiler would take two.
template <int Shift>
DEVICE u32 add_shifted(u32 x, u32 y) {
  u32 out;
  asm("{.reg .b32 s; shr.u32 s, %1, %3; add.u32 %0, s, %2;}" : "=r"(out) : "r"(x), "r"(y), "n"(Shift));
  return out;
}
DEVICE u32 exclusive_nor(u32 x, u32 y, u32 z) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0x69;" : "=r"(out) : "r"(x), "r"(y), "r"(z));
  return out;
}

#endif

DEVICE float as_float(u32 bits) { return __int_as_float((i32)bits); }
DEVICE u32 as_bits(float value) { return (u32)__float_as_int(value); }

#define FLOAT_EXPONENT 0x7F800000u  // bits of Inf; those of NaN are larger
#define MAGNITUDE 0x7FFFFFFFu

// The canonical NaN in place of any.
DEVICE float canonical(float x) { return x == x ? x : as_float(0x7FC00000u); }

// Bits of the nearest bfloat16, to even: half a last place less one is added, and one more where that place is odd.
// Number: x is no NaN.
template <bool Number>
DEVICE u32 bfloat16_bits(float x) {
  u32 bits = as_bits(x);
  return !Number && x != x ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}

// Copies Count times 16 bytes from global to shared memory with all Threads of a block, without waiting.
template <int Count, int Threads>
DEVICE void copy_words(void* shared, const void* global) {
  UNROLLED for (int i = 0; i < (Count + Threads - 1) / Threads; ++i) {
    i32 word = i * Threads + threadIdx.x;
    if (Count % Threads == 0 || word < Count) copy16_async((Words4*)shared + word, (const Words4*)global + word);
  }
}
