// SPDX-License-Identifier: Apache-2.0
// A step of Adam, Lion or SGD on many parameters at once, whose moments are E4M3 codes of groups of 128 with expanded
// range (COAT): decode, update, encode from one read. The update is that of fmtsim/optim/rules.py; the expansion, step
// by step, that of fmtsim/optim/codec.py, with the logarithm and the exponential of fmtsim/rounding/elementary.py.
//
// Eight lanes compute scales, powers and centres of two groups at once. Numbers are first computed in fewer steps whose
// error is bounded: unless a rounding could go another way within the bound, the result is the definition's; else it is
// computed as defined.
//
// Macros: those of optimizer.cuh.
#define EXPANDED
#include "optimizer.cuh"

#define GROUP 128  // a warp's; a lane has four neighbours
#define TOP 448.0f
#define FLOOR 1e-30f
#define RANGE 11.516439284270025  // fmtsim.optim.codec.RANGE: ln(448 * 448 / 2)

// fmtsim.rounding.elementary.ln of a positive, finite, normal number.
__device__ __noinline__ double ln_of(double x) {
  i64 bits = __double_as_longlong(x);
  double m = __longlong_as_double((bits & 0xFFFFFFFFFFFFFll) | 0x3FE0000000000000ll);
  bool low = m < 0.7071067811865476;
  m = low ? m + m : m;
  double k = (double)((bits >> 52) - 1022 - (low ? 1 : 0)), f = m - 1.0, s = f / (f + 2.0), z = s * s, p = 2.0 / 21;
  UNROLLED for (int i = 9; i >= 1; i--) p = p * z + 2.0 / (2 * i + 1);
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
  if (!((as_bits(x) & MAGNITUDE) < INFINITE)) return wide;
  return ln_of(x > 0.0f ? wide : 1.0);
}

DEVICE float raised(float x, double power, double centre) {
  return __double2float_rn(exp_of(power * (ln_or_itself(x) - centre)));
}

struct Group {
  float scale, power, centre;
};

// The magnitude of a code.
DEVICE float size_of(u32 code) {
  u32 size = code & 0x7F;
  return as_float(size < 0x7F ? magnitude_of<3, 7>(size) : 0x7FC00000u);
}

// E4M3 of a magnitude, to nearest even, saturated.
DEVICE u32 code_of(float x) {
  u32 bits = as_bits(x);
  if (bits > INFINITE) return 0x7F;
  return nearest_code<3, 7>(bits > 0x43E00000u ? 0x43E00000u : bits);  // 448
}

// What lanes of a block share: logarithms of E4M3's magnitudes by code, and 2^(i / 128).
#define ROOTS 128
struct Tables {
  double logarithms[128], roots[ROOTS];
};

DEVICE void fill(Tables& t) {
  for (u32 i = threadIdx.x; i < 128; i += 256) t.logarithms[i] = ln_of(i % 127 ? (double)size_of(i) : 1.0);
  for (u32 i = threadIdx.x; i < ROOTS; i += 256) t.roots[i] = exp_of(i * (0.6931471805599453 / ROOTS));
}

// e^x for |x| < 80, with a relative error below 2^-48.
DEVICE double short_exp(double x, const Tables& t) {
  double magic = __fma_rn(x, 184.6649652337873, 6755399441055744.0), n = magic - 6755399441055744.0;
  double r = __fma_rn(n, -0.0054152123481245725, x);
  r = __fma_rn(n, -1.8117553233174215e-19, r);
  double p = __fma_rn(r, 1.0 / 24, 1.0 / 6);
  p = __fma_rn(p, r, 0.5);
  p = __fma_rn(p, r, 1.0);
  p = p * r;
  i64 place = __double_as_longlong(magic);
  double root = t.roots[place & (ROOTS - 1)];
  p = __fma_rn(root, p, root);
  return __longlong_as_double(__double_as_longlong(p) + (place >> 7 << 52));
}

// What decoding needs of a group: the scale's logarithm, 1 / power.
struct Decoder {
  double logarithm, inverse;
};

__device__ __noinline__ float factor_of(float z, float power) {
  return __double2float_rn(exp_of(ln_or_itself(z) / (double)power));
}

// The logarithm of z = fl(q scale) is that of q plus that of the scale, less what rounding changed: right to 2^-46,
// which powers of 1/16 and more make 2^-42 of the result. `low` is what lies behind float32's last place; within 2^-40
// of the middle nothing is decided.
DEVICE float decoded(u32 code, const Group& group, const Decoder& d, const Tables& t) {
  float q = size_of(code), z = __fmul_rn(q, group.scale), rest = __fmaf_rn(q, group.scale, -z);
  double x = (t.logarithms[code & 0x7F] + d.logarithm - (double)__fmul_rn(rest, short_inverse(z))) * d.inverse;
  double y = short_exp(x, t);
  u32 low = (u32)__double_as_longlong(y) & 0x1FFFFFFFu;
  bool sure = z > 1e-30f && z < 1e30f && fabs(x) < 80.0 && low - 0x0FFFE000u > 0x4000u;
  float factor = __double2float_rn(y);
  if (!sure && z != 0.0f) factor = factor_of(z, group.power);
  float size = z != 0.0f ? __fmul_rn(factor, group.centre) : 0.0f;
  return as_float((as_bits(size) & MAGNITUDE) | (code & 0x80) << 24);
}

