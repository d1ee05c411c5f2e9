// SPDX-License-Identifier: Apache-2.0
// Floating point: intrinsics with a rounding, conversions, bit views. Results that are NaN are the GPU's 0x7fffffff for
// float32; plain operators and casts are the host's (a NaN of another sign; a cast out of range is undefined).
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <fenv.h>
#endif

namespace host {

enum Mode { RN, RZ, RU, RD };

#if defined(__x86_64__)
struct Rounded {
  unsigned saved;
  explicit Rounded(Mode mode) : saved(_mm_getcsr()) {
    constexpr unsigned bits[] = {0x0000, 0x6000, 0x4000, 0x2000};
    _mm_setcsr((saved & ~0x6000u) | bits[mode]);
  }
  ~Rounded() { _mm_setcsr(saved); }
};
#define OPAQUE(value) asm volatile("" : "+x"(value)::"memory")
#else
struct Rounded {
  int saved;
  explicit Rounded(Mode mode) : saved(fegetround()) {
    const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_UPWARD, FE_DOWNWARD};
    fesetround(modes[mode]);
  }
  ~Rounded() { fesetround(saved); }
};
#if defined(__aarch64__)
#define OPAQUE(value) asm volatile("" : "+w"(value)::"memory")
#else
#define OPAQUE(value) asm volatile("" : "+m"(value)::"memory")
#endif
#endif

template <class To, class From>
inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  memcpy(&out, &value, sizeof out);
  return out;
}

inline float canonical(float value) { return value != value ? bits<float>(0x7fffffffu) : value; }
inline double canonical(double value) { return value; }

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float root(float a) { return __builtin_sqrtf(a); }
inline double root(double a) { return __builtin_sqrt(a); }

// The compiler does not know of modes. A function that is never inlined keeps the caller's arithmetic out of one; in
// it, operands pass through OPAQUE after the mode is set and results before it is set back.
#define ROUNDED(name, expression)                                     \
  template <Mode mode, class T>                                       \
  __attribute__((noinline, noipa)) T directed_##name(T a, T b, T c) { \
    Rounded scope(mode);                                              \
    OPAQUE(a);                                                        \
    OPAQUE(b);                                                        \
    OPAQUE(c);                                                        \
    T out = expression;                                               \
    OPAQUE(out);                                                      \
    return out;                                                       \
  }                                                                   \
  template <Mode mode, class T>                                       \
  inline T name(T a, T b = 0, T c = 0) {                              \
    if constexpr (mode == RN) return canonical(expression);           \
    else return canonical(directed_##name<mode>(a, b, c));            \
  }
ROUNDED(add, a + b)
ROUNDED(subtract, a - b)
ROUNDED(multiply, a * b)
ROUNDED(divide, a / b)
ROUNDED(multiply_add, fused(a, b, c))
ROUNDED(square_root, root(a))
ROUNDED(reciprocal, (T)1 / a)
#undef ROUNDED

template <Mode mode>
__attribute__((noinline, noipa)) float narrow(double value) {
  Rounded scope(mode);
  OPAQUE(value);
  float out = (float)value;
  OPAQUE(out);
  return canonical(out);
}

template <Mode mode, class T>
inline T whole(T value) {
  return mode == RN ? (T)__builtin_rint(value) : mode == RZ ? (T)__builtin_trunc(value)
         : mode == RU ? (T)__builtin_ceil(value) : (T)__builtin_floor(value);
}

// Out of range saturates; NaN is 0, or the top bit alone where a float64 or a 64-bit integer is involved (PTX, cvt).
template <class Integer, Mode mode, class T>
inline Integer to_integer(T value) {
  constexpr bool wide = sizeof(T) == 8 || sizeof(Integer) == 8;
  constexpr int width = sizeof(Integer) * 8;
  constexpr bool is_signed = std::is_signed_v<Integer>;
  constexpr Integer low = is_signed ? (Integer)(1ull << (width - 1)) : 0, high = ~low;
  if (value != value) return wide ? (Integer)(1ull << (width - 1)) : 0;
  double rounded = (double)whole<mode>(value);
  double limit = __builtin_ldexp(1.0, is_signed ? width - 1 : width);
  if (rounded >= limit) return high;
  if (rounded < (is_signed ? -limit : 0.0)) return low;
  return (Integer)rounded;
}

template <class T, Mode mode, class Integer>
inline T from_integer(Integer value) {
  constexpr int precision = sizeof(T) == 4 ? 24 : 53;
  bool negative = value < 0;
  unsigned long long size = negative ? 0ull - (unsigned long long)(long long)value : (unsigned long long)value;
  int excess = size ? 64 - __builtin_clzll(size) - precision : 0;
  if (excess > 0) {
    unsigned long long low = size & ((1ull << excess) - 1), half = 1ull << (excess - 1);
    size >>= excess;
    bool up = mode == RN ? low > half || (low == half && (size & 1)) : low && mode == (negative ? RD : RU);
    size += up;
  } else {
    excess = 0;
  }
  T out = (T)__builtin_ldexp((double)(long long)size, excess);
  return negative ? -out : out;
}

}  // namespace host

