// SPDX-License-Identifier: Apache-2.0
// Integer intrinsics: bits, wide products, bytes, and two or four numbers in one word.
#pragma once

inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline int __clz(int a) { return a ? __builtin_clz((unsigned)a) : 32; }
inline int __clzll(long long a) { return a ? __builtin_clzll((unsigned long long)a) : 64; }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __ffsll(long long a) { return __builtin_ffsll(a); }
inline unsigned __brev(unsigned a) {
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) out |= (a >> i & 1) << (31 - i);
  return out;
}
inline unsigned long long __brevll(unsigned long long a) {
  return (unsigned long long)__brev((unsigned)a) << 32 | __brev((unsigned)(a >> 32));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned choice = selector >> (4 * i);
    unsigned byte = both >> (8 * (choice & 7)) & 255;
    if (choice & 8) byte = byte & 128 ? 255 : 0;  // the sign alone, in all bits
    out |= byte << (8 * i);
  }
  return out;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return ((unsigned long long)high << 32 | low) << (shift & 31) >> 32;
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return ((unsigned long long)high << 32 | low) >> (shift & 31);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}

inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __mul24(int a, int b) { return (int)((unsigned)(a << 8 >> 8) * (unsigned)(b << 8 >> 8)); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
inline unsigned __sad(int a, int b, unsigned c) { return c + (unsigned)(a > b ? a - b : b - a); }
inline unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a > b ? a - b : b - a); }
inline int __hadd(int a, int b) { return (int)(((long long)a + b) >> 1); }
inline unsigned __uhadd(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a + b) >> 1); }

inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += (signed char)(a >> 8 * i) * (signed char)(b >> 8 * i);
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (unsigned char)(a >> 8 * i) * (unsigned char)(b >> 8 * i);
  return c;
}

namespace host {
// Applies an operation to the parts of two words: T is the type of a part; the result keeps its low bits.
template <class T, class Operation>
inline unsigned parts(unsigned a, unsigned b, Operation operation) {
  constexpr int width = sizeof(T) * 8;
  unsigned out = 0;
  for (int i = 0; i < 32; i += width) {
    long long part = operation((long long)(T)(a >> i), (long long)(T)(b >> i));
    out |= (unsigned)(part & ((1ll << width) - 1)) << i;
  }
  return out;
}
template <class T>
inline long long clamped(long long value) {
  constexpr long long low = std::is_signed_v<T> ? -(1ll << (sizeof(T) * 8 - 1)) : 0;
  constexpr long long high = std::is_signed_v<T> ? (1ll << (sizeof(T) * 8 - 1)) - 1 : (1ll << (sizeof(T) * 8)) - 1;
  return value < low ? low : value > high ? high : value;
}
}  // namespace host

#define PARTS(name, type, expression)                                                                 \
  inline unsigned name(unsigned x, unsigned y) {                                                      \
    return host::parts<type>(x, y, [](long long a, long long b) -> long long { return expression; }); \
  }
