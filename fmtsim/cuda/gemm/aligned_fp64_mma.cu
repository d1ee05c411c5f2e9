// SPDX-License-Identifier: Apache-2.0
// FP8, FP16, BF16 and TF32 products of Hopper, Ada, Ampere and Blackwell units, which truncate aligned terms (or round
// them down): the fp64 tensor core of the GPU truncates and adds the terms of a block, through a constant whose last
// place is the alignment grid. Tiles whose numbers do not fit (NaN, Inf, sums that could be subnormal) are marked for
// the general path.
//
// A unit truncates every product p to a multiple of the grid u = 2^(E - F) and adds exactly. A running sum that carries
// M, between 2^52 u and 2^53 u, has the grid u itself, so a fused multiply-add toward zero adds floor(p / u). Toward
// zero is
//     trunc(p / u) = floor(p (1 + eps) / u) + [p < 0]    for 0 < eps < 2^-W and 2^-(F + 2), W the bits of p
// for p > 0 the enlargement never reaches the next multiple; for p < 0 it lies strictly below trunc(p). A block's
// steps:
//     E:      a sum of powers 2^(spacing e) on the bf16 tensor core has the largest e in its exponent; its upper bits
//             times 1 / spacing (a shift, for a spacing of 8) are the exponent field of M, whose fraction may be
//             anything that leaves room for the sum; the addend's exponent may be larger
//     start:  M + trunc(c), one fused multiply-add, and the number of negative terms (an xor and a population count of
//             signs), added to the low word
//     chain:  DMMA, rounding toward zero; the first operand carries 1 + eps
//     finish: take M away, truncate to the accumulator's bits
// aligned_fp64_mma_chains.cuh has start and finish, for short sums without arithmetic in float64. With WIDE every row
// is divided by the power of two of its base, so that exponents are at most 0; powers too small for bf16 are zero.
//
// Macros: SPAN, BLOCK (places of a block in use), COLUMNS warps along the columns, HALVES (1, 2) of 16 x 32 outputs a
// warp, STAGES, RESIDENT blocks of a multiprocessor, RECORDS (blocks of a stage: short ones share a barrier),
// TWO_WORDS, WIDE, PROMOTE (0 no, 1 plain, 2 scaled, 3 scaled successively), DOWN, SINGLE (sums in float32), FRACTION:
// F; ACC_MANTISSA: bits of the accumulator; EIGHT: the spacing is 8; DOUBLE_M (aligned_fp64_mma_chains.cuh).
#include "common.cuh"
#include "aligned_fp64_mma_layout.cuh"

#define ROWS_A 64
#define ROWS_B (32 * COLUMNS)
#define THREADS (32 * (4 / HALVES) * COLUMNS)
#define TILES (4 * HALVES)  // of 16 x 8 outputs, of a warp
#define BYTES_A record_bytes(ROWS_A, TWO_WORDS, WIDE)
#define BYTES_B record_bytes(ROWS_B, false, WIDE)
#define STAGE_BYTES (RECORDS * (BYTES_A + BYTES_B))

#define AHEAD 2  // tiles that begin before the tensor core needs them

#define LONG (FRACTION > 28)  // the low word of M carries

struct alignas(8) Floor {
  double enlarged;      // 1 + eps
  i32 base;             // field of an empty sum of powers
  u32 factor;           // 2^(FIELD_PLACE - 7) / spacing, a whole number
  i32 zero_field;       // exponent of the field of E = 0
  i32 least_exponent;            // the smallest E that is always found (WIDE)
  i32 lowest, highest;  // products with exponents in this range give sums in the accumulator's normal range
};

// The fields of Floor that every block needs, in registers: from constant memory they would be copied at every use.
struct Constants {
  double enlarged;
  i32 base;
  u32 factor;
  i32 low;
};

DEVICE u32 in_register(u32 word) { return __shfl_sync(0xFFFFFFFFu, word, 0); }  // the compiler cannot see through it

DEVICE Constants constants_of(const Floor& f) {
  return {f.enlarged, (i32)in_register((u32)f.base), in_register(f.factor), (i32)in_register(0x80000000u)};
}