#define WITH_MODE(suffix, mode)                                                                                       \
  inline float __fadd_##suffix(float a, float b) { return host::add<host::mode>(a, b); }                              \
  inline float __fsub_##suffix(float a, float b) { return host::subtract<host::mode>(a, b); }                         \
  inline float __fmul_##suffix(float a, float b) { return host::multiply<host::mode>(a, b); }                         \
  inline float __fdiv_##suffix(float a, float b) { return host::divide<host::mode>(a, b); }                           \
  inline float __fmaf_##suffix(float a, float b, float c) { return host::multiply_add<host::mode>(a, b, c); }         \
  inline float __fsqrt_##suffix(float a) { return host::square_root<host::mode>(a); }                                 \
  inline float __frcp_##suffix(float a) { return host::reciprocal<host::mode>(a); }                                   \
  inline double __dadd_##suffix(double a, double b) { return host::add<host::mode>(a, b); }                           \
  inline double __dsub_##suffix(double a, double b) { return host::subtract<host::mode>(a, b); }                      \
  inline double __dmul_##suffix(double a, double b) { return host::multiply<host::mode>(a, b); }                      \
  inline double __ddiv_##suffix(double a, double b) { return host::divide<host::mode>(a, b); }                        \
  inline double __fma_##suffix(double a, double b, double c) { return host::multiply_add<host::mode>(a, b, c); }      \
  inline double __dsqrt_##suffix(double a) { return host::square_root<host::mode>(a); }                               \
  inline double __drcp_##suffix(double a) { return host::reciprocal<host::mode>(a); }                                 \
  inline float __double2float_##suffix(double a) { return host::narrow<host::mode>(a); }                              \
  inline int __float2int_##suffix(float a) { return host::to_integer<int, host::mode>(a); }                           \
  inline unsigned __float2uint_##suffix(float a) { return host::to_integer<unsigned, host::mode>(a); }                \
  inline long long __float2ll_##suffix(float a) { return host::to_integer<long long, host::mode>(a); }                \
  inline unsigned long long __float2ull_##suffix(float a) {                                                           \
    return host::to_integer<unsigned long long, host::mode>(a);                                                       \
  }                                                                                                                   \
  inline int __double2int_##suffix(double a) { return host::to_integer<int, host::mode>(a); }                         \
  inline unsigned __double2uint_##suffix(double a) { return host::to_integer<unsigned, host::mode>(a); }              \
  inline long long __double2ll_##suffix(double a) { return host::to_integer<long long, host::mode>(a); }              \
  inline unsigned long long __double2ull_##suffix(double a) {                                                         \
    return host::to_integer<unsigned long long, host::mode>(a);                                                       \
  }                                                                                                                   \
  inline float __int2float_##suffix(int a) { return host::from_integer<float, host::mode>(a); }                       \
  inline float __uint2float_##suffix(unsigned a) { return host::from_integer<float, host::mode>(a); }                 \
  inline float __ll2float_##suffix(long long a) { return host::from_integer<float, host::mode>(a); }                  \
  inline float __ull2float_##suffix(unsigned long long a) { return host::from_integer<float, host::mode>(a); }        \
  inline double __ll2double_##suffix(long long a) { return host::from_integer<double, host::mode>(a); }               \
  inline double __ull2double_##suffix(unsigned long long a) { return host::from_integer<double, host::mode>(a); }
WITH_MODE(rn, RN)
WITH_MODE(rz, RZ)
WITH_MODE(ru, RU)
WITH_MODE(rd, RD)
#undef WITH_MODE

inline double __int2double_rn(int a) { return a; }
inline double __uint2double_rn(unsigned a) { return a; }
inline float __saturatef(float a) { return a >= 1.0f ? 1.0f : a > 0.0f ? a : 0.0f; }

inline int __float_as_int(float a) { return host::bits<int>(a); }
inline unsigned __float_as_uint(float a) { return host::bits<unsigned>(a); }
inline float __int_as_float(int a) { return host::bits<float>(a); }
inline float __uint_as_float(unsigned a) { return host::bits<float>(a); }
inline long long __double_as_longlong(double a) { return host::bits<long long>(a); }
inline double __longlong_as_double(long long a) { return host::bits<double>(a); }
inline int __double2hiint(double a) { return (int)(host::bits<long long>(a) >> 32); }
inline int __double2loint(double a) { return (int)host::bits<long long>(a); }
inline double __hiloint2double(int high, int low) {
  return host::bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}

// The smaller and the larger operand: the other one where one is NaN, and -0 below +0 (PTX, min and max).
namespace host {
template <class T>
inline T smaller(T a, T b) {
  return a != a ? canonical(b) : b != b ? a : a == b ? (signbit(a) ? a : b) : a < b ? a : b;
}
template <class T>
inline T larger(T a, T b) {
  return a != a ? canonical(b) : b != b ? a : a == b ? (signbit(a) ? b : a) : a > b ? a : b;
}
}  // namespace host
inline float max_or_nan(float a, float b) { return a != a || b != b ? host::canonical(a + b) : host::larger(a, b); }
#define fminf(a, b) host::smaller<float>(a, b)
#define fmaxf(a, b) host::larger<float>(a, b)
#define fmin(a, b) host::smaller<double>(a, b)
#define fmax(a, b) host::larger<double>(a, b)

template <class A, class B, class T = std::common_type_t<A, B>>
inline T min(A a, B b) {
  if constexpr (std::is_floating_point_v<T>) return host::smaller<T>(a, b);
  else return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B, class T = std::common_type_t<A, B>>
inline T max(A a, B b) {
  if constexpr (std::is_floating_point_v<T>) return host::larger<T>(a, b);
  else return (T)a > (T)b ? (T)a : (T)b;
}
inline long long llmax(long long a, long long b) { return a > b ? a : b; }
inline long long llmin(long long a, long long b) { return a < b ? a : b; }
inline unsigned umax(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
