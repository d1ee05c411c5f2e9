// Hadamard transforms of neighbours in one pass, and the gradient of a tensor from that of its rotated values.
#include "amax.cuh"
#include "element.cuh"
#include "hadamard.cuh"

#ifndef OUTPUT

// y = (s x) H / sqrt(SIZE) in float32 of groups of SIZE neighbours, a power of two from 16 to 512. The inverse turns
// signs behind the product.

#define PER_LANE 16
#define CHUNK (128 / INPUT_BITS)  // elements of 16 bytes

DEVICE float loaded(u32 bits) {
#if INPUT == 2
  if ((bits & 0x7C00) == 0x7C00) return as_float((bits & 0x8000) << 16 | FLOAT_EXPONENT | (bits & 0x3FF) << 13);
#endif
  return input_value(bits);
}

// Change signs; flips: a byte for each element of a group; null changes none.
DEVICE void flip_signs(float (&y)[PER_LANE], const u8* flips, u32 group) {
  if (flips == nullptr) return;
  Packed<PER_LANE, 8> turned = load_vector<PER_LANE, 8>(flips, group);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) y[i] = as_float(as_bits(y[i]) ^ turned.get(i) << 31);
}

// x and out begin where 16 bytes do; before, after: whose signs turn before the transform and behind it.
KERNEL __launch_bounds__(256) hadamard(const void* x, void* out, const u8* before, const u8* after, u64 total) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, first = thread * PER_LANE;
  u32 lane = (u32)thread % 32, group = lane * PER_LANE % SIZE;
  bool there = first < total;
  float y[PER_LANE];
#pragma unroll
  for (int v = 0; v < PER_LANE; v += CHUNK) {
    Packed<CHUNK, INPUT_BITS> in;
    in.clear();
    if (there) in = load_vector<CHUNK, INPUT_BITS>(x, first + v);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) y[v + i] = loaded(in.get(i));
  }
  flip_signs(y, before, group);
  butterflies<SIZE>(y, lane);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) y[i] = __fmul_rn(y[i], as_float(root_bits(SIZE)));
  flip_signs(y, after, group);
  Packed<PER_LANE, 32> z;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) z.words[i] = y[i] == y[i] ? as_bits(y[i]) : 0x7FC00000u;
  if (there) store_vector<PER_LANE, 32>(out, first, z);
}

#else

// out = RN(H(y * mask)), RN to float32, bfloat16 or float16 (OUTPUT) and H the transform of SIZE neighbours in a row
// (1: none), signs last. Four numbers a lane.
#define THREADS 256
#define VECTORS 4

KERNEL __launch_bounds__(THREADS) finish_rotated(
    const float* y, const u8* mask, void* out, u64 fours, u32 signs) {
  u64 first = (u64)blockIdx.x * (THREADS * VECTORS) + threadIdx.x;
  Words4 in[VECTORS];
  u32 kept[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    u64 at = first + v * THREADS;
    in[v] = {0, 0, 0, 0}, kept[v] = 0x01010101u;
    if (at < fours) in[v] = ((const Words4*)y)[at];
    if (at < fours && mask != nullptr) kept[v] = ((const u32*)mask)[at];
  }
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    u64 at = first + v * THREADS;
    float x[4] = {as_float(in[v].x), as_float(in[v].y), as_float(in[v].z), as_float(in[v].w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (mask != nullptr) x[i] = __fmul_rn(x[i], kept[v] >> (8 * i) & 1 ? 1.0f : 0.0f);
    }
#if SIZE > 1
    butterflies<SIZE>(x, threadIdx.x);
    u32 flips = signs >> (4 * (threadIdx.x % (SIZE / 4)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = __fmul_rn(x[i], as_float(root_bits(SIZE)));
      if (flips >> i & 1) x[i] = -x[i];
    }
#endif
    if (at >= fours) continue;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = rounded_bits<OUTPUT>(x[i]);
    store_four<OUTPUT>(out, at, words);
  }
}

#endif