// What encoding needs of a group. inverse: of the centre. step: log2 of the scale.
struct Coder {
  double ln_centre;
  float scale, power, inverse, step;
  bool quick;  // the short path may be taken
};

DEVICE Coder coder_of(const Group& group, double ln_centre) {
  float step = short_log2(group.scale);
  bool quick = group.power > 0.0f && group.power <= 16.0f && fabsf(step) < 40.0f;
  quick = quick && group.centre > 1e-30f && group.centre < 1e30f;
  return Coder{ln_centre, group.scale, group.power, short_inverse(group.centre), step, quick};
}

__device__ __noinline__ u32 code_by_definition(float magnitude, float power, double ln_centre, float scale) {
  return code_of(__fdiv_rn(raised(magnitude, power, ln_centre), scale));
}

// Codes of two magnitudes, side by side; no NaN.
DEVICE u32 codes_of(float low, float high) {
#if !defined(FMTSIM_HOST) && __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return code_of(low) | code_of(high) << 8;
#endif
}

// The code of a number. With powers up to 16, the short path's y is off by less than 2^-16 of itself wherever it is not
// far below the smallest code: if y less 2^-15 and y plus 2^-15 have one code, that is the number's.
DEVICE u32 encoded(float x, const Coder& c) {
  u32 bits = as_bits(x) & MAGNITUDE, sign = as_bits(x) >> 24 & 0x80;
  float u = as_float(bits) * c.inverse, y = short_exp2(__fmaf_rn(c.power, short_log2(u), -c.step));
  u32 pair = codes_of(y * 0.999969482421875f, y * 1.000030517578125f), code = bits ? pair & 0x7F : 0;
  bool sure = c.quick && u > 1e-30f && u < 1e30f && (pair & 0x7F) == pair >> 8;
  if (!sure && bits) {
    code = code_by_definition(as_float(bits), c.power, c.ln_centre, c.scale);
    sign = code == 0x7F ? 0 : sign;
  }
  return sign | code;
}

// The largest number of a group, or the smallest that is not zero, as bits.
DEVICE u32 top_of(const float (&x)[4]) {
  u32 top = 0;
  UNROLLED for (int k = 0; k < 4; k++) top = max(top, as_bits(x[k]) & MAGNITUDE);
  return __reduce_max_sync(0xFFFFFFFFu, top);
}
DEVICE u32 low_of(const float (&x)[4]) {
  u32 low = 0xFFFFFFFFu;  // of bits - 1, which are the most for zeros
  UNROLLED for (int k = 0; k < 4; k++) low = min(low, (as_bits(x[k]) & MAGNITUDE) - 1);
  return __reduce_min_sync(0xFFFFFFFFu, low) + 1;
}

// Steps 1 to 3 and 5 for the state of a lane: even lanes bring its largest number, odd ones its smallest, and both have
// the group then.
DEVICE Group group_of(u32 extreme, double& ln_centre) {
  u32 other = __shfl_xor_sync(0xFFFFFFFFu, extreme, 1);
  bool odd = threadIdx.x & 1;
  u32 top = odd ? other : extreme, low = odd ? extreme : other;
  bool nan = top > INFINITE;
  low = nan ? 0x7FC00000u : low == INFINITE ? 0 : low;  // only Inf, or only zeros: nothing is smallest
  float high = __fadd_rn(as_float(top), FLOOR), least = __fadd_rn(as_float(low), FLOOR);
  double mine = ln_or_itself(odd ? least : high), others = __shfl_xor_sync(0xFFFFFFFFu, mine, 1);
  double ln_high = odd ? others : mine, distance = ln_high - (odd ? mine : others);
  Group group;
  group.centre = __fmul_rn(__fsqrt_rn(high), __fsqrt_rn(least));
  ln_centre = ln_or_itself(group.centre);
  double power = floor(16.0 * (RANGE / (distance > 0.0 ? distance : 1.0))) / 16.0;
  group.power = distance == 0.0 ? 1.0f : nan ? as_float(0x7FC00000u) : __double2float_rn(power);
  group.scale = __fdiv_rn(__double2float_rn(exp_of((double)group.power * (ln_high - ln_centre))), TOP);
  return group;
}

DEVICE Group of_lane(const Group& group, u32 lane) {
  return Group{__shfl_sync(0xFFFFFFFFu, group.scale, lane), __shfl_sync(0xFFFFFFFFu, group.power, lane),
               __shfl_sync(0xFFFFFFFFu, group.centre, lane)};
}

