// SPDX-License-Identifier: Apache-2.0
// Effects of a cast on a tensor (fmtsim/lab/analysis/measure.py), counted in one read of its elements and of their
// quantised values: a tile of 8192 elements at a time, whose blocks' scales follow from what its threads hold.
//
// Macros: INPUT, QUANTISED: dtypes (common.cuh). SCALED: elements are seen under the scales of blocks, which are 1
// powers of two, 2 any numbers; 0: under none.
//
// A tile is `across` vectors of eight elements wide, a power of two that divides 256, and 1024 / across rows high; a
// thread holds four rows of one vector:
//
//   across = 4      thread 0: row 0 ... 3, columns 0 ... 7     thread 4: row 4 ... 7, columns 0 ... 7
//                   thread 1: row 0 ... 3, columns 8 ... 15    ...
#include "scale.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define ROWS 4
#define BINS 277         // exponents of float32 from -149 on: 23 of subnormal numbers, and a field each from 1 on
#define MOST_BLOCKS 512  // of a tile
#define TABLES (SCALED ? 2 : 1)
#define SMALL 0x20000000u  // bits of 2^-63: products of such numbers are normal

// Zeros before the first launch: counters, and the exponents of x and of x / scale.
struct Counters {
  u64 kept, saturated, nonfinite, top, done, exponents[2][BINS];
};

typedef Vectors<INPUT, 8> Elements;
typedef Vectors<QUANTISED, 8> Values;

struct Shared {
  u32 fields[WARPS][TABLES][256];
  u32 small[TABLES][23];
  u32 kept, saturated, nonfinite, top, last;
  u64 nonzero;
  double sums[2][WARPS];
#if SCALED
  u32 amax[MOST_BLOCKS];
  float factor[MOST_BLOCKS];  // 1 / scale of powers of two, else the scale
  u32 slow;                   // whether quotients may be subnormal
#endif
};

DEVICE void tally(Shared& s, int which, u32 magnitude) {
  atomicAdd(&s.fields[threadIdx.x / 32][which][magnitude >> 23], 1);
}

DEVICE void tally_any(Shared& s, int which, u32 magnitude) {
  tally(s, which, magnitude);
  if (magnitude - 1 < FLOAT_MANTISSA) atomicAdd(&s.small[which][31 - __clz((int)magnitude)], 1);
}

DEVICE double sum_of_warp(double x) {
  UNROLLED for (int far = 16; far; far /= 2) x = __dadd_rn(x, __shfl_xor_sync(~0u, x, far));
  return x;
}

// The sums of all threads in one order: those of warps first, which a thread adds behind a barrier.
DEVICE void put_sums(Shared& s, double signal, double noise) {
  signal = sum_of_warp(signal), noise = sum_of_warp(noise);
  if (threadIdx.x % 32 == 0) s.sums[0][threadIdx.x / 32] = signal, s.sums[1][threadIdx.x / 32] = noise;
}

DEVICE void take_sums(const Shared& s, double& signal, double& noise) {
  double all[2] = {};
  for (u32 w = 0; w < WARPS; ++w) all[0] = __dadd_rn(all[0], s.sums[0][w]), all[1] = __dadd_rn(all[1], s.sums[1][w]);
  signal = all[0], noise = all[1];
}

#if SCALED
DEVICE u32 finite_bits(const Elements& x, int i) {
  u32 magnitude = as_bits(x.get(i)) & MAGNITUDE;
  return magnitude < FLOAT_EXPONENT ? magnitude : 0;
}

// The scales of a tile's blocks, `wide` of them side by side. A block is one row high or one column wide, or as high
// and as wide as what a thread holds, or several times that; first: of those in which this thread has elements.
DEVICE void find_scales(
    Shared& s, const Elements (&x)[ROWS], u32 first, u32 block_rows, u32 block_columns, u32 blocks, u32 wide,
    TensorScale tensor, const Cast& c) {
  for (u32 i = threadIdx.x; i < blocks; i += THREADS) s.amax[i] = 0;
  __syncthreads();  // the factors of the tile before are read, too
  if (threadIdx.x == 0) s.slow = 0;
  if (block_columns == 1) {
    UNROLLED for (int i = 0; i < 8; ++i) {
      u32 top = 0;
      UNROLLED for (int r = 0; r < ROWS; ++r) top = max(top, finite_bits(x[r], i));
      atomicMax(&s.amax[first + i], top);
    }
  } else {
    u32 above = 0;
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      u32 top = block_rows == 1 ? 0 : above;
      UNROLLED for (int i = 0; i < 8; ++i) top = max(top, finite_bits(x[r], i));
      if (block_rows == 1) atomicMax(&s.amax[first + r * wide], top);
      above = top;
    }
    if (block_rows > 1) atomicMax(&s.amax[first], above);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < blocks; i += THREADS) {
    float scale = scale_of({0.0, (double)as_float(s.amax[i]), false}, c.scale, tensor).stored;
    scale = __double2float_rn(__dmul_rn((double)scale, (double)tensor.decode));
    s.factor[i] = SCALED == 1 ? __fdiv_rn(1.0f, scale) : scale;  // from 2^-127 to 2^127
    if (scale > as_float(0x5F000000u)) s.slow = 1;               // 2^63
  }
  __syncthreads();
}
#endif

