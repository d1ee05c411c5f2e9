// SPDX-License-Identifier: Apache-2.0
// NVFP4 and MXFP4 products of Blackwell units, which add groups of products exactly before the alignment
// (docs/matmul.md, section 2): the bf16 tensor core of any GPU sums groups, or whole blocks where nothing is truncated.
//
// Operands are packed as values times scales, of at most 8 bits, which bfloat16 holds. The terms of a block are
// multiples of u = 2^(low + LSB), low being the smallest sum of scale exponents, and every sum below 2^24 u is exact. A
// block is then one addition toward zero, c + sum, if the alignment to E = max(top, e(c)) truncates nothing either:
// e(c) <= low + LSB + FRACTION, and c is zero or has its last bit at 2^(top - FRACTION) or above. Every output and
// block is held to these conditions (`fast_block`). Where one fails, two tiles of 16 x 8 outputs are computed again,
// group by group, in float64 (`exact_block`): with a small eps > 0, trunc(t) = floor(t (1 + eps)) + (t < 0), and an fma
// toward zero onto a large constant takes the floor.
//
// A panel (panels.cuh) of one block holds values, as fragments of the bf16 tensor core (8 tiles of 16 rows, STEPS steps
// of 16 along K, 32 lanes of 16 bytes); exponents of scales, a word a row, a signed byte a group; and their bounds for
// each 32 rows.
//
// Macros: STEPS and GROUPS of a block, GROUP (k positions of a group). Of pack_operand: TYPE (operands.cuh), BLOCK (k
// positions of a block), SCALE_BLOCK and SCALE_EMIN of the scales, COLUMNS (1: the second operand). Of block_scaled:
// FRACTION, LSB, SPREAD (the largest top - low of the one addition), ROOM (its sums stay below 2^ROOM u), EPS (eps is
// 2^-EPS), PROMOTE, STAGES, RESIDENT (blocks of threads a multiprocessor).
#include "operands.cuh"
#include "panels.cuh"

#define TILES (PANEL / 16)
#define EMPTY (-128)        // the exponent of a group without products, smaller than any sum of two others
#define OUTSIDE 50          // scales beyond 2^50 or below 2^-50 leave a panel to the general path
#define SMALLEST -126       // the exponent of the smallest normal number: bounds of rows that hold nothing are below
#define PANEL_WORDS (TILES * STEPS * 32)  // of 16 bytes

DEVICE i32 byte_of(u32 word, int place) { return (i8)(word >> (8 * place)); }
DEVICE float float_power(i32 exponent) { return as_float((u32)(exponent + 127) << 23); }

#ifdef TYPE

// A block of threads packs a block of K of a panel, a warp 16 rows of it.
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
  UNROLLED for (int i = 0; i < 2; ++i) {
    i32 k = start + place + i;
    if (row < from.rows && place + i < BLOCK && k < from.k) {
      float value = read_value(from.x, row * from.row_stride + k * from.stride) * scale;
      word |= as_bits(value) >> 16 << (16 * i);
    }
  }
  return word;
}

// Bounds of the exponents of some rows: the largest, and the smallest of groups that are not zero, both with 1024
// added; 0 and 2047 where there is none.
struct Bounds { i32 top, low; };

