// SPDX-License-Identifier: Apache-2.0
// FP8 products of Hopper and Ada units on GPUs without fp64 tensor cores: aligned terms of at most 13 fraction bits
// summed by one float32 multiply-add toward zero each.
//
// With u = 2^(E - FRACTION) and a small eps > 0, trunc(p / u) = floor(p (1 + eps) / u) + (p < 0) for every product p.
// An fma toward zero onto M = 1.5 * 2^23 u takes the floor; a' = a (1 + eps) is packed so; M already counts the
// negative products, which follow from the signs. The addend goes the same way. E comes from the bf16 tensor core:
// products of 2^(STEP e(a)) and 2^(STEP e(b)) add up to less than 2^STEP times the largest, so that the exponent of
// their sum, divided by STEP, is the largest e(a) + e(b).
//
// A panel (panels.cuh) of one block of the unit holds float32 values, k position by k position, in the order in which
// lanes take them; powers of two that stand for exponents, as fragments of the bf16 tensor core; and the signs of a row
// as bits. Zeros, and k positions without a product, become TINY with their sign: small enough to move no sum by more
// than the floor of a negative product, which is counted.
//
// Macros: BLOCK (k positions of a block), STEP. Of pack_operand: TYPE (operands.cuh), EMIN (lowest exponent of the
// operand), ENLARGED (eps is 2^-ENLARGED, 0: none), COLUMNS (1: the second operand), POWER (an exponent e stands as
// 2^(STEP (e - EMIN) - POWER)). Of aligned_fp32_fma: FRACTION, CHAIN (steps of 16 that one sum of powers takes, 0: half
// a step), OFFSET (exponent field of a float32 for quotient 0), ACC_MANTISSA, EPS (of the addend), PROMOTE, STAGES,
// UNROLL (k positions of a loop), RESIDENT (blocks of threads on a multiprocessor).
#include "operands.cuh"
#include "panels.cuh"

#define TILES (PANEL / 16)
#define STEPS ((BLOCK + 15) / 16)
#define MASKS ((BLOCK + 31) / 32)
#define FLOATS (BLOCK * PANEL)
#define POWERS (TILES * STEPS * 32)  // of 16 bytes

#ifdef TYPE

#define TINY 0x0D800000u  // 2^-100

// Four bits from `place` on as the lowest bits of four bytes.
DEVICE u32 four_bytes(u32 bits, i32 place) { return ((bits >> place & 15) * 0x00204081u) & 0x01010101u; }

// A fragment of the int8 tensor core has four signs in the four bytes of each of its registers. A word has register r
// of a fragment in bits r, r + 8, r + 16 and r + 24: for rows two fragments of 16 x 32, words 2 lane and 2 lane + 1
// of 64 rows; for columns four of 32 x 8, word `lane` of 32 columns.
DEVICE u32 signs_of_rows(const u32* masks, i32 word) {
  i32 lane = word / 2 % 32, top = word / 64 * 64 + word % 2 * 32 + lane / 4, k = lane % 4 * 4;
  u32 signs = 0;
  UNROLLED for (int r = 0; r < 8; ++r)
    signs |= four_bytes(masks[top + r / 4 * 16 + r % 2 * 8], k + r / 2 % 2 * 16) << r;
  return signs;
}

DEVICE u32 signs_of_columns(const u32* masks, i32 word) {
  i32 lane = word % 32, first = word / 32 * 32 + lane / 4, k = lane % 4 * 4;
  u32 signs = 0;
  UNROLLED for (int r = 0; r < 8; ++r) signs |= four_bytes(masks[first + r / 2 * 8], k + r % 2 * 16) << r;
  return signs;
}

