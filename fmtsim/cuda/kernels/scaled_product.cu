// Products of operands whose groups along the sum have scales: c[m, n] = sum over groups g of
// fma(a_scale[m, g] P_g, b_scale[n, g], ...), or fma(P_g, a_scale[m, g] b_scale[n, g], ...), P_g being the tensor core's
// float32 sum of a group's products of bfloat16 elements, each step one rounding to nearest.
//
// A block of threads takes tiles of 128 x 128 one after another, each of its two groups of four warps 64 rows. A stage
// holds 64 places of the sum; copies run STAGES - 2 stages ahead, across the ends of tiles. Sums of groups are written
// to two sets of registers by turns: one is scaled while products go to the other. At stage i the products of stage
// i - 2 are done for all threads behind the barrier, and its place is filled anew. The scales of a group come with its
// last stage, which is kept until the stage but one behind it.
//
// Macros: TURNED_A, TURNED_B (1: the operand lies with its rows next to each other, not the places of the sum), GROUP
// (places of the sum that share a scale, a multiple of 64), SHARED_B (1: so do all columns of a tile), OUTPUT (float32: 0, bfloat16: 1), STAGES, PAIRS (of groups in
// a turn of the loop).
#include "common.cuh"
#include "warpgroup.cuh"

#define THREADS 256
#define TILE 128
#define DEPTH 64
#define STEPS (GROUP / DEPTH)

struct Stage {
  u8 a[PANEL_BYTES], b[PANEL_BYTES];
  float scales[2 * TILE];
};

// An operand: elements, `stride` apart from line to line, and the scale of every block of 2^height rows and a group.
struct alignas(16) Factor {
  const u16* elements;
  i64 stride;
  const float* scales;
  i64 row_step, group_step;
  i32 height, rows;
};

struct alignas(16) Task {
  i32 depth;
  i32 parts, part_groups;  // the sum is cut into parts, of so many groups each: a multiple of 2 PAIRS
};

// What a block of threads works at: a part of a tile, and a stage of it.
struct Place {
  i32 unit, row, column, part, stage, stages;

  DEVICE void start(i32 next, const Factor& a, const Factor& b, const Task& t) {
    unit = next;
    i32 down = (a.rows + TILE - 1) / TILE, across = (b.rows + TILE - 1) / TILE, tile = unit % (down * across);
    // rows of tiles in groups of 8, so that blocks that run together share operands in the second-level cache
    i32 group = tile / (8 * across), high = min(8, down - 8 * group), rest = tile % (8 * across);
    row = (8 * group + rest % high) * TILE, column = rest / high * TILE, part = unit / (down * across), stage = 0;
    stages = t.part_groups * STEPS;
  }
  DEVICE i32 units(const Factor& a, const Factor& b, const Task& t) const {
    return (a.rows + TILE - 1) / TILE * ((b.rows + TILE - 1) / TILE) * t.parts;
  }
};

// Copies 128 rows by 64 places of the sum as warpgroup.cuh has them; what an operand does not have is zero.
template <bool Turned>
DEVICE void copy_panel(u8* to, const Factor& x, i32 row, i32 k, i32 depth) {
  constexpr i32 WORDS = Turned ? 16 : 8, LINES = THREADS / WORDS;  // 16-byte words of a line, lines of a turn
  const i32 word = threadIdx.x % WORDS, line = threadIdx.x / WORDS;
  const i32 line_end = Turned ? depth - k : x.rows - row, word_end = Turned ? x.rows - row : depth - k;
  const u16* from = x.elements + (i64)((Turned ? k : row) + line) * x.stride + (Turned ? row : k) + word * 8;
  to += word / 8 * (PANEL_BYTES / 2) + line * 128 + ((word ^ line) % 8) * 16;
  const bool there = word * 8 < word_end;
#pragma unroll
  for (i32 i = 0; i < 4; ++i)
    copy16_or_zeros(to + i * LINES * 128, from + i * LINES * x.stride, there && line + i * LINES < line_end);
}

