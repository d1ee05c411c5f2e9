// SPDX-License-Identifier: Apache-2.0
// Casts to block formats whose blocks are runs of memory: along the last dimension in one pass, and blocks of any shape
// whose amaxes statistic.cu found before. In LAYOUT 2 (runs.cuh) results are stored in one piece; it serves codes
// alone: a block that is cast the exact path is written twice.
#define VECTORS (LAYOUT == 2 ? 32 / VECTOR : 4)
#define BLOCKS_OF_LANE 4  // `known_amaxes` holds their amaxes, flags
#include "runs.cuh"
#include "block.cuh"

// Whole vectors: what one instruction does for two bfloat16 numbers, and codes packed as section 11 of
// docs/semantics.md has them. A pair of codes travels in the halves of a word, with loose bits above each.

#define ALL_BYTES(byte) ((byte) * 0x01010101u)
#define BOTH_HALVES(bits) ((bits) * 0x00010001u)
#define SIGN_OF_CODE (1u << (CODE_BITS - 1))

// Two formats of few binades, e2m1 and e2m3, need no exponents: where every step of a code is one, magnitudes are
//
//   code = min(y / d, y / 2d + 2^M, y / 4d + 2 * 2^M, largest)       d the smallest value, M bits of mantissa
//
// and rounding commutes with the minimum. Each term is one multiply-add onto a number whose last place is one, rounded
// to nearest even once; the terms 2^M are even, so that ties are those of the format.
#define NEAREST_FLOAT (!STOCHASTIC && !ELEMENT_INTEGER && ELEMENT_NEGATIVE_ZERO)
#define SEGMENTED                                                                                      \
  (NEAREST_FLOAT && OUTPUT >= 2 && ELEMENT_MANTISSA <= 3 && CODE_BITS == ELEMENT_MANTISSA + 3 && \
   ELEMENT_TOP + 127 == (ELEMENT_LOWEST >> 23) + 2)
#define IN_BFLOAT16 (NEAREST_FLOAT && INPUT == 1 && RULE != 4 && ELEMENT_MANTISSA <= 4)
#define IN_PAIRS (IN_BFLOAT16 || (SEGMENTED && RULE == 4 && INPUT != 2))

#if IN_BFLOAT16
// Two bfloat16 magnitudes on their grid under a power of two: their binades, and their sums with 2^7 last places of
// those binades, which keep their last place.
struct PairOnGrid { u32 binades, sums; };
#define PAIR_DROPPED (7 - ELEMENT_MANTISSA)
#define PAIR_MAGIC BOTH_HALVES((127u + PAIR_DROPPED) << 7)

DEVICE PairOnGrid pair_on_grid(u32 raw, const FastBlock& block) {
  u32 limits = block.limit >> 16 | block.limit, lowest = block.lowest >> 16 | block.lowest;  // bfloat16 holds both
  u32 magnitudes = __vminu2(raw & 0x7FFF7FFFu, limits);
  u32 binades = __vmaxu2(magnitudes & 0x7F807F80u, lowest);
  return {binades, fma_bfloat2(binades, PAIR_MAGIC, magnitudes)};
}

// The values of two bfloat16 numbers.
DEVICE u32 value_pair(u32 raw, const FastBlock& block) {
  PairOnGrid pair = pair_on_grid(raw, block);
  return fma_bfloat2(pair.binades, PAIR_MAGIC | 0x80008000u, pair.sums) | (raw & 0x80008000u);
}
#endif

#if OUTPUT >= 2
#define LARGEST_CODE (((ELEMENT_LIMIT - ELEMENT_LOWEST) >> (23 - ELEMENT_MANTISSA)) + (1u << ELEMENT_MANTISSA))
#define FIRST_SLOPE (254u + ELEMENT_MANTISSA - (ELEMENT_LOWEST >> 23))  // the exponent field of 1 / d

// The signs of two numbers at the places of their codes' signs.
DEVICE u32 signs_of_pair(u32 raw) { return raw >> (16 - CODE_BITS) & BOTH_HALVES(SIGN_OF_CODE); }

#if SEGMENTED && IN_BFLOAT16
#define BASE (128u + SIGN_OF_CODE / 2)  // bfloat16 counts in ones from 128 to 256
#define PAIR_OF(integer) BOTH_HALVES(0x4300u + (integer) - 128u)

