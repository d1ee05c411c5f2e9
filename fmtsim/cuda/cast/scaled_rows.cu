// SPDX-License-Identifier: Apache-2.0
// Operands under a recipe's scale rule whose blocks are runs of memory, in one pass, or the whole matrix under a scale
// that is known before. A lane holds four vectors of eight elements, two where sums are taken: more would not fit the
// registers. Words that are shared, and sums, ask for LAYOUT 1 of runs.cuh, in which sums need fewer shuffles.
//
// Macros: those of scaled.cuh; RUN: elements of a block, a power of two from 16 to 128, or 0 where one scale serves
// all; SOURCE (RUN 0): the scale follows from amaxes of parts or from a factor (0, 1); RECORDS (RUN 0): amaxes of parts
// are written; MOMENTS: the statistic is one of sums.
#define VECTOR 8
#define VECTORS (RUN && MOMENTS && WORDS != 1 ? 2 : 4)
#define LAYOUT (WORDS == 1 || (RUN && MOMENTS))
#define BLOCKS_OF_LANE 1
#include "scaled.cuh"
#include "runs.cuh"

#define UNIT (VECTORS * DISTANCE)  // elements that lie together
#define LOADS 5            // parts that a thread takes the amaxes of

// Where a lane's elements are.
struct Lane {
  u64 row, column;  // of its first element in memory
  u64 first, step;  // index of that in the matrix's own order, and from one element of a row to the next
};

#if RUN && MOMENTS
// Sums of value(v, i) over blocks: elements at the largest distance first.
template <class Value>
DEVICE void folded_sums(double (&sums)[BLOCKS], const Value& value) {
  UNROLLED for (int b = 0; b < BLOCKS; b++) {
    double parts[8];
    UNROLLED for (int i = 0; i < 8; i++) {
      double terms[EACH];
      UNROLLED for (int v = 0; v < EACH; v++) {
        terms[v] = value(b * EACH + v, i);
        UNROLLED for (int flip = SPAN / 2; flip > 1; flip /= 2) {
          terms[v] = __dadd_rn(terms[v], __shfl_xor_sync(~0u, terms[v], flip));
        }
      }
      double sum = folded<EACH>(terms);
      parts[i] = __dadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    }
    sums[b] = folded<8>(parts);
  }
}

DEVICE double finite_or_zero(float x) { return finite_magnitude(x) ? (double)x : 0.0; }
DEVICE bool is_finite(float x) { return (as_bits(x) & FLOAT_EXPONENT) != FLOAT_EXPONENT; }

// inside: whether a lane's vector v lies in the matrix; what fills up a block counts as no element.
DEVICE void statistics(
    float (&block_statistic)[BLOCKS], const Eight (&in)[VECTORS], const bool (&inside)[VECTORS], const Rule& r) {
  double sums[BLOCKS], means[BLOCKS], counts[BLOCKS];
  UNROLLED for (int b = 0; b < BLOCKS; b++) {
    u32 count = 0;
    UNROLLED for (int k = 0; k < 8 * EACH; k++)
      count += inside[b * EACH + k / 8] && is_finite(in[b * EACH + k / 8].get(k % 8));
    UNROLLED for (int flip = 1; flip < SPAN; flip *= 2) count += __shfl_xor_sync(~0u, count, flip);
    counts[b] = (double)max(count, 1u);
    means[b] = 0.0;
  }
  if (r.statistic == MEAN_ABS) {
    folded_sums(sums, [&](int v, int i) { return finite_or_zero(fabsf(in[v].get(i))); });
  } else {
    if (r.statistic == STD) {
      folded_sums(sums, [&](int v, int i) { return finite_or_zero(in[v].get(i)); });
      UNROLLED for (int b = 0; b < BLOCKS; b++) means[b] = __ddiv_rn(sums[b], counts[b]);
    }
    folded_sums(sums, [&](int v, int i) {
      float x = in[v].get(i);
      double off = inside[v] && is_finite(x) ? __dsub_rn((double)x, means[v / EACH]) : 0.0;
      return __dmul_rn(off, off);
    });
  }
  UNROLLED for (int b = 0; b < BLOCKS; b++) {
    double mean = __ddiv_rn(sums[b], counts[b]);
    block_statistic[b] = at_most_float_max(__double2float_rn(r.statistic == MEAN_ABS ? mean : __dsqrt_rn(mean)));
  }
}
#elif RUN
DEVICE void statistics(float (&block_statistic)[BLOCKS], const Eight (&in)[VECTORS], const bool (&)[VECTORS], const Rule&) {
  UNROLLED for (int b = 0; b < BLOCKS; b++) {
    bool clean;
    u32 top = finite_raw_amax<EACH>(in + b * EACH, clean);
    block_statistic[b] = as_float(amax_of_raw(raw_amax_of_lanes<SPAN>(top)));
  }
}
#endif

