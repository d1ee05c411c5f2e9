// SPDX-License-Identifier: Apache-2.0
// Casts to element formats, the fast path: float32 numbers onto a grid in a dozen float32 operations, exactly.
//
// A grid is what floats and integers share: magnitudes n * 2^q, q constant below some exponent. Where the last place of
// |x| = a is P = 2^q, adding and subtracting the magic number 2^23 P leaves the multiple of P next to a, because
// float32 has no finer bits there; ties go to even n, because 2^23 is even. Float formats have a P for each binade:
//
//   a = 1.mmm|rrrr * 2^e     P = 2^(e - M)     a + 2^23 P = 1.000...mmm * 2^(e - M + 23), rrrr rounded away
#pragma once
#include "vectors.cuh"

// Parameters; the host side is fmtsim.cuda.cast.parameters.grid_of.
struct alignas(16) Grid {
  float highest, lowest;    // what x is clamped to before rounding: saturation, or where the magic number stays finite
  float over_above;         // a rounded magnitude above it becomes over_value (Inf or NaN)
  float over_value;
  float nan_value;
  float zero;               // -0 to keep the sign of zero, +0 to drop it
  float shift;              // from a binade to its magic number
  float least_magic;        // that of the smallest normal binade
  u32 sign;                 // the sign bit, 0 for an unsigned format
  u32 drop, half, keep, parity, one;  // bit addition: dropped bits, half a place less one (rounded stochastically: a
                                      // place less one), kept bits, parity of codes
  u32 flush_below, flush_tie, flush_low;  // the first is the least result above the second, the third that below it
                                          // (powers of two from 2^-127 on: the last number that becomes the first)
  float code_scale;         // floats: 2^(bias - 127), which gives the value's bits the format's exponent field;
                            // integers: steps a unit
  u32 code_factor;          // a power of two: moves a code to the top bits of a word
  u32 nan_code, over_code;  // in the top bits
  float step;               // integers: the place value
  u32 word_keep, word_set;  // random bits in use, and what stands below them
  float least_binade;       // of magnitudes that are rounded stochastically; of these, too:
  float fine;               // from a binade to 2^-32 of its last place; that itself where one magic number serves all
  float base;               // from a binade to 1.5 * 2^23 of its last places; that itself, as above
  float code_base;          // the same and some places more, so that the sum's low bits are the code's
};

#define INTEGER_BASE 12582912.0f  // 1.5 * 2^23: the low bits of its sum with an integer are that integer's

// A magnitude a rounded stochastically by `rest`, what its random word w lacks of 2^32 - 1, as its sum with base
// binades; fine and base: from a binade to 2^-32, and to 1.5 * 2^23, of its last place P.
//
// a goes up where its part above the grid, d P, and w / 2^32 reach P together, that is d > rest / 2^32: the result is
// the least multiple of P that is not below a - rest P / 2^32. Both steps round up, which multiples of P survive.
// `rest` has 32 bits, float32 24: what its first 24 leave out never matters, for d, which has 24 as well, or 23 bits
// where a is P or more, is no number between.
DEVICE float stochastic_sum(float a, float binade, float fine, float base, u32 rest) {
  float low = __fmaf_ru(-__uint2float_rz(rest), __fmul_rn(binade, fine), a);
  return __fmaf_ru(binade, base, low);
}

template <bool Asymmetric>
DEVICE float clamped(float x, const Grid& g) {
  if (Asymmetric) return fabsf(fminf(fmaxf(x, g.lowest), g.highest));
  return fminf(fabsf(x), g.highest);
}

DEVICE float magic_of(float a, const Grid& g) {
  return fmaxf(as_float(as_bits(a) & 0x7F800000u) * g.shift, g.least_magic);
}

// A clamped magnitude to nearest even by the magic number.
DEVICE float nearest_magic(float a, const Grid& g) {
  float magic = magic_of(a, g);
  return (a + magic) - magic;
}

// The same by bit addition, half a last place onto the bits of a: for formats that share float32's smallest exponent,
// which reach its largest one too, where 2^23 P is infinite, and for those without mantissa, whose ties look at the
// exponent. Flush: with a comparison for what lies below the smallest values.
template <bool Flush>
DEVICE float nearest_bits(float a, const Grid& g) {
  u32 bits = as_bits(a), odd = ((bits >> g.drop) ^ g.parity) & g.one;
  u32 rounded = (bits + g.half + odd) & g.keep;
  if (Flush) rounded = bits > g.flush_tie ? (rounded > g.flush_below ? rounded : g.flush_below) : g.flush_low;
  return as_float(rounded);
}

