// Blocks whose rows are runs of memory: blocks along the last dimension in one pass, and blocks of any shape whose
// amaxes block_amax.cu found before. A thread holds four vectors of VECTOR elements, in one of two layouts:
//
//   STRIDED 0   neighbouring lanes hold neighbouring vectors, and the next vector of a lane lies a warp further.
//   STRIDED 1   64 elements belong to 16 / VECTOR lanes, and a lane holds elements at distance 16 (here VECTOR = 8):
//                 lane 0:  0 ... 7   16 ... 23   32 ... 39   48 ... 55
//                 lane 1:  8 ... 15  24 ... 31   40 ... 47   56 ... 63
//               so that blocks need fewer shuffles, a lane fewer scales, and one Philox call gives the words of four
//               elements of a lane (docs/semantics.md, section 9).
#include "block.cuh"
#include "block_exact.cuh"

#define VECTORS 4
#ifndef COUNTS
#define COUNTS 0
#endif
#define LANES (16 / VECTOR)

// RUN is the elements of a block, a power of two from 16 on that fits a warp, or 0 where `given` holds amaxes and flags.
#if RUN == 0
#define BLOCKS 4
#define SPAN 1
#elif STRIDED
#define BLOCKS (RUN >= 64 ? 1 : 64 / RUN)
#define SPAN (RUN >= 64 ? LANES * (RUN / 64) : LANES)
#else
#define BLOCKS 4
#define SPAN (RUN / VECTOR)
#endif
#define VECTORS_PER_BLOCK (VECTORS / BLOCKS)
#define DISTANCE (STRIDED ? 16 : 32 * VECTOR)  // between the vectors of a lane

typedef Packed<VECTOR, INPUT_BITS> Input;
typedef Packed<VECTOR, OUTPUT_BITS> Output;

// How pieces of rows, each the columns of one block, find their blocks: piece q of rows of `across` pieces belongs to
// block (q / (across * outer)) * across + q % across. Sixteens are 16 elements.
struct alignas(16) Pieces {
  u32 sixteens, across, outer, unused;
};

DEVICE u32 block_of(u64 element, const Pieces& p, bool& opens) {
  u32 sixteen = (u32)(element / 16), piece = sixteen / p.sixteens;
  opens = sixteen == piece * p.sixteens && element % 16 == 0;
  if (p.outer == 1) return piece;
  u32 row = piece / p.across, column = piece - row * p.across, down = row / p.outer;
  opens &= row == down * p.outer;
  return down * p.across + column;
}

// What statistics count (fmtsim/analysis/stats.py): finite elements that are not zero, finite elements whose value is
// not zero, finite elements beyond the largest value under their scale, and elements that are not finite. With COUNTS
// the cast of values counts them as it goes, into one of many slots: few atomics meet at one address.
struct Counts {
  u32 nonzero, kept, saturated, strange, amax;
};
#define SLOTS 64

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
  counts.amax = max(counts.amax, magnitude);
  counts.nonzero += magnitude != 0;
  counts.kept += (value & (OUTPUT == 0 ? MAGNITUDE : 0x7FFFu)) != 0;
  counts.saturated += as_float(seen) > as_float(as_bits(x) & ~MAGNITUDE ? over_negative : over);  // 0 / 0 is not
}

DEVICE void add_counts(Slot* slot, const Counts& counts) {
  if (counts.nonzero) atomicAdd(&slot->nonzero, (u64)counts.nonzero);
  if (counts.kept) atomicAdd(&slot->kept, (u64)counts.kept);
  if (counts.saturated) atomicAdd(&slot->saturated, (u64)counts.saturated);
  if (counts.strange) atomicAdd(&slot->strange, (u64)counts.strange);
  if (counts.amax) atomicMax(&slot->amax, (u64)counts.amax);
}

// Add up a block of threads' counts. All of its threads have to come here.
DEVICE void add_all_counts(Slot* slots, Counts counts) {
  __shared__ Counts warps[8];
  counts = {__reduce_add_sync(~0u, counts.nonzero), __reduce_add_sync(~0u, counts.kept),
            __reduce_add_sync(~0u, counts.saturated), __reduce_add_sync(~0u, counts.strange),
            __reduce_max_sync(~0u, counts.amax)};
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = counts;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (u32 w = 1; w < blockDim.x / 32; ++w)
    counts = {counts.nonzero + warps[w].nonzero, counts.kept + warps[w].kept,
              counts.saturated + warps[w].saturated, counts.strange + warps[w].strange, max(counts.amax, warps[w].amax)};
  add_counts(slots + blockIdx.x % SLOTS, counts);
}

