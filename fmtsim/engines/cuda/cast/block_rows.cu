// SPDX-License-Identifier: Apache-2.0
// Blocks whose rows are runs of memory: blocks along the last dimension in one pass, and blocks of any shape whose
// amaxes statistic.cu found before. In LAYOUT 2 (runs.cuh) results are stored in one piece; it serves codes alone: a block
// that is cast the exact way is written twice.
#define VECTORS (LAYOUT == 2 ? 32 / VECTOR : 4)
#define BLOCKS_OF_LANE 4  // `given` holds their amaxes, flags
#include "runs.cuh"
#include "block_codes.cuh"

typedef Vectors<INPUT, VECTOR> Input;
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

DEVICE void find_blocks(const BlockAmax (&found)[BLOCKS], FastBlock (&block)[BLOCKS], TensorScale tensor) {
#if RULE == 4 && SPAN > 1
  u32 amaxes[BLOCKS];
  Scale scale[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) amaxes[b] = found[b].amax;
  find_scales<false>(scale, amaxes, [&](u32 amax) { return scale_of_block(amax, tensor); });
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) block[b] = under_scale(scale[b], found[b].amax);
#else
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) block[b] = fast_block(found[b].amax, tensor);
#endif
}

// Codes of a vector before they are packed.
struct Parts { u32 fours[VECTOR / 4]; };

// Cast elements `first` ... first + 3 of a vector: codes into parts, values into y.
DEVICE void cast_four(
    Parts& parts, Output& y, const Input& in, int first, const u32 (&rests)[4], const FastBlock& block, float decode) {
#if OUTPUT >= 2
  parts.fours[first / 4] = four_codes<VECTOR>(in, rests, first, block);
#elif IN_BFLOAT16 && OUTPUT == 1
  y.words[first / 2] = value_pair(in.words[first / 2], block);
  y.words[first / 2 + 1] = value_pair(in.words[first / 2 + 1], block);
#else
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    u32 low = as_bits(fast_value(in.get(first + i), rests[i], block, decode));
    u32 high = as_bits(fast_value(in.get(first + i + 1), rests[i + 1], block, decode));
    if (OUTPUT == 1) y.words[(first + i) / 2] = __byte_perm(low, high, 0x7632);
    else y.words[first + i] = low, y.words[first + i + 1] = high;
  }
#endif
}

#if LAYOUT == 2
// Vectors of whole words, one after the other.
DEVICE Packed<PER_LANE, OUTPUT_BITS> joined(const Output (&parts)[VECTORS]) {
  Packed<PER_LANE, OUTPUT_BITS> all;
#pragma unroll
  for (int i = 0; i < all.LENGTH; ++i) all.words[i] = parts[i / Output::LENGTH].words[i % Output::LENGTH];
  return all;
}
#endif

// Whether two lanes that hold 64 codes of four bits exchange some, so that each writes 16 bytes. A block that is cast the
// exact way is written twice then, too.
#define EXCHANGES (LAYOUT == 1 && LANES == 2 && OUTPUT == 3 && CODE_BITS == 4)

#if EXCHANGES
DEVICE void store_exchanged(void* out, u64 base, const Output (&y)[VECTORS], bool there) {
  bool odd = threadIdx.x % 2;
  u32 first = __shfl_xor_sync(~0u, odd ? y[0].words[0] : y[2].words[0], 1);
  u32 second = __shfl_xor_sync(~0u, odd ? y[1].words[0] : y[3].words[0], 1);
  u32 own = odd ? y[2].words[0] : y[0].words[0], next = odd ? y[3].words[0] : y[1].words[0];
  Packed<32, 4> all = {odd ? first : own, odd ? own : first, odd ? second : next, odd ? next : second};
  if (there) store_vector<32, 4>(out, base / 64 * 64 + odd * 32, all);
}
#endif

