// SPDX-License-Identifier: Apache-2.0
// Casts to block formats whose blocks run down the columns of [leading, inner, trailing], without a transposed copy;
// with BOTH, for values, also blocks along the rows, from the same read (both operands of a training step's products).
//
// A thread holds 8 rows of VECTOR columns, a warp 32 rows: 8 lanes stand side by side,
//
//   lanes 0 ... 7     rows 0 ... 7      of 8 VECTOR columns
//   lanes 8 ... 15    rows 8 ... 15     and so on
//
// so that a scale serves 8 elements of a thread either way.
//
// Macros: those of block.cuh; RUN: elements of a block down a column, 16, 32, or 64, 128 and 256, which DOWN = RUN / 32
// warps share; ROW_RUN: along a row, 16 or 32; VECTOR; BOTH; TRANSPOSED: the column-wise result is [leading, trailing,
// inner].
#include "block.cuh"

#define ROWS 8
#define DOWN (RUN > 32 ? RUN / 32 : 1)
#define ACROSS (8 / DOWN)

typedef Vectors<INPUT, VECTOR> Input;
typedef Packed<VECTOR, OUTPUT_BITS> Output;

struct alignas(16) ColumnJob {
  const void* x;
  void* out;          // column-wise: like x, or [leading, trailing, inner]
  void* scales;       // [leading * trailing, inner / RUN]
  void* row_out;      // row-wise: like x
  const void* unused;  // keeps what follows where the code that was measured has it
  const u32* tensor;  // amax of the tensor
  float* tensor_scale;
  i64 inner, trailing;
  Draw row_draw;
};

DEVICE u32 cast_fast(float x, u64 index, const FastBlock& block, float decode, const Draw& draw) {
  u32 rest = 0;
#if STOCHASTIC
  rest = ~random_integer(index, draw, nullptr);
#endif
  if (OUTPUT >= 2) return fast_code(x, rest, block);
  return as_bits(fast_value(x, rest, block, decode)) >> (32 - OUTPUT_BITS);
}

// The largest raw magnitudes of a thread's columns over their blocks. All threads come here together.
template <bool Finite>
DEVICE void find_tops(const Input (&in)[ROWS], u32 (&top)[Input::LENGTH]) {
  UNROLLED for (int w = 0; w < Input::LENGTH; ++w) {
    top[w] = 0;
    UNROLLED for (int i = 0; i < ROWS; ++i) top[w] = raw_larger(top[w], raw_magnitudes<Finite>(in[i].words[w]));
    UNROLLED for (int flip = 8; flip < (RUN == 16 ? 16 : 32); flip *= 2)
      top[w] = raw_larger(top[w], __shfl_xor_sync(~0u, top[w], flip));
  }
#if DOWN > 1
  __shared__ u32 tops[Input::LENGTH][8][8];
  u32 lane = threadIdx.x % 8, warp = threadIdx.x / 32;
  UNROLLED for (int w = 0; w < Input::LENGTH; ++w) tops[w][warp][lane] = top[w];
  __syncthreads();
  UNROLLED for (int w = 0; w < Input::LENGTH; ++w)
    UNROLLED for (int d = 0; d < DOWN; ++d) top[w] = raw_larger(top[w], tops[w][d * ACROSS + warp % ACROSS][lane]);
#endif
}

DEVICE u32 amax_of_column(const u32 (&top)[Input::LENGTH], int j) {
  return widened(INPUT == 0 ? top[j % Input::LENGTH] : top[j / 2] >> (16 * (j % 2)) & 0xFFFF);
}

// Find the magnitudes of the blocks to which a thread's columns belong.
DEVICE void find_column_amaxes(const Input (&in)[ROWS], BlockAmax (&amaxes)[VECTOR]) {
  u32 top[Input::LENGTH];
  find_tops<false>(in, top);
  bool nonfinite = false;
  UNROLLED for (int j = 0; j < VECTOR; ++j) {
    u32 amax = amax_of_column(top, j);
    amaxes[j] = {amax, amax >= FLOAT_EXPONENT, amax > FLOAT_EXPONENT};
    nonfinite |= amaxes[j].nonfinite;
  }
  nonfinite = DOWN > 1 ? __syncthreads_or(nonfinite) : __any_sync(~0u, nonfinite);
  if (!nonfinite) return;
  find_tops<true>(in, top);
  UNROLLED for (int j = 0; j < VECTOR; ++j)
    if (amaxes[j].nonfinite) amaxes[j].amax = amax_of_column(top, j);
}

// Where a thread's part lies: offsets of its first element in x and in a transposed result, and whether it is there.
struct Part {
  u64 place, across;
  bool there;
};