DEVICE void copy_scales(float* to, const Factor& a, const Factor& b, const Place& at, i32 group, i32 depth) {
  const bool second = threadIdx.x >= TILE;
  const Factor& x = second ? b : a;
  const i32 row = (second ? at.column : at.row) + threadIdx.x % TILE;
  const bool there = row < x.rows && group * GROUP < depth;
  copy4_or_zeros(to + threadIdx.x, x.scales + (row >> x.height) * x.row_step + group * x.group_step, there);
}

// Copies the stage of a place, if there is one, and moves the place on.
DEVICE void copy_stage(Stage& to, Place& at, i32 units, const Factor& a, const Factor& b, const Task& t) {
  if (at.unit < units) {
    const i32 stage = at.part * t.part_groups * STEPS + at.stage;
    copy_panel<TURNED_A>(to.a, a, at.row, stage * DEPTH, t.depth);
    copy_panel<TURNED_B>(to.b, b, at.column, stage * DEPTH, t.depth);
    if (at.stage % STEPS == STEPS - 1) copy_scales(to.scales, a, b, at, stage / STEPS, t.depth);
    if (++at.stage >= at.stages) at.start(at.unit + gridDim.x, a, b, t);
  }
  commit_copies();
}

DEVICE bool is_moderate(float scale) { return scale > 0x1p-100f && scale < 0x1p100f; }

// Adds the sums of a group, scaled. Where all columns of a tile share a scale, its product with a row's is taken first,
// unless that may leave the range of float32.
DEVICE void add_group(float (&total)[64], float (&sums)[64], const float* scales) {
  const i32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const float upper = scales[row], lower = scales[row + 8];
  const float* columns = scales + TILE + threadIdx.x % 4 * 2;
  pin(sums);
#if SHARED_B
  const float above = __fmul_rn(upper, scales[TILE]), below = __fmul_rn(lower, scales[TILE]);
  if (is_moderate(above) && is_moderate(below)) {
#pragma unroll
    for (i32 i = 0; i < 64; ++i) total[i] = __fmaf_rn(sums[i], i / 2 % 2 ? below : above, total[i]);
    return;
  }
#endif
#pragma unroll
  for (i32 j = 0; j < 16; ++j) {
    const float left = columns[8 * j], right = columns[8 * j + 1];
    total[4 * j] = __fmaf_rn(__fmul_rn(sums[4 * j], upper), left, total[4 * j]);
    total[4 * j + 1] = __fmaf_rn(__fmul_rn(sums[4 * j + 1], upper), right, total[4 * j + 1]);
    total[4 * j + 2] = __fmaf_rn(__fmul_rn(sums[4 * j + 2], lower), left, total[4 * j + 2]);
    total[4 * j + 3] = __fmaf_rn(__fmul_rn(sums[4 * j + 3], lower), right, total[4 * j + 3]);
  }
}

DEVICE u32 rounded(float value) {
  const u32 code = __float_as_uint(value);
  return value == value ? (code + 0x7FFF + (code >> 16 & 1)) >> 16 : 0x7FC0;
}

DEVICE void store_pair(void* out, i64 index, float left, float right) {
#if OUTPUT == 1
  ((u32*)out)[index / 2] = rounded(left) | rounded(right) << 16;
#else
  ((Words2*)out)[index / 2] = {__float_as_uint(left), __float_as_uint(right)};
#endif
}

DEVICE void store_tile(void* out, const float (&total)[64], const Place& at, const Factor& a, const Factor& b) {
  const i32 row = at.row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = at.column + threadIdx.x % 4 * 2;
  const i64 index = ((i64)at.part * a.rows + row) * b.rows + column;
#pragma unroll
  for (i32 j = 0; j < 16; ++j) {
    if (column + 8 * j >= b.rows) continue;
    if (row < a.rows) store_pair(out, index + 8 * j, total[4 * j], total[4 * j + 1]);
    if (row + 8 < a.rows) store_pair(out, index + 8 * b.rows + 8 * j, total[4 * j + 2], total[4 * j + 3]);
  }
}

