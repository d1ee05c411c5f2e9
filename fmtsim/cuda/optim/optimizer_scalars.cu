// SPDX-License-Identifier: Apache-2.0
// Counts a step of parameters whose steps are counted on the device, and works out its scalars as `numbers` of
// fmtsim/optim/rules.py does on the host: in double precision, rounded once to float32.
//
// Macros: DECOUPLED: whether Adam's weight decay multiplies parameters. FOLDED: bias corrections are part of the step's
// size. AFTER: decay multiplies after the update. Those of optimizer.cuh.
#include "optimizer.cuh"

// The hyperparameters of a group. lr_at: the learning rate where a tensor has it, float64 or float32.
struct alignas(16) Group {
  double lr, beta1, beta2, eps, decay, bound;
  const void* lr_at;
  i32 lr_is_double, unused;
};

// A double-precision number to the power of a whole one, rounded to nearest but for one time in 2^40: products have a
// second number behind the first.
DEVICE double power_of(double base, i64 exponent) {
  double high = 1.0, low = 0.0, square = base, rest = 0.0;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) {
      double product = __dmul_rn(high, square), lost = __fma_rn(high, square, -product);
      lost = __dadd_rn(lost, __dadd_rn(__dmul_rn(high, rest), __dmul_rn(low, square)));
      high = __dadd_rn(product, lost);
      low = __dsub_rn(lost, __dsub_rn(high, product));
    }
    double product = __dmul_rn(square, square), lost = __fma_rn(square, square, -product);
    lost = __dadd_rn(lost, __dmul_rn(2.0, __dmul_rn(square, rest)));
    square = __dadd_rn(product, lost);
    rest = __dsub_rn(lost, __dsub_rn(square, product));
  }
  return high;
}

DEVICE Numbers numbers_of(const Group& h, double lr, i64 step) {
  double before = 1.0, after = 1.0, penalty = 0.0, correction = 1.0, eps = 0.0, size = lr;
#if UPDATE == ADAM
  double first = __dsub_rn(1.0, power_of(h.beta1, step));
  double second = __dsqrt_rn(__dsub_rn(1.0, power_of(h.beta2, step)));
  eps = FOLDED ? __dmul_rn(h.eps, second) : h.eps;
  size = __ddiv_rn(FOLDED ? __dmul_rn(lr, second) : lr, first);
  correction = FOLDED ? 1.0 : second;
#elif OF_CODES
  correction = __dsub_rn(1.0, power_of(h.beta2, step));
  penalty = __dmul_rn(lr, h.decay);
#endif
#if UPDATE == LION || (UPDATE == ADAM && DECOUPLED)
  (AFTER ? after : before) = __dsub_rn(1.0, __dmul_rn(lr, h.decay));
#elif !OF_CODES
  penalty = h.decay;
#endif
  float divisor = __double2float_rn(correction);
  return Numbers{__double2float_rn(before), __double2float_rn(after), __double2float_rn(penalty),
                 __double2float_rn(h.beta1), __double2float_rn(__dsub_rn(1.0, h.beta1)), __double2float_rn(h.beta2),
                 __double2float_rn(__dsub_rn(1.0, h.beta2)), divisor, __double2float_rn(eps), __double2float_rn(size),
                 __double2float_rn(h.bound), __fdiv_rn(1.0f, divisor)};
}

// A thread a parameter. shift: from where on an offset counts steps.
KERNEL scalars(const Entries entries, i32 count, const Group group, i32 shift, Scalars* out) {
  for (i32 i = threadIdx.x; i < count; i += blockDim.x) {
    double lr = group.lr;
    if (group.lr_at) lr = group.lr_is_double ? *(const double*)group.lr_at : (double)*(const float*)group.lr_at;
    i64 step = ++*entries.of[i].step;
    out[i] = Scalars{numbers_of(group, lr, step), (u64)step << shift, 0};
  }
}
