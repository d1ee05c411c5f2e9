// SPDX-License-Identifier: Apache-2.0
// What steps of Adam on many parameters share: the table of a launch, reads and writes of four neighbours, the update.
// Macros: ENTRIES, parameters of a launch. TYPE: of parameters and gradients, 0 float32, 1 bfloat16, 2 float16.
#pragma once
#include "philox.cuh"
#include "vectors.cuh"

#define CHUNK 2048  // elements of a block of threads at a time: whole blocks
#define INFINITE 0x7F800000u

typedef Stored<TYPE>::type Number;

struct Entry {  // a parameter
  Number* p;
  const Number* g;
  void* m;
  void* v;
  float* m_scales;
  float* v_scales;
  float* m_powers;  // these four of expanded groups alone
  float* v_powers;
  float* m_centres;
  float* v_centres;
  void* w;  // weights that are kept; 0 where the parameter holds them, or there are none
  float* w_scale;
  i64 plain;  // the moments are float32, whatever those of other parameters are
  i64 place;  // of the parameter's random words
  i64 count;
  i64 first;  // of its chunks, among those of the launch
};
struct alignas(16) Entries {
  Entry of[ENTRIES];
};
struct alignas(16) Numbers {
  float before, after, penalty, beta1, rest1, beta2, rest2, correction, eps, size;
  float inverse;  // 1 / correction, which lies from 2^-60 to 1
  i32 zeroing;    // elements whose gradient is not finite lose their moments and stay
};

// Four neighbours; what lies behind the end is zero. Whole: all that are meant exist, so that no test for the end is
// left.
struct Four {
  float x[4];
};

template <bool Whole>
DEVICE Four read(const float* from, i64 at, i64 count) {
  Four four;
  if (Whole || at + 4 <= count) {
    Words4 w = *(const Words4*)(from + at);
    four = Four{__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
  } else {
#pragma unroll
    for (int k = 0; k < 4; k++) four.x[k] = at + k < count ? from[at + k] : 0.0f;
  }
  return four;
}

template <bool Whole>
DEVICE void write(float* to, i64 at, i64 count, const Four& four) {
  if (Whole || at + 4 <= count) {
    *(Words4*)(to + at) = Words4{__float_as_uint(four.x[0]), __float_as_uint(four.x[1]), __float_as_uint(four.x[2]),
                                 __float_as_uint(four.x[3])};
  } else {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (at + k < count) to[at + k] = four.x[k];
    }
  }
}

// Four neighbours of 16 or 8 bits, the first in the lowest bits.
template <bool Whole, class Code>
DEVICE u64 read_four(const Code* from, i64 at, i64 count) {
  if (Whole || at + 4 <= count) return sizeof(Code) == 1 ? *(const u32*)(from + at) : *(const u64*)(from + at);
  u64 codes = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) codes |= at + k < count ? (u64)from[at + k] << (8 * sizeof(Code) * k) : 0;
  return codes;
}

template <bool Whole, class Code>
DEVICE void write_four(Code* to, i64 at, i64 count, u64 codes) {
  if (Whole || at + 4 <= count) {
    if (sizeof(Code) == 1) *(u32*)(to + at) = (u32)codes;
    else *(u64*)(to + at) = codes;
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; k++) {
    if (at + k < count) to[at + k] = (Code)(codes >> (8 * sizeof(Code) * k));
  }
}

// The magnitude, as bits, to the code of a format, to nearest even, and back; whoever calls sees that neither overflows.
template <int Mantissa, int Bias>
DEVICE u32 nearest_code(u32 bits) {
  if (Bias < 127 && bits < (128u - Bias) << 23) {  // a subnormal: the last place of the sum is its step
    u32 magic = (151u - Bias - Mantissa) << 23;
    return __float_as_uint(__fadd_rn(__uint_as_float(bits), __uint_as_float(magic))) - magic;
  }
  u32 half = (1u << (22 - Mantissa)) - 1, odd = bits >> (23 - Mantissa) & 1;
  return ((bits + half + odd) >> (23 - Mantissa)) - ((127u - Bias) << Mantissa);
}

template <int Mantissa, int Bias>
DEVICE u32 magnitude_of(u32 code) {
  return __float_as_uint(__fmul_rn(__uint_as_float(code << (23 - Mantissa)), __uint_as_float((254u - Bias) << 23)));
}

// Numbers of a parameter or gradient.
#if TYPE != 0
#define PLACES (TYPE == 1 ? 7 : 10)
#define BIASED (TYPE == 1 ? 127 : 15)
#define NO_NUMBER (TYPE == 1 ? 0x7F80u : 0x7C00u)  // Inf; NaN lies above it

DEVICE u32 rounded(float x) {
  u32 bits = __float_as_uint(x), size = bits & MAGNITUDE, most = (128u + BIASED) << 23;
  if (size > INFINITE) return NO_NUMBER | 1u << (PLACES - 1);
  return (bits >> 16 & 0x8000) | nearest_code<PLACES, BIASED>(size > most ? most : size);
}

template <bool Whole>
DEVICE Four read(const u16* from, i64 at, i64 count) {
  u64 bits = read_four<Whole>(from, at, count);
  Four four;
#pragma unroll
  for (int k = 0; k < 4; k++) four.x[k] = loaded<TYPE>((u16)(bits >> (16 * k)));
  return four;
}

