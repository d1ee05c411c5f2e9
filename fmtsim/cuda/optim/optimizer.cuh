// SPDX-License-Identifier: Apache-2.0
// What optimizer steps on many parameters share: the update of one element, the table of a launch, reads and writes of
// four neighbours.
//
// Macros: ENTRIES, parameters of a launch. TYPE: of parameters and gradients, 0 float32, 1 bfloat16, 2 float16.
// CAPTURABLE: the scalars of steps lie on the device. ROWS: whether scales of weights are of rows, which are chunks
// then. UPDATE: one of those below. GAMMA, TOP_CODE: of Madam, codes an octave and the largest of a magnitude.
#pragma once
#include "philox.cuh"
#include "vectors.cuh"

// The update of one element: the rules of fmtsim/optim/rules.py, operation by operation.

#define ADAM 0
#define LION 1
#define SGD 2
#define NESTEROV 3
#define MADAM 4        // weights are codes of logarithms, of which directions are integers
#define MADAM_FREELY 5  // directions are not rounded

#define OF_CODES (UPDATE >= MADAM)
#define HAS_FIRST (!OF_CODES)
#define HAS_SECOND (UPDATE == ADAM || OF_CODES)
#define INFINITE 0x7F800000u

struct alignas(16) Numbers {
  float before, after, penalty, beta1, rest1, beta2, rest2, correction, eps, size, bound;
  float inverse;  // 1 / correction, which lies from 2^-60 to 1
};

// x / divisor as IEEE rounds it but for the sign of zeros, with inverse = fl(1 / divisor) (Markstein): for divisors
// from 2^-60 to 2^60, x that are 0 or from 2^-80 to 2^66, and quotients from 2^-100 to 2^126, so that all remainders
// are exact.
DEVICE float corrected(float x, float divisor, float inverse) {
  float q = __fmul_rn(x, inverse);
  q = __fmaf_rn(__fmaf_rn(-q, divisor, x), inverse, q);
  return __fmaf_rn(__fmaf_rn(-q, divisor, x), inverse, q);
}

// The same with the sign of zeros, and of infinite numbers and NaN.
DEVICE float quotient(float x, float divisor, float inverse) {
  u32 bits = as_bits(x);
  float q = as_float(as_bits(corrected(x, divisor, inverse)) | (bits & ~MAGNITUDE));  // of zeros
  return (bits & MAGNITUDE) < INFINITE ? q : __fmul_rn(x, inverse);
}

DEVICE bool is_bad(float g) { return (as_bits(g) & MAGNITUDE) >= INFINITE; }

// New moments of an element; returns the direction, but Adam's, which takes a root and divisions.
DEVICE float grow(float p, float g, float& m, float& v, const Numbers& n) {
  if (HAS_FIRST && UPDATE != LION && n.penalty != 0.0f) g = __fadd_rn(g, __fmul_rn(p, n.penalty));
  float old = m;
  if (UPDATE == ADAM) m = __fadd_rn(__fmul_rn(m, n.beta1), __fmul_rn(g, n.rest1));
  if (UPDATE == LION) m = __fadd_rn(__fmul_rn(m, n.beta2), __fmul_rn(g, n.rest2));
  if (UPDATE == SGD || UPDATE == NESTEROV) m = __fadd_rn(__fmul_rn(m, n.beta1), g);
  if (HAS_SECOND) v = __fadd_rn(__fmul_rn(v, n.beta2), __fmul_rn(__fmul_rn(g, n.rest2), g));
  if (UPDATE == LION) {
    float mixed = __fadd_rn(__fmul_rn(old, n.beta1), __fmul_rn(g, n.rest1));
    return mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : 0.0f;
  }
  if (UPDATE == NESTEROV) return __fadd_rn(g, __fmul_rn(m, n.beta1));
  if (!OF_CODES) return m;
  float normal = __fdiv_rn(g, __fsqrt_rn(__fdiv_rn(v, n.correction)));
  normal = normal != normal ? 0.0f : normal < -n.bound ? -n.bound : normal > n.bound ? n.bound : normal;
  return UPDATE == MADAM ? rintf(normal) : normal;
}

// What new moments make of an element.
DEVICE float moved(float p, float direction, float m, float v, const Numbers& n) {
  if (UPDATE == ADAM) {
    float root = __fsqrt_rn(v);
    if (n.correction != 1.0f) root = quotient(root, n.correction, n.inverse);
    direction = __fdiv_rn(m, __fadd_rn(root, n.eps));
  }
  return __fmul_rn(__fsub_rn(__fmul_rn(p, n.before), __fmul_rn(direction, n.size)), n.after);
}

