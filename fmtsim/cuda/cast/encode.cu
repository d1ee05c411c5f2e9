// SPDX-License-Identifier: Apache-2.0
// Encode float16, bfloat16 or float32 to codes of an element format (E4M3, INT8, ...), each in 1, 2 or 4 bytes, or
// packed (docs/semantics.md, section 11): fmtsim.encode, and what casts to codes in layers and states.
//
// Macros: INPUT (dtype of vectors.cuh); those of grid.cuh; CODE: bits of a code, at most 32; SLOT: bits from one
// code to the next, CODE where they are packed; INTEGER: two's complement codes; MANTISSA: bits of it, where RANDOM and
// not INTEGER; VECTORS: addresses of whole vectors; RUN: elements of a thread, whose codes fill whole words.
#include "grid.cuh"
#include "philox.cuh"

typedef Stored<INPUT>::type Input;

// Codes that are joined in one word before they are placed in the output.
#define PART (SLOT > 16 ? 1 : SLOT > 8 ? 2 : SLOT > 4 ? 4 : SLOT > 2 ? 8 : SLOT > 1 ? 16 : 32)
#define WORDS (RUN * SLOT / 32)

// Codes of stochastic rounding are the low bits of the sum with the magic number and the binade's number.
#define SUMS (RANDOM && METHOD == MAGIC && SIGNS_LAST && !INTEGER && CODE <= 16 && SLOT == CODE)

// (SUMS) The code of a clamped magnitude, in the low bits of a word; the bits above it are undefined.
DEVICE u32 low_code(float a, u32 rest, const Grid& g) {
  float binade = binade_of<false>(a, g);
  u32 sum = as_bits(stochastic_sum<false, RANDOM == 1>(a, binade, g.code_base, rest, g));
#if SUMS
  sum = add_shifted<23 - MANTISSA>(as_bits(binade), sum);
#endif
  return sum;
}

// The code of x with a clamped magnitude a in the top bits of a word, unless x is NaN.
DEVICE u32 code_of(float a, float x, u32 rest, const Grid& g) {
  if constexpr (SUMS) return low_code(a, rest, g) << (32 - CODE) | (as_bits(x) & g.sign);
  float rounded = rounded_magnitude(a, rest, g);
  if (SIGNS_LAST && !INTEGER) return signed_code(rounded, x, g);
  return top_code<INTEGER, SPECIAL>(finished<SPECIAL, KEEPS>(rounded, x, g), g);
}

// The code of x in the top bits of a word, unless x is NaN.
DEVICE u32 top_of(float x, u32 rest, const Grid& g) {
  if constexpr (SPLIT) return code_of(clamped<ASYMMETRIC>(x, g), x, rest, g);
  float y = rounded_number(x, rest, g);
  u32 code = top_code<INTEGER, SPECIAL>(y, g);
  return SPECIAL && becomes_nan<SPECIAL>(y, x) ? g.nan_code : code;
}

DEVICE u32 code_at(const Input* x, i64 i, const Grid& g, const Draw& d) {
  float value = loaded<INPUT>(x[i]);
  u32 code = top_of(value, RANDOM ? ~random_word((u64)i, d) : 0, g);
  return (value != value ? g.nan_code : code) >> (32 - CODE);
}

// Encode elements first ... last - 1 one by one; the last byte is padded with zeros.
DEVICE void encode_slowly(const Input* x, u8* to, i64 first, i64 last, const Grid& g, const Draw& d) {
  u64 pending = 0;
  int bits = 0;
#pragma unroll 1
  for (i64 i = first; i < last; i++) {
    pending |= (u64)code_at(x, i, g, d) << bits;
    for (bits += SLOT; bits >= 8; bits -= 8, pending >>= 8) *to++ = (u8)pending;
  }
  if (bits) *to = (u8)pending;
}