#define PARTS_OF(count, s, u)                                                                                         \
  PARTS(__vadd##count, u, a + b)                                                                                      \
  PARTS(__vaddss##count, s, host::clamped<s>(a + b))                                                                  \
  PARTS(__vaddus##count, u, host::clamped<u>(a + b))                                                                  \
  PARTS(__vsub##count, u, a - b)                                                                                      \
  PARTS(__vsubss##count, s, host::clamped<s>(a - b))                                                                  \
  PARTS(__vsubus##count, u, host::clamped<u>(a - b))                                                                  \
  PARTS(__vmaxs##count, s, a > b ? a : b)                                                                             \
  PARTS(__vmaxu##count, u, a > b ? a : b)                                                                             \
  PARTS(__vmins##count, s, a < b ? a : b)                                                                             \
  PARTS(__vminu##count, u, a < b ? a : b)                                                                             \
  PARTS(__vavgu##count, u, (a + b + 1) >> 1)                                                                          \
  PARTS(__vhaddu##count, u, (a + b) >> 1)                                                                             \
  PARTS(__vabsdiffs##count, s, a > b ? a - b : b - a)                                                                 \
  PARTS(__vabsdiffu##count, u, a > b ? a - b : b - a)                                                                 \
  PARTS(__vcmpeq##count, u, a == b ? -1 : 0)                                                                          \
  PARTS(__vcmpne##count, u, a != b ? -1 : 0)                                                                          \
  PARTS(__vcmpgts##count, s, a > b ? -1 : 0)                                                                          \
  PARTS(__vcmpgtu##count, u, a > b ? -1 : 0)                                                                          \
  PARTS(__vcmpges##count, s, a >= b ? -1 : 0)                                                                         \
  PARTS(__vcmpgeu##count, u, a >= b ? -1 : 0)                                                                         \
  PARTS(__vcmplts##count, s, a < b ? -1 : 0)                                                                          \
  PARTS(__vcmpltu##count, u, a < b ? -1 : 0)                                                                          \
  PARTS(__vcmples##count, s, a <= b ? -1 : 0)                                                                         \
  PARTS(__vcmpleu##count, u, a <= b ? -1 : 0)                                                                         \
  PARTS(__vseteq##count, u, a == b)                                                                                   \
  PARTS(__vsetne##count, u, a != b)                                                                                   \
  PARTS(__vsetgts##count, s, a > b)                                                                                   \
  PARTS(__vsetgtu##count, u, a > b)                                                                                   \
  PARTS(__vsetges##count, s, a >= b)                                                                                  \
  PARTS(__vsetgeu##count, u, a >= b)                                                                                  \
  PARTS(__vsetlts##count, s, a < b)                                                                                   \
  PARTS(__vsetltu##count, u, a < b)                                                                                   \
  inline unsigned __vneg##count(unsigned x) { return __vsub##count(0, x); }                                           \
  inline unsigned __vnegss##count(unsigned x) { return __vsubss##count(0, x); }                                       \
  inline unsigned __vabs##count(unsigned x) {                                                                         \
    return host::parts<s>(x, x, [](long long a, long long) { return a < 0 ? -a : a; });                               \
  }                                                                                                                   \
  inline unsigned __vabsss##count(unsigned x) {                                                                       \
    return host::parts<s>(x, x, [](long long a, long long) { return host::clamped<s>(a < 0 ? -a : a); });             \
  }
PARTS_OF(2, short, unsigned short)
PARTS_OF(4, signed char, unsigned char)
#undef PARTS_OF
#undef PARTS

// Dynamic programming instructions (compute capability 9.0; earlier cards take several instructions).
#define DPX(type, suffix, maximum, minimum, plus)                                                   \
  inline type __viaddmax_##suffix(type a, type b, type c) { return (type)maximum(plus(a, b), c); }  \
  inline type __viaddmin_##suffix(type a, type b, type c) { return (type)minimum(plus(a, b), c); }  \
  inline type __vimax3_##suffix(type a, type b, type c) { return (type)maximum(maximum(a, b), c); } \
  inline type __vimin3_##suffix(type a, type b, type c) { return (type)minimum(minimum(a, b), c); }
#define DPX_RELU(type, suffix, maximum, minimum, plus)                                                                \
  inline type __viaddmax_##suffix##_relu(type a, type b, type c) { return maximum(maximum(plus(a, b), c), (type)0); } \
  inline type __viaddmin_##suffix##_relu(type a, type b, type c) { return maximum(minimum(plus(a, b), c), (type)0); } \
  inline type __vimax3_##suffix##_relu(type a, type b, type c) { return maximum(maximum(maximum(a, b), c), (type)0); }\
  inline type __vimin3_##suffix##_relu(type a, type b, type c) { return maximum(minimum(minimum(a, b), c), (type)0); }\
  inline type __vimax_##suffix##_relu(type a, type b) { return maximum(maximum(a, b), (type)0); }                     \
  inline type __vimin_##suffix##_relu(type a, type b) { return maximum(minimum(a, b), (type)0); }
namespace host {
inline int wrapped(int a, int b) { return (int)((unsigned)a + (unsigned)b); }
inline unsigned wrapped(unsigned a, unsigned b) { return a + b; }
}
DPX(int, s32, max, min, host::wrapped)
DPX(unsigned, u32, max, min, host::wrapped)
DPX(unsigned, s16x2, __vmaxs2, __vmins2, __vadd2)
DPX(unsigned, u16x2, __vmaxu2, __vminu2, __vadd2)
DPX_RELU(int, s32, max, min, host::wrapped)
DPX_RELU(unsigned, s16x2, __vmaxs2, __vmins2, __vadd2)
#undef DPX
#undef DPX_RELU