KERNEL pack_operand(const void* x, i64 row_stride, i64 stride, i32 rows, const i32* source, i32 blocks, float* values,
                      Words4* powers, u32* signs, u32* flags) {
  __shared__ u8 fields[PANEL][STEPS * 16 + 4];
  __shared__ u32 masks[MASKS][PANEL];  // the signs of a row
  i32 panel = blockIdx.x, block = blockIdx.y, thread = threadIdx.x;
  i64 to = (i64)panel * blocks + block;
  for (i32 i = thread; i < MASKS * PANEL; i += blockDim.x) masks[i / PANEL][i % PANEL] = 0;
  __syncthreads();

  // 1. values, enlarged, and exponent fields and signs into shared memory
  bool special = false;
  i32 own = thread % PANEL, row = panel * PANEL + own;
  i32 lies = COLUMNS ? place_of_column<4>(own) : place_of_row<4>(own);
  u32 negative[MASKS] = {};
#pragma unroll 8
  for (i32 turn = 0; turn < STEPS * 8; ++turn) {
    i32 place = 2 * turn + thread / PANEL;
    i32 k = place < BLOCK ? source[(i64)block * BLOCK + place] : -1;
    u32 bits = k >= 0 && row < rows ? as_bits(read_value(x, row * row_stride + k * stride)) : 0;
    u32 magnitude = bits & 0x7FFFFFFFu, sign = bits >> 31, field = 0;
    if (magnitude >= 0x7F800000u) special = true;
    if (magnitude) field = STEP * (max((i32)(magnitude >> 23) - 127, (i32)EMIN) - EMIN) - POWER + 127;
    else bits |= TINY;
    fields[own][place] = field;
    if (place < BLOCK) {
      float value = as_float(bits);
      if (ENLARGED) value = __fmaf_rn(value, as_float((127 - ENLARGED) << 23), value);
      values[to * FLOATS + place * PANEL + lies] = value;
      negative[turn / 16] |= sign << (place % 32);
    }
  }
  UNROLLED for (int mask = 0; mask < MASKS; ++mask) atomicOr(&masks[mask][own], negative[mask]);
  if (special) atomicOr(flags + panel, 1u);
  __syncthreads();

  // 2. signs as fragments of the int8 tensor core, and a count for each column
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
  // 3. powers as fragments of the bf16 tensor core
  for (i32 i = thread; i < POWERS; i += blockDim.x) {
    i32 lane = i % 32, step = i / 32 % STEPS, top = i / 32 / STEPS * 16 + lane / 4, place = step * 16 + lane % 4 * 2;
    u32 words[4];
    UNROLLED for (int w = 0; w < 4; ++w) {
      int low = COLUMNS ? w / 2 : w % 2, high = COLUMNS ? w % 2 : w / 2;  // a pair of words is what 8 columns take
      const u8* pair = fields[top + low * 8] + place + high * 8;
      words[w] = (u32)pair[0] << 7 | (u32)pair[1] << 23;
    }
    powers[to * POWERS + i] = Words4{words[0], words[1], words[2], words[3]};
  }
}

#else

struct Stage {
  float a[FLOATS], b[FLOATS];
  Words4 powers_a[POWERS], powers_b[POWERS];
  u32 signs_a[MASKS * PANEL], signs_b[MASKS * PANEL], counts_b[PANEL];
};

struct Operand {
  const float* values;
  const Words4* powers;
  const u32* signs;
  i64 place;  // of its panel's first block
};

DEVICE void fetch(Stage* to, const Operand& a, const Operand& b, i32 block) {
  copy_words<FLOATS / 4, THREADS>(to->a, a.values + (a.place + block) * FLOATS);
  copy_words<FLOATS / 4, THREADS>(to->b, b.values + (b.place + block) * FLOATS);
  copy_words<POWERS, THREADS>(to->powers_a, a.powers + (a.place + block) * POWERS);
  copy_words<POWERS, THREADS>(to->powers_b, b.powers + (b.place + block) * POWERS);
  copy_words<MASKS * PANEL / 4, THREADS>(to->signs_a, a.signs + (a.place + block) * MASKS * PANEL);
  copy_words<(MASKS + 1) * PANEL / 4, THREADS>(to->signs_b, b.signs + (b.place + block) * (MASKS + 1) * PANEL);
}

