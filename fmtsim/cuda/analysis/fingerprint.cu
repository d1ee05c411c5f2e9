// SPDX-License-Identifier: Apache-2.0
// Fingerprints of tensors (fmtsim/lab/analysis/fingerprint.py) in one read: runs of words times odd numbers, summed
// modulo 2^64; the sums mixed, times odd numbers of their places, added; and the largest magnitude. Integers wrap: the
// order of additions does not matter, so blocks of threads add with atomics.
//
// Macros: WORD: bits of a word, 8, 16 or 32. VECTOR: words of a load, 4 or 1. LARGEST: bits of the elements whose
// magnitudes a word holds, 32 or 16; 0 for none.
#include "vectors.cuh"

#define ROWS 4        // of a team of threads, which share the numbers that they are multiplied with
#define RUN 65536     // words
#define THREADS 256
#define WARPS (THREADS / 32)

#if WORD == 32
typedef i32 Number;
#elif WORD == 16
typedef i16 Number;
#else
typedef i8 Number;
#endif

struct Vector { i32 words[VECTOR]; };

DEVICE Vector load_vector_at(const Number* from) {
  Vector v;
#if VECTOR == 4
  Words4 w = load_words<false>(from);
  v.words[0] = (i32)w.x, v.words[1] = (i32)w.y, v.words[2] = (i32)w.z, v.words[3] = (i32)w.w;
#else
  v.words[0] = (i32)*from;
#endif
  return v;
}

// A number modulo 2^64 as low + 2^32 high with a signed low half, so that a product with a word takes two instructions.
struct Factor { i32 low; u32 high; };

DEVICE Factor factor_of(i64 number) {
  i32 low = (i32)number;
  return {low, (u32)(number >> 32) + ((u32)low >> 31)};
}

// The finaliser of splitmix64.
DEVICE u64 mixed(u64 z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

DEVICE u64 times_place(u64 number, u64 place) { return number * (mixed((place + 1) * 0x9E3779B97F4A7C15ull) | 1); }

DEVICE u64 sum_of_warp(u64 x) {
  UNROLLED for (int flip = 16; flip; flip /= 2) x += __shfl_xor_sync(~0u, x, flip);
  return x;
}

DEVICE u32 magnitudes(i32 word) {
  if (LARGEST == 32) return (u32)word & MAGNITUDE;
  return (u32)word & (WORD == 32 ? 0x7FFF7FFFu : 0x7FFFu);
}

DEVICE u32 larger(u32 a, u32 b) { return LARGEST == 32 ? max(a, b) : __vmaxu2(a, b); }

// found starts at zeros: the hash, the bits of the largest magnitude, the hashes of members, each of as many sums.
// A team of 32 or all threads sums a run in each of ROWS rows.
KERNEL __launch_bounds__(THREADS) fingerprint(
    const Number* x, u64* results, const i64* multipliers, u64 rows, u64 width, u64 runs, u64 sums_of_member, u32 team) {
  u32 teams = THREADS / team, lane = threadIdx.x % team;
  u64 begun = blockIdx.x * (u64)teams, item = begun + threadIdx.x / team;
  u64 run = runs == 1 ? 0 : item % runs, first = (runs == 1 ? item : item / runs) * ROWS;
  u64 start = run * RUN, count = min((u64)RUN, width - start);
  const Number* from = x + first * width + start;
  // 1. sums of a run of each row: words times multipliers, modulo 2^64, in halves
  u64 total[ROWS] = {};
  u32 upper[ROWS] = {}, top = 0;
  if (first < rows) {
    for (u64 at = (u64)lane * VECTOR; at < count; at += (u64)team * VECTOR) {
      Vector v[ROWS];
      UNROLLED for (int r = 0; r < ROWS; ++r) {
        if (first + r < rows) v[r] = load_vector_at(from + r * width + at);
        else
          for (int i = 0; i < VECTOR; ++i) v[r].words[i] = 0;
      }
      UNROLLED for (int i = 0; i < VECTOR; ++i) {
        Factor f = factor_of(multipliers[at + i]);
        UNROLLED for (int r = 0; r < ROWS; ++r) {
          total[r] += (u64)((i64)v[r].words[i] * f.low);
          upper[r] += (u32)v[r].words[i] * f.high;
          if (LARGEST) top = larger(top, magnitudes(v[r].words[i]));
        }
      }
    }
  }
  // 2. over a warp, then over a team of warps
  __shared__ u64 parts[WARPS][ROWS];
  __shared__ u32 tops[WARPS];
  u32 warp = threadIdx.x / 32;
  top = LARGEST == 32 ? top : max(top & 0xFFFF, top >> 16);
  top = __reduce_max_sync(~0u, top);
  UNROLLED for (int r = 0; r < ROWS; ++r) {
    u64 sum = sum_of_warp(total[r] + ((u64)upper[r] << 32));
    if (threadIdx.x % 32 == 0) parts[warp][r] = sum, tops[warp] = top;
  }
  __syncthreads();
  if (warp) return;

  // A thread each of the first warp: a run of a row.
  u32 own = threadIdx.x / ROWS, r = threadIdx.x % ROWS;
  item = begun + own;
  run = runs == 1 ? 0 : item % runs;
  u64 row = (runs == 1 ? item : item / runs) * ROWS + r, sum = 0;
  bool there = own < teams && row < rows;
  for (u32 w = 0; w < team / 32; ++w) sum += there ? parts[own * (team / 32) + w][r] : 0;
  sum = mixed(sum);
  u64 place = row * runs + run, member = there ? place / sums_of_member : 0;
  u64 hash = sum_of_warp(there ? times_place(sum, place) : 0);
  u64 share = there ? times_place(sum, place - member * sums_of_member) : 0;
  u64 common = __shfl_sync(~0u, member, 0);  // thread 0 has a row wherever there is a block
  u64 whole = sum_of_warp(there && member == common ? share : 0);
  if (there && member != common) atomicAdd(results + 2 + member, share);
  if (threadIdx.x == 0) {
    for (u32 w = 0; w < WARPS; ++w) top = max(top, tops[w]);
    atomicAdd(results, hash);
    atomicAdd(results + 2 + common, whole);
    if (LARGEST) atomicMax(results + 1, (u64)top);
  }
}
