// Reads an operand's numbers, with the scale and the exponent that the unit gives them (docs/matmul.md, section 1).
#pragma once

#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2
#define FLOAT8_E4M3 3
#define FLOAT8_E5M2 4

struct alignas(8) Operand {
  const void* data;
  const float* scales;  // [rows, groups along k], SCALED
  i64 row_stride, k_stride, scale_row_stride, scale_group_stride;
  double enlarged;      // 1 + 2^-eps
  i32 rows, block;      // block: places of a block in the order of sums
  i32 emin, top;        // smallest exponent of a number; largest, scales included (if not WIDE)
  i32 scale_every, scale_emin;
  i32 power_count, eps;
  u32 zero;             // high word of a zero, without sign
  u32 addend;           // whether sums begin with a number, which exponents of zeros would cut
};

// sign: bit 31. A NaN or Inf, of number or scale, is `special` and a zero.
struct Element { double value; i32 exponent; u32 sign; bool special; };

DEVICE float half_value(u32 code) {
  const u32 magnitude = code & 0x7FFFu;
  const float value = magnitude >= 0x7C00u ? __uint_as_float(0x7F800000u | magnitude << 13)
                                           : __uint_as_float(magnitude << 13) * 5.192296858534828e33f;  // 2^112
  return __uint_as_float(__float_as_uint(value) | (code & 0x8000u) << 16);
}

DEVICE float number(const void* data, i64 place) {
#if ELEMENT == FLOAT32
  return ((const float*)data)[place];
#elif ELEMENT == BFLOAT16
  return __uint_as_float((u32)((const u16*)data)[place] << 16);
#elif ELEMENT == FLOAT16
  return half_value(((const u16*)data)[place]);
#elif ELEMENT == FLOAT8_E5M2
  return half_value((u32)((const u8*)data)[place] << 8);
#else
  const u32 code = ((const u8*)data)[place], magnitude = code & 0x7Fu;
  const float value = magnitude == 0x7Fu ? __uint_as_float(0x7FC00000u)
                                         : __uint_as_float(magnitude << 20) * 1.329227995784916e36f;  // 2^120
  return __uint_as_float(__float_as_uint(value) | (code & 0x80u) << 24);
#endif
}

DEVICE i32 exponent_of(double value) { return ((__double2hiint(value) >> 20) & 0x7FF) - 1023; }

// A number without its scale.
DEVICE Element plain_element(const Operand& x, float given) {
  const u32 bits = __float_as_uint(given);
  Element e = {(double)given, 0, bits & 0x80000000u, (bits & 0x7F800000u) == 0x7F800000u};
  e.exponent = max(exponent_of(e.value), x.emin);
  if (e.special) e.value = 0.0;
  return e;
}

DEVICE Element element(const Operand& x, i64 row, i64 k) {
  Element e = plain_element(x, number(x.data, row * x.row_stride + k * x.k_stride));
#if SCALED
  const float factor = fabsf(x.scales[row * x.scale_row_stride + k / x.scale_every * x.scale_group_stride]);
  e.special |= (__float_as_uint(factor) & 0x7F800000u) == 0x7F800000u;
  e.exponent += max(exponent_of((double)factor), x.scale_emin);
  e.value = e.special ? 0.0 : e.value * (double)factor;
#endif
  return e;
}