struct Sums {
  const float* c;      // [M, N] or null
  i64 c_row, c_column;
  const float* scale_a;
  const float* scale_b;
  i64 scale_a_row, scale_a_group, scale_b_row, scale_b_group;
  const i32* scale_places;
  float* out;          // [parts, M, N]
  i64 part, row, column;
  u8* marks;
  i32 m, n;
};

#include "aligned_fp64_mma_chains.cuh"

// Return true if a block has products although its field is below `least`: then the field may be wrong.
DEVICE bool unknown(const State& s, i32 least, const u32* a, const u32* b) {
  bool bad = false;
  UNROLLED for (int h = 0; h < HALVES; ++h) {
    UNROLLED for (int j = 0; j < 4; ++j) {
      UNROLLED for (int i = 0; i < 4; ++i) {
        u32 products = 0;
        UNROLLED for (int w = 0; w < WORDS; ++w)
          products |= a[w * ROWS_A + 2 * h + (i >> 1)] & b[w * ROWS_B + 2 * j + (i & 1)];
        bad |= field_in(s, h, j, i) < least && products != 0;
      }
    }
  }
  return bad;
}

// End a block of a tile of 16 x 8 outputs, the `last` of its chain or not; begin the next, for which `powers` are
// known.
DEVICE void finish_tile(State& s, const Constants& k, int h, int j, bool last) {
  UNROLLED for (int i = 0; i < 4; ++i) finish(s, k, h, j, i, last);
}

// The field of the largest exponent of a block's products.
DEVICE i32 products_field(const Constants& k, float powers) {
  const u32 bits = as_bits(powers);
  return EIGHT ? (i32)add_shifted<26 - FIELD_PLACE>(bits, (u32)k.base) : k.base + (i32)((bits >> 16) * k.factor);
}

DEVICE void start_tile(State& s, const Constants& k, const float (&powers)[4], int h, int j, i32& smallest,
                       const u32* a, const u32* b) {
  UNROLLED for (int i = 0; i < 4; ++i) {
    u32 negative = 0;
    UNROLLED for (int w = 0; w < WORDS && !DOWN; ++w)
      negative += __popc(a[w * ROWS_A + 2 * h + (i >> 1)] ^ b[w * ROWS_B + 2 * j + (i & 1)]);
    start(s, k, h, j, i, products_field(k, powers[i]), negative);
    if (WIDE) smallest = min(smallest, field_in(s, h, j, i));
  }
}

// The first operand's numbers of a block, 16 rows.
struct Left { double value[(BLOCK + 15) / 16][8]; };

DEVICE void load_left(Left& left, const u8* a, int group, int lane) {
  UNROLLED for (int k = 0; k < BLOCK; k += 16) {
    double part[8];
    load_values<4, TWO_WORDS>(part, a, group, k / 4, min((BLOCK - k + 3) / 4, 4), lane);
    UNROLLED for (int i = 0; i < 8; ++i) left.value[k / 16][i] = part[i];
  }
}

template <int QUADS>
DEVICE void chain(double (&sum)[4], const double (&left)[8], int skip, const u8* b, int group, int half, int first,
                  int lane) {
  double part[2 * QUADS], right[QUADS];
  UNROLLED for (int i = 0; i < 2 * QUADS; ++i) part[i] = left[2 * skip + i];
  load_column<QUADS>(right, b, group, half, first, lane);
  floor_chain<QUADS>(sum, part, right);
}

DEVICE void chain_tile(double (&sum)[4], const Left& left, const u8* b, int group, int half, int lane) {
  UNROLLED for (int k = 0; k + 16 <= BLOCK; k += 16) chain<4>(sum, left.value[k / 16], 0, b, group, half, k / 4, lane);
  constexpr int LAST = BLOCK / 16, REST = BLOCK % 16;
  if constexpr (REST > 12) {
    chain<4>(sum, left.value[LAST], 0, b, group, half, LAST * 4, lane);
  } else if constexpr (REST != 0) {
    if constexpr (REST > 4) chain<2>(sum, left.value[LAST], 0, b, group, half, LAST * 4, lane);
    if constexpr (REST > 8 || REST <= 4) {
      constexpr int SKIP = REST > 8 ? 2 : 0;
      chain<1>(sum, left.value[LAST], SKIP, b, group, half, LAST * 4 + SKIP, lane);
    }
  }
}

