// SPDX-License-Identifier: Apache-2.0
// Largest magnitudes of elements in float32, bfloat16 or float16, the statistic of most scales. "Raw" magnitudes are
// those of the input's dtype, two in a word where elements have 16 bits, and are compared both at once.
//
// Macros: INPUT; FROM_FLOAT: memory holds float32, which become INPUT, bfloat16, as they are loaded; OUTPUT: 0 float32,
// 1 bfloat16, 2 codes of CODE_BITS bits, one a byte, 3 the same packed (docs/semantics.md, section 11).
#pragma once
#include "vectors.cuh"

#ifndef INPUT  // of kernels that read no elements
#define INPUT FLOAT32
#endif
#define INPUT_BITS (INPUT == FLOAT32 ? 32 : 16)
#define OUTPUT_BITS (OUTPUT == 0 ? 32 : OUTPUT == 1 ? 16 : OUTPUT == 2 ? 8 : CODE_BITS)

// A magnitude as float32 bits, NaN above Inf.
DEVICE u32 widened(u32 magnitude) {
  return INPUT == FLOAT32 ? magnitude : INPUT == BFLOAT16 ? magnitude << 16 : as_bits(float_of_half((u16)magnitude));
}

#define RAW_MAGNITUDE (INPUT == FLOAT32 ? MAGNITUDE : 0x7FFF7FFFu)
DEVICE u32 raw_larger(u32 a, u32 b) { return INPUT == FLOAT32 ? max(a, b) : __vmaxu2(a, b); }
DEVICE u32 amax_of_raw(u32 top) { return INPUT == FLOAT32 ? top : widened(max(top & 0xFFFF, top >> 16)); }

#define CARRY (INPUT == FLOAT16 ? 0x04000400u : 0x00800080u)  // exponents of ones carry into the sign

// Whether a raw magnitude is that of NaN or Inf.
DEVICE bool is_nonfinite(u32 raw) {
  if (INPUT == FLOAT32) return raw >= FLOAT_EXPONENT;
  return ((raw + CARRY) & 0x80008000u) != 0;
}

// Raw magnitudes in a word; Finite: those of NaN and Inf become zero.
template <bool Finite>
DEVICE u32 raw_magnitudes(u32 word) {
  u32 m = word & RAW_MAGNITUDE;
  if (!Finite) return m;
  if (INPUT == FLOAT32) return m < FLOAT_EXPONENT ? m : 0;
  u32 nonfinite = (m + CARRY) & 0x80008000u;              // bit 15 of a half that is
  return m & ~(nonfinite | (nonfinite - (nonfinite >> 15)));  // all bits of such a half
}

// Bits of a finite magnitude; 0 for NaN and Inf.
DEVICE u32 finite_magnitude(float x) {
  u32 magnitude = as_bits(x) & MAGNITUDE;
  return magnitude < FLOAT_EXPONENT ? magnitude : 0;
}

// The largest raw magnitude in Count vectors.
template <bool Finite, int Count, class Vector>
DEVICE u32 raw_amax(const Vector* in) {
  u32 top = 0;
  UNROLLED for (int v = 0; v < Count; v++)
    UNROLLED for (int i = 0; i < Vector::LENGTH; i++) top = raw_larger(top, raw_magnitudes<Finite>(in[v].words[i]));
  return top;
}

// The same over what Lanes neighbouring lanes hold.
template <int Lanes>
DEVICE u32 raw_amax_of_lanes(u32 top) {
  UNROLLED for (int flip = 1; flip < Lanes; flip *= 2) top = raw_larger(top, __shfl_xor_sync(~0u, top, flip));
  return top;
}

// The largest finite magnitude of vectors, raw; clean: whether there was no other.
template <int Count, class Vector>
DEVICE u32 finite_raw_amax(const Vector* in, bool& clean) {
  u32 top = raw_amax<false, Count>(in);
  clean = !is_nonfinite(top);
  if (clean) return top;
  return raw_amax<true, Count>(in);
}

// Eight neighbours in memory. Lines are read again soon, here or by another kernel.
#if FROM_FLOAT
typedef float Number;
struct Eight : Vectors<INPUT, 8> {
  DEVICE void load(const Number* from) {
    Words4 w = load_narrowed(from);
    words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
  }
};
#else
typedef Stored<INPUT>::type Number;
struct Eight : Vectors<INPUT, 8> {
  DEVICE void load(const Number* from) { Vectors<INPUT, 8>::load<false>(from); }
};
#endif

// The largest finite magnitudes of vectors, place by place.
template <int Count>
DEVICE Eight column_tops(const Eight* in) {
  Eight top;
  UNROLLED for (int i = 0; i < Eight::LENGTH; i++) {
    top.words[i] = 0;
    UNROLLED for (int v = 0; v < Count; v++)
      top.words[i] = raw_larger(top.words[i], raw_magnitudes<true>(in[v].words[i]));
  }
  return top;
}

// The largest of all threads' numbers, in thread 0 or in All; blocks of up to 1024 threads.
template <bool All = false>
DEVICE u32 block_max(u32 top, u32 warps = blockDim.x / 32) {
  __shared__ u32 tops[32];
  top = __reduce_max_sync(~0u, top);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  if (All || threadIdx.x == 0) {
    for (u32 w = 0; w < warps; w++) top = max(top, tops[w]);
  }
  return top;
}