// Two bfloat16 numbers under a power of two: nothing is lost before the one rounding. The sign adds half a sign bit up
// or down from the base in between.
DEVICE u32 code_pair(u32 raw, const FastBlock& block) {
  u32 slope = (FIRST_SLOPE << 23) - (block.limit - ELEMENT_LIMIT);
  u32 slopes = __byte_perm(slope, slope, 0x3232), magnitudes = raw & 0x7FFF7FFFu;
  u32 fine = fma_bfloat2(magnitudes, slopes, PAIR_OF(BASE));
  u32 middle = fma_bfloat2(magnitudes, slopes - BOTH_HALVES(0x80u), PAIR_OF(BASE + (1u << ELEMENT_MANTISSA)));
  u32 coarse = fma_bfloat2(magnitudes, slopes - BOTH_HALVES(0x100u), PAIR_OF(BASE + (2u << ELEMENT_MANTISSA)));
  u32 code = __vminu2(__vminu2(__vminu2(fine, middle), coarse), PAIR_OF(BASE + LARGEST_CODE));
  u32 half_signs = (raw & 0x80008000u) | BOTH_HALVES((125u + CODE_BITS) << 7);  // 2^(CODE_BITS - 2), signed
  return fma_bfloat2(half_signs, BOTH_HALVES(0xBF80u), code);
}

#elif SEGMENTED && RULE == 4
DEVICE u32 segmented_code(float x, const FastBlock& block) {
  float y = ARITHMETIC == 0 ? __fdiv_rn(fabsf(x), block.factor) : __fmul_rn(fabsf(x), block.factor);
  const float base = 12582912.0f;  // 1.5 * 2^23
  const float slope = as_float(FIRST_SLOPE << 23), step = (float)(1u << ELEMENT_MANTISSA);
  u32 fine = as_bits(__fmaf_rn(y, slope, base)), middle = as_bits(__fmaf_rn(y, 0.5f * slope, base + step));
  u32 coarse = as_bits(__fmaf_rn(y, 0.25f * slope, base + 2.0f * step));
  return min(min(min(fine, middle), coarse), as_bits(base) + LARGEST_CODE);
}

#elif IN_BFLOAT16
// The codes of two bfloat16 numbers on a grid of more binades: the steps that the sums count, and the binades before.
DEVICE u32 code_pair(u32 raw, const FastBlock& block) {
  PairOnGrid pair = pair_on_grid(raw, block);
  u32 lowest = block.lowest >> 16 | block.lowest, places = pair.binades >> PAIR_DROPPED;
  u32 offset = BOTH_HALVES(PAIR_DROPPED << 7) + (lowest >> PAIR_DROPPED);
  u32 codes = pair.sums - places * ((1u << PAIR_DROPPED) - 1u) - offset;
  return codes | signs_of_pair(raw);
}
#endif

#if IN_PAIRS
// The codes of elements 2 i and 2 i + 1 of a vector.
template <int COUNT>
DEVICE u32 pair_of(const Vectors<INPUT, COUNT>& in, int i, const FastBlock& block) {
#if IN_BFLOAT16
  return code_pair(in.words[i], block);
#else
  u32 low = segmented_code(in.get(2 * i), block);
  u32 high = segmented_code(in.get(2 * i + 1), block);
#if INPUT == 0
  u32 raw = __byte_perm(in.words[2 * i], in.words[2 * i + 1], 0x7632);
#else
  u32 raw = in.words[i];
#endif
  return __byte_perm(low, high, 0x5410) | signs_of_pair(raw);
#endif
}
#endif

// Four codes, one a byte, from the signs of x (bit 7 of each byte of `signs`) and magnitude codes with loose high bits.
DEVICE u32 signed_codes(u32 magnitudes, u32 signs) {
  return (magnitudes & ALL_BYTES(SIGN_OF_CODE - 1u)) | (signs & ALL_BYTES(0x80u)) >> (8 - CODE_BITS);
}

// Codes `first` ... first + 3 of a vector, one a byte, in the order 0 1 2 3, or, ZIPPED, 0 2 1 3.
#define ZIPPED (OUTPUT == 3 && CODE_BITS == 4)
template <int COUNT>
DEVICE u32 four_codes(const Vectors<INPUT, COUNT>& in, const u32 (&rests)[4], int first, const FastBlock& block) {
#if IN_PAIRS
  return __byte_perm(
      pair_of<COUNT>(in, first / 2, block), pair_of<COUNT>(in, first / 2 + 1, block), ZIPPED ? 0x6240 : 0x6420);
#elif ELEMENT_INTEGER || !ELEMENT_NEGATIVE_ZERO
  u32 codes = 0;
  UNROLLED for (int i = 0; i < 4; ++i) codes |= fast_code(in.get(first + i), rests[i], block) << (8 * i);
  return __byte_perm(codes, 0, ZIPPED ? 0x3120 : 0x3210);
#else
  u32 code[4];
  UNROLLED for (int i = 0; i < 4; ++i)
    code[i] = magnitude_code(fast_element(in.get(first + i), block), rests[i], block);
  u32 low = __byte_perm(code[0], code[1], 0x0040), high = __byte_perm(code[2], code[3], 0x0040), signs;
#if INPUT == 0
  signs = __byte_perm(__byte_perm(in.words[first], in.words[first + 1], 0x0073),
                      __byte_perm(in.words[first + 2], in.words[first + 3], 0x0073), 0x5410);
#else
  signs = __byte_perm(in.words[first / 2], in.words[first / 2 + 1], 0x7531);
#endif
  return __byte_perm(signed_codes(__byte_perm(low, high, 0x5410), signs), 0, ZIPPED ? 0x3120 : 0x3210);
#endif
}

