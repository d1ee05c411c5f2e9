// Eight elements at a time, and their largest magnitudes: what the kernels of scale rules share. Macros: INPUT.
#pragma once
#include "amax.cuh"

#define CARRY (INPUT == FLOAT16 ? 0x04000400u : 0x00800080u)  // exponents of ones carry into the sign

// Bits of a finite magnitude; 0 for NaN and Inf.
DEVICE u32 finite_magnitude(float x) {
  u32 magnitude = as_bits(x) & MAGNITUDE;
  return magnitude < FLOAT_EXPONENT ? magnitude : 0;
}

// Eight neighbours in memory. Lines are read again soon, here or by another kernel.
typedef Stored<INPUT>::type Input;
struct Eight : Vectors<INPUT, 8> {
  DEVICE void load(const Input* from) { Vectors<INPUT, 8>::load<false>(from); }

  // Raw magnitudes in a word; Finite: those of NaN and Inf become zero.
  template <bool Finite>
  DEVICE u32 magnitudes(int i) const {
    u32 m = words[i] & RAW_MAGNITUDE;
    if (!Finite) return m;
    if (INPUT == FLOAT32) return m < FLOAT_EXPONENT ? m : 0;
    u32 strange = (m + CARRY) & 0x80008000u;
    return m & ~(strange | (strange - (strange >> 15)));
  }
};

// Whether a raw magnitude is that of NaN or Inf.
DEVICE bool is_strange(u32 raw) {
  if (INPUT == FLOAT32) return raw >= FLOAT_EXPONENT;
  return ((raw + CARRY) & 0x80008000u) != 0;
}

// The largest raw magnitude of vectors.
template <bool Finite, int Count>
DEVICE u32 raw_amax(const Eight* in) {
  u32 top = 0;
#pragma unroll
  for (int v = 0; v < Count; v++) {
#pragma unroll
    for (int i = 0; i < Eight::LENGTH; i++) top = raw_larger(top, in[v].template magnitudes<Finite>(i));
  }
  return top;
}

// The largest finite magnitudes of vectors, place by place.
template <int Count>
DEVICE Eight column_tops(const Eight* in) {
  Eight top;
#pragma unroll
  for (int i = 0; i < Eight::LENGTH; i++) {
    top.words[i] = 0;
#pragma unroll
    for (int v = 0; v < Count; v++) top.words[i] = raw_larger(top.words[i], in[v].template magnitudes<true>(i));
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