struct Ring {
  Stage* stages;
  i32 slot;  // of the stage that is multiplied next

  DEVICE i32 behind(i32 distance) const { return slot < distance ? slot - distance + STAGES : slot - distance; }
};

// Multiplies a group into `sums`, and meanwhile adds the group before.
DEVICE void multiply_group(float (&sums)[64], float (&before)[64], float (&total)[64], Ring& ring, Place& ahead,
                           i32 units, const Factor& a, const Factor& b, const Task& t) {
#pragma unroll
  for (i32 step = 0; step < STEPS; ++step) {
    wait_copies<STAGES - 3>();
    publish_shared();
    __syncthreads();
    const Stage& stage = ring.stages[ring.slot];
    const u32 panel_a = shared_place(stage.a), panel_b = shared_place(stage.b);
    begin_products();
#pragma unroll
    for (i32 i = 0; i < DEPTH / 16; ++i)
      product_64x128x16<TURNED_A, TURNED_B>(sums, matrix<TURNED_A>(panel_a, threadIdx.x / 128, i),
                                            matrix<TURNED_B>(panel_b, 0, i), step + i > 0);
    commit_products();
    copy_stage(ring.stages[ring.behind(2)], ahead, units, a, b, t);
    wait_products<1>();
    if (step == 0) add_group(total, before, ring.stages[ring.behind(1)].scales);
    ring.slot = ring.slot + 1 == STAGES ? 0 : ring.slot + 1;
  }
}

KERNEL __launch_bounds__(THREADS, 1)
multiply_groups(const __grid_constant__ Factor a, const __grid_constant__ Factor b, const __grid_constant__ Task t,
                void* out) {
  DYNAMIC_SHARED(memory);
  Ring ring = {(Stage*)(memory + (0u - shared_place(memory)) % 1024), 0};
  Place at, ahead;
  const i32 units = at.units(a, b, t);
  ahead.start(blockIdx.x, a, b, t);
  for (i32 i = 0; i < STAGES - 2; ++i) copy_stage(ring.stages[i], ahead, units, a, b, t);
  float even[64], odd[64], total[64];
#pragma unroll
  for (i32 i = 0; i < 64; ++i) even[i] = odd[i] = total[i] = 0.0f;
  Place last = {-1};
  at.start(blockIdx.x, a, b, t);
  while (at.unit < units) {
#pragma unroll
    for (i32 pair = 0; pair < PAIRS; ++pair) {
      multiply_group(even, odd, total, ring, ahead, units, a, b, t);
      if (pair == 0 && at.stage == 0) {  // what was added then was the last group of the tile before
        if (last.unit >= 0) store_tile(out, total, last, a, b);
#pragma unroll
        for (i32 i = 0; i < 64; ++i) total[i] = 0.0f;
        last = at;
      }
      multiply_group(odd, even, total, ring, ahead, units, a, b, t);
    }
    wait_products<0>();  // the assembler serialises all products where some are under way at the end of a loop's turn
    at.stage += 2 * PAIRS * STEPS;
    if (at.stage >= at.stages) at.start(at.unit + gridDim.x, a, b, t);
  }
  add_group(total, odd, ring.stages[ring.behind(1)].scales);
  store_tile(out, total, last, a, b);
}

// Adds the parts of sums, each of `fours` times four, in order.
KERNEL __launch_bounds__(256) add_parts(const Words4* sums, void* out, i32 parts, i64 fours) {
  const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= fours) return;
  float total[4] = {};
  for (i32 part = 0; part < parts; ++part) {
    const Words4 words = sums[part * fours + at];
    const u32 given[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) total[i] = __fadd_rn(total[i], __uint_as_float(given[i]));
  }
  store_pair(out, at * 4, total[0], total[1]);
  store_pair(out, at * 4 + 2, total[2], total[3]);
}