// Four blocks of threads a multiprocessor: 64 registers. Left to itself, the assembler takes 48 for some formats, and
// keeps in memory what it then has no room for. 32 float32 numbers beside random words need more.
#define RESIDENT (STOCHASTIC && PER_LANE * INPUT_BITS >= 1024 ? 3 : 4)
KERNEL __launch_bounds__(256, RESIDENT) cast_runs(
    const void* x, void* out, void* scales, const u32* given, const u32* tensor, float* tensor_scale, u64 total,
    const __grid_constant__ Pieces pieces, u32 reversed, const __grid_constant__ Cast c) {
  u32 block_index = reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  u64 thread = (u64)block_index * blockDim.x + threadIdx.x;
  u64 base = first_of_lane(thread);
  Input in[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    in[v].clear();
    u64 first = base + DISTANCE * v;
    if ((LAYOUT == 2 ? base : first) < total) in[v] = Input{load_vector<VECTOR, INPUT_BITS>(x, first)};
  }
  TensorScale scale = {1.0f, 1.0f};
#if TWO_LEVEL
  scale = te_tensor(as_float(tensor[0]), c.scale);
  if (tensor_scale != nullptr && thread == 0) *tensor_scale = scale.decode;
#endif

  BlockAmax found[BLOCKS];
  FastBlock block[BLOCKS];
  bool exactly[BLOCKS], any = false;
#if RUN == 0
  u32 number[BLOCKS];
  bool opens[BLOCKS];
#endif
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    u64 first = base + DISTANCE * (b * EACH);
#if RUN == 0
    number[b] = block_of(min(first, total - 1), pieces, opens[b]);
    if (b > 0 && number[b] == number[b - 1]) {  // most often: the vectors of a lane share a scale
      found[b] = found[b - 1], block[b] = block[b - 1];
    } else {
      u32 flags = given[2 * number[b] + 1];
      found[b] = {given[2 * number[b]], flags != 0, (flags & 1) != 0};
      block[b] = fast_block(found[b].amax, scale);
    }
#else
    found[b] = find_amax<SPAN, EACH>(in + b * EACH);
#endif
  }
#if RUN != 0
  find_blocks(found, block, scale);
#endif
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    u64 first = base + DISTANCE * (b * EACH);
    exactly[b] = first < total && (block[b].refused || found[b].nonfinite);
    any |= exactly[b];
  }

  Output y[VECTORS];
  Parts parts[VECTORS];
#if STOCHASTIC
  u64 counter = counter_of((u64)block_index * (256 * PER_LANE)) >> 32 << 32 | (u32)counter_of(base);
#pragma unroll
  for (int first = 0; first < VECTOR; first += 4) {  // four at a time: all words together would not fit the registers
    u32 rests[VECTORS][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Words4 four = philox<true>(counter | (u32)(first + i), c.draw);
      rests[0][i] = four.x, rests[1][i] = four.y, rests[2][i] = four.z, rests[3][i] = four.w;
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      cast_four(parts[v], y[v], in[v], first, rests[v], block[v / EACH], scale.decode);
    }
  }
#endif
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const FastBlock& own = block[v / EACH];
#if !STOCHASTIC
    const u32 none[4] = {};
#pragma unroll
    for (int first = 0; first < VECTOR; first += 4) cast_four(parts[v], y[v], in[v], first, none, own, scale.decode);
#endif
#if OUTPUT >= 2
    y[v] = packed_codes<VECTOR>(parts[v].fours);
#endif
  }
#if LAYOUT == 2
  if (base < total) store_vector<PER_LANE, OUTPUT_BITS>(out, base, joined(y));
#else
  bool whole = false;
#if EXCHANGES
  whole = base / 64 * 64 + 64 <= total;
  store_exchanged(out, base, y, whole);
#endif
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
    if (!whole && base + DISTANCE * v < total && !exactly[v / EACH])
      store_vector<VECTOR, OUTPUT_BITS>(out, base + DISTANCE * v, y[v]);
#endif

  if (__any_sync(~0u, any)) {
    __syncwarp();  // what other lanes wrote of these blocks comes first
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll 1
      for (int v = b * EACH; v < (b + 1) * EACH; ++v) {
        u64 first = base + DISTANCE * v;
        Path path = {first, first, 1, 1, first, exactly[b] && first < total ? VECTOR : 0u};
        float stored = cast_exactly(x, out, path, found[b].amax, found[b].has_nan, scale, c.draw, c);
        if (exactly[b]) block[b].stored = stored;
      }
    }
  }
#if LAYOUT == 2 && SCALES_IN_BYTES && BLOCKS == 2
  if (base < total) ((u16*)scales)[thread] = (u16)(scale_code(block[0].stored) | scale_code(block[1].stored) << 8);
#elif OUTPUT >= 2
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    u64 first = base + DISTANCE * (b * EACH);
#if RUN == 0
    if (first < total && opens[b]) store_scale(scales, number[b], block[b].stored);
#else
    if (first < total && thread % SPAN == 0) store_scale(scales, first / RUN, block[b].stored);
#endif
  }
#endif
}
