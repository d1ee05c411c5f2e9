// SPDX-License-Identifier: Apache-2.0
// Elements of the input's dtype, and their largest magnitudes.
//
// INPUT is float32, bfloat16 or float16; OUTPUT is 0 float32, 1 bfloat16, 2 codes of CODE_BITS bits, one a byte, 3 the
// same packed (docs/semantics.md, section 11). "Raw" magnitudes are two in a word where elements have 16 bits.
#pragma once
#include "vectors.cuh"

#ifndef INPUT  // of kernels that read no elements
#define INPUT FLOAT32
#endif
#if INPUT == 0
#define INPUT_BITS 32
#else
#define INPUT_BITS 16
#endif
#ifndef OUTPUT
#elif OUTPUT == 0
#define OUTPUT_BITS 32
#elif OUTPUT == 1
#define OUTPUT_BITS 16
#elif OUTPUT == 2
#define OUTPUT_BITS 8
#else
#define OUTPUT_BITS CODE_BITS
#endif

// An element of the input's dtype as float32. NaN and Inf of float16 come out finite: blocks with those are refused.
DEVICE float input_value(u32 bits) {
#if INPUT == 0
  return as_float(bits);
#elif INPUT == 1
  return as_float(bits << 16);
#else
  return as_float(as_bits(__fmul_rn(as_float((bits & 0x7FFF) << 13), 5192296858534827628530496329220096.0f)) |
                  (bits & 0x8000) << 16);  // 2^112
#endif
}

// A magnitude as float32 bits, NaN above Inf.
DEVICE u32 widened(u32 magnitude) {
#if INPUT == 0
  return magnitude;
#elif INPUT == 1
  return magnitude << 16;
#else
  return magnitude < 0x7C00 ? as_bits(input_value(magnitude)) : FLOAT_EXPONENT + (magnitude - 0x7C00);
#endif
}

#define RAW_MAGNITUDE (INPUT == FLOAT32 ? MAGNITUDE : 0x7FFF7FFFu)
DEVICE u32 raw_larger(u32 a, u32 b) { return INPUT == FLOAT32 ? max(a, b) : __vmaxu2(a, b); }
DEVICE u32 amax_of_raw(u32 top) { return INPUT == FLOAT32 ? top : widened(max(top & 0xFFFF, top >> 16)); }

#define CARRY (INPUT == FLOAT16 ? 0x04000400u : 0x00800080u)  // exponents of ones carry into the sign

// Raw magnitudes in a word; Finite: those of NaN and Inf become zero.
template <bool Finite>
DEVICE u32 raw_magnitudes(u32 word) {
  u32 m = word & RAW_MAGNITUDE;
  if (!Finite) return m;
  if (INPUT == FLOAT32) return m < FLOAT_EXPONENT ? m : 0;
  u32 nonfinite = (m + CARRY) & 0x80008000u;
  return m & ~(nonfinite | (nonfinite - (nonfinite >> 15)));
}

template <int COUNT, bool Finite = false>
DEVICE u32 raw_amax(const Packed<COUNT, INPUT_BITS>& v) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < Packed<COUNT, INPUT_BITS>::LENGTH; ++i) top = raw_larger(top, raw_magnitudes<Finite>(v.words[i]));
  return top;
}

// Eight elements at a time, as scale rules take them.

// Bits of a finite magnitude; 0 for NaN and Inf.
DEVICE u32 finite_magnitude(float x) {
  u32 magnitude = as_bits(x) & MAGNITUDE;
  return magnitude < FLOAT_EXPONENT ? magnitude : 0;
}

// Eight neighbours in memory. Lines are read again soon, here or by another kernel.
typedef Stored<INPUT>::type Number;
struct Eight : Vectors<INPUT, 8> {
  DEVICE void load(const Number* from) { Vectors<INPUT, 8>::load<false>(from); }
};

// Whether a raw magnitude is that of NaN or Inf.
DEVICE bool is_nonfinite(u32 raw) {
  if (INPUT == FLOAT32) return raw >= FLOAT_EXPONENT;
  return ((raw + CARRY) & 0x80008000u) != 0;
}

// The largest finite magnitudes of vectors, place by place.
template <int Count>
DEVICE Eight column_tops(const Eight* in) {
  Eight top;
#pragma unroll
  for (int i = 0; i < Eight::LENGTH; i++) {
    top.words[i] = 0;
#pragma unroll
    for (int v = 0; v < Count; v++) top.words[i] = raw_larger(top.words[i], raw_magnitudes<true>(in[v].words[i]));
  }
  return top;
}

// The largest finite magnitude of vectors, raw; clean: whether there was no other.
template <int Count>
DEVICE u32 raw_amax_of(const Eight* in, bool& clean) {
  u32 top = 0;
#pragma unroll
  for (int v = 0; v < Count; v++) top = raw_larger(top, raw_amax<8>(in[v]));
  clean = !is_nonfinite(top);
  if (clean) return top;
  top = 0;
#pragma unroll
  for (int v = 0; v < Count; v++) top = raw_larger(top, raw_amax<8, true>(in[v]));
  return top;
}

// The largest of all threads' numbers, in thread 0; blocks of up to 1024 threads.
DEVICE u32 block_max(u32 top) {
  __shared__ u32 tops[32];
  top = __reduce_max_sync(~0u, top);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (u32 w = 1; w < blockDim.x / 32; w++) top = max(top, tops[w]);
  }
  return top;
}
