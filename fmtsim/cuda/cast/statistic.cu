// SPDX-License-Identifier: Apache-2.0
// Statistics of scales where one pass does not give scale and elements both: amaxes of blocks, parts and columns, means
// of whole matrices, and the history of delayed scaling (FP8 training).
//
// Macros: INPUT; VECTOR: elements of 16 bytes, for blocks of block formats.
#include "scale.cuh"
#include "amax.cuh"

#ifdef VECTOR

// Largest finite magnitudes of blocks, before the kernels that cast under them: rows, groups, tiles, whole tensors.
//
// found[2 b] rises to the amax of block b as float32 bits, found[2 b + 1] gets bit 0 for NaN and bit 1 for NaN or Inf.
// A tensor under one scale is read by a grid that stays: few atomics meet at one address.
#define WORDS_EACH 4  // vectors a thread has on their way

typedef Packed<VECTOR, INPUT_BITS> Neighbours;

struct Found { u32 amax, flags; };

DEVICE Found look(u32 top, const Neighbours& v) {
  u32 amax = amax_of_raw(top), flags = amax >= FLOAT_EXPONENT ? 2 | (amax > FLOAT_EXPONENT) : 0;
  return {flags ? amax_of_raw(raw_amax<true, 1>(&v)) : amax, flags};
}

DEVICE void raise(u32* found, u64 block, Found f) {
  if (f.amax > 0) atomicMax(found + 2 * block, f.amax);
  if (f.flags) atomicOr(found + 2 * block + 1, f.flags);
}

// The same of all threads of a block, for one address.
DEVICE void raise_by_block(u32* found, Found all) {
  all = {__reduce_max_sync(~0u, all.amax), __reduce_or_sync(~0u, all.flags)};
  __shared__ Found warps[8];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = all;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (u32 w = 1; w < blockDim.x / 32; ++w) all = {max(all.amax, warps[w].amax), all.flags | warps[w].flags};
    raise(found, 0, all);
  }
}

KERNEL __launch_bounds__(256) amax_of_tensor(const void* x, u32* found, u64 vectors) {
  u64 stride = (u64)gridDim.x * blockDim.x;
  u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  Found all = {0, 0};
  for (u64 at = first; at < vectors; at += WORDS_EACH * stride) {
    Neighbours v[WORDS_EACH];
    u32 top = 0;
    UNROLLED for (int i = 0; i < WORDS_EACH; ++i) {
      v[i].clear();
      if (at + i * stride < vectors) v[i] = load_vector<VECTOR, INPUT_BITS>(x, (at + i * stride) * VECTOR);
    }
    UNROLLED for (int i = 0; i < WORDS_EACH; ++i) top = raw_larger(top, raw_amax<false, 1>(v + i));
    u32 amax = amax_of_raw(top);
    if (amax < FLOAT_EXPONENT) {
      all.amax = max(all.amax, amax);
    } else {
      UNROLLED for (int i = 0; i < WORDS_EACH; ++i) {
        Found f = look(raw_amax<false, 1>(v + i), v[i]);
        all = {max(all.amax, f.amax), all.flags | f.flags};
      }
    }
  }
  raise_by_block(found, all);
}

// Pieces of rows, each the columns of one block, go to blocks of `outer` rows (see Pieces in block_rows.cu). tensor: what
// rises with the whole tensor, or null.
KERNEL __launch_bounds__(256) amax_of_runs(
    const void* x, u32* found, u32* tensor, u64 vectors, u32 vectors_per_piece, u32 across, u32 outer) {
  u64 first = (u64)blockIdx.x * blockDim.x * WORDS_EACH + threadIdx.x;
  Neighbours v[WORDS_EACH];
  UNROLLED for (int i = 0; i < WORDS_EACH; ++i) {
    u64 at = first + i * blockDim.x;
    v[i].clear();
    if (at < vectors) v[i] = load_vector<VECTOR, INPUT_BITS>(x, at * VECTOR);
  }
  Found all = {0, 0};
  UNROLLED for (int i = 0; i < WORDS_EACH; ++i) {
    u64 at = first + i * blockDim.x;
    Found f = look(raw_amax<false, 1>(v + i), v[i]);
    all = {max(all.amax, f.amax), all.flags | f.flags};
    u32 piece = (u32)(min(at, vectors - 1) / vectors_per_piece), row = piece / across;
    u32 block = outer == 1 ? piece : row / outer * across + (piece - row * across);
    if (vectors_per_piece % 32 == 0) {  // a warp's vectors share a block
      f = {__reduce_max_sync(~0u, f.amax), __reduce_or_sync(~0u, f.flags)};
      if (at < vectors && threadIdx.x % 32 == 0) raise(found, block, f);
    } else if (at < vectors) {
      raise(found, block, f);
    }
  }
  if (tensor != nullptr) raise_by_block(tensor, all);
}