// Four numbers of a lane, of the state that a lane has prepared to decode.
DEVICE void decode(float (&x)[4], u32 codes, const Group& own, const Decoder& prepared, u32 lane, const Tables& t) {
  Group group = of_lane(own, lane);
  Decoder d = {__shfl_sync(0xFFFFFFFFu, prepared.logarithm, lane), __shfl_sync(0xFFFFFFFFu, prepared.inverse, lane)};
  UNROLLED for (int k = 0; k < 4; k++) x[k] = decoded(codes >> (8 * k) & 0xFFu, group, d, t);
}

DEVICE u32 encode(const float (&x)[4], const Group& own, double ln_centre, u32 lane) {
  Coder c = coder_of(of_lane(own, lane), __shfl_sync(0xFFFFFFFFu, ln_centre, lane));
  u32 codes = 0;
  UNROLLED for (int k = 0; k < 4; k++) codes |= encoded(x[k], c) << (8 * k);
  return codes;
}

// Two groups of a parameter, side by side; all lanes of a warp come here together. A lane works out scales for the
// state that three bits of its number name: the group, whether it is v, and which extreme it brings.
template <int Whole>
DEVICE u32 step_groups(const Entry& e, i64 first, const Numbers& n, bool zeroing, const Tables& t) {
  u32 lane = threadIdx.x % 32, bad = 0;
  i64 place = first / GROUP + (lane >> 2 & 1);
  bool is_v = lane & 2, present = (Whole > 0 || place * GROUP < e.count) && (is_v ? HAS_SECOND : HAS_FIRST);
  float* scales = is_v ? e.v_scales : e.m_scales;
  float* powers = is_v ? e.v_powers : e.m_powers;
  float* centres = is_v ? e.v_centres : e.m_centres;
  Group own = {0.0f, 1.0f, 1.0f};
  if (present) own = Group{scales[place], powers[place], centres[place]};
  Decoder prepared = {ln_or_itself(own.scale), 1.0 / (double)own.power};
  float m[2][4], v[2][4];
  u32 extreme = 0;
  UNROLLED for (u32 group = 0; group < 2; group++) {
    i64 at = first + group * GROUP + lane * 4;
    Four p = read<Whole>(e.p, at, e.count), g = read<Whole>(e.g, at, e.count);
    u32 mc = HAS_FIRST ? read_four<Whole>((const u8*)e.m, at, e.count) : 0;
    u32 vc = HAS_SECOND ? read_four<Whole>((const u8*)e.v, at, e.count) : 0;
    decode(m[group], mc, own, prepared, 4 * group, t);
    decode(v[group], vc, own, prepared, 4 * group + 2, t);
    UNROLLED for (int k = 0; k < 4; k++) {
      bad += update(p.x[k], g.x[k], m[group][k], v[group][k], n, zeroing);
      if (Whole < 1 && at + k >= e.count) m[group][k] = v[group][k] = 0.0f;
    }
    write<Whole>(e.p, at, e.count, p);
    u32 m_top = top_of(m[group]), m_low = low_of(m[group]), v_top = top_of(v[group]), v_low = low_of(v[group]);
    u32 mine = is_v ? (lane & 1 ? v_low : v_top) : lane & 1 ? m_low : m_top;
    extreme = (lane >> 2 & 1) == group ? mine : extreme;
  }
  double ln_centre;
  own = group_of(extreme, ln_centre);
  UNROLLED for (u32 group = 0; group < 2; group++) {
    i64 at = first + group * GROUP + lane * 4;
    if (HAS_FIRST) write_four<Whole>((u8*)e.m, at, e.count, encode(m[group], own, ln_centre, 4 * group));
    if (HAS_SECOND) write_four<Whole>((u8*)e.v, at, e.count, encode(v[group], own, ln_centre, 4 * group + 2));
  }
  if (present && lane < 8 && !(lane & 1)) {
    scales[place] = own.scale, powers[place] = own.power, centres[place] = own.centre;
  }
  return bad;
}

// nonfinite: counts the elements of gradients that are NaN or infinite.
KERNEL __launch_bounds__(256) optimize(const Entries entries, i32 count, i64 chunks, const Step scalars, u64* nonfinite) {
  __shared__ Tables tables;
  fill(tables);
  __syncthreads();
  each_chunk(entries, count, chunks, scalars, nonfinite, [&](const Entry& e, i32, i64 chunk, const Numbers& n) {
    const i64 start = chunk * CHUNK;
    const i64 first = start + threadIdx.x / 32 * (2 * GROUP);  // a block's eight warps take a chunk's sixteen groups
    if (start + CHUNK <= e.count) return step_groups<1>(e, first, n, scalars.zeroing, tables);
    return first < e.count ? step_groups<0>(e, first, n, scalars.zeroing, tables) : 0;
  });
}