// What the words of element i of a lane's vectors lack of 2^32 - 1.
DEVICE void draw(u32 (&rests)[VECTORS], int i, const Lane& at, const Draw& d) {
#if WORDS == 1
  Words4 w = philox<true>(counter_of(at.first) + i, d);
  rests[0] = w.x, rests[1] = w.y, rests[2] = w.z, rests[3] = w.w;
#else
  UNROLLED for (int v = 0; v < VECTORS; v++) {
    rests[v] = WORDS ? ~random_word(at.first + (u64)(DISTANCE * v + i) * at.step, d) : 0;
  }
#endif
}

// Casts a lane's vectors; Clean: none holds NaN or Inf.
template <bool Clean>
DEVICE void cast_lane(
    Results (&out)[VECTORS], const Eight (&in)[VECTORS], const Scale (&scale)[BLOCKS], const Lane& at, const Rule& r,
    const Grid& g, const Draw& d) {
  UNROLLED for (int i = 0; i < 8; i++) {
    u32 rests[VECTORS];
    draw(rests, i, at, d);
    UNROLLED for (int v = 0; v < VECTORS; v++) {
      u32 passes, value = cast_element<Clean>(in[v].get(i), scale[v / EACH], rests[v], r, g, passes);
      out[v].put(i, value, passes);
    }
  }
}

// source: amaxes of `parts` parts, or a factor. units: of a row, filled up to whole blocks. steps: from a row of
// memory to the next and from an element to the next, in the matrix's own order.
#if WORDS
#define BOUNDS __launch_bounds__(128, 4)  // left to itself, the assembler spills
#else
#define BOUNDS __launch_bounds__(128)
#endif
KERNEL BOUNDS cast_runs(
    const Number* x, u16* y, float* scales, u8* masks, const u32* source, u32* tops, u64 rows, u64 columns, u64 row_step,
    u64 column_step, u32 units, u32 parts, const __grid_constant__ Rule rule, const __grid_constant__ Grid grid,
    const __grid_constant__ Grid scale_grid, const __grid_constant__ Draw d) {
#if RUN == 0 && SOURCE == 0  // what was read last, for the amaxes, is read first: it may still be in the cache
  u64 thread = (u64)(gridDim.x - 1 - blockIdx.x) * blockDim.x + threadIdx.x;
#else
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
#endif
  // 1. where the lane's elements are, and what they are
  const u32 lanes = UNIT / PER_LANE;
  u32 unit = (u32)(thread / lanes), row = unit / units;
  Lane at = {row, (u64)(unit - row * units) * UNIT + thread % lanes * 8, 0, column_step};
  at.first = at.row * row_step + at.column * column_step;
  u64 place = at.row * columns + at.column;
  Eight in[VECTORS];
  bool inside[VECTORS];
  UNROLLED for (int v = 0; v < VECTORS; v++) {
    inside[v] = at.row < rows && at.column + DISTANCE * v < columns;
    in[v].clear();
    if (inside[v]) in[v].load(x + place + DISTANCE * v);
  }
  // 2. scales: of the lane's blocks, of a tensor by its parts' amaxes, or a known one
  Scale scale[BLOCKS];
#if RUN
  float block_statistic[BLOCKS];
  statistics(block_statistic, in, inside, rule);
  find_scales<FOLDS>(scale, block_statistic, [&](float a) { return scale_of(a, rule, scale_grid); });
  UNROLLED for (int b = 0; b < BLOCKS; b++) {
    u64 column = at.column + DISTANCE * EACH * b, across = (columns + RUN - 1) / RUN;
    if (threadIdx.x % SPAN == 0 && inside[b * EACH]) scales[at.row * across + column / RUN] = scale[b].stored;
  }
#else
  __shared__ Scale shared;
#if SOURCE == 0
  u32 top = 0;
  UNROLLED for (u32 k = 0; k < LOADS; k++) {
    u32 part = threadIdx.x + k * blockDim.x;
    top = max(top, part < parts ? source[part] : 0);
  }
  top = block_max(top);
  if (threadIdx.x == 0) shared = scale_of(as_float(top), rule, scale_grid);
  __syncthreads();
  scale[0] = shared;
#else
  float factor = as_float(*source), stored = reciprocal(factor);
  scale[0] = {stored, stored, factor, 0};
#endif
  if (thread == 0) *scales = scale[0].stored;
#endif
  // 3. elements; without NaN and Inf in a few instructions less
  Results out[VECTORS];
  UNROLLED for (int v = 0; v < VECTORS; v++) out[v].clear();
  bool clean;
  u32 raw_top = finite_raw_amax<VECTORS>(in, clean);
  if (clean && !WORDS) cast_lane<true>(out, in, scale, at, rule, grid, d);
  else cast_lane<false>(out, in, scale, at, rule, grid, d);
  UNROLLED for (int v = 0; v < VECTORS; v++)
    if (inside[v]) out[v].store(y, masks, place + DISTANCE * v);
#if RECORDS
  raw_top = block_max(amax_of_raw(raw_top));
  if (threadIdx.x == 0) tops[blockIdx.x] = raw_top;
#endif
}