#else

#define VECTORS_EACH 4

// Of parts of a tensor, one a block of threads; kernels that need the amax of the tensor reduce these.
KERNEL __launch_bounds__(512) amaxes_of_parts(const Number* x, u32* tops, u64 vectors) {
  u64 together = VECTORS_EACH * blockDim.x;  // of a block of threads at a time, which follow each other
  u32 top = 0;
  for (u64 first = blockIdx.x * together; first < vectors; first += gridDim.x * together) {
    u64 at = first + threadIdx.x;
    Eight in[VECTORS_EACH];
    UNROLLED for (int v = 0; v < VECTORS_EACH; v++) {
      in[v].clear();
      if (at + v * blockDim.x < vectors) in[v].load(x + (at + v * blockDim.x) * 8);
    }
    bool clean;
    top = raw_larger(top, finite_raw_amax<VECTORS_EACH>(in, clean));
  }
  top = block_max(amax_of_raw(top));
  if (threadIdx.x == 0) tops[blockIdx.x] = top;
}

// Of columns: found [columns] starts at zero. A block of threads takes 256 columns of 128 rows, a warp eight rows of
// them.
#define ROWS 8
KERNEL __launch_bounds__(512) amaxes_of_columns(const Number* x, u32* found, u64 rows, u64 columns) {
  __shared__ u32 tops[256];
  u32 lane = threadIdx.x % 32, across = (u32)((columns + 255) / 256), down = blockIdx.x / across;
  u64 left = (u64)(blockIdx.x - down * across) * 256, column = left + lane * 8;
  u64 row = (u64)down * (16 * ROWS) + threadIdx.x / 32;
  Eight in[ROWS];
  UNROLLED for (int j = 0; j < ROWS; j++) {
    in[j].clear();
    if (row + 16 * j < rows && column < columns) in[j].load(x + (row + 16 * j) * columns + column);
  }
  if (threadIdx.x < 256) tops[threadIdx.x] = 0;  // column 8 lane + i at place 32 i + lane
  __syncthreads();
  Eight top = column_tops<ROWS>(in);
  UNROLLED for (int i = 0; i < 8; i++) atomicMax(&tops[32 * i + lane], as_bits(top.get(i)));
  __syncthreads();
  u64 mine = left + threadIdx.x;
  if (threadIdx.x < 256 && mine < columns) atomicMax(found + mine, tops[threadIdx.x % 8 * 32 + threadIdx.x / 8]);
}

// Means over a whole matrix: float64 sums of neighbours at a distance that is halved until one number is left, zeros
// filling up to a power of two (fmtsim/scaling/blocks.py). A thread folds the 32 numbers at the largest distances,
// so that each launch leaves one number of 32.
#define FOLDED 32

// sums [left] of magnitudes, or of squares; counts: of finite elements, one number a block of threads.
KERNEL __launch_bounds__(256) fold_elements(
    const Number* x, double* sums, u32* counts, u64 total, u64 left, u32 squares) {
  u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  double terms[FOLDED];
  u32 count = 0;
  UNROLLED for (int k = 0; k < FOLDED; k++) {
    u64 place = first + k * left;
    float a = place < total ? fabsf(loaded<INPUT>(x[place])) : 0.0f;
    bool finite = as_bits(a) < FLOAT_EXPONENT;
    double number = finite ? (double)a : 0.0;
    terms[k] = squares ? __dmul_rn(number, number) : number;
    count += place < total && finite;
  }
  sums[first] = folded<FOLDED>(terms);
  __shared__ u32 all[8];
  count = __reduce_add_sync(~0u, count);
  if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; w++) count += all[w];
    counts[blockIdx.x] = count;
  }
}

KERNEL __launch_bounds__(256) fold_sums(const double* from, double* sums, u64 left) {
  u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  double terms[FOLDED];
  UNROLLED for (int k = 0; k < FOLDED; k++) terms[k] = from[first + k * left];
  sums[first] = folded<FOLDED>(terms);
}

