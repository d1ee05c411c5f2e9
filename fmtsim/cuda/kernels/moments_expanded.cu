// A step of Adam on many parameters at once, whose moments are E4M3 codes of groups of 128 with expanded range (COAT):
// decode, update, encode from one read. The update is that of fmtsim/optim/rules.py; the expansion, step by step, that of
// fmtsim/optim/expansion.py, with the logarithm and the exponential of fmtsim/rounding/elementary.py.
//
// Macros: those of moments.cuh.
#include "moments.cuh"

#define GROUP 128  // a warp's; a lane has four neighbours
#define TOP 448.0f
#define FLOOR 1e-30f
#define RANGE 11.516439284270025  // fmtsim.optim.expansion.RANGE: ln(448 * 448 / 2)

// fmtsim.rounding.elementary.ln of a positive, finite, normal number.
__device__ __noinline__ double ln_of(double x) {
  i64 bits = __double_as_longlong(x);
  double m = __longlong_as_double((bits & 0xFFFFFFFFFFFFFll) | 0x3FE0000000000000ll);
  bool low = m < 0.7071067811865476;
  m = low ? m + m : m;
  double k = (double)((bits >> 52) - 1022 - (low ? 1 : 0)), f = m - 1.0, s = f / (f + 2.0), z = s * s, p = 2.0 / 21;
#pragma unroll
  for (int i = 9; i >= 1; i--) p = p * z + 2.0 / (2 * i + 1);
  p = p * z;
  double t = s * (f - p);
  t = t - k * 5.497923018708371e-14;
  t = f - t;
  return k * 0.6931471805598903 + t;
}

DEVICE double power_of_two(i64 exponent) { return __longlong_as_double((exponent + 1023) << 52); }

// fmtsim.rounding.elementary.exp.
__device__ __noinline__ double exp_of(double x) {
  if (x != x) return x;
  if (x > 709.782712893384) return __longlong_as_double(0x7FF0000000000000ll);
  if (x < -745.1332191019411) return 0.0;
  double n = x * 1.4426950408889634;
  n = n + 6755399441055744.0;
  n = n - 6755399441055744.0;
  double r = x - n * 0.6931471805598903;
  r = r - n * 5.497923018708371e-14;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = r * r * p;
  p = r + p;
  p = 1.0 + p;
  i64 exponent = (i64)n, half = exponent >> 1;  // 2^exponent itself may lie outside the normal range
  return p * power_of_two(half) * power_of_two(exponent - half);
}

// The logarithm of a magnitude; NaN and Inf stay, 0 gives 0.
DEVICE double ln_or_itself(float x) {
  double wide = x;
  if (!((__float_as_uint(x) & MAGNITUDE) < INFINITE)) return wide;
  return ln_of(x > 0.0f ? wide : 1.0);
}

DEVICE float raised(float x, double power, double centre) {
  return __double2float_rn(exp_of(power * (ln_or_itself(x) - centre)));
}

struct Group {
  float scale, power, centre;
};

DEVICE float value_of(u32 code) {
  u32 magnitude = code & 0x7F, sign = (code & 0x80) << 24;
  if (magnitude == 0x7F) return __uint_as_float(0x7FC00000u);
  float x = magnitude < 8 ? (float)magnitude * 0.001953125f : __uint_as_float((magnitude + 960) << 20);
  return __uint_as_float(__float_as_uint(x) | sign);
}