// Place `part`, the codes i ... i + PART - 1 of a run, in the run's words.
DEVICE void put_part(u32 (&out)[WORDS], u32 part, int i) {
  int bit = i * SLOT, end = bit % 32 + PART * SLOT;
  out[bit / 32] = bit % 32 ? out[bit / 32] | part << (bit % 32) : part;
  if (end > 32) out[bit / 32 + 1] = part >> (32 - bit % 32);
}

// Pack the codes of a run: PART codes into a word, then these words into the output. Low: a code is the low bits of its
// word, and the bits above are undefined; else it is the top bits, and the bits below are zero.
template <bool Low>
DEVICE void pack(u32 (&out)[WORDS], const u32 (&codes)[RUN]) {
  UNROLLED for (int i = 0; i < RUN; i += PART) {
    u32 part = 0;
    if constexpr (Low && SLOT == 8) {
      u32 low = __byte_perm(codes[i], codes[i + 1], 0x0040), high = __byte_perm(codes[i + 2], codes[i + 3], 0x0040);
      part = __byte_perm(low, high, 0x5410);
    } else if constexpr (Low) {
      UNROLLED for (int k = i; k < i + PART; k++) part = __funnelshift_r(part, codes[k], SLOT);
      part >>= 32 - PART * SLOT;
    } else {
      UNROLLED for (int k = i + PART - 1; k >= i; k--) {
        u32 top = SLOT < 32 && SLOT > CODE ? codes[k] >> (SLOT - CODE) : codes[k];
        part = SLOT == 32 ? top >> (32 - CODE) : __funnelshift_l(top, part, SLOT);
      }
    }
    put_part(out, part, i);
  }
}

// Pack the codes of a run from their signs and magnitudes, for codes of other widths than 8 bits: the sign is the top
// bit of the input's word, the magnitude the top bits of `top`. Multiplications do the shifts, because philox keeps the
// units for shifts and logic busy; their factors are arguments, or the compiler would make them shifts again.
DEVICE void pack_signed(
    u32 (&out)[WORDS], const Vectors<INPUT, RUN>& from, const float (&a)[RUN], const u32 (&rests)[RUN], const Grid& g) {
  const bool wide = BYTES_OF(INPUT) == 4;
  u32 of_steps = g.code_factor << (24 - (SUMS ? MANTISSA : 0)), of_binades = g.code_factor << 1;
  UNROLLED for (int i = 0; i < RUN; i += PART) {
    u32 part = 0;
    UNROLLED for (int k = i + PART - 1; k >= i; k--) {
      u32 word = from.words[wide ? k : k / 2];
      float binade = binade_of<false>(a[k], g);
      float sum = stochastic_sum<false, RANDOM == 1>(a[k], binade, g.code_base, rests[k], g);
      u32 top = as_bits(sum) * of_steps + as_bits(binade) * of_binades;
      part = __funnelshift_l(wide || k % 2 ? word : word << 16, part, 1);
      part = __funnelshift_l(top, part, CODE - 1);
    }
    put_part(out, part, i);
  }
}

// The codes of elements from their clamped magnitudes (SUMS); four signs at a time where codes are bytes.
DEVICE void pack_sums(
    u32 (&out)[WORDS], const Vectors<INPUT, RUN>& from, const float (&a)[RUN], const u32 (&rests)[RUN], const Grid& g) {
  const bool wide = BYTES_OF(INPUT) == 4;
  u32 codes[RUN];
  UNROLLED for (int k = 0; k < RUN; k++) {
    codes[k] = low_code(a[k], rests[k], g);
#if SUMS
    if (SLOT == 8) continue;
    u32 sign = from.words[wide ? k : k / 2] & (wide ? g.sign : g.sign | g.sign >> 16);
    codes[k] = wide || k % 2 ? add_shifted<32 - CODE>(sign, codes[k]) : add_shifted<16 - CODE>(sign, codes[k]);
#endif
  }
  pack<true>(out, codes);
  if constexpr (SLOT == 8) {
    u32 signs = g.sign | g.sign >> 8, four = signs | signs >> 16;
    UNROLLED for (int k = 0; k < RUN; k += 4) {
      const u32* word = from.words + (wide ? k : k / 2);
      u32 low = wide ? __byte_perm(word[0], word[1], 0x0073) : __byte_perm(word[0], word[1], 0x7531);
      u32 tops = wide ? __byte_perm(low, __byte_perm(word[2], word[3], 0x0073), 0x5410) : low;
      out[k / 4] |= tops & four;
    }
  }
}

