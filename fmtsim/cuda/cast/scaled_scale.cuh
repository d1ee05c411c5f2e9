// Scale rules as data: from the statistic of a block to its scale. Every operation is the one of float32 that
// fmtsim/scaling/scales.py names, in its order.
//
// Macros: INPUT (a dtype of vectors.cuh).
#pragma once
#include "common.cuh"
#include "grid.cuh"
#include "vectors.cuh"

#define FLT_MAX_BITS 0x7F7FFFFFu
#define FLT_MIN_BITS 0x00800000u
#define MANTISSA 0x007FFFFFu
#define INFINITE 0x7F800000u
#define STEPS 8  // allowed scales

typedef Stored<INPUT>::type Input;

// Parameters; the host side is fmtsim.cuda.cast.scaled_rules.
struct alignas(16) Rule {
  float top, inverse_top;  // what a statistic becomes, and RN32(1 / top)
  float factor, offset;    // instead of top where factor is not 0
  float eps, least;        // least: of a scale, FLT_MIN at least
  float multiplier;
  float limit;             // of masks
  float allowed[STEPS];    // rising, the last one repeated
  i32 statistic, eps_rule, order, divides, power, stored, chooses, mask;  // of the lists below; chooses: from allowed
};
#define AMAX 0
#define STD 1
#define RMS 2
#define MEAN_ABS 3
#define EPS_OF_STATISTIC 0
#define EPS_IN_SUM 1
#define EPS_OF_SCALE 2
#define ENCODES 0  // r = top / a, and the scale is 1 / r
#define ENCODES_DOUBLE 1
#define QUOTIENT 2  // s = a / top
#define PRODUCT 3   // s = a * RN32(1 / top)
#define INVERTS 2  // x / scale is x times a power of two, exactly
#define FLOOR 1
#define CEIL 2
#define STORED_WHOLE -1  // the scale is float32; else a method of fmtsim/cuda/cast/grid.py
#define STORED_MAGIC 0
#define STORED_FLUSHING 2
#define CLIP 1
#define TRUST 2

// Numbers that belong to a block: its scale, the power of two in it that values are folded with, and what elements are
// multiplied with or divided by.
struct alignas(16) Scale {
  float stored, fold, factor, unused;
};

DEVICE float at_most_max(float x) { return fminf(x, __uint_as_float(FLT_MAX_BITS)); }
DEVICE float reciprocal(float x) { return at_most_max(__fdiv_rn(1.0f, x)); }

// The power of two next to a positive finite number, which counts as 2^-126 below that.
DEVICE float power_of_two(float x, bool up) {
  u32 bits = max(__float_as_uint(x), FLT_MIN_BITS);
  if (up) bits = min(bits + MANTISSA, 254u << 23);
  return __uint_as_float(bits & ~MANTISSA);
}

DEVICE float raised(float a, const Rule& r) {
  if (r.eps_rule == EPS_OF_STATISTIC) return fmaxf(a, r.eps);
  return r.eps_rule == EPS_IN_SUM ? at_most_max(__fadd_rn(a, r.eps)) : a;
}

// A scale as it is kept: the least allowed one that is not below, in the format of scales.
DEVICE float kept_scale(float s, const Rule& r, const Grid& g) {
  if (r.chooses) {
    float least = r.allowed[STEPS - 1];
#pragma unroll
    for (int i = STEPS - 2; i >= 0; i--) least = r.allowed[i] >= s ? r.allowed[i] : least;
    s = least;
  }
  if (r.stored == STORED_WHOLE) return s;
  float a = fminf(s, g.highest);
  if (r.stored == STORED_MAGIC) return nearest_magic(a, g);
  return r.stored == STORED_FLUSHING ? nearest_bits<true>(a, g) : nearest_bits<false>(a, g);
}

// 1 / r and r; bare: without the multiplier.
DEVICE float encoding(float a, bool empty, const Rule& r, float& factor, float& bare) {
  if (r.order == ENCODES_DOUBLE) factor = __double2float_rn(__dmul_rn(__ddiv_rn(1.0, (double)a), (double)r.top));
  else factor = __fdiv_rn(r.top, a);
  factor = empty ? 1.0f : at_most_max(factor);
  if (r.power && !empty) factor = power_of_two(factor, r.power == FLOOR);
  bare = reciprocal(factor);
  if (r.multiplier == 1.0f) return bare;
  float s = __fmul_rn(bare, r.multiplier);
  factor = reciprocal(s);
  return s;
}

DEVICE float decoding(float a, bool empty, const Rule& r, float& bare) {
  float s = a;
  if (r.factor != 0.0f) s = __fmul_rn(a, r.factor);
  else s = r.order == PRODUCT ? __fmul_rn(a, r.inverse_top) : __fdiv_rn(a, r.top);
  if (r.offset != 0.0f) s = __fadd_rn(s, r.offset);
  s = at_most_max(fmaxf(s, r.least));
  if (r.power) s = power_of_two(s, r.power == CEIL);
  bool one = empty && !(r.offset != 0.0f && r.factor != 0.0f);  // an offset keeps the scale of nothing above zero
  bare = one ? 1.0f : s;
  if (r.multiplier != 1.0f) s = at_most_max(__fmul_rn(s, r.multiplier));
  return one ? 1.0f : s;
}