template <bool Whole>
DEVICE void write(u16* to, i64 at, i64 count, const Four& four) {
  u64 bits = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) bits |= (u64)rounded(four.x[k]) << (16 * k);
  write_four<Whole>(to, at, count, bits);
}
#endif

// x / divisor as IEEE rounds it, with inverse = fl(1 / divisor) (Markstein): for divisors from 2^-60 to 2^60, x that
// are 0, infinite, NaN or from 2^-80 to 2^66, and quotients from 2^-100 to 2^126, so that all remainders are exact.
DEVICE float quotient(float x, float divisor, float inverse) {
  float first = __fmul_rn(x, inverse);
  float q = __fmaf_rn(__fmaf_rn(-first, divisor, x), inverse, first);
  q = __fmaf_rn(__fmaf_rn(-q, divisor, x), inverse, q);
  q = __uint_as_float(__float_as_uint(q) | (__float_as_uint(x) & ~MAGNITUDE));  // of zeros
  return (__float_as_uint(x) & MAGNITUDE) < INFINITE ? q : first;
}

// 1 / x with a relative error below 2^-20, of which subnormal results and operands are zero.
#ifdef FMTSIM_HOST
DEVICE float short_inverse(float x) {
  return 1.0f / (fabsf(x) < 1.1754944e-38f ? __uint_as_float(__float_as_uint(x) & ~MAGNITUDE) : x) * (1.0f - 0x1p-21f);
}
#else
DEVICE float short_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

DEVICE bool is_bad(float g) { return (__float_as_uint(g) & MAGNITUDE) >= INFINITE; }

// New moments of an element.
DEVICE void grow(float p, float g, float& m, float& v, const Numbers& n) {
  if (n.penalty != 0.0f) g = __fadd_rn(g, __fmul_rn(p, n.penalty));
  m = __fadd_rn(__fmul_rn(m, n.beta1), __fmul_rn(g, n.rest1));
  v = __fadd_rn(__fmul_rn(v, n.beta2), __fmul_rn(__fmul_rn(g, n.rest2), g));
}

// What new moments make of an element.
DEVICE float moved(float p, float m, float v, const Numbers& n) {
  float root = __fsqrt_rn(v);
  if (n.correction != 1.0f) root = quotient(root, n.correction, n.inverse);
  float direction = __fdiv_rn(m, __fadd_rn(root, n.eps));
  return __fmul_rn(__fsub_rn(__fmul_rn(p, n.before), __fmul_rn(direction, n.size)), n.after);
}

// One element: parameter, gradient and both moments become the new ones; returns whether the gradient is not finite.
DEVICE bool update(float& p, float g, float& m, float& v, const Numbers& n) {
  bool bad = is_bad(g);
  grow(p, g, m, v, n);
  float now = moved(p, m, v, n);
  bool dropped = bad && n.zeroing;
  p = dropped ? p : now;
  m = dropped ? 0.0f : m;
  v = dropped ? 0.0f : v;
  return bad;
}

// A chunk of a parameter whose moments are float32.
DEVICE u32 step_plainly(const Entry& e, i64 start, const Numbers& n) {
  u32 bad = 0;
#pragma unroll
  for (int group = 0; group < 2; group++) {
    i64 at = start + threadIdx.x * 4 + group * (CHUNK / 2);
    if (at >= e.count) continue;
    Four p = read<false>(e.p, at, e.count), g = read<false>(e.g, at, e.count);
    Four m = read<false>((const float*)e.m, at, e.count), v = read<false>((const float*)e.v, at, e.count);
#pragma unroll
    for (int k = 0; k < 4; k++) bad += update(p.x[k], g.x[k], m.x[k], v.x[k], n);
    write<false>(e.p, at, e.count, p);
    write<false>((float*)e.m, at, e.count, m);
    write<false>((float*)e.v, at, e.count, v);
  }
  return bad;
}

// The largest of neighbouring lanes, a power of two of them.
template <int Lanes = 32>
DEVICE u32 largest_of_warp(u32 top) {
#pragma unroll
  for (int lane = Lanes / 2; lane; lane >>= 1) {
    u32 other = __shfl_xor_sync(0xFFFFFFFFu, top, lane);
    top = other > top ? other : top;
  }
  return top;
}

// The largest magnitude of a block as bits, NaN above Inf: over a warp, and over the warps that share the block.
template <int Lanes, int Warps>
DEVICE u32 largest_of_block(u32 top, u32* shared) {
  top = largest_of_warp<Lanes>(top);
  if (Warps < 2) return top;
  constexpr int COUNT = Warps > 0 ? Warps : 1;
  u32 warp = threadIdx.x / 32, first = warp / COUNT * COUNT;
  if (threadIdx.x % 32 == 0) shared[warp] = top;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < COUNT; k++) top = shared[first + k] > top ? shared[first + k] : top;
  __syncthreads();
  return top;
}

// Blocks of 256 threads take the chunks of a launch in turn; step(e, which, start) does a chunk of parameter `which`
// and returns how many of its gradients are not finite.
template <class Step>
DEVICE void each_chunk(const Entries& entries, i32 count, i64 chunks, const Numbers& n, u64* nonfinite, Step step) {
  u32 bad = 0;
  i32 which = 0;
  for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    while (which + 1 < count && entries.of[which + 1].first <= chunk) which++;
    const Entry& e = entries.of[which];
    const i64 start = (chunk - e.first) * CHUNK;
    bad += e.plain ? step_plainly(e, start, n) : step(e, which, start);
  }
  if (bad) atomicAdd(nonfinite, (u64)bad);
}
