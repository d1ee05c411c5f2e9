// Counts of what a cast lost, as the kernel of rows (block_rows.cu) goes through its vectors.
#pragma once
#include "block_pairs.cuh"

#ifndef COUNTS
#define COUNTS 0
#endif

typedef Packed<VECTOR, INPUT_BITS> Input;
typedef Packed<VECTOR, OUTPUT_BITS> Output;

// What statistics count (fmtsim/analysis/stats.py): finite elements that are not zero, finite elements whose value is
// not zero, finite elements beyond the largest value under their scale, and elements that are not finite. With COUNTS
// the cast of values counts them as it goes, into one of many slots: few atomics meet at one address.
struct Counts {
  u32 nonzero, kept, saturated, strange, amax;
  u32 nonzero_pairs, kept_pairs, saturated_pairs;  // of a thread, in halves
};
#define SLOTS 256

struct alignas(16) Slot {
  u64 nonzero, kept, saturated, strange, amax;
};

DEVICE void count(Counts& counts, float x, u32 value, u32 over, u32 over_negative, float scale) {
  u32 magnitude = as_bits(x) & MAGNITUDE;
#if RULE == 4
  float scaled = __fdiv_rn(x, scale);
  u32 seen = as_bits(scaled) & MAGNITUDE;
#else
  u32 seen = magnitude;
#endif
  counts.nonzero += magnitude != 0;
  counts.kept += (value & (OUTPUT == 0 ? MAGNITUDE : 0x7FFFu)) != 0;
  counts.saturated += as_float(seen) > as_float(as_bits(x) & ~MAGNITUDE ? over_negative : over);  // 0 / 0 is not
}

// Count a vector of a block whose amax is known and finite.
DEVICE void count_vector(
    Counts& counts, const Input& in, const Output& y, u32 amax, const FastBlock& block, float decode) {
  counts.amax = max(counts.amax, amax);
#if COUNTS && INPUT == 1 && OUTPUT == 1 && RULE != 4
  constexpr bool SYMMETRIC = ELEMENT_OVER == ELEMENT_OVER_NEGATIVE;
#pragma unroll
  for (int i = 0; i < (SYMMETRIC ? Input::WORDS : 0); ++i) {  // a minimum with one says whether a half is zero
    u32 ones = 0x00010001u, magnitudes = in.words[i] & 0x7FFF7FFFu;
    u32 over = __byte_perm(ELEMENT_OVER + (block.limit - ELEMENT_LIMIT), 0, 0x3232);
    counts.nonzero_pairs += __vminu2(magnitudes, ones);
    counts.kept_pairs += __vminu2(y.words[i] & 0x7FFF7FFFu, ones);
    counts.saturated_pairs += __vminu2(__vmaxu2(magnitudes, over) - over, ones);
  }
  if (SYMMETRIC) return;
#endif
#if COUNTS
  u32 shift = block.limit - ELEMENT_LIMIT;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i)
    count(counts, input_value(in.get(i)), y.get(i), ELEMENT_OVER + shift, ELEMENT_OVER_NEGATIVE + shift,
          __fmul_rn(block.scale, decode));
#endif
}

DEVICE u32 sum_of_halves(u32 pairs) { return (pairs & 0xFFFF) + (pairs >> 16); }

DEVICE void add_counts(Slot* slot, const Counts& counts) {
  if (counts.nonzero) atomicAdd(&slot->nonzero, (u64)counts.nonzero);
  if (counts.kept) atomicAdd(&slot->kept, (u64)counts.kept);
  if (counts.saturated) atomicAdd(&slot->saturated, (u64)counts.saturated);
  if (counts.strange) atomicAdd(&slot->strange, (u64)counts.strange);
  if (counts.amax) atomicMax(&slot->amax, (u64)counts.amax);
}

// Add up a warp's counts, all of whose lanes come here. Warps do not wait for each other: a block of threads that did
// would hold its place on the multiprocessor for longer. Elements that are not finite are counted where they are cast.
DEVICE void add_warp_counts(Slot* slots, const Counts& counts) {
  u32 lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  u32 nonzero = counts.nonzero + sum_of_halves(counts.nonzero_pairs);
  u32 kept = counts.kept + sum_of_halves(counts.kept_pairs);
  u32 both = __reduce_add_sync(~0u, nonzero | kept << 16);  // a warp holds 1024 elements at most
  u32 saturated = __reduce_add_sync(~0u, counts.saturated + sum_of_halves(counts.saturated_pairs));
  u32 amax = __reduce_max_sync(~0u, counts.amax);
  Slot* slot = slots + warp % SLOTS;
  u64* place = lane == 0 ? &slot->nonzero : lane == 1 ? &slot->kept : &slot->saturated;
  u32 found = lane == 0 ? both & 0xFFFF : lane == 1 ? both >> 16 : saturated;
  if (lane < 3 && found) atomicAdd(place, (u64)found);
  if (lane == 3 && amax) atomicMax(&slot->amax, (u64)amax);
}
