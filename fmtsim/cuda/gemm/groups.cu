// Products of units that add groups of products exactly before the alignment (docs/matmul.md, section 2).
//
// The operands come from groups_prepare.cu as values times scales, which bfloat16 holds. So the bf16 tensor core gives
// the exact sum of a group, and of a whole block wherever its bits lie close enough: the terms of a block are multiples
// of u = 2^(low + LSB), low being the smallest sum of scale exponents, and every sum below 2^24 u is exact. Then the
// block's result is one addition toward zero, c + sum, if the alignment to E = max(top, e(c)) cuts nothing either:
// e(c) <= low + LSB + FRACTION, and c is zero or has its last bit at 2^(top - FRACTION) or above. These conditions are
// looked at for every output and block. Where one fails, two tiles of 16 x 8 outputs are done again, group by group, by
// the perturbed floor in float64: with a small eps > 0, trunc(t) = floor(t (1 + eps)) + (t < 0), and an fma toward zero
// onto a large constant takes the floor.
//
// Macros: STEPS, GROUPS, GROUP (groups.cuh), FRACTION, LSB, SPREAD (the largest top - low of the fast way), ROOM (its
// sums stay below 2^ROOM u), EPS (eps is 2^-EPS), PROMOTE, STAGES, RESIDENT (blocks of threads a multiprocessor).
#include "groups.cuh"

#define THREADS 256

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
#pragma unroll
  for (int i = 0; i < PANEL_WORDS / THREADS; ++i) {
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
  float sums[GROUPS][4];
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[group][i] = 0.0f;
#pragma unroll
    for (int step = group * (GROUP / 16); step < (group + 1) * (GROUP / 16) && step < STEPS; ++step) {
      Words4 left = a[step * 32], right = b[step * 32];
      u32 x[4] = {left.x, left.y, left.z, left.w};
      u32 y[2] = {odd ? right.z : right.x, odd ? right.w : right.y};
      hmma_bf16_16x8x16(sums[group], x, y);
    }
  }
  const double factor = 1.0 + __hiloint2double((1023 - EPS) << 20, 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 row = rows[i / 2 * 8], column = columns[i % 2], magnitude = __float_as_uint(c[i]) & 0x7FFFFFFFu;
    i32 exponent = magnitude ? max((i32)(magnitude >> 23), 1) - 127 : 4 * EMPTY;
    i32 negatives = c[i] < 0;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      exponent = max(exponent, byte_of(row, group) + byte_of(column, group));
      negatives += sums[group][i] < 0;
    }
    i32 high = (exponent + 52 - FRACTION + 1023) << 20 | 1 << 19;
    double sum = __fma_rz((double)c[i], factor, __hiloint2double(high, negatives));
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) sum = __fma_rz((double)sums[group][i], factor, sum);
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

// What a block of 64 x 32 outputs may hold so that nothing is cut, from the bounds of their scales.
DEVICE Limits limits_of(const u32* bounds_a, const u32* bounds_b) {
  u32 one = bounds_a[0], two = bounds_a[1], other = bounds_b[0];
  i32 top = (i32)max(one >> 16, two >> 16) + (i32)(other >> 16) - 2048;
  i32 low = min((i32)min(one & 0xFFFF, two & 0xFFFF) + (i32)(other & 0xFFFF) - 2048, top);
  Limits limits;
  limits.fast = top - low <= SPREAD;
  limits.sum = float_power(min(max(low + LSB + ROOM, -126), 127));
  limits.factor = float_power(ROOM - FRACTION - 1);
  limits.lowest = __float_as_uint(float_power(min(max(top - FRACTION + 23, -126), 127))) * 2 - 1;
  return limits;
}

// Adds a block to the outputs of a lane in two 16 x 8 tiles side by side. Returns a bit for each of the two that is
// not exact so, the same in all lanes; its outputs stay as they were.
DEVICE u32 fast_block(float (&c)[4], float (&d)[4], const Words4* a, const Words4 (&b)[STEPS], const Limits& limits) {
  float sums[2][4] = {}, sizes[2][4];
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Words4 word = a[step * 32];
    u32 x[4] = {word.x, word.y, word.z, word.w};
    u32 even[2] = {b[step].x, b[step].y}, odd[2] = {b[step].z, b[step].w};
    hmma_bf16_16x8x16(sums[0], x, even);
    hmma_bf16_16x8x16(sums[1], x, odd);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float size = fabsf(sums[i / 4][i % 4]);
      sizes[i / 4][i % 4] = step ? sizes[i / 4][i % 4] + size : size;
    }
  }
  bool fine[2];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    float largest = 0.0f;
    u32 smallest = ~0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float own = tile ? d[i] : c[i];
      u32 bits = __float_as_uint(own);
      largest = fmaxf(largest, __fmaf_rn(fabsf(own), limits.factor, sizes[tile][i]));
      smallest = min(smallest, bits + bits - 1);  // the sign leaves, and a zero becomes the largest
    }
    fine[tile] = largest < limits.sum && smallest >= limits.lowest;
  }
  if (__all_sync(~0u, fine[0] && fine[1])) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
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
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Words4 words[STEPS];
#pragma unroll
      for (int step = 0; step < STEPS; ++step) words[step] = b[(j * STEPS + step) * 32];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int tile = 4 * i + 2 * j;
        left |= fast_block(c[tile], c[tile + 1], a + i * STEPS * 32, words, limits) << tile;
        __syncwarp();  // a barrier for the compiler, which would keep words in registers that it has not
      }
    }
  }
  if (!left) return;
  float kept[16][4];  // in memory: registers have no run-time index