// The same for powers of two from 2^-127 on and zero: float32 has no exponent of its own for the first of them.
DEVICE float nearest_power(float a, const Grid& g) {
  u32 bits = as_bits(a), odd = ((bits >> g.drop) ^ g.parity) & g.one;
  u32 first = bits > g.flush_tie ? g.flush_below : 0;
  return as_float(bits > g.flush_low ? (bits + g.half + odd) & g.keep : first);
}

// The same where one magic number serves all.
DEVICE float nearest_fixed(float a, const Grid& g) { return (a + g.base) - g.base; }

// What a word lacks of 2^32 - 1 where only some bits of it are in use (not Whole).
template <bool Whole>
DEVICE u32 used_rest(u32 rest, const Grid& g) {
  return Whole ? rest : (rest | ~g.word_keep) & ~g.word_set;
}

// A magnitude rounded stochastically by bit addition, exactly: the dropped bits of a are d of 2^drop, and
// d 2^(32 - drop) + w >= 2^32 says the same as d + (w >> 32 - drop) >= 2^drop.
template <bool Whole>
DEVICE float stochastic_bits(float a, u32 rest, const Grid& g) {
  u32 lacks = __funnelshift_l(used_rest<Whole>(rest, g), 0, g.drop);
  return as_float((as_bits(a) + g.half - lacks) & g.keep);
}

template <bool Fixed>
DEVICE float binade_of(float a, const Grid& g) {
  return Fixed ? 1.0f : fmaxf(as_float(as_bits(a) & 0x7F800000u), g.least_binade);
}

// A clamped magnitude rounded stochastically (variants a and b), as its sum with the magic number. rest: what the
// random word lacks of 2^32 - 1. Fewer bits (not Whole) are the word's top ones: for an integer w, floor(d 2^r) + w >=
// 2^r says the same as d + w / 2^r >= 1.
template <bool Fixed, bool Whole>
DEVICE float stochastic_sum(float a, float binade, float base, u32 rest, const Grid& g) {
  rest = used_rest<Whole>(rest, g);
  if (!Fixed) return stochastic_sum(a, binade, g.fine, base, rest);
  return __fadd_ru(__fmaf_ru(-__uint2float_rz(rest), g.fine, a), base);
}

template <bool Fixed, bool Whole>
DEVICE float stochastic_magnitude(float a, u32 rest, const Grid& g) {
  float binade = binade_of<Fixed>(a, g), sum = stochastic_sum<Fixed, Whole>(a, binade, g.base, rest, g);
  return Fixed ? sum - g.base : __fmaf_rn(-binade, g.base, sum);
}

// The number on the grid: overflow (Special), sign, and the sign of zero, which formats with -0 keep. NaN comes last:
// where x or, with Special, this is NaN.
template <bool Special, bool Keeps>
DEVICE float finished(float rounded, float x, const Grid& g) {
  if (Special) rounded = rounded > g.over_above ? g.over_value : rounded;
  float y = as_float(as_bits(rounded) | (as_bits(x) & g.sign));
  return Keeps ? y : y + g.zero;
}

template <bool Special>
DEVICE bool becomes_nan(float y, float x) {
  return x != x || (Special && y != y);
}

// To nearest even on the half-offset grid: the code is floor(x / step), or the even one of two where x lies between.
DEVICE float nearest_half_offset(float x, const Grid& g) {
  const float base = INTEGER_BASE;
  float steps = fminf(fmaxf(x, g.lowest), g.highest) * g.code_scale;
  float floored = __fadd_rd(steps, base);
  if (floored - base == steps) floored = as_float(as_bits(floored) & ~1u);
  return ((floored - base) + 0.5f) * g.step;
}

// The code of a number on the grid in the top bits of a word, zeros below; NaN aside.
template <bool Integer, bool Special>
DEVICE u32 top_code(float y, const Grid& g) {
  if (Integer) return as_bits(__fmaf_rd(y, g.code_scale, INTEGER_BASE)) * g.code_factor;  // down: half-offset
  u32 bits = as_bits(y * g.code_scale), code = ((bits * g.code_factor) & ~g.sign) | (bits & g.sign);
  return Special && fabsf(y) > g.over_above ? g.over_code | (bits & g.sign) : code;
}

