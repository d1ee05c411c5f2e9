// SPDX-License-Identifier: Apache-2.0
// Native products (nothing is emulated) of bfloat16 operands whose groups along the sum have scales, on Hopper's wgmma:
// c[m, n] = sum over groups g of fma(a_scale[m, g] P_g, b_scale[n, g], ...), or fma(P_g, a_scale[m, g] b_scale[n, g],
// ...), P_g being the tensor core's float32 sum of a group's products, each step one rounding to nearest.
//
// A block of threads takes tiles of 128 x 128 one after another. A stage holds 64 places of the sum, and the last of
// a group its scales. Four warps copy stages, as many ahead as there is room for, across the ends of tiles. Two groups
// of four warps multiply, each 64 rows, at their own pace: while one scales the sums of a group, the tensor core works
// for the other.
//
// Macros: TRANSPOSED_A, TRANSPOSED_B (1: the operand lies with its rows next to each other, not the places of the sum),
// GROUP (places of the sum that share a scale, 64 or 128), SHARED_B (1: so do all columns of a tile), OUTPUT (float32:
// 0, bfloat16: 1), STAGES.
#include "common.cuh"
#include "warpgroup.cuh"

#define THREADS 384
#define MULTIPLYING 256
#define COPYING 128
#define ROWS 128
#define COLUMNS 128
#define DEPTH 64
#define STEPS (GROUP / DEPTH)
#define SUMS (COLUMNS / 2)

struct alignas(1024) Stage {
  u8 a[ROWS * DEPTH * 2], b[COLUMNS * DEPTH * 2];
  float scales[ROWS + COLUMNS];
};

struct Memory {
  Stage stages[STAGES];
  u64 filled[STAGES], freed[STAGES];
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
  i32 parts, part_groups;  // the sum is split into parts, of so many groups each
};

// What a block of threads works at: a part of a tile.
struct Place {
  i32 row, column, part, stages;

  DEVICE void start(i32 unit, const Factor& a, const Factor& b, const Task& t) {
    i32 down = (a.rows + ROWS - 1) / ROWS, across = (b.rows + COLUMNS - 1) / COLUMNS, tile = unit % (down * across);
    // rows of tiles in groups of 8, so that blocks that run together share operands in the second-level cache
    i32 group = tile / (8 * across), high = min(8, down - 8 * group), rest = tile % (8 * across);
    row = (8 * group + rest % high) * ROWS, column = rest / high * COLUMNS, part = unit / (down * across);
    stages = t.part_groups * STEPS;
  }
};

DEVICE i32 units_of(const Factor& a, const Factor& b, const Task& t) {
  return (a.rows + ROWS - 1) / ROWS * ((b.rows + COLUMNS - 1) / COLUMNS) * t.parts;
}

// Copies Rows rows by 64 places of the sum as warpgroup.cuh has them; what an operand does not have is zero.
template <bool Transposed, int Rows>
DEVICE void copy_panel(u8* to, const Factor& x, i32 row, i32 k, i32 depth) {
  constexpr i32 LINES = COPYING / 8, TURNS = (Transposed ? DEPTH : Rows) / LINES;
  const i32 word = threadIdx.x % 8, line = threadIdx.x % COPYING / 8;
  const i32 lines = Transposed ? depth - k : x.rows - row, words = (Transposed ? x.rows - row : depth - k) - word * 8;
  const u16* from = x.elements + (i64)((Transposed ? k : row) + line) * x.stride + (Transposed ? row : k) + word * 8;
  to += line * 128 + ((word ^ line) % 8) * 16;
  UNROLLED for (i32 i = 0; i < TURNS; ++i) {
    UNROLLED for (i32 band = 0; band < (Transposed ? Rows / 64 : 1); ++band)
      copy16_or_zeros(to + band * BAND_BYTES + i * LINES * 128, from + band * 64,
                      band * 64 < words && line + i * LINES < lines);
    from += LINES * x.stride;
  }
}

DEVICE void copy_scales(float* to, const Factor& a, const Factor& b, const Place& at, i32 group, i32 depth) {
  UNROLLED for (i32 i = threadIdx.x % COPYING; i < ROWS + COLUMNS; i += COPYING) {
    const bool second = i >= ROWS;
    const Factor& x = second ? b : a;
    const i32 row = second ? at.column + i - ROWS : at.row + i;
    const bool there = row < x.rows && group * GROUP < depth;
    copy4_or_zeros(to + i, x.scales + (row >> x.height) * x.row_step + group * x.group_step, there);
  }
}