struct Found {
  u32 kept, saturated, nonfinite, top;
  double signal, noise;
};

// An element that is finite, and its value.
template <bool Any>
DEVICE void look(Shared& s, Found& f, float x, float q, float factor, float low, float high) {
  u32 magnitude = as_bits(x) & MAGNITUDE;
  f.kept += q != 0.0f;  // NaN is kept
  double wide = x, error = __fsub_rn(x, q);
  f.signal = __fma_rn(wide, wide, f.signal);
  f.noise = __fma_rn(error, error, f.noise);
  Any ? tally_any(s, 0, magnitude) : tally(s, 0, magnitude);
#if SCALED
  x = SCALED == 1 ? __fmul_rn(x, factor) : __fdiv_rn(x, factor);
  magnitude = as_bits(x) & MAGNITUDE;
  Any ? tally_any(s, 1, magnitude) : tally(s, 1, magnitude);
#endif
  f.saturated += x > high || x < low;
}

// Eight neighbours; x, q: where they lie, for the rare case of numbers that are not normal; step: from one element's
// factor to the next.
DEVICE void look_at_eight(
    Shared& s, Found& f, const Elements& v, const Values& to, const void* x, const void* q, u64 at,
    const float* factors, u32 step, bool slow, float low, float high) {
  u32 top = 0, least = ~0u;
  UNROLLED for (int i = 0; i < 8; ++i) {
    u32 magnitude = as_bits(v.get(i)) & MAGNITUDE;
    top = max(top, magnitude), least = min(least, magnitude - 1);  // zero becomes the largest
  }
  if (top < FLOAT_EXPONENT && least >= SMALL - 1 && !slow) {
    f.top = max(f.top, top);
    UNROLLED for (int i = 0; i < 8; ++i) {
      look<false>(s, f, v.get(i), to.get(i), SCALED ? factors[i * step] : 1.0f, low, high);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    float number = loaded<INPUT>(((const Stored<INPUT>::type*)x)[at + i]);
    float value = loaded<QUANTISED>(((const Stored<QUANTISED>::type*)q)[at + i]);
    u32 magnitude = as_bits(number) & MAGNITUDE;
    bool finite = magnitude < FLOAT_EXPONENT;
    if (finite) f.top = max(f.top, magnitude);
    f.nonfinite += !finite;
    look<true>(s, f, finite ? number : 0.0f, finite ? value : 0.0f, SCALED ? factors[i * step] : 1.0f, low, high);
  }
}

// out [8 + 2 * 321]: elements, nonzero, underflowed, saturated, nonfinite, amax, signal, noise, and exponents from
// -160. The last block of threads writes it, all of its threads at once: one alone would wait for memory a thousand
// times.
DEVICE void finish(Shared& s, double* out, Counters* counters, const double* sums, u64 elements) {
  u64 nonzero = 0;
  double signal = 0.0, noise = 0.0;
  for (u32 i = threadIdx.x; i < 2 * BINS; i += THREADS) {
    u32 which = i / BINS, bin = i % BINS;
    u64 count = atomicAdd(&counters->exponents[SCALED ? which : 0][bin], 0);
    out[8 + which * 321 + 11 + bin] = (double)count;
    if (which == 0) nonzero += count;
  }
  for (u32 b = threadIdx.x; b < gridDim.x; b += THREADS) {
    signal = __dadd_rn(signal, __ldcg(sums + 2 * b)), noise = __dadd_rn(noise, __ldcg(sums + 2 * b + 1));
  }
  atomicAdd(&s.nonzero, nonzero);
  put_sums(s, signal, noise);
  __syncthreads();
  if (threadIdx.x) return;
  take_sums(s, signal, noise);
  u64 kept = atomicAdd(&counters->kept, 0);
  nonzero = s.nonzero;
  out[0] = (double)elements, out[1] = (double)nonzero, out[2] = nonzero > kept ? (double)(nonzero - kept) : 0.0;
  out[3] = (double)atomicAdd(&counters->saturated, 0), out[4] = (double)atomicAdd(&counters->nonfinite, 0);
  out[5] = (double)as_float((u32)atomicAdd(&counters->top, 0)), out[6] = signal;
  out[7] = noise == noise ? noise : __longlong_as_double(0x7FF0000000000000ll);
}

// x, q: [rows, columns], columns a multiple of eight. tensor: bits of the largest finite magnitude where the format has
// a scale of the tensor. sums [2 * blocks of threads]: each adds up the tiles that it takes, in their order.
KERNEL __launch_bounds__(THREADS) count_cast(
    const void* x, const void* q, double* out, Counters* counters, double* sums, const u32* tensor, u64 rows,
    u64 columns, u32 across, u32 block_rows, u32 block_columns, float low, float high
#if SCALED
    , const __grid_constant__ Cast c
#endif
) {
  __shared__ Shared s;
  // 1. counters in shared memory
  for (u32 i = threadIdx.x; i < WARPS * TABLES * 256; i += THREADS) (&s.fields[0][0][0])[i] = 0;
  for (u32 i = threadIdx.x; i < TABLES * 23; i += THREADS) (&s.small[0][0])[i] = 0;
  if (threadIdx.x == 0) s.kept = s.saturated = s.nonfinite = s.top = s.last = 0, s.nonzero = 0;
  __syncthreads();
  // 2. the tiles of this block of threads: scales of blocks, then elements
  u32 high_tile = ROWS * THREADS / across, row = threadIdx.x / across * ROWS, column = threadIdx.x % across * 8;
  u64 wide_tiles = (columns + across * 8 - 1) / (across * 8), tiles = (rows + high_tile - 1) / high_tile * wide_tiles;
#if SCALED
  u32 wide = across * 8 / block_columns, blocks = high_tile / block_rows * wide;
  TensorScale whole = {1.0f, 1.0f};
  if (c.scale.two_level) whole = te_tensor(as_float(tensor[0]), c.scale);
#endif
  Found f = {};
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    u64 top = tile / wide_tiles * high_tile + row, left = tile % wide_tiles * (across * 8) + column;
    Elements v[ROWS];
    Values to[ROWS];
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      v[r].clear(), to[r].clear();
      if (top + r < rows && left < columns) {
        v[r].template load<false>((const Stored<INPUT>::type*)x + (top + r) * columns + left);
        to[r].load((const Stored<QUANTISED>::type*)q + (top + r) * columns + left);
      }
    }
#if SCALED
    u32 first = row / block_rows * wide + column / block_columns;
    find_scales(s, v, first, block_rows, block_columns, blocks, wide, whole, c);
#endif
    UNROLLED for (int r = 0; r < ROWS; ++r) {
      if (top + r >= rows || left >= columns) continue;
      const float* factors = nullptr;
      bool slow = false;
#if SCALED
      factors = &s.factor[block_rows == 1 ? first + r * wide : first], slow = s.slow;
#endif
      u64 at = (top + r) * columns + left;
      look_at_eight(s, f, v[r], to[r], x, q, at, factors, block_columns == 1, slow, low, high);
    }
  }

  // 3. its sums, joined to those of all blocks
  put_sums(s, f.signal, f.noise);
  atomicAdd(&s.kept, f.kept), atomicAdd(&s.saturated, f.saturated), atomicAdd(&s.nonfinite, f.nonfinite);
  atomicMax(&s.top, f.top);
  __syncthreads();
  for (u32 i = threadIdx.x; i < TABLES * BINS; i += THREADS) {
    u32 which = i / BINS, bin = i % BINS, count = 0;
    if (bin < 23) count = s.small[which][bin];
    for (u32 w = 0; bin >= 23 && w < WARPS; ++w) count += s.fields[w][which][bin - 22];
    if (count) atomicAdd(&counters->exponents[which][bin], (u64)count);
  }
  if (threadIdx.x == 0) {
    take_sums(s, sums[2 * blockIdx.x], sums[2 * blockIdx.x + 1]);
    atomicAdd(&counters->kept, (u64)s.kept), atomicAdd(&counters->saturated, (u64)s.saturated);
    atomicAdd(&counters->nonfinite, (u64)s.nonfinite), atomicMax(&counters->top, (u64)s.top);
  }
  __threadfence();  // what this block has written is seen before it says that it is done
  __syncthreads();
  // 4. the last block writes the result
  if (threadIdx.x == 0) s.last = atomicAdd(&counters->done, (u64)1) == gridDim.x - 1;
  __syncthreads();
  if (!s.last) return;
  __threadfence();
  finish(s, out, counters, sums, rows * columns);
}
