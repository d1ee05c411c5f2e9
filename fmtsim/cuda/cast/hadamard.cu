// SPDX-License-Identifier: Apache-2.0
// Hadamard transforms of neighbours in one pass, for what is not cast at once and for the gradients of rotated
// operands: y = (s x) H / sqrt(SIZE) in float32 of groups of SIZE neighbours, a power of two from 16 to 512 (1: none).
// The inverse changes signs behind the product. The gradient of a tensor from that of its rotated values is the inverse
// of sums times two scales, one after the other, under a mask, rounded once to OUTPUT.
//
// Macros: INPUT, OUTPUT (dtypes of vectors.cuh but float64), SIZE.
#include "element.cuh"
#include "hadamard.cuh"
#include "vectors.cuh"

#define PER_LANE (SIZE > 128 ? 16 : 4)  // neighbours that a lane holds, so that a warp holds groups
#define VECTORS (SIZE > 128 ? 1 : 4)    // such of a thread
#define THREADS 256

typedef Vectors<INPUT, 4> Four;
typedef Stored<INPUT>::type Input;

// Change signs; flips: a byte for each element of a group; null changes none.
DEVICE void flip_signs(float (&y)[PER_LANE], const u8* flips, u32 group) {
  if (flips == nullptr) return;
  Packed<PER_LANE, 8> flip = load_vector<PER_LANE, 8>(flips, group);
  UNROLLED for (int i = 0; i < PER_LANE; ++i) y[i] = as_float(as_bits(y[i]) ^ flip.get(i) << 31);
}

// x, mask and out begin where 16 bytes do, total is a multiple of 16; mask: bytes, or null; before, after: whose signs
// change before the transform and after it; one, other: what x is multiplied with first, or null; signs: bits of those
// that change after it in groups of up to 32.
KERNEL __launch_bounds__(THREADS) hadamard(
    const Input* x, const u8* mask, void* out, const u8* before, const u8* after, const float* one, const float* other,
    u32 signs, u64 total) {
  u64 first = ((u64)blockIdx.x * (THREADS * VECTORS) + threadIdx.x) * PER_LANE;
  u32 group = threadIdx.x % 32 * PER_LANE % SIZE;
  Four in[VECTORS][PER_LANE / 4];
  Packed<PER_LANE, 8> passing[VECTORS];
  UNROLLED for (int v = 0; v < VECTORS; ++v) {
    u64 at = first + v * (THREADS * PER_LANE);
    UNROLLED for (int i = 0; i < PER_LANE / 4; ++i) {
      in[v][i].clear();
      if (at < total) in[v][i].load(x + at + 4 * i);
    }
    passing[v].clear();
    if (at < total && mask != nullptr) passing[v] = load_vector<PER_LANE, 8>(mask, at);
  }
  UNROLLED for (int v = 0; v < VECTORS; ++v) {
    u64 at = first + v * (THREADS * PER_LANE);
    float y[PER_LANE];
    UNROLLED for (int i = 0; i < PER_LANE; ++i) {
      y[i] = in[v][i / 4].get(i % 4);
      if (one != nullptr) y[i] = __fmul_rn(y[i], *one);
      if (other != nullptr) y[i] = __fmul_rn(y[i], *other);
      if (mask != nullptr) y[i] = __fmul_rn(y[i], passing[v].get(i) ? 1.0f : 0.0f);
    }
    flip_signs(y, before, group);
#if SIZE > 1
    butterflies<SIZE>(y, threadIdx.x);
    UNROLLED for (int i = 0; i < PER_LANE; ++i) y[i] = __fmul_rn(y[i], as_float(root_bits(SIZE)));
#endif
    flip_signs(y, after, group);
    UNROLLED for (int i = 0; i < PER_LANE; ++i) {
      if (SIZE <= 32) y[i] = as_float(as_bits(y[i]) ^ signs >> (group + i) << 31);
    }
    if (at >= total) continue;
    UNROLLED for (int i = 0; i < PER_LANE; i += 4) {
      u32 words[4];
      UNROLLED for (int k = 0; k < 4; ++k) words[k] = rounded_bits<OUTPUT>(y[i + k]);
      store_four<OUTPUT>(out, (at + i) / 4, words);
    }
  }
}
