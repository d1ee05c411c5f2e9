// SPDX-License-Identifier: Apache-2.0
// What PyTorch 2.11's kernels compute for one element, in C: x, y, z are elements, p, q, s numbers. Arguments are in
   the
// order of the operator. R rounds to the tensors' dtype, as arithmetic in c10::BFloat16 and c10::Half does; all else is
// float32. The last expression is the result. `python -m tools.elementwise` compiles each to PTX: elementwise.zip.

// CUDA's library
OP(tan, tanf(x))
OP(asin, asinf(x))
OP(acos, acosf(x))
OP(atan, atanf(x))
OP(sinh, sinhf(x))
OP(cosh, coshf(x))
OP(asinh, asinhf(x))
OP(acosh, acoshf(x))
OP(atanh, atanhf(x))
OP(erfc, erfcf(x))
OP(erfinv, erfinvf(x))
OP(lgamma, lgammaf(x))
OP(atan2, atan2f(x, y))
OP(hypot, hypotf(x, y))
OP(fmod, fmodf(x, y))
OP(power, powf(x, y))
OP(sinc, float t = 3.14159265358979323846f * x; x == 0.0f ? 1.0f : sinf(t) / t)
OP(entr, x != x ? x : x > 0.0f ? -x * logf(x) : x == 0.0f ? 0.0f : -INFINITY)

// activations
OP(mish, x * tanhf(log1pf(expf(x))))
OP(mish_backward, float e = 1.0f / (1.0f + expf(-y)); float t = tanhf(log1pf(expf(y))); x * (t + y * e * (1.0f - t *
   t)))
