// SPDX-License-Identifier: Apache-2.0
// A product and its unit as numbers, outer sums of promoted chains, and writing of sums: what all kernels of products
// take.
#pragma once
#include "operands.cuh"
#include "philox.cuh"

// A product and its unit as numbers; job.py builds it. Strides count elements.
struct alignas(16) Problem {
  i64 a_row, a_stride, b_row, b_stride;                           // operands [rows, K], [columns, K]
  i64 scale_a_row, scale_a_stride, scale_b_row, scale_b_stride;   // scales [rows or columns, groups]
  i64 c_row, c_stride;                                            // addend [rows, columns]
  Draw draw;                                                      // of stochastic sums
  Format accumulator, outer;      // of chains, and of the sum to which they are promoted
  Rounding rounding;              // to the accumulator
  i32 rows, columns, a_type, b_type;
  i32 block, parts, tile, promotes;   // places of a block; rows and columns that one mark stands for
  i32 scaled_promotion, successive, kind, fraction_bits;  // of sums; NO_FRACTION
  i32 term_mode, lowest, group, signed_zero;              // lowest: of the alignment exponent
  i32 scale_block, scale_bits, scale_emin, sum_bits;      // of scales inside the unit; of a two-stage unit
  i32 a_bits, b_bits, a_emin, b_emin;                     // mantissa bits, and the exponent of subnormals
  i32 grid, a_lsb, b_lsb, parity;    // place of the lowest bit of an exact sum; of an operand's last bit
  i32 leaves, saturates, sum_width, spare;  // of a pairwise unit: products; of an integer unit: clamps, bits of its sum
};

#define NO_FRACTION -1
#define NO_EXPONENT -100000000

// Dtypes of sums.
#define KIND_FLOAT 0
#define KIND_DOUBLE 1
#define KIND_INT32 2

// Whether this block's tile, of a grid of tiles in rows of `across`, has nothing to do.
DEVICE bool is_idle(const u8* marks, const Problem& p, int first_row, int first_column) {
  int across = (p.columns + p.tile - 1) / p.tile;
  return marks != nullptr && marks[(i64)(first_row / p.tile) * across + first_column / p.tile] == 0;
}

DEVICE double addend_at(const void* c, const Problem& p, i64 row, i64 column) {
  i64 place = row * p.c_row + column * p.c_stride;
  if (p.kind == KIND_INT32) return ((const i32*)c)[place];
  return p.kind == KIND_DOUBLE ? ((const double*)c)[place] : (double)((const float*)c)[place];
}

// Write a sum, NaN as the units' one NaN.
DEVICE void write_at(void* sums, i64 place, const Problem& p, double y) {
  if (p.kind == KIND_INT32) ((i32*)sums)[place] = (i32)y;
  else if (p.kind == KIND_DOUBLE) ((double*)sums)[place] = is_nan(y) ? as_double(NAN_BITS) : y;
  else ((float*)sums)[place] = is_nan(y) ? as_float(0x7FFFFFFFu) : (float)y;
}

// Write a sum of a part, and read one that was written, but of integers; sums are [parts, rows, columns].
DEVICE void write_sum(void* sums, const Problem& p, i64 part, i64 row, i64 column, double y) {
  write_at(sums, (part * p.rows + row) * p.columns + column, p, y);
}
DEVICE double sum_at(const void* sums, const Problem& p, i64 part, i64 row, i64 column) {
  i64 place = (part * p.rows + row) * p.columns + column;
  return p.kind == KIND_DOUBLE ? ((const double*)sums)[place] : (double)((const float*)sums)[place];
}

// The scale of a promoted chain: 1 where a call has none.
DEVICE float scale_at(const float* scales, i64 row_stride, i64 stride, i64 row, i64 group) {
  return scales == nullptr ? 1.0f : scales[row * row_stride + group * stride];
}

// An integer below 2^53 brought into an accumulator of up to 32 bits.
DEVICE double to_integer(double n, const Problem& p) {
  const double beyond = (double)(1ll << (p.sum_width - 1));
  if (p.saturates) return fmin(fmax(n, -beyond), beyond - 1);
  const int unused = 64 - p.sum_width;  // the sign is that of the highest bit left
  return (double)((i64)((u64)__double2ll_rn(n) << unused) >> unused);
}

// A chain added to the outer sum (docs/matmul.md, section 4, step 4).
DEVICE double promoted(double total, double chain, const Problem& p, float scale_a, float scale_b) {
  if (p.kind == KIND_INT32) return to_integer(total + chain, p);
  if (!p.scaled_promotion) return add_in(total, chain, p.outer);
  float of_chain = (float)chain, sum = (float)total;
  if (p.successive) return __fmaf_rn(__fmul_rn(of_chain, scale_a), scale_b, sum);
  return __fmaf_rn(of_chain, __fmul_rn(scale_a, scale_b), sum);
}

// What scales promoted chains, and where chains end.
struct Order {
  const float *scale_a, *scale_b;
  const i32* scale_places;  // of a block: the group of scales of its chain
  const u8* ends;           // of a block: whether a chain ends with it
  const i32* part_blocks;   // of a part: its first block and the one behind its last
};

