// Values of byte codes whose blocks are runs of memory: a table of the format's values, times scales.
//
// OUTPUT is 0 for float32, 1 for bfloat16 (of formats whose values float32 holds exactly, so that one rounding is left).
// Sixteen codes a thread; they share a block.
#include "block_vectors.cuh"

KERNEL __launch_bounds__(256) decode_runs(
    const u8* codes, const float* values, const float* scales, const i32* offsets, const float* tensor_scale, void* out,
    u64 sixteens, u32 sixteens_per_run) {
  __shared__ float table[256];
  table[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  float whole = tensor_scale == nullptr ? 1.0f : *tensor_scale;
  u64 stride = (u64)gridDim.x * blockDim.x;
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < sixteens; at += stride) {
    Packed<16, 8> in = load_vector<16, 8>(codes, 16 * at);
    u32 block = (u32)at / sixteens_per_run;
    float scale = scales[block];
    i32 zero = offsets == nullptr ? 0 : offsets[block];
#pragma unroll
    for (int first = 0; first < 16; first += 4) {
      Packed<4, OUTPUT_BITS> y;
      y.clear();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 code = in.get(first + i);
        float value = offsets == nullptr ? table[code] : (float)((i32)code - zero);
        value = __fmul_rn(value, scale);
        if (tensor_scale != nullptr) value = __fmul_rn(value, whole);
        u32 bits = value == value ? as_bits(value) : 0x7FC00000u;
        if (OUTPUT == 1) bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        y.put(i, bits);
      }
      store_vector<4, OUTPUT_BITS>(out, 16 * at + first, y);
    }
  }
}