DEVICE void copy_stages(Memory& m, const Factor& a, const Factor& b, const Task& t) {
  const i32 units = units_of(a, b, t);
  i32 slot = 0;
  u32 phase = 1;
  for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
    Place at;
    at.start(unit, a, b, t);
    for (i32 i = 0; i < at.stages; ++i) {
      const i32 stage = at.part * at.stages + i;
      Stage& to = m.stages[slot];
      wait_phase(&m.freed[slot], phase);
      copy_panel<TRANSPOSED_A, ROWS>(to.a, a, at.row, stage * DEPTH, t.depth);
      copy_panel<TRANSPOSED_B, COLUMNS>(to.b, b, at.column, stage * DEPTH, t.depth);
      if (i % STEPS == STEPS - 1) copy_scales(to.scales, a, b, at, stage / STEPS, t.depth);
      arrive_behind_copies(&m.filled[slot]);
      if (++slot == STAGES) slot = 0, phase ^= 1;
    }
  }
}

DEVICE bool is_moderate(float scale) { return scale > 0x1p-100f && scale < 0x1p100f; }

// Adds the sums of a group, scaled. Where all columns of a tile share a scale, its product with a row's is taken first,
// unless that may leave the range of float32.
DEVICE void add_group(float (&total)[SUMS], float (&sums)[SUMS], const float* scales) {
  const i32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const float upper = scales[row], lower = scales[row + 8];
  const float* columns = scales + ROWS + threadIdx.x % 4 * 2;
  pin(sums);
#if SHARED_B
  const float above = __fmul_rn(upper, scales[ROWS]), below = __fmul_rn(lower, scales[ROWS]);
  if (is_moderate(above) && is_moderate(below)) {
    UNROLLED for (i32 i = 0; i < SUMS; ++i) total[i] = __fmaf_rn(sums[i], i / 2 % 2 ? below : above, total[i]);
    return;
  }
#endif
  UNROLLED for (i32 j = 0; j < COLUMNS / 8; ++j) {
    const float left = columns[8 * j], right = columns[8 * j + 1];
    total[4 * j] = __fmaf_rn(__fmul_rn(sums[4 * j], upper), left, total[4 * j]);
    total[4 * j + 1] = __fmaf_rn(__fmul_rn(sums[4 * j + 1], upper), right, total[4 * j + 1]);
    total[4 * j + 2] = __fmaf_rn(__fmul_rn(sums[4 * j + 2], lower), left, total[4 * j + 2]);
    total[4 * j + 3] = __fmaf_rn(__fmul_rn(sums[4 * j + 3], lower), right, total[4 * j + 3]);
  }
}

#if OUTPUT == 1
typedef u16 Output;
DEVICE void store_pair(Output* to, float left, float right) { *(u32*)to = rounded_pair<BFLOAT16>(left, right); }

// Word i of lane l of four becomes word l of lane i.
DEVICE void exchange(u32 (&words)[4]) {
  UNROLLED for (i32 flip = 1; flip <= 2; flip *= 2) {
    const bool second = threadIdx.x & flip;
    UNROLLED for (i32 k = 0; k < 2; ++k) {
      const i32 low = flip == 1 ? 2 * k : k, high = low + flip;
      const u32 got = __shfl_xor_sync(~0u, second ? words[low] : words[high], flip);
      words[low] = second ? got : words[low], words[high] = second ? words[high] : got;
    }
  }
}

// Stores a whole tile, 16 bytes a lane and 64 of a row: four lanes exchange what they hold of 32 columns.
DEVICE void store_whole_tile(void* out, const float (&total)[SUMS], const float* bias, const Place& at, const Factor& a,
                             const Factor& b) {
  const i32 row = at.row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, own = threadIdx.x % 4;
  Output* to = (Output*)out + ((i64)at.part * a.rows + row) * b.rows + at.column + own * 8;
  UNROLLED for (i32 j = 0; j < COLUMNS / 8; j += 4) {
    u32 upper[4], lower[4];
    UNROLLED for (i32 k = 0; k < 4; ++k) {
      float t[4];
      UNROLLED for (i32 i = 0; i < 4; ++i) t[i] = total[4 * (j + k) + i];
      if (bias != nullptr) {
        const Words2 added = *(const Words2*)(bias + at.column + own * 2 + 8 * (j + k));
        UNROLLED for (i32 i = 0; i < 4; ++i) t[i] = __fadd_rn(t[i], as_float(i % 2 ? added.y : added.x));
      }
      upper[k] = rounded_pair<BFLOAT16>(t[0], t[1]), lower[k] = rounded_pair<BFLOAT16>(t[2], t[3]);
    }
    exchange(upper), exchange(lower);
    *(Words4*)(to + 8 * j) = {upper[0], upper[1], upper[2], upper[3]};
    *(Words4*)(to + 8 * j + 8 * (i64)b.rows) = {lower[0], lower[1], lower[2], lower[3]};
  }
}
#else
typedef float Output;
DEVICE void store_pair(Output* to, float left, float right) {
  *(Words2*)to = {as_bits(left), as_bits(right)};
}
#endif