// Copy min(most, count) bytes, whole units of 16, by all threads of the block.
template <int most>
DEVICE void copy_bytes(u8* to, const u8* from, i32 count) {
  UNROLLED for (int i = 0; i < (most / 16 + THREADS - 1) / THREADS; ++i) {
    const int at = (i * THREADS + threadIdx.x) * 16;
    if ((RECORDS == 1 && (i + 1) * THREADS * 16 <= most) || at < (RECORDS == 1 ? most : count))
      copy16_async(to + at, from + at);
  }
}

// Pointers of a warp's lane into the record of a block in a stage of the ring.
struct Stage {
  const u8 *a, *b, *a_powers, *b_powers;
  const u32 *a_bits, *b_bits;
};

DEVICE Stage stage_at(const u8* slot, int record, int lane, int a_group, int b_group) {
  const u8 *a = slot + record * BYTES_A, *b = slot + RECORDS * BYTES_A + record * BYTES_B;
  const u8 *a_powers = a + value_bytes(ROWS_A, TWO_WORDS), *b_powers = b + value_bytes(ROWS_B, false);
  const u32* a_bits = (const u32*)(a_powers + power_bytes(ROWS_A)) + a_group / 2 * 32 + lane / 4 * 4 + a_group % 2 * 2;
  return {a, b, a_powers, b_powers, a_bits, (const u32*)(b_powers + power_bytes(ROWS_B)) + b_group * 16 + lane % 4 * 8};
}

// The operands' records of a part, and the ring of stages in shared memory.
struct Ring {
  u8* shared;
  const u8 *a, *b;  // the next records to copy
  i32 remaining;    // records to copy
  int slot;         // of the stage that is worked on
};

DEVICE u8* slot_of(const Ring& ring, int ahead) {
  const int slot = ring.slot + ahead;
  return ring.shared + (slot < STAGES ? slot : slot - STAGES) * STAGE_BYTES;
}

// Copy the next records into the slot `ahead` of the current one, which no warp reads any more.
DEVICE void refill(Ring& ring, int ahead) {
  u8* slot = slot_of(ring, ahead);
  if (ring.remaining > 0) {
    const i32 count = min(ring.remaining, RECORDS);
    copy_bytes<RECORDS * BYTES_A>(slot, ring.a, count * BYTES_A);
    copy_bytes<RECORDS * BYTES_B>(slot + RECORDS * BYTES_A, ring.b, count * BYTES_B);
  }
  commit_copies();
  ring.a += RECORDS * BYTES_A, ring.b += RECORDS * BYTES_B, ring.remaining -= RECORDS;
}

// Work on a block: the sums of the one before are finished here, its own are left to the next. While the tensor core
// works on one tile of 16 x 8, another is finished and started, AHEAD tiles ahead; powers are added four tiles ahead of
// that, or they would queue behind the chains. ENDED: the block before was the last of its chains.
template <bool ENDED>
DEVICE bool run_block(State& s, const Constants& k, float (&powers)[TILES][4], const Stage& stage, const Stage& next,
                      int a_group, int b_group, i32 least, int lane, const Sums& sums, const Place& place,
                      float* outer, i32 block) {
  i32 smallest = 0x7FFFFFFF;
  Left left;
  UNROLLED for (int t = 0; t < TILES + AHEAD; ++t) {
    if (t < TILES) {
      finish_tile(s, k, t / 4, t % 4, ENDED);
      if (ENDED) promote_tile(s, sums, place, outer, t / 4, t % 4, block - 1);
      start_tile(s, k, powers[t], t / 4, t % 4, smallest, stage.a_bits, stage.b_bits);
    }
    if (t < AHEAD) continue;
    const int h = (t - AHEAD) / 4, j = (t - AHEAD) % 4;
    const Stage& later = h + 1 < HALVES ? stage : next;
    add_powers(powers[(t - AHEAD + 4) % TILES], later.a_powers, later.b_powers, a_group + (h + 1) % HALVES, b_group, j,
               lane);
    if (j == 0) load_left(left, stage.a, a_group + h, lane);
    chain_tile(s.sum[h][j], left, stage.b, b_group + j / 2, j % 2, lane);
  }
  if (!WIDE || !__any_sync(0xFFFFFFFFu, smallest < least)) return false;
  return unknown(s, least, stage.a_bits + WORDS * ROWS_A, stage.b_bits + WORDS * ROWS_B);
}

