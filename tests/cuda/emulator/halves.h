// SPDX-License-Identifier: Apache-2.0
// Float16 and bfloat16, alone and two in a word, and short approximations, which common.cuh has in assembly.
#pragma once

namespace host {

// a b + c, a b being exact, with the last bit set where the sum is not exact: rounded to fewer bits, it rounds as the
// exact sum does.
inline double fused_to_odd(double a, double b, double c) {
  double p = a * b, s = p + c;
  if (!__builtin_isfinite(s)) return s;
  double of_c = s - p, error = (p - (s - of_c)) + (c - of_c);
  unsigned long long code = bits<unsigned long long>(s);
  if (error == 0 || (code & 1)) return s;
  return bits<double>((error > 0) == (s > 0) ? code + 1 : code - 1);
}

// A double to the code of a format of 16 bits, to nearest even; NaN is 0x7fff.
template <int Mantissa>
inline unsigned short_code(double x) {
  constexpr int emin = Mantissa == 10 ? -14 : -126;
  constexpr unsigned infinity = 0x7fff >> Mantissa << Mantissa;
  if (x != x) return 0x7fff;
  unsigned sign = __builtin_signbit(x) ? 0x8000 : 0;
  double magnitude = __builtin_fabs(x);
  if (magnitude == 0 || !__builtin_isfinite(magnitude)) return sign | (magnitude == 0 ? 0 : infinity);
  int exponent = __builtin_ilogb(magnitude);
  exponent = exponent < emin ? emin : exponent;
  if (exponent - emin > 1 << 9) return sign | infinity;
  unsigned places = (unsigned)__builtin_rint(__builtin_ldexp(magnitude, Mantissa - exponent));
  unsigned code = ((unsigned)(exponent - emin) << Mantissa) + places;  // a carry of places goes into the exponent
  return sign | (code > infinity ? infinity : code);
}

template <int Mantissa>
inline double short_value(unsigned code) {
  constexpr int emin = Mantissa == 10 ? -14 : -126;
  unsigned magnitude = code & 0x7fff, field = magnitude >> Mantissa, rest = magnitude & ((1u << Mantissa) - 1);
  double value = field == 0x7fffu >> Mantissa ? (rest ? __builtin_nan("") : __builtin_inf())
                 : __builtin_ldexp(field ? rest + (1u << Mantissa) : rest, emin - Mantissa + (field ? field - 1 : 0));
  return code & 0x8000 ? -value : value;
}

template <int Mantissa>
inline unsigned fused_pair(unsigned a, unsigned b, unsigned c) {
  unsigned out = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    double x = short_value<Mantissa>(a >> shift & 0xffff), y = short_value<Mantissa>(b >> shift & 0xffff);
    out |= short_code<Mantissa>(fused_to_odd(x, y, short_value<Mantissa>(c >> shift & 0xffff))) << shift;
  }
  return out;
}

// One of the two numbers of a pair. Type: BFLOAT16 (1) or FLOAT16 (2) of common.cuh.
template <int Type>
inline double half_of_pair(unsigned pair, int place) {
  return short_value<Type == 2 ? 10 : 7>(pair >> (16 * place) & 0xffff);
}

inline float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }

}  // namespace host

// float16 as the upper bits of a float32 whose exponent is 112 too small; a product corrects that exactly.
inline float float_of_half(unsigned short x) {
  unsigned magnitude = (x & 0x7fffu) << 13, sign = (x & 0x8000u) << 16;
  unsigned product = host::bits<unsigned>(host::bits<float>(magnitude) * 0x1p112f);
  return host::bits<float>(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : product));
}
inline unsigned short half_of_float(float x) { return host::short_code<10>(x); }
inline unsigned short bfloat_of_float(float x) { return host::short_code<7>(x); }

template <int Type, bool Positive>
inline unsigned clamp_pair(unsigned pair, unsigned limit) {
  unsigned out = 0;
  for (int place = 0; place < 2; place++) {
    double x = host::half_of_pair<Type>(pair, place), most = host::half_of_pair<Type>(limit, place);
    unsigned kept = (__builtin_fabs(x) > most ? limit : pair & 0x7fff7fffu) >> (16 * place) & 0xffff;
    out |= (x != x ? 0x7fff : Positive && !(x > 0) ? 0 : kept) << (16 * place);
  }
  return out;
}
template <int Type>
inline unsigned add_pairs(unsigned sum, unsigned pair) {  // only whether one is NaN is asked of it
  unsigned out = 0;
  for (int place = 0; place < 2; place++) {
    double a = host::half_of_pair<Type>(sum, place), b = host::half_of_pair<Type>(pair, place);
    out |= (a != a || b != b ? 0x7fffu : 0) << (16 * place);
  }
  return out;
}
template <int Type>
inline unsigned rounded_pair(float low, float high) {
  constexpr int bits = Type == 2 ? 10 : 7;
  return host::short_code<bits>(low) | host::short_code<bits>(high) << 16;
}

template <int Shift>
inline unsigned add_shifted(unsigned x, unsigned y) { return y + (x >> Shift); }
inline unsigned exclusive_nor(unsigned x, unsigned y, unsigned z) { return ~(x ^ y ^ z); }

// Wrong on purpose, by about as much as the device's may be.
inline float short_inverse(float x) { return 1.0f / host::flushed(x) * (1.0f - 0x1p-21f); }
inline float short_root(float x) { return __builtin_sqrtf(x < 0x1p-126f ? 0.0f : x) * (1.0f + 0x1p-21f); }
inline float short_log2(float x) { return __builtin_log2f(x) * (1.0f + 0x1p-22f); }
inline float short_exp2(float x) { return __builtin_exp2f(x) * (1.0f - 0x1p-22f); }

inline unsigned fma_half2(unsigned a, unsigned b, unsigned c) { return host::fused_pair<10>(a, b, c); }
inline unsigned fma_bfloat2(unsigned a, unsigned b, unsigned c) { return host::fused_pair<7>(a, b, c); }
