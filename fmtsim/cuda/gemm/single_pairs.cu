// Products of fused units whose sums need two float32 numbers: 16-bit inputs and TF32 with 24 or 25 fraction bits.
//
// The high sum has the grid g = 2^(E + HEAD - 23), the low one u = 2^(E - FRACTION), both on a constant 1.5 * 2^23
// grids. A product p goes in five steps: the high sum takes d, p to the nearest multiple of g; the rest r = p - d is
// exact; a multiple of p that is too small to cross anything, added and rounded down, moves r below itself where p <
// 0; the low sum takes the floor of that. As everywhere, trunc(p / u) = floor(p (1 + eps) / u) + (p < 0), and how
// many products are negative follows from the signs. The addend goes the same way, times 1. At the end both sums
// without their constants are exact, and one addition toward zero is the block's result.
//
// Macros: BLOCK (at most 32), FRACTION, HEAD, KEPT (mantissa bits of the accumulator), LOWEST (of the exponents),
// PROMOTE.
#include "single.cuh"

#define THREADS 512
#define STAGES 2
#define HIGH ((HEAD << 23) + (1 << 22))             // what makes 1.5 * 2^(E + HEAD) of an exponent field
#define LOW (((23 - FRACTION) * (1 << 23)) + (1 << 22))

struct Stage {
  float a[FLOATS], b[FLOATS];
  i32 exponents_a[FLOATS], exponents_b[FLOATS];
  u32 signs_a[2 * PANEL], signs_b[2 * PANEL];  // bits of signs, then of what is not zero
};

struct Operand {
  const float* values;
  const i32* exponents;
  const u32* signs;
  i64 place;  // of its panel's first block
};

DEVICE void fetch(Stage* to, const Operand& a, const Operand& b, i32 block) {
  copy_words<FLOATS / 4, THREADS>(to->a, a.values + (a.place + block) * FLOATS);
  copy_words<FLOATS / 4, THREADS>(to->b, b.values + (b.place + block) * FLOATS);
  copy_words<FLOATS / 4, THREADS>(to->exponents_a, a.exponents + (a.place + block) * FLOATS);
  copy_words<FLOATS / 4, THREADS>(to->exponents_b, b.exponents + (b.place + block) * FLOATS);
  copy_words<PANEL / 2, THREADS>(to->signs_a, a.signs + (a.place + block) * 2 * PANEL);
  copy_words<PANEL / 2, THREADS>(to->signs_b, b.signs + (b.place + block) * 2 * PANEL);
}

template <typename T>
DEVICE void load4(T* to, const T* from) {
  Words4 words = *(const Words4*)from;
  *(Words4*)to = words;
}

// The running sums of a lane: a result in `high` between blocks.
struct Sums {
  float high[8][4], low[8][4];
};

DEVICE void add_term(float& high, float& low, float x, float y, float tiny) {
  float next = __fmaf_rn(x, y, high);
  float rest = __fmaf_rn(x, y, high - next);
  low = __fadd_rz(low, __fmaf_rd(x, tiny, rest));
  high = next;
}

// Replaces results by the two constants with the number of negative terms in the low one, and the addend's own term.
DEVICE void start_block(Sums& sums, const Stage& stage, i32 row, i32 column) {
  i32 exponents[8][4];  // above 2 LOWEST, as exponent fields
#pragma unroll
  for (int i = 0; i < 32; ++i) exponents[i / 4][i % 4] = 0;
#pragma unroll 4
  for (int place = 0; place < BLOCK; ++place) {
    i32 x[8], y[4];
    load4(x, stage.exponents_a + place * PANEL + row);
    load4(x + 4, stage.exponents_a + place * PANEL + row + 32);
    load4(y, stage.exponents_b + place * PANEL + column);
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) exponents[i][j] = max(exponents[i][j], x[i] + y[j]);
  }
  u32 signs_b[4], some_b[4];
  load4(signs_b, stage.signs_b + column);
  load4(some_b, stage.signs_b + PANEL + column);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    u32 sign = stage.signs_a[row + i / 4 * 32 + i % 4], some = stage.signs_a[PANEL + row + i / 4 * 32 + i % 4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float own = sums.high[i][j];
      u32 field = max((u32)exponents[i][j] + ((2 * LOWEST + 127) << 23), __float_as_uint(own) & 0x7F800000u);
      u32 negatives = __popc((sign ^ signs_b[j]) & some & some_b[j]) + (__float_as_uint(own) >> 31);
      sums.high[i][j] = __uint_as_float(field + HIGH);
      sums.low[i][j] = __uint_as_float(field + (u32)LOW + negatives);
      add_term(sums.high[i][j], sums.low[i][j], own, 1.0f, 0x1p-30f);
    }
  }
}