// A sum with the bits that the accumulator keeps.
DEVICE float truncated(float sum) { return as_float(as_bits(sum) & ~((1u << (23 - ACC_MANTISSA)) - 1)); }

// The largest sums of powers of each output of a 16 x 8 tile, as bits of a float32.
DEVICE void sum_powers(u32 (&largest)[4], const Words4* a, const Words4* b, bool odd) {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  UNROLLED for (int step = 0; step < STEPS; ++step) {
    Words4 x = a[step * 32], y = b[step * 32];
    u32 right[2] = {odd ? y.z : y.x, odd ? y.w : y.y};
    UNROLLED for (int half = 0; half < (CHAIN ? 1 : 2); ++half) {
      u32 left[4] = {half ? 0 : x.x, half ? 0 : x.y, CHAIN || half ? x.z : 0, CHAIN || half ? x.w : 0};
      hmma_bf16_16x8x16(sums, left, right);
      if (CHAIN && step % max(CHAIN, 1) != CHAIN - 1 && step != STEPS - 1) continue;
      bool first = CHAIN ? step < CHAIN : step + half == 0;
      UNROLLED for (int i = 0; i < 4; ++i) {
        largest[i] = first ? as_bits(sums[i]) : max(largest[i], as_bits(sums[i]));
        sums[i] = 0.0f;
      }
    }
  }
}

// A float32 whose exponent field is that of a float32 `power`, divided by STEP, plus OFFSET.
DEVICE float quotient_of(u32 power) {
  u32 quotient = (STEP & (STEP - 1)) == 0 ? power / STEP : (power >> 23) * ((1u << 23) / STEP + 1);
  return as_float(quotient + ((u32)OFFSET << 23));
}

// Replaces the addends by M with the number of negative terms, plus the addend's own floor. A product is negative
// where s_a (1 - 2 s_b) + s_b is 1, s being the signs: an int8 product, and a count for each column.
DEVICE void start_block(float (&c)[8][8], const Stage& stage, i32 warp_row, i32 warp_column, i32 lane) {
  const Words4* a = stage.powers_a + warp_row * 4 * STEPS * 32 + lane;
  const Words4* b = stage.powers_b + warp_column * 2 * STEPS * 32 + lane;
  const Words2* signs_a = (const Words2*)stage.signs_a + warp_row * 32 + lane;
  const u32* signs_b = stage.signs_b + warp_column * 32 + lane;
  const Words2* counts_b = (const Words2*)stage.counts_b + warp_column * 16 + lane % 4;
  const float factor = 1.0f + as_float((127 - EPS) << 23);
  UNROLLED for (int i = 0; i < 4; ++i) {
    UNROLLED for (int j = 0; j < 4; ++j) {
      // 1. the largest exponents of products
      u32 powers[4];
      sum_powers(powers, a + i * STEPS * 32, b + j / 2 * STEPS * 32, j % 2);
      // 2. how many products are negative, above the bits of M
      Words2 count = counts_b[4 * j];
      i32 even = (i32)count.x + ((23 - FRACTION) * (1 << 23) + (1 << 22));
      i32 odd = (i32)count.y + ((23 - FRACTION) * (1 << 23) + (1 << 22));
      i32 magics[4] = {even, odd, even, odd};
      UNROLLED for (int mask = 0; mask < MASKS; ++mask) {
        u32 left[4], right[2];
        u32 rows = i / 2 ? signs_a[mask * PANEL / 2].y : signs_a[mask * PANEL / 2].x, columns = signs_b[mask * PANEL];
        UNROLLED for (int r = 0; r < 4; ++r) left[r] = rows >> (i % 2 * 4 + r) & 0x01010101u;
        UNROLLED for (int r = 0; r < 2; ++r) right[r] = (columns >> (j * 2 + r) & 0x01010101u) * 0xFE | 0x01010101u;
        imma_s8_16x8x32(magics, left, right);
      }
      UNROLLED for (int r = 0; r < 4; ++r) {
        // 3. the addend's exponent may be larger; 4. M plus the addend's own floor
        float& acc = c[2 * i + r / 2][2 * j + r % 2];
        u32 field = as_bits(fmaxf(quotient_of(powers[r]), fabsf(acc))) & 0x7F800000u;
        u32 magic = field + ((u32)magics[r] + (as_bits(acc) >> 31));
        acc = __fmaf_rz(acc, factor, as_float(magic));
      }
    }
    __syncwarp();  // a barrier for the compiler, which would keep words in registers that it has not
  }
}

