// SPDX-License-Identifier: Apache-2.0
// Codes of one byte to values, of element formats and of blocks that are runs of memory: a table in shared memory.
//
// Macros: OUTPUT (dtype of vectors.cuh but float64); SCALED: values are multiplied by scales (of formats whose values
// float32 holds exactly: one rounding is left); VECTORS: addresses of whole vectors.
#include "vectors.cuh"

typedef Stored<OUTPUT>::type Output;
#define WIDTH (16 / BYTES_OF(OUTPUT))  // codes of a vector, four or eight; they share a block
#define UNROLL 4                       // vectors of a thread

// What a block's codes are multiplied with and, where `offsets` are given, count from.
struct Blocks {
  const float* scales;
  const i32* offsets;
  const float* tensor_scale;  // or null
  u32 sixteens;               // of 16 elements in a block
  i32 shift;                  // the same as a power of two, or -1
};

struct BlockOfCodes {
  float scale, whole;
  i32 zero;
};

DEVICE BlockOfCodes block_of(i64 place, const Blocks& b) {
  u32 sixteen = (u32)(place / 16), block = b.shift >= 0 ? sixteen >> b.shift : sixteen / b.sixteens;
  return {b.scales[block], b.tensor_scale == nullptr ? 1.0f : *b.tensor_scale, b.offsets == nullptr ? 0 : b.offsets[block]};
}

// A product rounded to the output's dtype, NaN canonical.
DEVICE float scaled_value(float value, u32 code, const BlockOfCodes& block, const Blocks& b) {
  if (b.offsets != nullptr) value = (float)((i32)code - block.zero);
  value = __fmul_rn(value, block.scale);
  if (b.tensor_scale != nullptr) value = __fmul_rn(value, block.whole);
  return to_nearest<OUTPUT>(canonical(value));
}

// values: float32 [256].
KERNEL __launch_bounds__(256) decode(
    const u8* codes, Output* y, i64 count, const float* values, const __grid_constant__ Blocks blocks) {
  __shared__ float table[256];
  i64 base = ((i64)blockIdx.x * blockDim.x * UNROLL + threadIdx.x) * WIDTH, stride = (i64)blockDim.x * WIDTH;
  u32 words[UNROLL][WIDTH / 4];
  BlockOfCodes block[UNROLL];
  UNROLLED for (int u = 0; u < UNROLL; u++) {
    i64 place = base + u * stride;
    if (!VECTORS || place + WIDTH > count) continue;
    if constexpr (WIDTH == 4) {
      words[u][0] = __ldcs((const u32*)(codes + place));
    } else {
      uint2 w = __ldcs((const uint2*)(codes + place));
      words[u][0] = w.x, words[u][1] = w.y;
    }
    if (SCALED) block[u] = block_of(place, blocks);
  }
  for (i32 k = threadIdx.x; k < 256; k += blockDim.x) table[k] = values[k];
  __syncthreads();
  UNROLLED for (int u = 0; u < UNROLL; u++) {
    i64 place = base + u * stride;
    if (VECTORS && place + WIDTH <= count) {
      float part[WIDTH];
      UNROLLED for (int k = 0; k < WIDTH; k++) {
        u32 code = (words[u][k / 4] >> (8 * (k % 4))) & 0xFF;
        part[k] = SCALED ? scaled_value(table[code], code, block[u], blocks) : table[code];
      }
      Vectors<OUTPUT, WIDTH> to;
      to.template set<false>(part);
      to.store(y + place);
    } else if (!SCALED) {
      for (i64 i = place; i < count && i < place + WIDTH; i++) y[i] = stored<OUTPUT>(table[codes[i]]);
    }
  }
}