DEVICE void store_run(u8* to, const u32 (&out)[WORDS]) {
  UNROLLED for (int k = 0; k < WORDS; k += WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1) {
    if constexpr (WORDS % 4 == 0) {
      store_words<WORDS == 4>((u32*)to + k, out[k], out[k + 1], out[k + 2], out[k + 3]);
    } else if constexpr (WORDS % 2 == 0) {
      uint2 pair = {out[k], out[k + 1]};
      *(uint2*)((u32*)to + k) = pair;
    } else {
      ((u32*)to)[k] = out[k];
    }
  }
}

// The codes of a run of elements, and whether none was NaN.
DEVICE bool encode_run(u32 (&out)[WORDS], const Vectors<INPUT, RUN>& from, const u32 (&rests)[RUN], const Grid& g) {
  u32 codes[RUN];
  if constexpr (SPLIT) {
    Magnitudes<INPUT> magnitudes;
    float a[RUN];
    magnitudes.take(a, from, g);
    if constexpr (SUMS && SLOT == 8) {
      pack_sums(out, from, a, rests, g);
    } else if constexpr (SUMS) {
      pack_signed(out, from, a, rests, g);
    } else {
      UNROLLED for (int k = 0; k < RUN; k++) codes[k] = code_of(a[k], from.get(k), rests[k], g);
      pack<false>(out, codes);
    }
    return !magnitudes.hold_nan();
  } else {
    float values[RUN];
    UNROLLED for (int k = 0; k < RUN; k++) {
      values[k] = from.get(k);
      codes[k] = top_of(values[k], rests[k], g);
    }
    pack<false>(out, codes);
    return !holds_nan(values);
  }
}

// A warp takes SPAN elements: with random words a tile, else one run a lane. Elements beyond the last whole SPAN are
// encoded one by one.
#define SPAN (RANDOM ? TILE : 32 * RUN)
#define RUNS (SPAN / (32 * RUN))

KERNEL encode(const Input* x, u8* codes, i64 count, const Grid g, const Draw d) {
#if RANDOM
  __shared__ Words4 memory[4][TILE_WORDS / 4];
  u32* warp_words = (u32*)memory[threadIdx.x / 32];
#endif
  i64 start = ((i64)blockIdx.x * 4 + threadIdx.x / 32) * SPAN, base = start + threadIdx.x % 32 * RUN;
  codes += base / RUN * WORDS * 4;
  bool slow = true;
  if (VECTORS && start + SPAN <= count) {
    // 1. load; 2. the tile's random words; 3. codes of a run, packed and stored
    Vectors<INPUT, RUN> from[RUNS];
    slow = false;
    UNROLLED for (int v = 0; v < RUNS; v++) from[v].load(x + base + v * 32 * RUN);
    __syncwarp();  // or the compiler would load late, one vector after the other
#if RANDOM
    make_words(warp_words, (u64)start, upper_counter(), d);
#endif
    UNROLLED for (int v = 0; v < RUNS; v++) {
      u32 rests[RUN] = {}, out[WORDS];
#if RANDOM
      take_words(rests, warp_words + word_place(threadIdx.x % 32 * RUN) + word_place(v * 32 * RUN));
#endif
      slow |= !encode_run(out, from[v], rests, g);
      store_run(codes + v * 32 * WORDS * 4, out);
    }
  }
// 4. runs with NaN, and what fills none, one by one
#pragma unroll 1
  for (i32 v = 0; slow && v < RUNS && base < count; v++, base += 32 * RUN, codes += 32 * WORDS * 4) {
    encode_slowly(x, codes, base, base + RUN < count ? base + RUN : count, g, d);
  }
}
