// The fast path of element formats: float32 numbers onto a grid in a dozen float32 operations, exactly.
//
// A grid is what floats and integers share: magnitudes n * 2^q, q constant below some exponent. Where the last place of
// |x| = a is P = 2^q, adding and subtracting the magic number 2^23 P leaves the multiple of P next to a, because float32
// has no finer bits there; ties go to even n, because 2^23 is even. For float formats P follows the binade of a:
//
//   a = 1.mmm|rrrr * 2^e     P = 2^(e - M)     a + 2^23 P = 1.000...mmm * 2^(e - M + 23), rrrr rounded away
//
// Stochastic rounding adds u P to a first, u = w / 2^32, and lets the sums round toward zero: a + u P is cut at bits
// below P's, and so the cut never changes which multiple of P lies below. u has 32 bits, float32 24: its last nine go
// first. They matter only where a has bits below 2^-23 P, thus a < 2 P, and there that first sum is cut below 2^-32 P.
//
// Formats that share float32's smallest exponent reach its largest one too, where 2^23 P is infinite: they add half a
// place to the bits of a instead, as do formats without mantissa, whose ties look at the exponent.
#pragma once
#include "common.cuh"

// Parameters; the host side is fmtsim.cuda.grid.grid_of.
struct alignas(16) Grid {
  float highest, lowest;    // what x is clamped to before rounding: saturation, or where the magic number stays finite
  float over_above;         // a rounded magnitude above it becomes over_value (Inf or NaN)
  float over_value;
  float nan_value;
  float zero;               // -0 to keep the sign of zero, +0 to drop it
  float shift;              // from a binade to its magic number; 0 where one magic number serves all
  float least_magic;        // that of the smallest normal binade
  u32 sign;                 // the sign bit, 0 for an unsigned format
  u32 drop, half, keep, parity, one;  // bit addition: dropped bits, half a place less one, kept bits, parity of codes
  u32 flush_below, flush_tie, flush_low;  // the first is the least result above the second, the third that below it
  float code_scale;         // floats: 2^(bias - 127), which gives the value's bits the format's exponent field;
                            // integers: steps a unit
  u32 code_factor;          // a power of two: moves a code to the top bits of a word
  u32 nan_code, over_code;  // in the top bits
  float step;               // integers: the place value
  u32 word_keep, word_set;  // random bits in use, and what stands below them
};

#define INTEGER_BASE 12582912.0f  // 1.5 * 2^23: the low bits of its sum with an integer are that integer's

template <bool Asymmetric>
DEVICE float clamped(float x, const Grid& g) {
  if (Asymmetric) return fabsf(fminf(fmaxf(x, g.lowest), g.highest));
  return fminf(fabsf(x), g.highest);
}

DEVICE float magic_of(float a, const Grid& g) {
  return fmaxf(__uint_as_float(__float_as_uint(a) & 0x7F800000u) * g.shift, g.least_magic);
}

// A clamped magnitude to nearest even by the magic number.
DEVICE float nearest_magic(float a, const Grid& g) {
  float magic = magic_of(a, g);
  return (a + magic) - magic;
}

// The same by bit addition; Flush: with a comparison for what lies below the smallest values.
template <bool Flush>
DEVICE float nearest_bits(float a, const Grid& g) {
  u32 bits = __float_as_uint(a), odd = ((bits >> g.drop) ^ g.parity) & g.one;
  u32 rounded = (bits + g.half + odd) & g.keep;
  if (Flush) rounded = bits > g.flush_tie ? (rounded > g.flush_below ? rounded : g.flush_below) : g.flush_low;
  return __uint_as_float(rounded);
}

// A clamped magnitude rounded stochastically (variants a and b) by a random word. Fewer bits are the word's top ones: for
// an integer w, floor(d 2^r) + w >= 2^r says the same as d + w / 2^r >= 1. Whole: all 32 bits are in use, and no
// last place exceeds 2^10.
template <bool Whole>
DEVICE float stochastic_magic(float a, u32 word, const Grid& g) {
  float magic = magic_of(a, g), place = magic * 1.1920928955078125e-07f, fine;  // 2^-23
  if (Whole) {  // the last bits as a subnormal number: 2^-149 * 2^94 = 2^-55 = 2^-32 * 2^-23
    fine = __fmaf_rz(__uint_as_float(word & 0x1FF), magic * 1.9807040628566084e28f, a);
  } else {  // the same fourteen places higher, for formats whose last places are large
    word = (word & g.word_keep) | g.word_set;
    fine = __fmaf_rz(__uint_as_float((word * 16384u) & 0x7FC000u), magic * 1.2089258196146292e24f, a);  // 2^80
  }
  float coarse = __uint_as_float(__funnelshift_r(word, 0x7F, 9)) - 1.0f;
  float sum = __fmaf_rz(coarse, place, fine);
  return __fadd_rz(sum, magic) - magic;
}

// The number on the grid: overflow (Special), sign, and the sign of zero, which formats with -0 keep. NaN comes last:
// where x or, with Special, this is NaN.
template <bool Special, bool Keeps>
DEVICE float finished(float rounded, float x, const Grid& g) {
  if (Special) rounded = rounded > g.over_above ? g.over_value : rounded;
  float y = __uint_as_float(__float_as_uint(rounded) | (__float_as_uint(x) & g.sign));
  return Keeps ? y : y + g.zero;
}

template <bool Special>
DEVICE bool is_spoiled(float y, float x) {
  return x != x || (Special && y != y);
}

// To nearest even on the half-offset grid: the code is floor(x / step), or the even one of two where x lies between.
DEVICE float nearest_half_offset(float x, const Grid& g) {
  const float base = INTEGER_BASE;
  float steps = fminf(fmaxf(x, g.lowest), g.highest) * g.code_scale;
  float floored = __fadd_rd(steps, base);
  if (floored - base == steps) floored = __uint_as_float(__float_as_uint(floored) & ~1u);
  return ((floored - base) + 0.5f) * g.step;
}

// The code of a number on the grid in the top bits of a word, zeros below; NaN aside.
template <bool Integer, bool Special>
DEVICE u32 top_code(float y, const Grid& g) {
  if (Integer) return __float_as_uint(__fmaf_rd(y, g.code_scale, INTEGER_BASE)) * g.code_factor;  // down: half-offset
  u32 bits = __float_as_uint(y * g.code_scale), code = ((bits * g.code_factor) & ~g.sign) | (bits & g.sign);
  return Special && fabsf(y) > g.over_above ? g.over_code | (bits & g.sign) : code;
}