// The scale of a block with a statistic, finite and not below zero.
DEVICE Scale scale_of(float a, const Rule& r, const Grid& g) {
  bool empty = a == 0.0f;
  a = raised(a, r);
  empty = empty && a == 0.0f;
  float bare, factor = 1.0f;
  bool encodes = r.order <= ENCODES_DOUBLE && r.factor == 0.0f;
  float s = encodes ? encoding(a, empty, r, factor, bare) : decoding(a, empty, r, bare);
  float stored = kept_scale(s, r, g);
  if (r.divides == INVERTS) factor = __fdiv_rn(1.0f, stored);
  else if (r.divides) factor = stored == 0.0f ? __uint_as_float(FLT_MIN_BITS) : stored;
  else if (!encodes || r.stored != STORED_WHOLE || r.chooses) factor = reciprocal(stored);
  return {stored, r.multiplier == 1.0f ? stored : bare, factor, 0.0f};
}

// Bits of a finite magnitude; 0 for NaN and Inf.
DEVICE u32 finite_magnitude(float x) {
  u32 magnitude = __float_as_uint(x) & 0x7FFFFFFFu;
  return magnitude < INFINITE ? magnitude : 0;
}

// Eight neighbours in memory.
struct Eight {
  static const int words = 8 * BYTES_OF(INPUT) / 4;
  Vectors<INPUT, 8> at;

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < words; i++) at.word[i] = 0;
  }
  DEVICE void load(const Input* from) {
#pragma unroll
    for (int i = 0; i < words; i += 4) {
      Words4 w = load_words<false>((const u32*)from + i);  // the line is read again soon, here or by another kernel
      at.word[i] = w.x, at.word[i + 1] = w.y, at.word[i + 2] = w.z, at.word[i + 3] = w.w;
    }
  }
  DEVICE float get(int i) const { return at.get(i); }

  // Magnitudes in a word, two where elements have 16 bits; Finite: those of NaN and Inf become zero.
  template <bool Finite>
  DEVICE u32 magnitudes(int i) const {
    const u32 carry = INPUT == FLOAT16 ? 0x04000400u : 0x00800080u;
    u32 m = at.word[i] & (INPUT == FLOAT32 ? 0x7FFFFFFFu : 0x7FFF7FFFu);
    if (!Finite) return m;
    if (INPUT == FLOAT32) return m < INFINITE ? m : 0;
    u32 strange = (m + carry) & 0x80008000u;  // exponents of ones carry into the sign
    return m & ~(strange | (strange - (strange >> 15)));
  }
};

// The larger of two raw magnitudes.
DEVICE u32 raw_larger(u32 a, u32 b) { return INPUT == FLOAT32 ? max(a, b) : __vmaxu2(a, b); }

// Whether a raw magnitude is that of NaN or Inf, and float32 bits of one that is not.
DEVICE bool is_strange(u32 raw) {
  if (INPUT == FLOAT32) return raw >= INFINITE;
  return ((raw + (INPUT == FLOAT16 ? 0x04000400u : 0x00800080u)) & 0x80008000u) != 0;
}
DEVICE u32 amax_of_raw(u32 raw) {
  if (INPUT == FLOAT32) return raw;
  u32 half = max(raw & 0xFFFFu, raw >> 16);
  return INPUT == BFLOAT16 ? half << 16 : __float_as_uint(float_of_half((u16)half));
}

// The largest raw magnitude of vectors.
template <bool Finite, int Count>
DEVICE u32 raw_amax(const Eight* in) {
  u32 top = 0;
#pragma unroll
  for (int v = 0; v < Count; v++) {
#pragma unroll
    for (int i = 0; i < Eight::words; i++) top = raw_larger(top, in[v].template magnitudes<Finite>(i));
  }
  return top;
}

// The largest finite magnitudes of vectors, place by place.
template <int Count>
DEVICE Eight column_tops(const Eight* in) {
  Eight top;
#pragma unroll
  for (int i = 0; i < Eight::words; i++) {
    top.at.word[i] = 0;
#pragma unroll
    for (int v = 0; v < Count; v++) top.at.word[i] = raw_larger(top.at.word[i], in[v].template magnitudes<true>(i));
  }
  return top;
}

// The largest finite magnitude of vectors, raw; clean: whether there was no other.
template <int Count>
DEVICE u32 raw_amax_of(const Eight* in, bool& clean) {
  u32 top = raw_amax<false, Count>(in);
  clean = !is_strange(top);
  return clean ? top : raw_amax<true, Count>(in);
}

// The largest of all threads' numbers, in thread 0; blocks of up to 1024 threads.
DEVICE u32 largest_of_block(u32 top) {
  __shared__ u32 tops[32];
  top = __reduce_max_sync(~0u, top);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (u32 w = 1; w < blockDim.x / 32; w++) top = max(top, tops[w]);
  }
  return top;
}