#pragma unroll
  for (int i = 0; i < 64; ++i) kept[i / 4][i % 4] = c[i / 4][i % 4];
#pragma unroll 1
  do {
    i32 tile = __ffs(left) - 1, i = tile / 4, j = tile % 4;
    left &= left - 1;
    const u32* rows = stage.exponents_a + warp_row * 64 + i * 16 + lane / 4;
    const u32* columns = stage.exponents_b + warp_column * 32 + j * 8 + lane % 4 * 2;
    exact_block(kept[tile], a + i * STEPS * 32, b + j / 2 * STEPS * 32, j % 2, rows, columns);
  } while (left);
#pragma unroll
  for (int i = 0; i < 64; ++i) c[i / 4][i % 4] = kept[i / 4][i % 4];
}

struct Output {
  float* sums;  // [rows, columns]
  i32 rows, columns, row, column;  // row and column: of the lane's first output
};

// Writes a chain's results, or adds them to those of earlier chains, and starts anew at zero.
DEVICE void end_chain(float (&c)[16][4], const Output& to, bool first) {
#pragma unroll
  for (int t = 0; t < 16; ++t)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      i32 row = to.row + t / 4 * 16 + r / 2 * 8, column = to.column + t % 4 * 8 + r % 2;
      if (row < to.rows && column < to.columns) {
        float* place = to.sums + (i64)row * to.columns + column;
        *place = first ? c[t][r] : *place + c[t][r];
      }
      c[t][r] = 0.0f;
    }
}

KERNEL __launch_bounds__(THREADS, RESIDENT)
groups(const Words4* values_a, const u32* exponents_a, const u32* bounds_a, const Words4* values_b,
       const u32* exponents_b, const u32* bounds_b, const u32* flags, const u8* ends, const i32* part_blocks,
       i32 blocks, float* sums, u8* marks, i32 rows, i32 columns) {
  DYNAMIC_SHARED(memory);
  Stage* stages = (Stage*)memory;
  Operand a = {values_a, exponents_a, bounds_a}, b = {values_b, exponents_b, bounds_b};
  i32 panels_a = (rows + PANEL - 1) / PANEL, panels_b = (columns + PANEL - 1) / PANEL;
  // panels of a in groups of 8, so that blocks that run together share operands in the second-level cache
  i32 group = blockIdx.x / (8 * panels_b), height = min(8, panels_a - 8 * group), rest = blockIdx.x % (8 * panels_b);
  i32 panel_a = 8 * group + rest % height, panel_b = rest / height;
  if (flags[panel_a] | flags[panels_a + panel_b]) {
    if (threadIdx.x == 0) marks[(i64)panel_a * panels_b + panel_b] = 1;
    return;
  }
  i32 begin = part_blocks[2 * blockIdx.z], end = part_blocks[2 * blockIdx.z + 1];
  i64 place_a = (i64)panel_a * blocks, place_b = (i64)panel_b * blocks;
  i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2, warp_column = warp / 2;
  Output to = {sums + (i64)blockIdx.z * rows * columns, rows, columns,
               panel_a * PANEL + warp_row * 64 + lane / 4, panel_b * PANEL + warp_column * 32 + lane % 4 * 2};
  float c[16][4] = {};
  bool first = true;

#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (begin + i < end) fetch(stages + i, a, b, place_a + begin + i, place_b + begin + i);
    commit_copies();
  }
  i32 slot = 0;
  for (i32 block = begin; block < end; ++block) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    i32 next = block + STAGES - 1;
    if (next < end) fetch(stages + (slot == 0 ? STAGES - 1 : slot - 1), a, b, place_a + next, place_b + next);
    commit_copies();
    add_block(c, stages[slot], warp_row, warp_column, lane);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (PROMOTE && ends[block]) {
      end_chain(c, to, first);
      first = false;
    }
  }
  if (!PROMOTE) end_chain(c, to, true);
}