// Cast a lane's part of a block the exact way, from memory; return the block's scale. A call, and one that takes no
// vectors, so that the common way keeps its registers. All lanes of a warp make it together, those that have nothing to
// do with `last` = `first`: a call of some lanes alone was seen to lose uniform registers of the others.
__device__ __noinline__ float cast_exactly(
    const void* x, void* out, u64 first, u64 last, u32 amax, bool has_nan, TensorScale tensor, const Cast& c,
    Slot* slot) {
  BlockScale s = scale_of({0.0, (double)as_float(amax), has_nan}, c.scale, tensor);
  bool spoiled = has_nan && !c.scale.element_has_nan;
#pragma unroll 1
  for (u64 place = first; place < last; place += DISTANCE) {
    Input in = load_vector<VECTOR, INPUT_BITS>(x, place);
    Output y;
    y.clear();
#pragma unroll 1
    for (int i = 0; i < VECTOR; ++i) {
      u32 bits = in.get(i);
      float decode = WITHOUT_TENSOR_SCALE ? 1.0f : tensor.decode;
      double number = load_element(&bits, 0, INPUT);
      ExactElement e = exact_element(number, false, place + i, s, spoiled, decode, c, c.draw);
      y.put(i, OUTPUT <= 1 ? narrowed(e.value, OUTPUT) : (u32)e.code);
#if COUNTS
      Counts one = {0, 0, 0, 0, 0};
      if (number - number != 0.0) {
        one.strange = 1;
      } else {
        // the limits are compared with x / scale, as the definition has it
        float scaled = __fdiv_rn((float)number, RULE == 4 ? __fmul_rn(s.scale, tensor.decode) : s.scale);
        count(one, (float)number, y.get(i), ~0u, ~0u, 1.0f);
        one.saturated = fabsf(scaled) > as_float(scaled < 0.0f ? ELEMENT_OVER_NEGATIVE : ELEMENT_OVER);
      }
      add_counts(slot, one);
#endif
    }
    store_vector<VECTOR, OUTPUT_BITS>(out, place, y);
  }
  return spoiled ? as_float(0x7FC00000) : s.scale;
}

// What was found of a block's magnitudes.
struct Seen {
  u32 amax;
  bool strange, has_nan;
};

// Find the magnitudes of the block that a lane's vectors in[first ...] belong to. All lanes of a warp look together.
DEVICE Seen look(const Input (&in)[VECTORS], int first) {
  u32 top = 0;
#pragma unroll
  for (int v = 0; v < VECTORS_PER_BLOCK; ++v) top = raw_larger(top, raw_amax<VECTOR>(in[first + v]));
#pragma unroll
  for (int flip = 1; flip < SPAN; flip *= 2) top = raw_larger(top, __shfl_xor_sync(~0u, top, flip));
  Seen seen = {amax_of_raw(top), false, false};
  seen.strange = seen.amax >= FLOAT_EXPONENT;
  if (__any_sync(~0u, seen.strange)) {  // look again, at finite elements alone
    Seen again = {0, true, false};
#pragma unroll
    for (int v = 0; v < VECTORS_PER_BLOCK; ++v) again.amax = max(again.amax, finite_amax<VECTOR>(in[first + v], again.has_nan));
#pragma unroll 1
    for (int flip = 1; flip < SPAN; flip *= 2) {
      again.amax = max(again.amax, __shfl_xor_sync(~0u, again.amax, flip));
      again.has_nan |= (bool)__shfl_xor_sync(~0u, (i32)again.has_nan, flip);
    }
    if (seen.strange) seen = again;
  }
  return seen;
}

// Find the scales of a lane's blocks. Divisions are dear: the lanes that share blocks share those, too.
DEVICE void find_scales(const Seen (&seen)[BLOCKS], FastBlock (&block)[BLOCKS], TensorScale step) {
#if RULE == 4 && SPAN > 1
  constexpr int TURNS = BLOCKS < SPAN ? BLOCKS : SPAN;  // lanes that take one of as many blocks each
  u32 turn = threadIdx.x % TURNS;
#pragma unroll
  for (int first = 0; first < BLOCKS; first += TURNS) {
    u32 amax = seen[first].amax;
#pragma unroll
    for (int k = 1; k < TURNS; ++k) amax = turn == k ? seen[first + k].amax : amax;
    FastBlock mine = fast_block(amax, step);
#pragma unroll
    for (int k = 0; k < TURNS; ++k) {
      block[first + k] = mine;
      block[first + k].factor = __shfl_sync(~0u, mine.factor, k, TURNS);
      block[first + k].scale = block[first + k].stored = __shfl_sync(~0u, mine.scale, k, TURNS);
      block[first + k].refused = seen[first + k].amax >= FLOAT_EXPONENT;
    }
  }
#else
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) block[b] = fast_block(seen[b].amax, step);
#endif
}