// Finish the chains of a warp, add them to the outer sums where there are some, and write the results.
DEVICE void write_results(State& s, const Constants& k, const Sums& sums, const Place& place, float* outer, i32 last) {
  UNROLLED for (int t = 0; t < TILES; ++t) {
    finish_tile(s, k, t / 4, t % 4, true);
    if (PROMOTE) promote_tile(s, sums, place, outer, t / 4, t % 4, last);
    write_tile(s, sums, place, outer, t / 4, t % 4);
  }
}

// Grid: x counts tiles of 64 x ROWS_B outputs, z parts. `pitch`: records of a panel. Every warp has 32 columns of 16 or
// 32 rows.
KERNEL __launch_bounds__(THREADS, RESIDENT)
aligned_fp64_mma(const u8* a_records, const u8* b_records, const i32* a_bases, const i32* b_bases, i32 pitch,
              const i32* part_blocks, const u8* ends, const Floor f, const Sums sums) {
  DYNAMIC_SHARED(shared);
  const Tile tile = tile_of(sums);
  i32 least = 0;
  if (!within_range(f, tile, a_bases, b_bases, least, (i32*)shared)) {
    if (threadIdx.x == 0) mark(sums, tile);
    return;
  }
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int a_group = warp % (4 / HALVES) * HALVES, b_group = warp / (4 / HALVES) * 2;
  const i32 first = part_blocks[2 * blockIdx.z], last = part_blocks[2 * blockIdx.z + 1];
  const u8* a = a_records + ((i64)(tile.row / ROWS_A) * pitch + first) * BYTES_A;
  const u8* b = b_records + ((i64)(tile.column / ROWS_B) * pitch + first) * BYTES_B;
  Ring ring = {shared, a, b, last - first, 0};
  for (int s = 0; s < STAGES - 1; ++s) refill(ring, s);
  const Place place = {tile.row + a_group * 16 + lane / 4, tile.column + b_group * 16 + lane % 4 * 2, a_bases, b_bases};
  float* outer = (float*)(shared + STAGES * STAGE_BYTES) + 4 * threadIdx.x;
  const Constants constants = constants_of(f);
  State state;
  bool bad = begin(state, constants, f, sums, place, outer);
  wait_copies<STAGES - 2>();
  __syncthreads();
  Stage stage = stage_at(shared, 0, lane, a_group, b_group);
  float powers[TILES][4];
  UNROLLED for (int j = 0; j < 4; ++j) add_powers(powers[j], stage.a_powers, stage.b_powers, a_group, b_group, j, lane);
  bool ended = false;
  int record = 0;  // of the stage
  for (i32 block = first; block < last; ++block) {
    const bool ends_here = PROMOTE && ends[block] != 0;  // asked for long before it is needed
    if (record == 0) {
      wait_copies<STAGES - 3>();
      __syncthreads();
      refill(ring, STAGES - 1);
      ring.slot = ring.slot + 1 == STAGES ? 0 : ring.slot + 1;
    }
    record = record + 1 == RECORDS ? 0 : record + 1;
    const int ahead = record == 0 ? 0 : STAGES - 1;  // of the slot after the one that is worked on
    const Stage next = stage_at(slot_of(ring, ahead), record, lane, a_group, b_group);
    if (PROMOTE && ended) {
      bad |= run_block<PROMOTE != 0>(state, constants, powers, stage, next, a_group, b_group, least, lane, sums, place,
                                     outer, block);
    } else {
      bad |= run_block<false>(state, constants, powers, stage, next, a_group, b_group, least, lane, sums, place, outer,
                              block);
    }
    stage = next;
    ended = ends_here;
  }
  write_results(state, constants, sums, place, outer, last - 1);
  wait_copies<0>();
  if (__syncthreads_or(bad) && threadIdx.x == 0) mark(sums, tile);
}
