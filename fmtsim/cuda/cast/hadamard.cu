// A Hadamard transform of groups of SIZE neighbours, a power of two from 16 to 512, in one pass.
//
// y = (s x) H / sqrt(SIZE) in float32 (fmtsim/scaling/hadamard.py has the order of operations): butterflies at distance
// 1, 2, 4, 8 within the sixteen numbers that a thread holds, from 16 on with other lanes, then one product by ROOT. The
// inverse turns signs behind the product.
#include "block_vectors.cuh"

#define HELD 16
#define CHUNK (128 / INPUT_BITS)  // elements of 16 bytes

DEVICE float loaded(u32 bits) {
#if INPUT == 2
  if ((bits & 0x7C00) == 0x7C00) return as_float((bits & 0x8000) << 16 | FLOAT_EXPONENT | (bits & 0x3FF) << 13);
#endif
  return input_value(bits);
}

// Turn signs; flips: a byte for each element of a group, 1 turns; null turns none.
DEVICE void turn(float (&y)[HELD], const u8* flips, u32 group) {
  if (flips == nullptr) return;
  Packed<HELD, 8> turned = load_vector<HELD, 8>(flips, group);
#pragma unroll
  for (int i = 0; i < HELD; ++i) y[i] = as_float(as_bits(y[i]) ^ turned.get(i) << 31);
}

DEVICE void transform(float (&y)[HELD], u32 lane) {
#pragma unroll
  for (int distance = 1; distance < HELD; distance *= 2) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (i & distance) continue;
      float a = y[i], b = y[i + distance];
      y[i] = __fadd_rn(a, b);
      y[i + distance] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int flip = 1; flip < SIZE / HELD; flip *= 2) {
    float sign = lane & flip ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) y[i] = __fmaf_rn(y[i], sign, __shfl_xor_sync(~0u, y[i], flip));
  }
#pragma unroll
  for (int i = 0; i < HELD; ++i) y[i] = __fmul_rn(y[i], as_float(ROOT));
}

// x and out begin where 16 bytes do; before, after: whose signs turn before the transform and behind it.
KERNEL __launch_bounds__(256) hadamard(const void* x, void* out, const u8* before, const u8* after, u64 total) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, first = thread * HELD;
  u32 lane = (u32)thread % 32, group = lane * HELD % SIZE;
  bool there = first < total;
  float y[HELD];
#pragma unroll
  for (int v = 0; v < HELD; v += CHUNK) {
    Packed<CHUNK, INPUT_BITS> in;
    in.clear();
    if (there) in = load_vector<CHUNK, INPUT_BITS>(x, first + v);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) y[v + i] = loaded(in.get(i));
  }
  turn(y, before, group);
  transform(y, lane);
  turn(y, after, group);
  Packed<HELD, 32> z;
#pragma unroll
  for (int i = 0; i < HELD; ++i) z.words[i] = y[i] == y[i] ? as_bits(y[i]) : 0x7FC00000u;
  if (there) store_vector<HELD, 32>(out, first, z);
}