DEVICE void add_products(float (&c)[8][8], const Stage& stage, i32 warp_row, i32 warp_column, i32 lane) {
  const float* a = stage.a + warp_row * 64 + lane / 4 * 4;
  const float* b = stage.b + warp_column * 32 + lane % 4 * 4;
#pragma unroll UNROLL
  for (int place = 0; place < BLOCK; ++place) {
    float x[8], y[8];
    load<float, 8, 8>(x, a + place * PANEL);
    load<float, 8, 4>(y, b + place * PANEL);
    UNROLLED for (int i = 0; i < 8; ++i)
      UNROLLED for (int j = 0; j < 8; ++j) c[i][j] = __fmaf_rz(x[i], y[j], c[i][j]);
  }
}

// Takes M away, one and a half times the power of two of the sum's binade. What the accumulator does not keep of it
// the next block's alignment truncates as well, whose grid is not finer; only the last block of a chain needs
// `truncated`.
DEVICE void finish_block(float (&c)[8][8]) {
  UNROLLED for (int i = 0; i < 8; ++i)
    UNROLLED for (int j = 0; j < 8; ++j) {
      float power = as_float(as_bits(c[i][j]) & 0x7F800000u);
      c[i][j] = __fmaf_rn(power, -1.5f, c[i][j]);
      if (ACC_MANTISSA < FRACTION) c[i][j] = truncated(c[i][j]);
    }
}

KERNEL __launch_bounds__(THREADS, RESIDENT)
aligned_fp32_fma(const float* values_a, const Words4* powers_a, const u32* signs_a, const float* values_b,
             const Words4* powers_b, const u32* signs_b, const u32* flags, const u8* ends, const i32* part_blocks,
             i32 blocks, float* sums, u8* marks, i32 rows, i32 columns) {
  DYNAMIC_SHARED(memory);
  Stage* stages = (Stage*)memory;
  const Panels panels = panels_of(rows, columns);
  if (panels.is_flagged(flags)) {
    if (threadIdx.x == 0) marks[panels.tile()] = 1;
    return;
  }
  i32 begin = part_blocks[2 * blockIdx.z], end = part_blocks[2 * blockIdx.z + 1];
  Operand a = {values_a, powers_a, signs_a, (i64)panels.a * blocks};
  Operand b = {values_b, powers_b, signs_b, (i64)panels.b * blocks};
  i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2, warp_column = warp / 2;
  float c[8][8] = {};
  bool first = true;
  auto end_chain = [&]() {
    write_floats(sums, rows, columns, panels, first, [&](int i, int j) { return truncated(c[i][j]); });
    first = false;
    UNROLLED for (int i = 0; i < 64; ++i) c[i / 8][i % 8] = 0.0f;
  };
  auto bring = [&](i32 slot, i32 block) { fetch(stages + slot, a, b, block); };
  add_blocks<STAGES, PROMOTE>(begin, end, ends, bring, end_chain, [&](i32 slot) {
    start_block(c, stages[slot], warp_row, warp_column, lane);
    add_products(c, stages[slot], warp_row, warp_column, lane);
    finish_block(c);
  });
}

#endif