// Put four codes, one a byte, side by side as OUTPUT asks.
DEVICE u32 squeezed(u32 codes) {
#if OUTPUT == 2 || CODE_BITS == 8
  return codes;
#elif CODE_BITS == 6
  u32 twos = codes + (codes & 0x00FF00FFu) * 3u;       // 4 a + 256 b = 4 (a + 64 b) in each half
  return (twos + (twos & 0xFFFFu) * 15u) >> 6;         // 16 (4 twelve bits) + 2^16 (4 twelve bits)
#else
  u32 mask = (1u << CODE_BITS) - 1u, all = 0;
  UNROLLED for (int i = 0; i < 4; ++i) all |= (codes >> (8 * i) & mask) << (i * CODE_BITS);
  return all;
#endif
}

// A vector from its codes as four_codes has them; COUNT is a multiple of eight where they are packed closer than bytes.
template <int COUNT>
DEVICE Packed<COUNT, OUTPUT_BITS> packed_codes(const u32 (&fours)[COUNT / 4]) {
  Packed<COUNT, OUTPUT_BITS> out;
  out.clear();
#if ZIPPED
  UNROLLED for (int first = 0; first < COUNT; first += 8) {  // codes 0 2 1 3 and 4 6 5 7, then 0 2 4 6 and 1 3 5 7
    u32 low = fours[first / 4], high = fours[first / 4 + 1];
    out.words[first / 8] = __byte_perm(low, high, 0x7632) * 16u + __byte_perm(low, high, 0x5410);
  }
#else
  UNROLLED for (int first = 0; first < COUNT; first += 4) {
    u32 bits = squeezed(fours[first / 4]), at = first * OUTPUT_BITS;
    out.words[at / 32] += bits * (1u << (at % 32));
    if (at % 32 + 4 * OUTPUT_BITS > 32) out.words[at / 32 + 1] = bits >> (32 - at % 32);
  }
#endif
  return out;
}
#endif

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

