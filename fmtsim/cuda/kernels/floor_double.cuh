// Chains of the floor kernels in float64: sums of any length up to 44 bits, accumulators of up to 24 bits.
#pragma once

#define FIELD_PLACE 20  // where the exponent stands in a field: the high word of M
#define SHIFT (((52 - FRACTION) << 20) + (1 << 19))  // from the exponent field of a chain to a field

// M's high word is kept alone and M made anew at every use: ptxas (12.9 to 13.5, sm_90) loses the low word of a double
// that lives on, is spilled and gets a new high word in each turn (tests/cuda/test_gemm_floor.py, spills).
struct State {
  double sum[HALVES][4][4];  // M + sum while a block runs, then the chain
  i32 field[HALVES][4][4];   // high word of M; the low one is Constants::low: what is added to the sum's carries nothing
};

DEVICE double constant_of(const Constants& k, i32 field) { return __hiloint2double(field, k.low); }

// As if a block had ended with the sum c: M, which is taken away first, is a number so tiny that only a sum of zero
// notices, which therefore is M itself.
DEVICE void begin_chain(State& s, const Constants& k, int h, int j, int i, double c) {
  s.field[h][j][i] = 0;
  s.sum[h][j][i] = c == 0.0 ? constant_of(k, s.field[h][j][i]) : c;
}

DEVICE void finish(State& s, const Constants& k, int h, int j, int i) {
  const double d = __dadd_rn(s.sum[h][j][i], -constant_of(k, s.field[h][j][i]));
  s.sum[h][j][i] = __longlong_as_double(__double_as_longlong(d) & (-1ll << (52 - KEPT)));
}

DEVICE double chain_of(const State& s, int h, int j, int i) { return s.sum[h][j][i]; }
DEVICE void clear_chain(State& s, int h, int j, int i) { s.sum[h][j][i] = 0.0; }
DEVICE i32 field_in(const State& s, int h, int j, int i) { return s.field[h][j][i]; }

// Begin a block with `negative` negative products, whose exponents have the field `products`.
DEVICE void start(State& s, const Constants& k, int h, int j, int i, i32 products, u32 negative) {
  const double c = s.sum[h][j][i];
  const i32 high = __double2hiint(c), field = max((high & 0x7FF00000) + SHIFT, products);
  s.field[h][j][i] = field;
  const double sum = __fma_rz(c, k.enlarged, constant_of(k, s.field[h][j][i]));
  const u32 terms = DOWN ? 0 : negative + ((u32)high >> 31);
  s.sum[h][j][i] = LONG ? __longlong_as_double(__double_as_longlong(sum) + terms)
                        : __hiloint2double(__double2hiint(sum), __double2loint(sum) + (i32)terms);
}