DEVICE void store_columns(
    const ColumnJob& job, const Input (&in)[ROWS], const Part& part, const FastBlock (&block)[VECTOR], float decode,
    const Draw& draw) {
#if TRANSPOSED
  UNROLLED for (int j = 0; j < VECTOR; ++j) {
    Packed<ROWS, OUTPUT_BITS> down;
    down.clear();
    UNROLLED for (int i = 0; i < ROWS; ++i)
      down.put(i, cast_fast(in[i].get(j), part.place + i * job.trailing + j, block[j], decode, draw));
    store_vector<ROWS, OUTPUT_BITS>(job.out, part.across + j * job.inner, down);
  }
#else
  UNROLLED for (int i = 0; i < ROWS; ++i) {
    u64 at = part.place + i * job.trailing;
    Output y;
    y.clear();
    UNROLLED for (int j = 0; j < VECTOR; ++j) y.put(j, cast_fast(in[i].get(j), at + j, block[j], decode, draw));
    store_vector<VECTOR, OUTPUT_BITS>(job.out, at, y);
  }
#endif
}

// Cast along the columns.
DEVICE void cast_down(
    const ColumnJob& job, const Input (&in)[ROWS], const Part& part, i64 column, i64 top, TensorScale scale,
    const Cast& c) {
  // 1. amaxes of the columns' blocks, and how elements are cast under their scales
  BlockAmax amaxes[VECTOR];
  find_column_amaxes(in, amaxes);
  FastBlock block[VECTOR];
  bool exactly = false;
  UNROLLED for (int j = 0; j < VECTOR; ++j) {
    block[j] = fast_block(amaxes[j].amax, scale);
    exactly |= part.there && (block[j].refused || amaxes[j].nonfinite);
  }
  // 2. round and store; what has NaN, Inf or scales at float32's limits takes the exact path
  if (part.there && !exactly) store_columns(job, in, part, block, scale.decode, c.draw);
  if (__any_sync(~0u, exactly)) {
    UNROLLED for (int j = 0; j < VECTOR; ++j) {
      u64 first = part.place + j, step = (u64)job.trailing;
      Path path = {first, first, step, step, first, exactly ? ROWS : 0u};
      if (TRANSPOSED) path.out = part.across + j * job.inner, path.out_stride = 1;
      float stored = cast_exactly(job.x, job.out, path, amaxes[j].amax, amaxes[j].has_nan, scale, c.draw, c);
      if (exactly) block[j].stored = stored;
    }
  }
// 3. scales
#if OUTPUT >= 2
  if (part.there && top % RUN == 0) {
    UNROLLED for (int j = 0; j < VECTOR; ++j) {
      u64 line = (u64)blockIdx.z * job.trailing + column + j;
      store_scale(job.scales, line * (job.inner / RUN) + top / RUN, block[j].stored);
    }
  }
#endif
}

// Cast row i of a thread's part along the rows.
DEVICE void cast_across(
    const ColumnJob& job, const Input& in, u64 place, bool there, TensorScale scale, const Cast& c) {
  BlockAmax row_amax = find_amax<ROW_RUN / VECTOR, 1>(&in);
  FastBlock block = fast_block(row_amax.amax, scale);
  bool exactly = there && (block.refused || row_amax.nonfinite);
  if (there && !exactly) {
    Output y;
    y.clear();
    UNROLLED for (int j = 0; j < VECTOR; ++j)
      y.put(j, cast_fast(in.get(j), place + j, block, scale.decode, job.row_draw));
    store_vector<VECTOR, OUTPUT_BITS>(job.row_out, place, y);
  }
  if (__any_sync(~0u, exactly)) {
    Path path = {place, place, 1, 1, place, exactly ? (u32)VECTOR : 0u};
    cast_exactly(job.x, job.row_out, path, row_amax.amax, row_amax.has_nan, scale, job.row_draw, c);
  }
}

KERNEL __launch_bounds__(256) cast_columns(const __grid_constant__ ColumnJob job, const __grid_constant__ Cast c) {
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 column = (((i64)blockIdx.x * ACROSS + warp % ACROSS) * 8 + lane % 8) * VECTOR;
  i64 top = (((i64)blockIdx.y * DOWN + warp / ACROSS) * 4 + lane / 8) * ROWS;
  u64 slab = (u64)blockIdx.z * job.inner * job.trailing;
  Part part = {slab + top * job.trailing + column, slab + column * job.inner + top, column < job.trailing && top < job.inner};
  Input in[ROWS];
  UNROLLED for (int i = 0; i < ROWS; ++i) {
    in[i].clear();
    if (part.there) in[i] = Input{load_vector<VECTOR, INPUT_BITS>(job.x, part.place + i * job.trailing)};
  }
  TensorScale scale = {1.0f, 1.0f};
#if TWO_LEVEL
  scale = te_tensor(as_float(job.tensor[0]), c.scale);
  if (job.tensor_scale != nullptr && threadIdx.x + blockIdx.x + blockIdx.y + blockIdx.z == 0)
    *job.tensor_scale = scale.decode;
#endif
  cast_down(job, in, part, column, top, scale, c);
#if BOTH
  UNROLLED for (int i = 0; i < ROWS; ++i) cast_across(job, in[i], part.place + i * job.trailing, part.there, scale, c);
#endif
}