KERNEL pack_operand(const void* x, i64 row_stride, i64 stride, const float* scales, i64 scale_row_stride,
                      i64 scale_stride, i32 rows, i32 k, i32 blocks, Words4* values, u32* exponents, u32* bounds,
                      u32* flags) {
  Source from = {x, scales, row_stride, stride, scale_row_stride, scale_stride, rows, k};
  i32 panel = blockIdx.x, block = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  i32 start = block * BLOCK, top_row = panel * PANEL + warp * 16;
  i64 place = (i64)panel * blocks + block;

  // 1. values times scales as fragments, and which groups of a row are zero
  Words4* to = values + place * PANEL_WORDS + warp * STEPS * 32 + lane;
  i32 row = top_row + lane / 4, column = lane % 4 * 2;
  u32 nonzero = 0;  // by steps: rows 0-7 of the tile in the low half, rows 8-15 in the high half
  UNROLLED for (int step = 0; step < STEPS; ++step) {
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

  // 2. exponents of scales, and their bounds over 32 rows
  __shared__ Bounds of_tiles[TILES];
  Bounds of_rows = {0, 2047};
  u32 word = 0;
  bool outside = false;
  row = top_row + lane % 16;
  UNROLLED for (int group = 0; group < GROUPS; ++group) {
    i32 exponent = EMPTY, first = start + group * GROUP;
    if (row < rows && first < k) {
      bool counts = nonzero >> (group * (GROUP / 16)) & ((1u << (GROUP / 16)) - 1);
      exponent = max((i32)(as_bits(scale_of(from, row, first)) >> 23) - 127, (i32)SCALE_EMIN);
      if (exponent > OUTSIDE || (counts && exponent < -OUTSIDE)) outside = true;
      of_rows.top = max(of_rows.top, exponent + 1024);
      if (counts) of_rows.low = min(of_rows.low, exponent + 1024);
    }
    word |= (u32)(exponent & 255) << (8 * group);
  }
  if (lane < 16) exponents[place * PANEL + warp * 16 + lane] = word;
  of_rows.top = __reduce_max_sync(~0u, of_rows.top);
  of_rows.low = __reduce_min_sync(~0u, of_rows.low);
  if (__any_sync(~0u, outside) && lane == 0) atomicOr(flags + panel, 1u);
  if (lane == 0) of_tiles[warp] = of_rows;
  __syncthreads();
  if (threadIdx.x < PANEL / 32) {
    Bounds one = of_tiles[2 * threadIdx.x], two = of_tiles[2 * threadIdx.x + 1];
    bounds[place * (PANEL / 32) + threadIdx.x] = (u32)max(one.top, two.top) << 16 | (u32)min(one.low, two.low);
  }
}

#else

struct Operand {
  const Words4* values;
  const u32* exponents;
  const u32* bounds;
};

// The first blocks of a panel and what one stage of shared memory holds of both operands.
struct Stage {
  Words4 a[PANEL_WORDS], b[PANEL_WORDS];
  u32 exponents_a[PANEL], exponents_b[PANEL];
  u32 bounds_a[4], bounds_b[4];
};

DEVICE void fetch(Stage* to, const Operand& a, const Operand& b, i64 place_a, i64 place_b) {
  i32 thread = threadIdx.x;
  UNROLLED for (int i = 0; i < PANEL_WORDS / THREADS; ++i) {
    i32 word = i * THREADS + thread;
    copy16_async(to->a + word, a.values + place_a * PANEL_WORDS + word);
    copy16_async(to->b + word, b.values + place_b * PANEL_WORDS + word);
  }
  i32 word = 4 * (thread % 32);
  if (thread < 32) copy16_async(to->exponents_a + word, a.exponents + place_a * PANEL + word);
  else if (thread < 64) copy16_async(to->exponents_b + word, b.exponents + place_b * PANEL + word);
  else if (thread == 64) copy16_async(to->bounds_a, a.bounds + place_a * 4);
  else if (thread == 65) copy16_async(to->bounds_b, b.bounds + place_b * 4);
}

// The four outputs of a lane in a 16 x 8 tile, after one block, whatever its exponents.
DEVICE void exact_block(float (&c)[4], const Words4* a, const Words4* b, bool odd, const u32* rows,
                        const u32* columns) {
  // 1. exact sums of groups
  float sums[GROUPS][4];
  UNROLLED for (int group = 0; group < GROUPS; ++group) {
    UNROLLED for (int i = 0; i < 4; ++i) sums[group][i] = 0.0f;
    UNROLLED for (int step = group * (GROUP / 16); step < (group + 1) * (GROUP / 16) && step < STEPS; ++step) {
      Words4 left = a[step * 32], right = b[step * 32];
      u32 x[4] = {left.x, left.y, left.z, left.w};
      u32 y[2] = {odd ? right.z : right.x, odd ? right.w : right.y};
      hmma_bf16_16x8x16(sums[group], x, y);
    }
  }
  // 2. E of the addend and the groups' scales, and the number of negative terms
  const double factor = 1.0 + __hiloint2double((1023 - EPS) << 20, 0);
  UNROLLED for (int i = 0; i < 4; ++i) {
    u32 row = rows[i / 2 * 8], column = columns[i % 2], magnitude = as_bits(c[i]) & 0x7FFFFFFFu;
    i32 exponent = magnitude ? max((i32)(magnitude >> 23), 1) - 127 : 4 * EMPTY;
    i32 negatives = c[i] < 0;
    UNROLLED for (int group = 0; group < GROUPS; ++group) {
      exponent = max(exponent, byte_of(row, group) + byte_of(column, group));
      negatives += sums[group][i] < 0;
    }
    // 3. floors of addend and groups onto M, one fused multiply-add each; 4. M away
    i32 high = (exponent + 52 - FRACTION + 1023) << 20 | 1 << 19;
    double sum = __fma_rz((double)c[i], factor, __hiloint2double(high, negatives));
    UNROLLED for (int group = 0; group < GROUPS; ++group) sum = __fma_rz((double)sums[group][i], factor, sum);
    c[i] = __double2float_rz(sum - __hiloint2double(high, 0));
  }
}

// What sums and addends of a block may be: the sum of |sums of the tensor core| and |c| factor below `sum`, and c
// zero or 2 |c| - 1 as an integer at least `lowest`.
struct Limits {
  float sum, factor;
  u32 lowest;
  bool fast;
};

// What a block of 64 x 32 outputs may hold so that nothing is truncated, from the bounds of their scales.
DEVICE Limits limits_of(const u32* bounds_a, const u32* bounds_b) {
  u32 one = bounds_a[0], two = bounds_a[1], other = bounds_b[0];
  i32 top = (i32)max(one >> 16, two >> 16) + (i32)(other >> 16) - 2048;
  i32 low = min((i32)min(one & 0xFFFF, two & 0xFFFF) + (i32)(other & 0xFFFF) - 2048, top);
  Limits limits;
  limits.fast = top - low <= SPREAD;
  limits.sum = float_power(max(low + LSB + ROOM, SMALLEST));
  limits.factor = float_power(ROOM - FRACTION - 1);
  limits.lowest = as_bits(float_power(max(top - FRACTION + 23, SMALLEST))) * 2 - 1;
  return limits;
}

// Adds a block to the outputs of a lane in two 16 x 8 tiles side by side. Returns a bit for each of the two that is
// not exact so, the same in all lanes; its outputs stay as they were.
DEVICE u32 fast_block(float (&c)[4], float (&d)[4], const Words4* a, const Words4 (&b)[STEPS], const Limits& limits) {
  float sums[2][4] = {}, sizes[2][4];
  UNROLLED for (int step = 0; step < STEPS; ++step) {
    Words4 word = a[step * 32];
    u32 x[4] = {word.x, word.y, word.z, word.w};
    u32 even[2] = {b[step].x, b[step].y}, odd[2] = {b[step].z, b[step].w};
    hmma_bf16_16x8x16(sums[0], x, even);
    hmma_bf16_16x8x16(sums[1], x, odd);
    UNROLLED for (int i = 0; i < 8; ++i) {
      float size = fabsf(sums[i / 4][i % 4]);
      sizes[i / 4][i % 4] = step ? sizes[i / 4][i % 4] + size : size;
    }
  }
  bool fine[2];
  UNROLLED for (int tile = 0; tile < 2; ++tile) {
    float largest = 0.0f;
    u32 smallest = ~0u;
    UNROLLED for (int i = 0; i < 4; ++i) {
      float acc = tile ? d[i] : c[i];
      u32 bits = as_bits(acc);
      largest = fmaxf(largest, __fmaf_rn(fabsf(acc), limits.factor, sizes[tile][i]));
      smallest = min(smallest, bits + bits - 1);  // the sign leaves, and a zero becomes the largest
    }
    fine[tile] = largest < limits.sum && smallest >= limits.lowest;
  }
  if (__all_sync(~0u, fine[0] && fine[1])) {
    UNROLLED for (int i = 0; i < 4; ++i) {
      c[i] = __fadd_rz(c[i], sums[0][i]);
      d[i] = __fadd_rz(d[i], sums[1][i]);
    }
    return 0;
  }
  return 3;
}

// A stage's block for the 4 x 4 tiles of a warp.
DEVICE void add_block(float (&c)[16][4], const Stage& stage, i32 warp_row, i32 warp_column, i32 lane) {
  const Words4* a = stage.a + warp_row * 4 * STEPS * 32 + lane;
  const Words4* b = stage.b + warp_column * 2 * STEPS * 32 + lane;
  Limits limits = limits_of(stage.bounds_a + 2 * warp_row, stage.bounds_b + warp_column);
  u32 left = limits.fast ? 0 : 0xFFFF;
  if (limits.fast) {
    UNROLLED for (int j = 0; j < 2; ++j) {
      Words4 words[STEPS];
      UNROLLED for (int step = 0; step < STEPS; ++step) words[step] = b[(j * STEPS + step) * 32];
      UNROLLED for (int i = 0; i < 4; ++i) {
        int tile = 4 * i + 2 * j;
        left |= fast_block(c[tile], c[tile + 1], a + i * STEPS * 32, words, limits) << tile;
        __syncwarp();  // a barrier for the compiler, which would keep words in registers that it has not
      }
    }
  }
  if (!left) return;
  float sums_in_memory[16][4];  // in memory: registers have no run-time index
  UNROLLED for (int i = 0; i < 64; ++i) sums_in_memory[i / 4][i % 4] = c[i / 4][i % 4];
#pragma unroll 1
  do {
    i32 tile = __ffs(left) - 1, i = tile / 4, j = tile % 4;
    left &= left - 1;
    const u32* rows = stage.exponents_a + warp_row * 64 + i * 16 + lane / 4;
    const u32* columns = stage.exponents_b + warp_column * 32 + j * 8 + lane % 4 * 2;
    exact_block(sums_in_memory[tile], a + i * STEPS * 32, b + j / 2 * STEPS * 32, j % 2, rows, columns);
  } while (left);
  UNROLLED for (int i = 0; i < 64; ++i) c[i / 4][i % 4] = sums_in_memory[i / 4][i % 4];
}

KERNEL __launch_bounds__(THREADS, RESIDENT)
block_scaled(const Words4* values_a, const u32* exponents_a, const u32* bounds_a, const Words4* values_b,
       const u32* exponents_b, const u32* bounds_b, const u32* flags, const u8* ends, const i32* part_blocks,
       i32 blocks, float* sums, u8* marks, i32 rows, i32 columns) {
  DYNAMIC_SHARED(memory);
  Stage* stages = (Stage*)memory;
  Operand a = {values_a, exponents_a, bounds_a}, b = {values_b, exponents_b, bounds_b};
  const Panels panels = panels_of(rows, columns);
  if (panels.is_flagged(flags)) {
    if (threadIdx.x == 0) marks[panels.tile()] = 1;
    return;
  }
  i32 begin = part_blocks[2 * blockIdx.z], end = part_blocks[2 * blockIdx.z + 1];
  i64 place_a = (i64)panels.a * blocks, place_b = (i64)panels.b * blocks;
  i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2, warp_column = warp / 2;
  float c[16][4] = {};
  bool first = true;
  auto end_chain = [&]() {
    auto result = [&](int i, int j) { return c[i / 2 * 4 + j / 2][i % 2 * 2 + j % 2]; };
    write_floats(sums, rows, columns, panels, first, result);
    first = false;
    UNROLLED for (int i = 0; i < 64; ++i) c[i / 4][i % 4] = 0.0f;
  };
  auto bring = [&](i32 slot, i32 block) { fetch(stages + slot, a, b, place_a + block, place_b + block); };
  add_blocks<STAGES, PROMOTE>(begin, end, ends, bring, end_chain,
                              [&](i32 slot) { add_block(c, stages[slot], warp_row, warp_column, lane); });
}

#endif
