// Chains of the floor kernels in float32, where sums have at most 21 bits and accumulators at most 21: the low word of
// the running sum is then the sum itself, and nothing but the chain on the tensor core is done in float64.
#pragma once

#define FIELD_PLACE 23  // where the exponent stands in a field: a float32
#define M_HIGH (((1023 - 127 + 52 - FRACTION) << 20) + (1 << 19))  // from a field / 8 to the high word of M
#define LOW_FLOAT (1.5f * (1 << 23) / (1 << FRACTION))  // plus n 2^-F, |n| < 2^22, its bits are its own plus n
#define SCALE ((254u + FRACTION) << 23)  // less a field 2^E: 2^(F - E), in range for all E that blocks of 8 or more have

struct State {
  double sum[HALVES][4][4];   // M + n u while a block runs, n an integer plus the bits of LOW_FLOAT
  float chain[HALVES][4][4];  // 2^E while a block runs, then the chain
};

// As if a block had ended with the sum c.
DEVICE void begin_chain(State& s, const Constants& k, int h, int j, int i, double c) {
  const u32 bits = __float_as_uint((float)c);
  const i32 significand = bits << 1 == 0 ? 0 : (i32)((bits & 0x7FFFFFu) | 0x800000u) >> 3;
  s.chain[h][j][i] = significand == 0 ? 0.0f : __uint_as_float((bits & 0x7F800000u) + ((u32)(FRACTION - 20) << 23));
  s.sum[h][j][i] = __hiloint2double(0, __float_as_int(LOW_FLOAT) + ((i32)bits < 0 ? -significand : significand));
}

DEVICE void finish(State& s, const Constants& k, int h, int j, int i) {
  const float units = __fadd_rn(__int_as_float(__double2loint(s.sum[h][j][i])), -LOW_FLOAT);
  const u32 bits = __float_as_uint(__fmul_rn(units, s.chain[h][j][i]));
  s.chain[h][j][i] = __uint_as_float(bits & (0xFFFFFFFFu << (23 - KEPT)));
}

DEVICE double chain_of(const State& s, int h, int j, int i) { return (double)s.chain[h][j][i]; }
DEVICE void clear_chain(State& s, int h, int j, int i) { s.chain[h][j][i] = 0.0f; }
DEVICE i32 field_in(const State& s, int h, int j, int i) { return __float_as_int(s.chain[h][j][i]); }

// Begin a block with `negative` negative products, whose exponents have the field `products`.
DEVICE void start(State& s, const Constants& k, int h, int j, int i, i32 products, u32 negative) {
  const float chain = s.chain[h][j][i];
  const i32 field = __float_as_int(fmaxf(fabsf(chain), __int_as_float(products))) & 0x7F800000;
  const float units = __fmul_rn(chain, __uint_as_float(SCALE - (u32)field));  // the chain on the grid
  const i32 cut = DOWN ? __float2int_rd(units) : __float2int_rz(units);
  s.sum[h][j][i] = __hiloint2double((field >> 3) + M_HIGH, __float_as_int(LOW_FLOAT) + cut + (i32)negative);
  s.chain[h][j][i] = __int_as_float(field);
}