OP(hardswish, x * MIN(MAX(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f))
OP(hardswish_backward, y <= -3.0f ? 0.0f : y < 3.0f ? x * (y / 3.0f + 0.5f) : x)
OP(hardsigmoid, MIN(MAX(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f))
OP(hardsigmoid_backward, y > -3.0f && y < 3.0f ? x * (1.0f / 6.0f) : 0.0f)
OP(hardtanh_backward, y <= p || y >= q ? 0.0f : x)
OP(elu, x > 0.0f ? x * q : expm1f(x * s) * (p * q))
OP(elu_backward, y <= 0.0f ? x * s * (p * q) * expf(y * s) : x * q)
OP(elu_backward_of_result, y <= 0.0f ? x * s * (y + p * q) : x * q)
OP(softshrink, x != x ? x : x > R(p) ? x - R(p) : x < -R(p) ? x + R(p) : 0.0f)
OP(shrink_backward, y >= -R(p) && y <= R(p) ? 0.0f : x)
OP(softplus, x * p > q ? x : log1pf(expf(x * p)) / p)
OP(softplus_backward, float e = expf(y * p); y * p > q ? x : x * e / (e + 1.0f))
OP(log_sigmoid, MIN(0.0f, x) - log1pf(expf(-fabsf(x))))
OP(log_sigmoid_backward, float e = expf(-fabsf(y)); x * ((y < 0.0f ? 1.0f : 0.0f) - (y < 0.0f ? 1.0f : -1.0f) * (e /
   (1.0f + e))))
OP(glu, x * (1.0f / (1.0f + expf(-y))))
OP(glu_backward_of_first, 1.0f / (1.0f + expf(-z)) * x)
OP(glu_backward_of_second, float e = 1.0f / (1.0f + expf(-z)); (1.0f - e) * e * x * y)
OP(prelu, x > 0.0f ? x : y * x)
OP(prelu_backward_of_input, y > 0.0f ? x : z * x)
OP(prelu_backward_of_weight, y > 0.0f ? 0.0f : y * x)
OP(sigmoid_backward, R(R(x * R(1.0f - y)) * y))
OP(logit, logf(x / (1.0f - x)))
OP(logit_clamped, float e = x < p ? p : x > q ? q : x; logf(e / (1.0f - e)))
OP(logit_backward, y < 0.0f || y > 1.0f ? NAN : x / (y * (1.0f - y)))
OP(logit_clamped_backward, y < p || y > q ? 0.0f : x / (y * (1.0f - y)))

// two and three tensors
OP(remainder, float e = fmodf(x, y); e != 0.0f && (y < 0.0f) != (e < 0.0f) ? e + y : e)
OP(floor_divide, float e = fmodf(x, y); float t = (x - e) / y; if (e != 0.0f && (y < 0.0f) != (e < 0.0f)) t -= 1.0f;
   float f = R(floorf(t)); if (t - f > 0.5f) f = R(f + 1.0f); y == 0.0f ? x / y : t != 0.0f ? f : copysignf(0.0f, x /
   y))
OP(floor_divide_by_number, float e = fmodf(x, p); float t = (x - e) * q; if (e != 0.0f && (p < 0.0f) != (e < 0.0f)) t
   -= 1.0f;
   float f = R(floorf(t)); if (t - f > 0.5f) f = R(f + 1.0f); t != 0.0f ? f : copysignf(0.0f, x * q))
OP(trunc_divide, truncf(R(x / y)))
OP(trunc_divide_by_number, truncf(x * p))
OP(logaddexp, isinf(x) && x == y ? x : fmaxf(x, y) + log1pf(expf(-fabsf(x - y))))
OP(logaddexp2, isinf(x) && x == y ? x : fmaxf(x, y) + log1pf(exp2f(-fabsf(x - y))) * (float)(1.0 / 0.693147180559945309417))
OP(xlogy, y != y ? NAN : x == 0.0f ? 0.0f : x * logf(y))
OP(xlog1py, y != y ? NAN : x == 0.0f ? 0.0f : x * log1pf(y))
OP(clamp, x != x ? x : y != y ? y : z != z ? z : fminf(fmaxf(x, y), z))
OP(fmax, fmaxf(x, y))
OP(fmin, fminf(x, y))
OP(lerp, fabsf(z) < 0.5f ? x + z * (y - x) : y - (y - x) * (1.0f - z))

// losses of one element
OP(mse_loss, float e = R(x - y); e * e)
OP(mse_loss_backward, R(R(R(p) * R(y - z)) * x))
OP(smooth_l1_loss, float e = fabsf(R(x - y)); float d = R(p); e < d ? 0.5f * e * e / d : e - R(0.5f * d))
OP(smooth_l1_loss_backward, float e = R(y - z); float n = R(p); float d = R(q);
   e < -d ? R(-n * x) : e > d ? R(n * x) : R(R(R(n * e) * x) / d))
OP(huber_loss, float e = fabsf(R(x - y)); float d = R(p); e < d ? 0.5f * e * e : d * (e - R(0.5f * d)))
OP(huber_loss_backward, float e = R(y - z); float n = R(p); float d = R(q);
   e < -d ? R(R(-n * x) * d) : e > d ? R(R(n * x) * d) : R(R(n * e) * x))
OP(binary_cross_entropy, float e = MAX(R(logf(x)), -100.0f); float t = MAX(R(log1pf(-x)), -100.0f);
   R(R(y - 1.0f) * t) - R(y * e))
OP(binary_cross_entropy_backward, R(R(x * R(y - z)) / fmaxf(R(R(1.0f - y) * y), R(1e-12f))))

// random numbers of a word of 32 bits as float32: curand's uniform and normal ones, PyTorch's of them
OP(uniform, x * 0x1p-32f + 0x1p-33f)
OP(uniform_between, float e = R((x * 0x1p-32f + 0x1p-33f) * R(R(q) - R(p)) + R(p)); e == R(q) ? R(p) : e)
OP(exponential, float e = x * 0x1p-32f + 0x1p-33f; -1.0f / p * (e >= 1.0f - 0x1p-24f ? -0x1p-24f : __logf(e)))
OP(normal, float e = sqrtf(-2.0f * logf(x * 0x1p-32f + 0x1p-33f));
   float t = y * (2.3283064e-10f * 6.2831855f) + (2.3283064e-10f * 6.2831855f / 2.0f);
   (z == 0.0f ? __sinf(t) * e : __cosf(t) * e) * q + p)