DEVICE void add_products(Sums& sums, const Stage& stage, i32 row, i32 column) {
#pragma unroll 4
  for (int place = 0; place < BLOCK; ++place) {
    float x[8], y[4];
    load4(x, stage.a + place * PANEL + row);
    load4(x + 4, stage.a + place * PANEL + row + 32);
    load4(y, stage.b + place * PANEL + column);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float tiny = y[j] * 0x1p-30f;
#pragma unroll
      for (int i = 0; i < 8; ++i) add_term(sums.high[i][j], sums.low[i][j], x[i], y[j], tiny);
    }
  }
}

// Takes the constants away: one and a half times the powers of two of the sums' binades.
DEVICE void finish_block(Sums& sums) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float power = __uint_as_float(__float_as_uint(sums.high[i][j]) & 0x7F800000u);
      float bottom = __uint_as_float(__float_as_uint(sums.low[i][j]) & 0x7F800000u);
      float high = __fmaf_rn(power, -1.5f, sums.high[i][j]), low = __fmaf_rn(bottom, -1.5f, sums.low[i][j]);
      sums.high[i][j] = __uint_as_float(__float_as_uint(__fadd_rz(high, low)) & ~((1u << (23 - KEPT)) - 1));
    }
}

// Writes a chain's results, or adds them to those of earlier chains, and starts anew at zero.
DEVICE void end_chain(Sums& sums, float* to, i32 row, i32 column, i32 rows, i32 columns, bool first) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (row + 8 * i < rows && column + j < columns) {
        float* place = to + (i64)(row + 8 * i) * columns + column + j;
        *place = first ? sums.high[i][j] : *place + sums.high[i][j];
      }
      sums.high[i][j] = 0.0f;
    }
}

KERNEL __launch_bounds__(THREADS, 1)
single_pairs(const float* values_a, const i32* exponents_a, const u32* signs_a, const float* values_b,
             const i32* exponents_b, const u32* signs_b, const u32* flags, const u8* ends, const i32* part_blocks,
             i32 blocks, float* results, u8* marks, i32 rows, i32 columns) {
  DYNAMIC_SHARED(memory);
  Stage* stages = (Stage*)memory;
  i32 panels_a = (rows + PANEL - 1) / PANEL, panels_b = (columns + PANEL - 1) / PANEL;
  // panels of a in groups of 8, so that blocks that run together share operands in the second-level cache
  i32 group = blockIdx.x / (8 * panels_b), height = min(8, panels_a - 8 * group), rest = blockIdx.x % (8 * panels_b);
  i32 panel_a = 8 * group + rest % height, panel_b = rest / height;
  if (flags[panel_a] | flags[panels_a + panel_b]) {
    if (threadIdx.x == 0) marks[(i64)panel_a * panels_b + panel_b] = 1;
    return;
  }
  i32 begin = part_blocks[2 * blockIdx.z], end = part_blocks[2 * blockIdx.z + 1];
  Operand a = {values_a, exponents_a, signs_a, (i64)panel_a * blocks};
  Operand b = {values_b, exponents_b, signs_b, (i64)panel_b * blocks};
  i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  i32 place_a = warp % 2 * 64 + lane / 4 * 4, place_b = warp / 2 * 16 + lane % 4 * 4;
  i32 row = panel_a * PANEL + warp % 2 * 64 + lane / 4, column = panel_b * PANEL + place_b;
  results += (i64)blockIdx.z * rows * columns;
  Sums sums = {};
  bool first = true;

  if (begin < end) fetch(stages, a, b, begin);
  commit_copies();
  i32 slot = 0;
  for (i32 block = begin; block < end; ++block, slot ^= 1) {
    wait_copies<0>();
    __syncthreads();
    if (block + 1 < end) fetch(stages + (slot ^ 1), a, b, block + 1);
    commit_copies();
    start_block(sums, stages[slot], place_a, place_b);
    add_products(sums, stages[slot], place_a, place_b);
    finish_block(sums);
    if (PROMOTE && ends[block]) {
      end_chain(sums, results, row, column, rows, columns, first);
      first = false;
    }
  }
  if (!PROMOTE) end_chain(sums, results, row, column, rows, columns, true);
}
