// SPDX-License-Identifier: Apache-2.0
// What a step makes of one element: the rules of fmtsim/optim/rules.py, operation by operation.
// Macros: UPDATE: one of those below. GAMMA, TOP_CODE: of Madam, codes an octave and the largest of a magnitude.
#pragma once
#include "common.cuh"

#define ADAM 0
#define LION 1
#define SGD 2
#define NESTEROV 3
#define MADAM 4        // weights are codes of logarithms, of which directions are integers
#define MADAM_FREELY 5  // directions are not rounded

#define OF_CODES (UPDATE >= MADAM)
#define HAS_FIRST (!OF_CODES)
#define HAS_SECOND (UPDATE == ADAM || OF_CODES)
#define INFINITE 0x7F800000u

struct alignas(16) Numbers {
  float before, after, penalty, beta1, rest1, beta2, rest2, correction, eps, size, bound;
  float inverse;  // 1 / correction, which lies from 2^-60 to 1
};

// x / divisor as IEEE rounds it but for the sign of zeros, with inverse = fl(1 / divisor) (Markstein): for divisors from
// 2^-60 to 2^60, x that are 0 or from 2^-80 to 2^66, and quotients from 2^-100 to 2^126, so that all remainders are exact.
DEVICE float corrected(float x, float divisor, float inverse) {
  float q = __fmul_rn(x, inverse);
  q = __fmaf_rn(__fmaf_rn(-q, divisor, x), inverse, q);
  return __fmaf_rn(__fmaf_rn(-q, divisor, x), inverse, q);
}

// The same with the sign of zeros, and of infinite numbers and NaN.
DEVICE float quotient(float x, float divisor, float inverse) {
  u32 bits = __float_as_uint(x);
  float q = __uint_as_float(__float_as_uint(corrected(x, divisor, inverse)) | (bits & ~MAGNITUDE));  // of zeros
  return (bits & MAGNITUDE) < INFINITE ? q : __fmul_rn(x, inverse);
}

// 1 / x with a relative error below 2^-20, of which subnormal results and operands are zero.
#ifdef FMTSIM_HOST
DEVICE float short_inverse(float x) {
  return 1.0f / (fabsf(x) < 1.1754944e-38f ? __uint_as_float(__float_as_uint(x) & ~MAGNITUDE) : x) * (1.0f - 0x1p-21f);
}
#else
DEVICE float short_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

DEVICE bool is_bad(float g) { return (__float_as_uint(g) & MAGNITUDE) >= INFINITE; }

// New moments of an element; returns the direction, but Adam's, which takes a root and divisions.
DEVICE float grow(float p, float g, float& m, float& v, const Numbers& n) {
  if (HAS_FIRST && UPDATE != LION && n.penalty != 0.0f) g = __fadd_rn(g, __fmul_rn(p, n.penalty));
  float old = m;
  if (UPDATE == ADAM) m = __fadd_rn(__fmul_rn(m, n.beta1), __fmul_rn(g, n.rest1));
  if (UPDATE == LION) m = __fadd_rn(__fmul_rn(m, n.beta2), __fmul_rn(g, n.rest2));
  if (UPDATE == SGD || UPDATE == NESTEROV) m = __fadd_rn(__fmul_rn(m, n.beta1), g);
  if (HAS_SECOND) v = __fadd_rn(__fmul_rn(v, n.beta2), __fmul_rn(__fmul_rn(g, n.rest2), g));
  if (UPDATE == LION) {
    float mixed = __fadd_rn(__fmul_rn(old, n.beta1), __fmul_rn(g, n.rest1));
    return mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : 0.0f;
  }
  if (UPDATE == NESTEROV) return __fadd_rn(g, __fmul_rn(m, n.beta1));
  if (!OF_CODES) return m;
  float normal = __fdiv_rn(g, __fsqrt_rn(__fdiv_rn(v, n.correction)));
  normal = normal != normal ? 0.0f : normal < -n.bound ? -n.bound : normal > n.bound ? n.bound : normal;
  return UPDATE == MADAM ? rintf(normal) : normal;
}

// What new moments make of an element.
DEVICE float moved(float p, float direction, float m, float v, const Numbers& n) {
  if (UPDATE == ADAM) {
    float root = __fsqrt_rn(v);
    if (n.correction != 1.0f) root = quotient(root, n.correction, n.inverse);
    direction = __fdiv_rn(m, __fadd_rn(root, n.eps));
  }
  return __fmul_rn(__fsub_rn(__fmul_rn(p, n.before), __fmul_rn(direction, n.size)), n.after);
}

#if OF_CODES
// The code of a sign and a magnitude, moved.
DEVICE u32 moved_code(u32 code, float direction, const Numbers& n) {
  float falls = __fmul_rn(__fmul_rn(direction, __fmul_rn(n.size, (float)GAMMA)), code > TOP_CODE ? -1.0f : 1.0f);
  falls = fminf(fmaxf(rintf(falls), -65536.0f), 65536.0f);
  i32 size = (i32)(code & TOP_CODE) - (i32)falls;
  return (code & ~(u32)(TOP_CODE)) | (u32)(size < 0 ? 0 : size > TOP_CODE ? TOP_CODE : size);
}
#endif

// One element: parameter, gradient and moments become the new ones; returns whether the gradient is not finite.
// Zeroing: elements whose gradient is not finite lose their moments and stay. A parameter of codes is one's bits.
DEVICE bool update(float& p, float g, float& m, float& v, const Numbers& n, bool zeroing) {
  bool bad = is_bad(g), dropped = bad && zeroing;
  float direction = grow(p, g, m, v, n), now;
#if OF_CODES
  now = __uint_as_float(moved_code(__float_as_uint(p), direction, n));
#else
  now = moved(p, direction, m, v, n);
#endif
  p = dropped ? p : now;
  m = dropped ? 0.0f : m;
  v = dropped ? 0.0f : v;
  return bad;
}