// The mean of magnitudes, or the root of the mean square, from at most 32 * 1024 sums: float32.
KERNEL __launch_bounds__(1024) fold_last(
    const double* from, float* found, const u32* counts, u32 blocks, u32 numbers, u32 squares) {
  __shared__ double sums[1024];
  __shared__ u64 finite[1024];
  double terms[FOLDED];
  u64 own = 0;
  UNROLLED for (int k = 0; k < FOLDED; k++) terms[k] = k * 1024 < numbers ? from[threadIdx.x + k * 1024] : 0.0;
  sums[threadIdx.x] = folded<FOLDED>(terms);
  for (u32 i = threadIdx.x; i < blocks; i += 1024) own += counts[i];
  finite[threadIdx.x] = own;
  __syncthreads();
  for (u32 half = 512; half; half /= 2) {
    if (threadIdx.x < half) {
      sums[threadIdx.x] = __dadd_rn(sums[threadIdx.x], sums[threadIdx.x + half]);
      finite[threadIdx.x] += finite[threadIdx.x + half];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    double mean = __ddiv_rn(sums[0], (double)(finite[0] ? finite[0] : 1));
    *found = at_most_float_max(__double2float_rn(squares ? __dsqrt_rn(mean) : mean));
  }
}

// Delayed scaling: the largest magnitude of a call is recorded, and the scale of later ones follows
// (fmtsim/scaling/history.py). One block of threads.

// The host side is fmtsim.cuda.cast.scale_rules.history_bytes.
struct alignas(16) History {
  float top;
  i32 power;                           // of a scale, as in Rule
  i32 recent, previous;                // the last magnitude alone counts; zeros leave the scale as it was
  u32 length, refresh, immediate, remembers;
};

DEVICE float factor_of(float amax, const History& h) {
  float factor = at_most_float_max(__fdiv_rn(h.top, amax));
  return h.power ? power_of_two(factor, h.power == FLOOR) : factor;
}

// in_force: the factor of this call, where that is asked for.
KERNEL __launch_bounds__(1024) advance(
    const u32* tops, float* amaxes, float* factor, i64* calls, float* in_force, u32 parts, const History h) {
  __shared__ u32 call_amax;
  u32 top = 0;
  for (u32 i = threadIdx.x; i < parts; i += blockDim.x) top = max(top, tops[i]);
  top = block_max(top);
  if (threadIdx.x == 0) call_amax = top;
  __syncthreads();
  float own = as_float(call_amax), before = *factor;
  i64 count = *calls;
  __syncthreads();
  if (in_force != nullptr && threadIdx.x == 0) {
    *in_force = count < (i64)h.immediate && own > 0.0f ? factor_of(own, h) : before;
  }
  if (!h.remembers) return;
  u32 most = call_amax;
  for (u32 chunk = (h.length - 1) / blockDim.x + 1; chunk-- > 0;) {  // the last first: each number moves one place on
    u32 place = chunk * blockDim.x + threadIdx.x;
    float moved = place == 0 ? own : place < h.length ? amaxes[place - 1] : 0.0f;
    __syncthreads();
    if (place < h.length) amaxes[place] = moved;
    most = max(most, as_bits(moved));
  }
  __syncthreads();
  most = block_max(most);
  if (threadIdx.x == 0) {
    float found = h.recent ? own : as_float(most);
    *calls = count + 1;
    if ((count + 1) % (i64)h.refresh == 0) *factor = found > 0.0f ? factor_of(found, h) : h.previous ? before : 1.0f;
  }
}

// A reduction over ranks (docs/distributed.md, reduction.cu), a thread a tensor.

// What elements are multiplied with before the cast and behind the sums, factors [2, tensors], from the largest
// magnitudes of all ranks: tops, or the largest of those that begin each rank's memory. factor: the reduction's, in place of mu; scaled: else the scale is 1; ranks: 0 for a sum.
KERNEL factors_of_tensors(
    const float* tops, const u64* memories, const float* mu, float* factors, i64 count, i32 members, float factor,
    float ranks, i32 scaled, const Rule r) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float top = memories ? 0.0f : tops[i];
  for (i32 member = 0; memories && member < members; member++) {
    top = fmaxf(top, ((const volatile float*)memories[member])[i]);  // another rank's
  }
  const Grid none = {};  // scales are float32
  float encode = __fmul_rn(scaled ? scale_of(top, r, none).factor : 1.0f, mu == nullptr ? factor : *mu);
  encode = fminf(fmaxf(encode, FLOAT_MIN), FLOAT_MAX);
  float decode = reciprocal(encode);
  factors[i] = encode;
  factors[count + i] = ranks == 0.0f ? decode : __fdiv_rn(decode, ranks);
}

#endif