// E4M3 of a number, to nearest even, saturated.
DEVICE u32 code_of(float x) {
  u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
  bits &= MAGNITUDE;
  if (bits > INFINITE) return 0x7F;
  if (bits > 0x43E00000u) bits = 0x43E00000u;  // 448
  if (bits < 0x3C800000u) return sign | (u32)__float2int_rn(__uint_as_float(bits) * 512.0f);  // below 2^-6
  return sign | (((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - 960);
}

DEVICE float decoded(u32 code, const Group& group) {
  float q = value_of(code), z = __fmul_rn(fabsf(q), group.scale);
  float size = 0.0f;
  if (z != 0.0f) size = __fmul_rn(__double2float_rn(exp_of(ln_or_itself(z) / (double)group.power)), group.centre);
  return __uint_as_float((__float_as_uint(size) & MAGNITUDE) | (__float_as_uint(q) & ~MAGNITUDE));
}

// Extremes over the warp and what follows from them, steps 1 to 3 and 5. The smallest of bits - 1 is that of numbers
// that are not zero.
DEVICE Group group_of(const float (&x)[4]) {
  u32 top = 0, low = 0xFFFFFFFFu;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 bits = __float_as_uint(x[k]) & MAGNITUDE;
    top = bits > top ? bits : top;
    low = bits - 1 < low ? bits - 1 : low;
  }
  top = largest_of_warp(top);
  low = ~largest_of_warp(~low) + 1;
  bool nan = top > INFINITE;
  low = nan ? 0x7FC00000u : low == INFINITE ? 0 : low;  // only Inf, or only zeros: nothing is smallest
  float high = __fadd_rn(__uint_as_float(top), FLOOR), least = __fadd_rn(__uint_as_float(low), FLOOR);
  Group group;
  group.centre = __fmul_rn(__fsqrt_rn(high), __fsqrt_rn(least));
  double distance = ln_or_itself(high) - ln_or_itself(least);
  double power = floor(16.0 * (RANGE / (distance > 0.0 ? distance : 1.0))) / 16.0;
  group.power = distance == 0.0 ? 1.0f : nan ? __uint_as_float(0x7FC00000u) : __double2float_rn(power);
  group.scale = __fdiv_rn(raised(high, (double)group.power, ln_or_itself(group.centre)), TOP);
  return group;
}

// Codes of a lane's four numbers, steps 4 and 6.
DEVICE u32 encoded(const float (&x)[4], const Group& group) {
  double centre = ln_or_itself(group.centre), power = group.power;
  u32 codes = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 bits = __float_as_uint(x[k]), magnitude = bits & MAGNITUDE;
    float z = 0.0f;
    if (magnitude) z = __fdiv_rn(raised(__uint_as_float(magnitude), power, centre), group.scale);
    u32 code = code_of(__uint_as_float((__float_as_uint(z) & MAGNITUDE) | (bits & ~MAGNITUDE)));
    codes |= code << (8 * k);
  }
  return codes;
}

DEVICE Group read_group(const float* scales, const float* powers, const float* centres, i64 at) {
  return Group{scales[at], powers[at], centres[at]};
}

// A group of a parameter; all lanes of a warp come here together.
DEVICE u32 step_group(const Entry& e, i64 first, const Numbers& n) {
  i64 at = first + threadIdx.x % 32 * 4, place = first / GROUP;
  Group mg = read_group(e.m_scales, e.m_powers, e.m_centres, place);
  Group vg = read_group(e.v_scales, e.v_powers, e.v_centres, place);
  Four p = read(e.p, at, e.count), g = read(e.g, at, e.count);
  u32 mc = read_codes((const u8*)e.m, at, e.count), vc = read_codes((const u8*)e.v, at, e.count), bad = 0;
  float m[4], v[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    m[k] = decoded(mc >> (8 * k) & 0xFFu, mg);
    v[k] = decoded(vc >> (8 * k) & 0xFFu, vg);
    bad += update(p.x[k], g.x[k], m[k], v[k], n);
    if (at + k >= e.count) m[k] = v[k] = 0.0f;
  }
  write(e.p, at, e.count, p);
  mg = group_of(m);
  vg = group_of(v);
  write_codes((u8*)e.m, at, e.count, encoded(m, mg));
  write_codes((u8*)e.v, at, e.count, encoded(v, vg));
  if (threadIdx.x % 32 == 0) {
    e.m_scales[place] = mg.scale, e.m_powers[place] = mg.power, e.m_centres[place] = mg.centre;
    e.v_scales[place] = vg.scale, e.v_powers[place] = vg.power, e.v_centres[place] = vg.centre;
  }
  return bad;
}

// Blocks of 256 threads take the chunks in turn. nonfinite: counts the elements of gradients that are NaN or infinite.
KERNEL __launch_bounds__(256) adam(
    const Entries entries, i32 count, i64 chunks, const Numbers n, u64* nonfinite) {
  u32 bad = 0;
  i32 which = 0;
  for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    while (which + 1 < count && entries.of[which + 1].first <= chunk) which++;
    const Entry& e = entries.of[which];
    i64 start = (chunk - e.first) * CHUNK;
    if (e.plain) {
      bad += step_plainly(e, start, n);
      continue;
    }
#pragma unroll 1
    for (i64 first = start + threadIdx.x / 32 * GROUP; first < start + CHUNK && first < e.count; first += 8 * GROUP) {
      bad += step_group(e, first, n);
    }
  }
  if (bad) atomicAdd(nonfinite, (u64)bad);
}