#if OF_CODES
// The code of a sign and a magnitude, moved.
DEVICE u32 moved_code(u32 code, float direction, const Numbers& n) {
  float falls = __fmul_rn(__fmul_rn(direction, __fmul_rn(n.size, (float)GAMMA)), code > TOP_CODE ? -1.0f : 1.0f);
  falls = fminf(fmaxf(rintf(falls), -65536.0f), 65536.0f);
  i32 size = (i32)(code & TOP_CODE) - (i32)falls;
  return (code & ~(u32)(TOP_CODE)) | (u32)(size < 0 ? 0 : size > TOP_CODE ? TOP_CODE : size);
}
#endif

// One element: parameter, gradient and moments become the new ones; returns whether the gradient is not finite.
// Zeroing: elements whose gradient is not finite lose their moments and stay. A parameter of codes is one's bits.
DEVICE bool update(float& p, float g, float& m, float& v, const Numbers& n, bool zeroing) {
  bool bad = is_bad(g), dropped = bad && zeroing;
  float direction = grow(p, g, m, v, n), now;
#if OF_CODES
  now = as_float(moved_code(as_bits(p), direction, n));
#else
  now = moved(p, direction, m, v, n);
#endif
  p = dropped ? p : now;
  m = dropped ? 0.0f : m;
  v = dropped ? 0.0f : v;
  return bad;
}

#define CHUNK 2048  // elements of a block of threads at a time: whole blocks

typedef Stored<TYPE>::type Number;

struct Entry {  // a parameter
  Number* p;
  const Number* g;
  void* m;
  void* v;
  float* m_scales;
  float* v_scales;
#ifdef EXPANDED
  float *m_powers, *v_powers, *m_centres, *v_centres;
#else
  void* w;  // weights that are kept; 0 where the parameter holds them, or there are none
  float* w_scale;
  i64 row;  // elements that share a scale of weights, where those are of rows
  i64 unused;
#endif
  i64* step;  // how many steps were done, where they are counted on the device
  i64 plain;  // the moments are float32, whatever those of other parameters are
  i64 place;  // of the parameter's random words
  i64 count;
  i64 first;  // of its chunks, among those of the launch
};
struct alignas(16) Entries {
  Entry of[ENTRIES];
};

// The scalars of a step of one parameter, worked out on the device (optimizer_scalars.cu).
struct alignas(16) Scalars {
  Numbers numbers;
  u64 offset;  // of random words
  u64 unused;
};

// The scalars of a step of all parameters; where `of` is not null, those of each.
struct alignas(16) Step {
  Numbers numbers;
  const Scalars* of;
  i32 zeroing;  // elements whose gradient is not finite lose their moments and stay
  i32 unused;
};

#if CAPTURABLE
#define NUMBERS_OF(step, which) const Numbers n = (step).of[which].numbers
#else
#define NUMBERS_OF(step, which) const Numbers& n = (step).numbers
#endif

// Four neighbours; what lies behind the end is zero. Whole: 1 where all that are meant exist, so that no test for the
// end is left; 0 where some may not; -1 where they are, besides, not aligned.
struct Four {
  float x[4];
};

template <int Whole>
DEVICE Four read(const float* from, i64 at, i64 count) {
  Four four;
  if (Whole > 0 || (Whole == 0 && at + 4 <= count)) {
    Words4 w = *(const Words4*)(from + at);
    four = Four{as_float(w.x), as_float(w.y), as_float(w.z), as_float(w.w)};
  } else {
    UNROLLED for (int k = 0; k < 4; k++) four.x[k] = at + k < count ? from[at + k] : 0.0f;
  }
  return four;
}

template <int Whole>
DEVICE void write(float* to, i64 at, i64 count, const Four& four) {
  if (Whole > 0 || (Whole == 0 && at + 4 <= count)) {
    *(Words4*)(to + at) = Words4{as_bits(four.x[0]), as_bits(four.x[1]), as_bits(four.x[2]),
                                 as_bits(four.x[3])};
  } else {
    UNROLLED for (int k = 0; k < 4; k++) {
      if (at + k < count) to[at + k] = four.x[k];
    }
  }
}

// Four neighbours of 16 or 8 bits, the first in the lowest bits.
template <int Whole, class Code>
DEVICE u64 read_four(const Code* from, i64 at, i64 count) {
  if (Whole > 0 || (Whole == 0 && at + 4 <= count)) return sizeof(Code) == 1 ? *(const u32*)(from + at) : *(const u64*)(from + at);
  u64 codes = 0;
  UNROLLED for (int k = 0; k < 4; k++) codes |= at + k < count ? (u64)from[at + k] << (8 * sizeof(Code) * k) : 0;
  return codes;
}

