// Values, powers and signs of one operand in the layout of single.cuh. A block of 256 threads does one panel of one
// block.
//
// Zeros, and places without a product, become TINY with their sign: small enough to move no sum by more than the
// floor of a negative product, which is counted.
//
// Macros: BLOCK, TYPE (general_operands.cuh), EMIN (lowest exponent of the operand), ENLARGED (eps is 2^-ENLARGED,
// 0: none), COLUMNS (1: the second operand), STEP and POWER (an exponent e stands as 2^(STEP (e - EMIN) - POWER)).
#include "groups_values.cuh"
#include "single.cuh"

#define TINY 0x0D800000u  // 2^-100

// Four bits from `place` on as the lowest bits of four bytes.
DEVICE u32 bytes_of(u32 bits, i32 place) { return ((bits >> place & 15) * 0x00204081u) & 0x01010101u; }

// A fragment of the int8 tensor core has four signs in the four bytes of each of its registers. A word has register r
// of a fragment in bits r, r + 8, r + 16 and r + 24: for rows two fragments of 16 x 32, words 2 lane and 2 lane + 1
// of 64 rows; for columns four of 32 x 8, word `lane` of 32 columns.
DEVICE u32 signs_of_rows(const u32* masks, i32 word) {
  i32 lane = word / 2 % 32, top = word / 64 * 64 + word % 2 * 32 + lane / 4, k = lane % 4 * 4;
  u32 signs = 0;
#pragma unroll
  for (int r = 0; r < 8; ++r) signs |= bytes_of(masks[top + r / 4 * 16 + r % 2 * 8], k + r / 2 % 2 * 16) << r;
  return signs;
}

DEVICE u32 signs_of_columns(const u32* masks, i32 word) {
  i32 lane = word % 32, first = word / 32 * 32 + lane / 4, k = lane % 4 * 4;
  u32 signs = 0;
#pragma unroll
  for (int r = 0; r < 8; ++r) signs |= bytes_of(masks[first + r / 2 * 8], k + r % 2 * 16) << r;
  return signs;
}

KERNEL single_prepare(const void* x, i64 row_stride, i64 stride, i32 rows, const i32* source, i32 blocks, float* values,
                      Words4* powers, u32* signs, u32* flags) {
  __shared__ u8 fields[PANEL][STEPS * 16 + 4];
  __shared__ u32 masks[MASKS][PANEL];  // the signs of a row
  i32 panel = blockIdx.x, block = blockIdx.y, thread = threadIdx.x;
  i64 to = (i64)panel * blocks + block;
  for (i32 i = thread; i < MASKS * PANEL; i += blockDim.x) masks[i / PANEL][i % PANEL] = 0;
  __syncthreads();

  bool special = false;
  i32 own = thread % PANEL, row = panel * PANEL + own;
  i32 lies = COLUMNS ? place_of_column(own) : place_of_row(own);
  u32 negative[MASKS] = {};
#pragma unroll 8
  for (i32 turn = 0; turn < STEPS * 8; ++turn) {
    i32 place = 2 * turn + thread / PANEL;
    i32 k = place < BLOCK ? source[(i64)block * BLOCK + place] : -1;
    u32 bits = k >= 0 && row < rows ? __float_as_uint(read_value(x, row * row_stride + k * stride)) : 0;
    u32 magnitude = bits & 0x7FFFFFFFu, sign = bits >> 31, field = 0;
    if (magnitude >= 0x7F800000u) special = true;
    if (magnitude) field = STEP * (max((i32)(magnitude >> 23) - 127, (i32)EMIN) - EMIN) - POWER + 127;
    else bits |= TINY;
    fields[own][place] = field;
    if (place < BLOCK) {
      float value = __uint_as_float(bits);
      if (ENLARGED) value = __fmaf_rn(value, __uint_as_float((127 - ENLARGED) << 23), value);
      values[to * FLOATS + place * PANEL + lies] = value;
      negative[turn / 16] |= sign << (place % 32);
    }
  }
#pragma unroll
  for (int mask = 0; mask < MASKS; ++mask) atomicOr(&masks[mask][own], negative[mask]);
  if (special) atomicOr(flags + panel, 1u);
  __syncthreads();

  signs += to * (MASKS + COLUMNS) * PANEL;
  for (i32 i = thread; i < MASKS * PANEL; i += blockDim.x) {
    const u32* own_masks = masks[i / PANEL];
    signs[i] = COLUMNS ? signs_of_columns(own_masks, i % PANEL) : signs_of_rows(own_masks, i % PANEL);
  }
  if (COLUMNS && thread < PANEL) {
    u32 count = 0;
    for (i32 mask = 0; mask < MASKS; ++mask) count += __popc(masks[mask][thread]);
    signs[MASKS * PANEL + thread] = count;
  }
  for (i32 i = thread; i < POWERS; i += blockDim.x) {
    i32 lane = i % 32, step = i / 32 % STEPS, top = i / 32 / STEPS * 16 + lane / 4, place = step * 16 + lane % 4 * 2;
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      int low = COLUMNS ? w / 2 : w % 2, high = COLUMNS ? w % 2 : w / 2;  // a pair of words is what 8 columns take
      const u8* pair = fields[top + low * 8] + place + high * 8;
      words[w] = (u32)pair[0] << 7 | (u32)pair[1] << 23;
    }
    powers[to * POWERS + i] = Words4{words[0], words[1], words[2], words[3]};
  }
}