// The same of a float format from a magnitude on the grid and what has its sign; NaN aside.
DEVICE u32 signed_code(float magnitude, float x, const Grid& g) {
  return as_bits(magnitude * g.code_scale) * g.code_factor | (as_bits(x) & g.sign);
}

// Which of these steps a cast takes, by macros: METHOD; SPECIAL: overflow gives Inf or NaN; ASYMMETRIC: the range is
// not -highest ... highest; CARRIES: it gives Inf, whose code follows the largest number's; KEEPS: the format has -0;
// RANDOM: stochastic rounding, 1 with whole words, else 2; PAIRS (below).
#ifdef METHOD

#define MAGIC 0
#define BITS 1
#define FLUSHING 2
#define HALVES 3
#define FIXED 4  // one magic number serves all
#define POWERS 5  // powers of two from 2^-127 on

// The clamped magnitude a, rounded; rest: what its random word lacks of 2^32 - 1.
DEVICE float rounded_magnitude(float a, u32 rest, const Grid& g) {
  if (RANDOM && METHOD == BITS) return stochastic_bits<RANDOM == 1>(a, rest, g);
  if (RANDOM) return stochastic_magnitude<METHOD == FIXED, RANDOM == 1>(a, rest, g);
  if (METHOD == FIXED) return nearest_fixed(a, g);
  if (METHOD == POWERS) return nearest_power(a, g);
  return METHOD == MAGIC ? nearest_magic(a, g) : nearest_bits<METHOD == FLUSHING>(a, g);
}

// The value to which float32 x rounds, unless becomes_nan says that it is NaN.
DEVICE float rounded_number(float x, u32 rest, const Grid& g) {
  if (METHOD == HALVES) return nearest_half_offset(x, g);
  return finished<SPECIAL, KEEPS>(rounded_magnitude(clamped<ASYMMETRIC>(x, g), rest, g), x, g);
}

DEVICE float cast_with_rest(float x, u32 rest, const Grid& g) {
  float y = rounded_number(x, rest, g);
  return becomes_nan<SPECIAL>(y, x) ? g.nan_value : y;
}

DEVICE float cast_value(float x, u32 word, const Grid& g) { return cast_with_rest(x, ~word, g); }

// Casts of whole vectors. Where overflow does not give NaN, clamping, rounding and the rest are steps of their own
// (SPLIT), a sum of magnitudes tells whether one was NaN, and then elements are cast one by one.
#define SPLIT ((!SPECIAL || CARRIES) && METHOD != HALVES)
#define SIGNS_LAST (KEEPS && SPLIT)  // the sign may be put on packed pairs or codes

template <int Count>
DEVICE bool holds_nan(const float (&x)[Count]) {
  if (SPECIAL) return false;
  float sums[2] = {0.0f, 0.0f};
  UNROLLED for (int k = 0; k < Count; k++) sums[k % 2] += fabsf(x[k]);
  float sum = sums[0] + sums[1];
  return sum != sum;
}

// Clamped magnitudes of vectors, and whether a number of them was NaN. PAIRS: two are clamped at a time, for the dtype
// has 16 bits and holds the largest one; what is ASYMMETRIC then has no signs.
template <int Type>
struct Magnitudes {
  float sums[2] = {0.0f, 0.0f};
  u32 pairs = 0;

  template <int Count>
  DEVICE void take(float (&a)[Count], const Vectors<Type, Count>& from, const Grid& g) {
    UNROLLED for (int k = 0; k < Count; k += 2) {
      if constexpr (PAIRS) {
        u32 high = (u32)stored<Type>(g.highest);
        u32 pair = clamp_pair<Type, ASYMMETRIC>(from.words[k / 2], high | high << 16);
        pairs = add_pairs<Type>(pairs, pair);
        a[k] = loaded<Type>((u16)pair);
        a[k + 1] = Type == BFLOAT16 ? as_float(pair & 0xFFFF0000u) : loaded<Type>((u16)(pair >> 16));
      } else {
        UNROLLED for (int i = 0; i < 2; i++) {
          float x = from.get(k + i);
          sums[i] += fabsf(x);
          a[k + i] = clamped<ASYMMETRIC>(x, g);
        }
      }
    }
  }

  DEVICE bool hold_nan() const {
    if constexpr (PAIRS) {
      float low = loaded<Type>((u16)pairs), high = loaded<Type>((u16)(pairs >> 16));
      return low != low || high != high;
    } else {
      float sum = sums[0] + sums[1];
      return sum != sum;
    }
  }
};

#endif