template <int Whole, class Code>
DEVICE void write_four(Code* to, i64 at, i64 count, u64 codes) {
  if (Whole > 0 || (Whole == 0 && at + 4 <= count)) {
    if (sizeof(Code) == 1) *(u32*)(to + at) = (u32)codes;
    else *(u64*)(to + at) = codes;
    return;
  }
  UNROLLED for (int k = 0; k < 4; k++) {
    if (at + k < count) to[at + k] = (Code)(codes >> (8 * sizeof(Code) * k));
  }
}

// The magnitude, as bits, to the code of a format, to nearest even, and back; the caller excludes overflow.
template <int Mantissa, int Bias>
DEVICE u32 nearest_code(u32 bits) {
  if (Bias < 127 && bits < (128u - Bias) << 23) {  // a subnormal: the last place of the sum is its step
    u32 magic = (151u - Bias - Mantissa) << 23;
    return as_bits(__fadd_rn(as_float(bits), as_float(magic))) - magic;
  }
  u32 half = (1u << (22 - Mantissa)) - 1, odd = bits >> (23 - Mantissa) & 1;
  return ((bits + half + odd) >> (23 - Mantissa)) - ((127u - Bias) << Mantissa);
}

template <int Mantissa, int Bias>
DEVICE u32 magnitude_of(u32 code) {
  return as_bits(__fmul_rn(as_float(code << (23 - Mantissa)), as_float((254u - Bias) << 23)));
}

// Numbers of a parameter or gradient.
#if TYPE != 0
DEVICE u32 rounded(float x) {
  u16 code = TYPE == 1 ? bfloat_of_float(x) : half_of_float(x);
  return x == x ? code : TYPE == 1 ? 0x7FC0u : 0x7E00u;
}

template <int Whole>
DEVICE Four read(const u16* from, i64 at, i64 count) {
  u64 bits = read_four<Whole>(from, at, count);
  Four four;
  UNROLLED for (int k = 0; k < 4; k++) four.x[k] = loaded<TYPE>((u16)(bits >> (16 * k)));
  return four;
}

template <int Whole>
DEVICE void write(u16* to, i64 at, i64 count, const Four& four) {
  u64 bits = 0;
  UNROLLED for (int k = 0; k < 4; k++) bits |= (u64)rounded(four.x[k]) << (16 * k);
  write_four<Whole>(to, at, count, bits);
}
#endif

// A chunk of a parameter whose moments are float32.
DEVICE u32 step_plainly(const Entry& e, i64 start, const Numbers& n, bool zeroing) {
  u32 bad = 0;
  UNROLLED for (int group = 0; group < 2; group++) {
    i64 at = start + threadIdx.x * 4 + group * (CHUNK / 2);
    if (at >= e.count) continue;
    Four p = read<0>(e.p, at, e.count), g = read<0>(e.g, at, e.count), m = {}, v = {};
    if (HAS_FIRST) m = read<0>((const float*)e.m, at, e.count);
    if (HAS_SECOND) v = read<0>((const float*)e.v, at, e.count);
    UNROLLED for (int k = 0; k < 4; k++) bad += update(p.x[k], g.x[k], m.x[k], v.x[k], n, zeroing);
    write<0>(e.p, at, e.count, p);
    if (HAS_FIRST) write<0>((float*)e.m, at, e.count, m);
    if (HAS_SECOND) write<0>((float*)e.v, at, e.count, v);
  }
  return bad;
}

// The largest of neighbouring lanes, a power of two of them.
template <int Lanes = 32>
DEVICE u32 largest_of_warp(u32 top) {
  if (Lanes == 32) return __reduce_max_sync(0xFFFFFFFFu, top);
  UNROLLED for (int lane = Lanes / 2; lane; lane >>= 1) {
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
  UNROLLED for (int k = 0; k < COUNT; k++) top = shared[first + k] > top ? shared[first + k] : top;
  __syncthreads();
  return top;
}

// Blocks of 256 threads take the chunks of a launch in turn; step(e, which, chunk, n) does a chunk of parameter
// `which`, counted from its first, and returns how many of its gradients are not finite.
template <class Chunk>
DEVICE void each_chunk(const Entries& entries, i32 count, i64 chunks, const Step& s, u64* nonfinite, Chunk step) {
  u32 bad = 0;
  i32 which = 0;
  for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    while (which + 1 < count && entries.of[which + 1].first <= chunk) which++;
    const Entry& e = entries.of[which];
    NUMBERS_OF(s, which);
    const i64 own = chunk - e.first;
    bad += e.plain ? step_plainly(e, own * CHUNK, n, s.zeroing) : step(e, which, own, n);
  }
  if (bad) atomicAdd(nonfinite, (u64)bad);
}
