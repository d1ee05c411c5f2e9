// The parts of a product added in the order of a plan (docs/matmul.md, section 4, step 5), one output a thread.
#include "numbers.cuh"

struct alignas(16) Formats {
  Format sum, partial;
};

enum Way { SERIAL, PAIRWISE, IN_PLACE };

DEVICE double number_at(const void* numbers, i64 at, i32 kind) {
  return kind ? ((const double*)numbers)[at] : (double)((const float*)numbers)[at];
}

struct Reduction {
  const void* sums;
  i64 place, size;  // of an output, and from one part to the next
  i32 kind;         // 0: float32, 1: float64, 2: int32
  bool partial, round_trip, saturates;
  Format sum, kept;

  DEVICE double part(i32 i) const {
    i64 at = i * size + place;
    if (kind == 2) return ((const i32*)sums)[at];
    double x = number_at(sums, at, kind);
    return partial ? nearest(x, kept) : x;
  }

  DEVICE double added(double x, double y) const {
    if (kind == 2) {  // exact in doubles
      double s = x + y;
      if (saturates) return fmin(fmax(s, -2147483648.0), 2147483647.0);
      return (double)(i32)(u32)(u64)__double2ll_rn(s);
    }
    double s = add_in(x, y, sum);
    return partial && round_trip ? nearest(s, kept) : s;
  }

  DEVICE double serial(i32 parts) const {
    double s = part(0);
    for (i32 i = 1; i < parts; ++i) s = added(s, part(i));
    return s;
  }

  DEVICE double pairwise(i32 parts) const {
    i32 half = (parts + 1) / 2;
    double s = part(parts - 1);
    for (i32 i = 0; i < half && parts > 1; ++i) {
      s = added(s, i + half < parts - 1 ? added(part(i), part(i + half)) : part(i));
    }
    return s;
  }

  // The parts, which are not rounded themselves, on top of what the output holds: -0 where that is nothing.
  DEVICE double in_place(i32 parts, double held) const {
    for (i32 i = 0; i < parts; ++i) {
      held = add_in(held, number_at(sums, i * size + place, kind), sum);
      if (partial) held = nearest(held, kept);
    }
    return held;
  }
};

KERNEL reduce_parts(const void* sums, void* out, i64 size, i64 columns, i64 row_stride, i64 stride, i32 parts, i32 kind,
                    i32 way, i32 partial, i32 round_trip, i32 saturates, const void* held, i64 held_row,
                    i64 held_stride, const Formats formats) {
  i64 place = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= size) return;
  Reduction how = Reduction{sums, place, size, kind, partial != 0, round_trip != 0, saturates != 0, formats.sum,
                            formats.partial};
  i64 row = place / columns, column = place % columns;
  double y;
  if (way == IN_PLACE) {
    y = how.in_place(parts, held ? number_at(held, row * held_row + column * held_stride, kind) : -0.0);
  } else {
    y = way == PAIRWISE ? how.pairwise(parts) : how.serial(parts);
  }
  i64 to = row * row_stride + column * stride;
  if (kind == 2) ((i32*)out)[to] = (i32)y;
  else if (kind == 1) ((double*)out)[to] = is_nan(y) ? as_double(NAN_BITS) : y;
  else ((float*)out)[to] = is_nan(y) ? __uint_as_float(0x7FFFFFFFu) : (float)y;
}