KERNEL __launch_bounds__(256) cast_runs(
    const void* x, void* out, void* scales, const u32* given, const u32* tensor, float* tensor_scale, u64 total,
    const __grid_constant__ Pieces pieces, u32 reversed, const __grid_constant__ Cast c,
    Slot* slots) {
  u64 thread = (u64)(reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * blockDim.x + threadIdx.x;
  u64 base = STRIDED ? thread / LANES * 64 + thread % LANES * VECTOR
                     : thread / 32 * (32 * VECTOR * VECTORS) + thread % 32 * VECTOR;
  Input in[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    in[v].clear();
    if (base + DISTANCE * v < total) in[v] = load_vector<VECTOR, INPUT_BITS>(x, base + DISTANCE * v);
  }
  TensorScale scale = {1.0f, 1.0f}, step = {1.0f, 1.0f};
#if TWO_LEVEL
  scale = tensor_scale_of(as_float(tensor[0]), c.scale);
  step = {at_most_float_max(__fmul_rn(scale.encode, c.scale.reciprocal_max)), scale.decode};
  if (tensor_scale != nullptr && thread == 0) *tensor_scale = scale.decode;
#endif

  Seen seen[BLOCKS];
  FastBlock block[BLOCKS];
  bool exactly[BLOCKS], any = false;
#if RUN == 0
  u32 number[BLOCKS];
  bool opens[BLOCKS];
#endif
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    u64 first = base + DISTANCE * (b * VECTORS_PER_BLOCK);
#if RUN == 0
    number[b] = block_of(min(first, total - 1), pieces, opens[b]);
    if (b > 0 && number[b] == number[b - 1]) {  // most often: the vectors of a lane share a scale
      seen[b] = seen[b - 1], block[b] = block[b - 1];
    } else {
      u32 flags = given[2 * number[b] + 1];
      seen[b] = {given[2 * number[b]], flags != 0, (flags & 1) != 0};
      block[b] = fast_block(seen[b].amax, step);
    }
#else
    seen[b] = look(in, b * VECTORS_PER_BLOCK);
#endif
  }
#if RUN != 0
  find_scales(seen, block, step);
#endif
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    u64 first = base + DISTANCE * (b * VECTORS_PER_BLOCK);
    exactly[b] = first < total && (block[b].refused || seen[b].strange);
    any |= exactly[b];
  }

  u32 words[VECTORS][VECTOR];
#if STOCHASTIC
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    Words4 four = philox(counter_of(base + i), c.draw);
    words[0][i] = four.x, words[1][i] = four.y, words[2][i] = four.z, words[3][i] = four.w;
  }
#endif
#if COUNTS
  Counts counts = {0, 0, 0, 0, 0};
#endif
  Output y[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const FastBlock& own = block[v / VECTORS_PER_BLOCK];
#if OUTPUT >= 2
    y[v] = fast_codes<VECTOR>(in[v], words[v], own);
#else
    y[v].clear();
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
      y[v].put(i, as_bits(fast_value(input_value(in[v].get(i)), words[v][i], own, scale.decode)) >> (32 - OUTPUT_BITS));
#endif
#if COUNTS
    if (!exactly[v / VECTORS_PER_BLOCK] && base + DISTANCE * v < total) {
      u32 shift = own.limit - ELEMENT_LIMIT;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        count(counts, input_value(in[v].get(i)), y[v].get(i), ELEMENT_OVER + shift, ELEMENT_OVER_NEGATIVE + shift,
              __fmul_rn(own.scale, scale.decode));
    }
#endif
  }
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
    if (base + DISTANCE * v < total && !exactly[v / VECTORS_PER_BLOCK])
      store_vector<VECTOR, OUTPUT_BITS>(out, base + DISTANCE * v, y[v]);

  if (__any_sync(~0u, any)) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      u64 first = base + DISTANCE * (b * VECTORS_PER_BLOCK);
      u64 last = exactly[b] ? min(first + DISTANCE * VECTORS_PER_BLOCK, total) : first;
      float stored = cast_exactly(x, out, first, last, seen[b].amax, seen[b].has_nan, scale, c, slots + blockIdx.x % SLOTS);
      if (exactly[b]) block[b].stored = stored;
    }
  }
#if OUTPUT >= 2
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    u64 first = base + DISTANCE * (b * VECTORS_PER_BLOCK);
#if RUN == 0
    if (first < total && opens[b]) store_scale(scales, number[b], block[b].stored);
#else
    if (first < total && thread % SPAN == 0) store_scale(scales, first / RUN, block[b].stored);
#endif
  }
#endif
#if COUNTS
  add_all_counts(slots, counts);
#endif
}