template <bool Whole>
DEVICE void store_tile(void* out, const float (&total)[SUMS], const float* bias, const Place& at, const Factor& a,
                       const Factor& b) {
  const i32 row = at.row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = at.column + threadIdx.x % 4 * 2;
  Output* upper = (Output*)out + ((i64)at.part * a.rows + row) * b.rows + column;
  Output* lower = upper + 8 * (i64)b.rows;
  UNROLLED for (i32 j = 0; j < COLUMNS / 8; ++j) {
    if (!Whole && column + 8 * j >= b.rows) continue;
    float t[4] = {total[4 * j], total[4 * j + 1], total[4 * j + 2], total[4 * j + 3]};
    if (bias != nullptr) {
      UNROLLED for (i32 i = 0; i < 4; ++i) t[i] = __fadd_rn(t[i], bias[column + 8 * j + i % 2]);
    }
    if (Whole || row < a.rows) store_pair(upper + 8 * j, t[0], t[1]);
    if (Whole || row + 8 < a.rows) store_pair(lower + 8 * j, t[2], t[3]);
  }
}

DEVICE void free_stage(Memory& m, i32 slot) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(&m.freed[slot]);
}

DEVICE void multiply_stages(Memory& m, const Factor& a, const Factor& b, const Task& t, const float* bias, void* out) {
  const i32 units = units_of(a, b, t);
  i32 slot = 0;
  u32 phase = 0;
  float sums[SUMS], total[SUMS];
  UNROLLED for (i32 i = 0; i < SUMS; ++i) sums[i] = 0.0f;
  for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
    Place at;
    at.start(unit, a, b, t);
    UNROLLED for (i32 i = 0; i < SUMS; ++i) total[i] = 0.0f;
    for (i32 group = 0; group < t.part_groups; ++group) {
      i32 last = 0;
      UNROLLED for (i32 step = 0; step < STEPS; ++step) {
        wait_phase(&m.filled[slot], phase);
        see_shared();
        const Stage& stage = m.stages[slot];
        const u32 panel_a = shared_place(stage.a), panel_b = shared_place(stage.b);
        begin_products();
        UNROLLED for (i32 i = 0; i < DEPTH / 16; ++i)
          add_product<TRANSPOSED_A, TRANSPOSED_B>(sums, matrix<TRANSPOSED_A>(panel_a, threadIdx.x / 128, i),
                                          matrix<TRANSPOSED_B>(panel_b, 0, i), step + i > 0);
        commit_products();
        if (step > 0) {
          wait_products<1>();
          free_stage(m, last);
        }
        last = slot;
        if (++slot == STAGES) slot = 0, phase ^= 1;
      }
      wait_products<0>();
      add_group(total, sums, m.stages[last].scales);
      free_stage(m, last);
    }
    const bool whole = at.row + ROWS <= a.rows && at.column + COLUMNS <= b.rows;
#if OUTPUT == 1
    if (whole && b.rows % 8 == 0) store_whole_tile(out, total, bias, at, a, b);
#else
    if (whole) store_tile<true>(out, total, bias, at, a, b);
#endif
    else store_tile<false>(out, total, bias, at, a, b);
  }
}

KERNEL __launch_bounds__(THREADS, 1)
multiply_groups(const __grid_constant__ Factor a, const __grid_constant__ Factor b, const __grid_constant__ Task t,
                const float* bias, void* out) {
  DYNAMIC_SHARED(memory);
  Memory& m = *(Memory*)(memory + (0u - shared_place(memory)) % 1024);
  if (threadIdx.x < STAGES) {
    start_barrier(&m.filled[threadIdx.x], COPYING);
    start_barrier(&m.freed[threadIdx.x], MULTIPLYING / 32);
  }
  __syncthreads();
  if (threadIdx.x >= MULTIPLYING) {
    leave_registers<40>();
    copy_stages(m, a, b, t);
  } else {
    take_registers<232>();
    multiply_stages(m, a, b, t, bias, out);
  }
}

// Adds the parts of sums, each of `fours` times four, in order, and then the bias of a column.
KERNEL __launch_bounds__(256) add_parts(const Words4* sums, const float* bias, void* out, i32 parts, i32 columns,
                                        i64 fours) {
  const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= fours) return;
  float total[4] = {};
  for (i32 part = 0; part < parts; ++part) {
    const Words4 words = sums[part * fours + at];
    const u32 part_words[4] = {words.x, words.y, words.z, words.w};
    UNROLLED for (i32 i = 0; i < 4; ++i) total[i] = __fadd_rn(total[i], as_float(part_words[i]));
  }
  if (bias != nullptr) {
    bias += at * 4 % columns;
    UNROLLED for (i32 i = 0; i < 4; ++i) total[i] = __fadd_rn(total[i], bias[i]);
  }
  store_pair((Output*)out + at * 4, total[0], total[1]);
  store_pair((Output*)out + at * 4 + 2, total[2], total[3]);
}
