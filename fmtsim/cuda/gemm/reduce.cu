// SPDX-License-Identifier: Apache-2.0
// The parts and lanes of a product added in the order of a plan (docs/matmul.md, section 4, step 5), one output a
// thread.
#include "problem.cuh"

struct alignas(16) Formats {
  Format sum, partial;
};

#define WAITING 24  // STACK of fmtsim/spec/schedule.py

enum Way { SERIAL, PAIRWISE, IN_PLACE };

struct Reduction {
  const void* sums;
  const Problem& p;
  i32 parts;
  i64 row, column;
  bool partial, round_trip;
  Formats formats;

  DEVICE double kept(double x) const { return nearest(x, formats.partial); }

  DEVICE double part(i32 i) const {
    if (p.kind == KIND_INT32) return ((const i32*)sums)[(i * (i64)p.rows + row) * p.columns + column];
    const double x = sum_at(sums, p, i, row, column);
    return partial ? kept(x) : x;
  }

  DEVICE double added(double x, double y) const {
    if (p.kind == KIND_INT32) return to_integer(x + y, p);  // exact in doubles
    const double s = add_in(x, y, formats.sum);
    return partial && round_trip ? kept(s) : s;
  }

  DEVICE double serial() const {
    double s = part(0);
    for (i32 i = 1; i < parts; ++i) s = added(s, part(i));
    return s;
  }

  DEVICE double pairwise() const {
    const i32 half = (parts + 1) / 2;
    double s = part(parts - 1);
    for (i32 i = 0; i < half && parts > 1; ++i) {
      s = added(s, i + half < parts - 1 ? added(part(i), part(i + half)) : part(i));
    }
    return s;
  }

  // Sums in the order of a Postfix (fmtsim/spec/schedule.py): the number of a sum, -1 for +0, and how many times the
  // two on top are then added.
  DEVICE double combined(const i32* steps, i32 count) const {
    double waiting[WAITING];
    i32 top = 0;
    for (i32 i = 0; i < count; ++i) {
      const i32 number = steps[2 * i];
      double s = number < 0 ? 0.0 : part(number);
      for (i32 additions = steps[2 * i + 1]; additions > 0; --additions) s = added(waiting[--top], s);
      waiting[top++] = s;
    }
    return waiting[0];
  }

  // The parts, which are not rounded themselves, on top of what the output begins with: -0 where that is nothing.
  DEVICE double in_place(const void* start) const {
    double s = start == nullptr ? -0.0 : addend_at(start, p, row, column);
    for (i32 i = 0; i < parts; ++i) {
      s = add_in(s, sum_at(sums, p, i, row, column), formats.sum);
      if (partial) s = kept(s);
    }
    return s;
  }
};

KERNEL reduce_parts(const void* sums, const void* start, void* out, i64 row_stride, i64 stride, i32 parts, i32 way,
                    i32 partial, i32 round_trip, const Formats formats, const Problem p) {
  const i64 place = (i64)blockIdx.x * blockDim.x + threadIdx.x, row = place / p.columns, column = place % p.columns;
  if (row >= p.rows) return;
  const Reduction how = {sums, p, parts, row, column, partial != 0, round_trip != 0, formats};
  const double y = way == IN_PLACE ? how.in_place(start) : way == PAIRWISE ? how.pairwise() : how.serial();
  write_at(out, row * row_stride + column * stride, p, y);
}

KERNEL combine_sums(const void* sums, const i32* steps, i32 count, void* out, i64 row_stride, i64 stride,
                    const Formats formats, const Problem p) {
  const i64 place = (i64)blockIdx.x * blockDim.x + threadIdx.x, row = place / p.columns, column = place % p.columns;
  if (row >= p.rows) return;
  const Reduction how = {sums, p, 0, row, column, false, false, formats};
  write_at(out, row * row_stride + column * stride, p, how.combined(steps, count));
}
