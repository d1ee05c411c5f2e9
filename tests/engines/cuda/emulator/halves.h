// SPDX-License-Identifier: Apache-2.0
// Fused multiply-adds of two float16 or bfloat16 side by side, which common.cuh has in assembly.
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

}  // namespace host

inline unsigned fma_half2(unsigned a, unsigned b, unsigned c) { return host::fused_pair<10>(a, b, c); }
inline unsigned fma_bfloat2(unsigned a, unsigned b, unsigned c) { return host::fused_pair<7>(a, b, c); }
