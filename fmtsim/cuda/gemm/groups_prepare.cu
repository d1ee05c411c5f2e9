// Values times their scales as bfloat16 fragments, exponents of scales and their bounds: operands of groups.cu.
//
// A value times its scale has at most 8 bits, so bfloat16 holds it. One block of threads does one panel of one block
// of K, a warp 16 rows of it.
//
// Macros besides those of groups.cuh: TYPE (general_operands.cuh), BLOCK (places of a block), SCALE_BLOCK and
// SCALE_EMIN of the scales, COLUMNS (1: the second operand).
#include "groups.cuh"
#include "groups_values.cuh"

struct Source {
  const void* x;
  const float* scales;  // null: ones
  i64 row_stride, stride, scale_row_stride, scale_stride;
  i32 rows, k;
};

DEVICE float scale_of(const Source& from, i32 row, i32 first) {
  if (!from.scales) return 1.0f;
  return fabsf(from.scales[row * from.scale_row_stride + first / SCALE_BLOCK * from.scale_stride]);
}

// The bfloat16 pair at (row, k) and (row, k + 1) of a block that starts at `start`.
DEVICE u32 pair_of(const Source& from, i32 row, i32 start, i32 place, float scale) {
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    i32 k = start + place + i;
    if (row < from.rows && place + i < BLOCK && k < from.k) {
      float value = read_value(from.x, row * from.row_stride + k * from.stride) * scale;
      word |= __float_as_uint(value) >> 16 << (16 * i);
    }
  }
  return word;
}

// Bounds of the exponents of some rows: the largest, and the smallest of groups that are not zero, both with 1024
// added; 0 and 2047 where there is none.
struct Bounds { i32 top, low; };

KERNEL groups_prepare(const void* x, i64 row_stride, i64 stride, const float* scales, i64 scale_row_stride,
                      i64 scale_stride, i32 rows, i32 k, i32 blocks, Words4* values, u32* exponents, u32* bounds,
                      u32* flags) {
  Source from = {x, scales, row_stride, stride, scale_row_stride, scale_stride, rows, k};
  i32 panel = blockIdx.x, block = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  i32 start = block * BLOCK, top_row = panel * PANEL + warp * 16;
  i64 place = (i64)panel * blocks + block;

  Words4* to = values + place * PANEL_WORDS + warp * STEPS * 32 + lane;
  i32 row = top_row + lane / 4, column = lane % 4 * 2;
  u32 nonzero = 0;  // by steps: rows 0-7 of the tile in the low half, rows 8-15 in the high half
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    i32 first = start + step * 16 / GROUP * GROUP;
    bool used = first < k;
    float upper = used && row < rows ? scale_of(from, row, first) : 0.0f;
    float lower = used && row + 8 < rows ? scale_of(from, row + 8, first) : 0.0f;
    Words4 word;
    word.x = pair_of(from, row, start, step * 16 + column, upper);
    word.y = pair_of(from, row + 8, start, step * 16 + column, lower);
    word.z = pair_of(from, row, start, step * 16 + column + 8, upper);
    word.w = pair_of(from, row + 8, start, step * 16 + column + 8, lower);
    if ((word.x | word.z) & 0x7FFF7FFFu) nonzero |= 1u << step;
    if ((word.y | word.w) & 0x7FFF7FFFu) nonzero |= 0x10000u << step;
    to[step * 32] = COLUMNS ? Words4{word.x, word.z, word.y, word.w} : word;  // two pairs, each for 8 columns
  }
  nonzero |= __shfl_xor_sync(~0u, nonzero, 1);
  nonzero |= __shfl_xor_sync(~0u, nonzero, 2);
  nonzero = __shfl_sync(~0u, nonzero, lane % 8 * 4) >> (lane % 16 < 8 ? 0 : 16);

  __shared__ Bounds of_tiles[TILES];
  Bounds own = {0, 2047};
  u32 word = 0;
  bool outside = false;
  row = top_row + lane % 16;
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    i32 exponent = EMPTY, first = start + group * GROUP;
    if (row < rows && group * GROUP < BLOCK && first < k) {
      bool counts = nonzero >> (group * (GROUP / 16)) & ((1u << (GROUP / 16)) - 1);
      exponent = max((i32)(__float_as_uint(scale_of(from, row, first)) >> 23) - 127, (i32)SCALE_EMIN);
      if (exponent > OUTSIDE || (counts && exponent < -OUTSIDE)) outside = true;
      own.top = max(own.top, exponent + 1024);
      if (counts) own.low = min(own.low, exponent + 1024);
    }
    word |= (u32)(exponent & 255) << (8 * group);
  }
  if (lane < 16) exponents[place * PANEL + warp * 16 + lane] = word;
  own.top = __reduce_max_sync(~0u, own.top);
  own.low = __reduce_min_sync(~0u, own.low);
  if (__any_sync(~0u, outside) && lane == 0) atomicOr(flags + panel, 1u);
  if (lane == 0) of_tiles[warp] = own;
  __syncthreads();
  if (threadIdx.x < PANEL / 32) {
    Bounds one = of_tiles[2 * threadIdx.x], two = of_tiles[2 * threadIdx.x + 1];
    bounds[place * (PANEL / 32) + threadIdx.x] = (u32)max(one.top, two.top) << 16 | (u32)min(one.low, two.low);
  }
}
