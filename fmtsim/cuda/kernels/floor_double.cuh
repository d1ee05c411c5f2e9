// Chains of the floor kernels in float64: sums of any length up to 44 bits, accumulators of up to 24 bits.
#pragma once

#define FIELD_PLACE 20  // where the exponent stands in a field: the high word of M
#define SHIFT (((52 - FRACTION) << 20) + (1 << 19))  // from the exponent field of a chain to a field

struct State {
  double sum[HALVES][4][4];       // M + sum while a block runs, then the chain
  double constant[HALVES][4][4];  // M; its low word is Constants::low, so that adding to the sum's carries nothing
};

// As if a block had ended with the sum c: M, which is taken away first, is a number so tiny that only a sum of zero
// notices, which therefore is M itself.
DEVICE void begin_chain(State& s, const Constants& k, int h, int j, int i, double c) {
  s.constant[h][j][i] = __hiloint2double(0, k.low);
  s.sum[h][j][i] = c == 0.0 ? s.constant[h][j][i] : c;
}

DEVICE void finish(State& s, int h, int j, int i) {
  const double d = __dadd_rn(s.sum[h][j][i], -s.constant[h][j][i]);
  s.sum[h][j][i] = __longlong_as_double(__double_as_longlong(d) & (-1ll << (52 - KEPT)));
}

DEVICE double chain_of(const State& s, int h, int j, int i) { return s.sum[h][j][i]; }
DEVICE i32 field_in(const State& s, int h, int j, int i) { return __double2hiint(s.constant[h][j][i]); }

// Begin a block with `negative` negative products, whose exponents have the field `products`.
DEVICE void start(State& s, const Constants& k, int h, int j, int i, i32 products, u32 negative) {
  const double c = s.sum[h][j][i];
  const i32 high = __double2hiint(c), field = max((high & 0x7FF00000) + SHIFT, products);
  s.constant[h][j][i] = __hiloint2double(field, __double2loint(s.constant[h][j][i]));
  const double sum = __fma_rz(c, k.enlarged, s.constant[h][j][i]);
  const u32 terms = DOWN ? 0 : negative + ((u32)high >> 31);
  s.sum[h][j][i] = LONG ? __longlong_as_double(__double_as_longlong(sum) + terms)
                        : __hiloint2double(__double2hiint(sum), __double2loint(sum) + (i32)terms);
}
