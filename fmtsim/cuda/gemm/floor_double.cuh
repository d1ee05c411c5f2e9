// Chains of the floor kernels in float64: sums of any length up to 44 bits, accumulators of up to 24 bits.
#pragma once

#define FIELD_PLACE 20  // where the exponent stands in a field: the high word of M
#define SHIFT (((52 - FRACTION) << 20) + (1 << 19))  // from the exponent field of a chain to a field

// M's low word is Constants::low: what is added to the sum's carries nothing. HELD: M is a double that lives on and gets a
// new high word in each block, which saves copies of the low one. ptxas (12.9 to 13.5, sm_90) loses the low word of such
// a double where it spills it (tests/cuda/test_gemm_floor.py, spills), so that without HELD, or with too few registers,
// the high word is kept alone and M made anew at every use.
#if HELD
typedef double Field;
DEVICE Field field_of(i32 high, Field last) { return __hiloint2double(high, __double2loint(last)); }
DEVICE i32 high_of(Field field) { return __double2hiint(field); }
DEVICE double constant_of(const Constants&, Field field) { return field; }
#else
typedef i32 Field;
DEVICE Field field_of(i32 high, Field) { return high; }
DEVICE i32 high_of(Field field) { return field; }
DEVICE double constant_of(const Constants& k, Field field) { return __hiloint2double(field, k.low); }
#endif

struct State {
  double sum[HALVES][4][4];  // M + sum while a block runs, then the chain
  Field field[HALVES][4][4];  // M, or its high word
};

// As if a block had ended with the sum c: M, which is taken away first, is a number so tiny that only a sum of zero
// notices, which therefore is M itself.
DEVICE void begin_chain(State& s, const Constants& k, int h, int j, int i, double c) {
#if HELD
  s.field[h][j][i] = __hiloint2double(0, k.low);
#else
  s.field[h][j][i] = 0;
#endif
  s.sum[h][j][i] = c == 0.0 ? constant_of(k, s.field[h][j][i]) : c;
}

DEVICE void finish(State& s, const Constants& k, int h, int j, int i) {
  const double d = __dadd_rn(s.sum[h][j][i], -constant_of(k, s.field[h][j][i]));
  s.sum[h][j][i] = __longlong_as_double(__double_as_longlong(d) & (-1ll << (52 - KEPT)));
}

DEVICE double chain_of(const State& s, int h, int j, int i) { return s.sum[h][j][i]; }
DEVICE void clear_chain(State& s, int h, int j, int i) { s.sum[h][j][i] = 0.0; }
DEVICE i32 field_in(const State& s, int h, int j, int i) { return high_of(s.field[h][j][i]); }

// Begin a block with `negative` negative products, whose exponents have the field `products`.
DEVICE void start(State& s, const Constants& k, int h, int j, int i, i32 products, u32 negative) {
  const double c = s.sum[h][j][i];
  const i32 high = __double2hiint(c), field = max((high & 0x7FF00000) + SHIFT, products);
  s.field[h][j][i] = field_of(field, s.field[h][j][i]);
  const double sum = __fma_rz(c, k.enlarged, constant_of(k, s.field[h][j][i]));
  const u32 terms = DOWN ? 0 : negative + ((u32)high >> 31);
  s.sum[h][j][i] = LONG ? __longlong_as_double(__double_as_longlong(sum) + terms)
                        : __hiloint2double(__double2hiint(sum), __double2loint(sum) + (i32)terms);
}