// The outer sum with the chain whose last block is t.
DEVICE double joined(double total, double chain, const Problem& p, i64 t, i64 row, i64 column, const Order& order) {
  float of_row = 1.0f, of_column = 1.0f;
  if (p.scaled_promotion && !p.scale_block) {  // else the scales are the unit's
    of_row = scale_at(order.scale_a, p.scale_a_row, p.scale_a_stride, row, order.scale_places[t]);
    of_column = scale_at(order.scale_b, p.scale_b_row, p.scale_b_stride, column, order.scale_places[t]);
  }
  return promoted(total, chain, p, of_row, of_column);
}

#define SIDE 16    // rows and columns of a block of threads with an output each
#define WINDOW 32  // places of the order that lie in shared memory at a time

// What a block of threads with an output each reads; window: the first place in shared memory.
struct Inputs {
  const void *a, *b;
  const Order& order;
  const i32* source;
  i64 places, window;
  i64 first_row, first_column;
};

// Bring `count` places from `first` on into shared memory unless they are there, by fill(row, place, k) for each row
// and place of the window; all threads come along.
template <typename Fill>
DEVICE int reach(Inputs& in, i64 first, int count, Fill fill) {
  if (first < in.window || first + count > in.window + WINDOW) {
    __syncthreads();
    for (int place = threadIdx.x % SIDE; place < WINDOW; place += SIDE)
      fill(threadIdx.x / SIDE, place, first + place < in.places ? in.source[first + place] : -1);
    in.window = first;
    __syncthreads();
  }
  return (int)(first - in.window);
}

// Add the blocks of an output and write the sum of each part.
template <typename BlockSum>
DEVICE void add_blocks(const void* c, const Order& order, void* sums, const Problem& p, i64 row, i64 column,
                       BlockSum block_sum) {
  const bool inside = row < p.rows && column < p.columns;
  for (int part = 0; part < p.parts; ++part) {
    double start = part == 0 && c != nullptr && inside ? addend_at(c, p, row, column) : 0.0;
    double running = p.promotes ? 0.0 : start, total = start;
    for (i64 t = order.part_blocks[2 * part]; t < order.part_blocks[2 * part + 1]; ++t) {
      running = block_sum(t, running, row, column);
      if (p.promotes && order.ends[t] && inside) {
        total = joined(total, running, p, t, row, column, order);
        running = 0.0;
      }
    }
    if (inside) write_sum(sums, p, part, row, column, p.promotes ? total : running);
  }
}

// For the squares of outputs that are left to this block call work(inputs, add), which calls add(block_sum) once:
// block_sum(t, running, row, column) is the running sum behind block t. Chains are promoted and the sum of each part is
// written; all threads of a block come along, those outside the result too.
//
// A grid has as many blocks as squares, or fewer, which walk: with a fast path before it next to nothing is marked, and
// thousands of blocks that only look would cost as much as a tenth of a fast product. So every thread looks at a
// square, and all of them leave together where there is none.
template <typename Work>
DEVICE void each_output(const void* a, const void* b, const void* c, const i32* source, const Order& order,
                        const u8* marks, void* sums, const Problem& p, Work work) {
  const i64 places = (i64)order.part_blocks[2 * p.parts - 1] * p.block, apart = gridDim.x;
  const i64 across = (p.columns + SIDE - 1) / SIDE, count = (p.rows + SIDE - 1) / SIDE * across;
  for (i64 first = blockIdx.x; first < count; first += SIDE * SIDE * apart) {
    const i64 own = first + threadIdx.x * apart;
    const bool busy = own < count && !is_idle(marks, p, own / across * SIDE, own % across * SIDE);
    if (!__syncthreads_or(busy)) continue;
    for (i64 square = first, i = 0; i < SIDE * SIDE && square < count; square += apart, ++i) {
      const int first_row = square / across * SIDE, first_column = square % across * SIDE;
      if (is_idle(marks, p, first_row, first_column)) continue;
      __syncthreads();  // shared memory is free again
      Inputs in = {a, b, order, source, places, -WINDOW - 1, first_row, first_column};
      const i64 row = first_row + threadIdx.x / SIDE, column = first_column + threadIdx.x % SIDE;
      work(in, [&](auto block_sum) { add_blocks(c, order, sums, p, row, column, block_sum); });
    }
  }
}

// Promotion of packed kernels' chains, whose outer sums lie in the result: not at all, to float32, or as `joined` does
// it.
#define PROMOTES_FLOAT32 1
#define PROMOTES_ANY 2

// Add a chain to its outer sum; `first`: nothing was written there.
template <int Promotion, typename Real>
DEVICE void promote(void* sums, const Problem& p, i64 row, i64 column, Real chain, bool first, i64 t,
                    const Order& order) {
  if (Promotion == PROMOTES_FLOAT32) {
    float* place = (float*)sums + ((i64)blockIdx.z * p.rows + row) * p.columns + column;
    float sum = __fadd_rn(first ? 0.0f : *place, (float)chain);
    *place = sum == sum ? sum : as_float(0x7FFFFFFFu);
  } else {
    double total = first ? 0.0 : sum_at(sums, p, blockIdx.z, row, column);
    write_sum(sums, p, blockIdx.z, row, column, joined(total, chain, p, t, row, column, order));
  }
}

// The random integer of a sum.
DEVICE u32 drawn(const Problem& p, i64 block, i64 row, i64 column) {
  if (p.rounding.mode != MODE_STOCHASTIC) return 0;
  return random_integer((u64)((block * p.rows + row) * p.columns + column), p.draw, nullptr);
}