DEVICE void find_blocks(const BlockAmax (&amax_of_block)[BLOCKS], FastBlock (&block)[BLOCKS], TensorScale tensor) {
#if RULE == 4 && SPAN > 1
  u32 amaxes[BLOCKS];
  Scale scale[BLOCKS];
  UNROLLED for (int b = 0; b < BLOCKS; ++b) amaxes[b] = amax_of_block[b].amax;
  find_scales<false>(scale, amaxes, [&](u32 amax) { return scale_of_block(amax, tensor); });
  UNROLLED for (int b = 0; b < BLOCKS; ++b) block[b] = under_scale(scale[b], amax_of_block[b].amax);
#else
  UNROLLED for (int b = 0; b < BLOCKS; ++b) block[b] = fast_block(amax_of_block[b].amax, tensor);
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
  UNROLLED for (int i = 0; i < 4; i += 2) {
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
  UNROLLED for (int i = 0; i < all.LENGTH; ++i) all.words[i] = parts[i / Output::LENGTH].words[i % Output::LENGTH];
  return all;
}
#endif

// Whether two lanes that hold 64 codes of four bits exchange some, so that each writes 16 bytes. A block that is cast
// the exact path is written twice then, too.
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
    const void* x, void* out, void* scales, const u32* known_amaxes, const u32* tensor, float* tensor_scale, u64 total,
    const __grid_constant__ Pieces pieces, u32 reversed, const __grid_constant__ Cast c) {
  u32 block_index = reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  u64 thread = (u64)block_index * blockDim.x + threadIdx.x;
  u64 base = first_of_lane(thread);
  // 1. load all vectors of the lane
  Input in[VECTORS];
  UNROLLED for (int v = 0; v < VECTORS; ++v) {
    in[v].clear();
    u64 first = base + DISTANCE * v;
    if ((LAYOUT == 2 ? base : first) < total) in[v] = Input{load_vector<VECTOR, INPUT_BITS>(x, first)};
  }
  TensorScale scale = {1.0f, 1.0f};
#if TWO_LEVEL
  scale = te_tensor(as_float(tensor[0]), c.scale);
  if (tensor_scale != nullptr && thread == 0) *tensor_scale = scale.decode;
#endif

  // 2. the amaxes of its blocks, and how elements are cast under their scales
  BlockAmax amax_of_block[BLOCKS];
  FastBlock block[BLOCKS];
  bool exactly[BLOCKS], any = false;
#if RUN == 0
  u32 number[BLOCKS];
  bool opens[BLOCKS];
#endif
  UNROLLED for (int b = 0; b < BLOCKS; ++b) {
    u64 first = base + DISTANCE * (b * EACH);
#if RUN == 0
    number[b] = block_of(min(first, total - 1), pieces, opens[b]);
    if (b > 0 && number[b] == number[b - 1]) {  // most often: the vectors of a lane share a scale
      amax_of_block[b] = amax_of_block[b - 1], block[b] = block[b - 1];
    } else {
      u32 flags = known_amaxes[2 * number[b] + 1];
      amax_of_block[b] = {known_amaxes[2 * number[b]], flags != 0, (flags & 1) != 0};
      block[b] = fast_block(amax_of_block[b].amax, scale);
    }
#else
    amax_of_block[b] = find_amax<SPAN, EACH>(in + b * EACH);
#endif
  }
#if RUN != 0
  find_blocks(amax_of_block, block, scale);
#endif
  UNROLLED for (int b = 0; b < BLOCKS; ++b) {
    u64 first = base + DISTANCE * (b * EACH);
    // 3. blocks with NaN, Inf or scales at float32's limits take the exact path below
    exactly[b] = first < total && (block[b].refused || amax_of_block[b].nonfinite);
    any |= exactly[b];
  }

  // 4. round: values, or codes that are packed
  Output y[VECTORS];
  Parts parts[VECTORS];
#if STOCHASTIC
  u64 counter = counter_of((u64)block_index * (256 * PER_LANE)) >> 32 << 32 | (u32)counter_of(base);
  // four at a time: all words together would not fit the registers
  UNROLLED for (int first = 0; first < VECTOR; first += 4) {
    u32 rests[VECTORS][4];
    UNROLLED for (int i = 0; i < 4; ++i) {
      Words4 four = philox<true>(counter | (u32)(first + i), c.draw);
      rests[0][i] = four.x, rests[1][i] = four.y, rests[2][i] = four.z, rests[3][i] = four.w;
    }
    UNROLLED for (int v = 0; v < VECTORS; ++v) {
      cast_four(parts[v], y[v], in[v], first, rests[v], block[v / EACH], scale.decode);
    }
  }
#endif
  UNROLLED for (int v = 0; v < VECTORS; ++v) {
    const FastBlock& own = block[v / EACH];
#if !STOCHASTIC
    const u32 none[4] = {};
    UNROLLED for (int first = 0; first < VECTOR; first += 4)
      cast_four(parts[v], y[v], in[v], first, none, own, scale.decode);
#endif
#if OUTPUT >= 2
    y[v] = packed_codes<VECTOR>(parts[v].fours);
#endif
  }
// 5. store
#if LAYOUT == 2
  if (base < total) store_vector<PER_LANE, OUTPUT_BITS>(out, base, joined(y));
#else
  bool whole = false;
#if EXCHANGES
  whole = base / 64 * 64 + 64 <= total;
  store_exchanged(out, base, y, whole);
#endif
  UNROLLED for (int v = 0; v < VECTORS; ++v)
    if (!whole && base + DISTANCE * v < total && !exactly[v / EACH])
      store_vector<VECTOR, OUTPUT_BITS>(out, base + DISTANCE * v, y[v]);
#endif

  // 6. the exact path, from memory, over what was stored
  if (__any_sync(~0u, any)) {
    __syncwarp();  // what other lanes wrote of these blocks comes first
    UNROLLED for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll 1
      for (int v = b * EACH; v < (b + 1) * EACH; ++v) {
        u64 first = base + DISTANCE * v;
        Path path = {first, first, 1, 1, first, exactly[b] && first < total ? VECTOR : 0u};
        float stored = cast_exactly(x, out, path, amax_of_block[b].amax, amax_of_block[b].has_nan, scale, c.draw, c);
        if (exactly[b]) block[b].stored = stored;
      }
    }
  }
// 7. scales
#if LAYOUT == 2 && SCALES_IN_BYTES && BLOCKS == 2
  if (base < total) ((u16*)scales)[thread] = (u16)(scale_code(block[0].stored) | scale_code(block[1].stored) << 8);
#elif OUTPUT >= 2
  UNROLLED for (int b = 0; b < BLOCKS; ++b) {
    u64 first = base + DISTANCE * (b * EACH);
#if RUN == 0
    if (first < total && opens[b]) store_scale(scales, number[b], block[b].stored);
#else
    if (first < total && thread % SPAN == 0) store_scale(scales, first / RUN, block[b].stored);
#endif
  }
#endif
}
