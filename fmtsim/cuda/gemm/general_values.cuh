// Operands in shared memory as doubles, 16 rows and columns and 32 places at a time: kernels with an output a thread.
#pragma once
#include "general_sums.cuh"

#define SIDE 16
#define WINDOW 32

struct Inputs {
  const void *a, *b;
  const i32* source;
  i64 places, window;  // window: the first place in shared memory
  i64 first_row, first_column;
};

__shared__ double values[2][SIDE][WINDOW];
__shared__ i32 absent[WINDOW];  // whether a place has no product

// Bring `count` places from `first` on into shared memory unless they are there; all threads come along.
DEVICE int reach(Inputs& in, const Problem& p, i64 first, int count) {
  if (first < in.window || first + count > in.window + WINDOW) {
    i64 row = in.first_row + threadIdx.x / SIDE, column = in.first_column + threadIdx.x / SIDE;
    __syncthreads();
    for (int place = threadIdx.x % SIDE; place < WINDOW; place += SIDE) {
      i32 k = first + place < in.places ? in.source[first + place] : -1;
      bool of_a = k >= 0 && row < p.rows, of_b = k >= 0 && column < p.columns;
      values[0][threadIdx.x / SIDE][place] = of_a ? element_at(in.a, row * p.a_row + k * p.a_stride, p.a_type) : 0.0;
      values[1][threadIdx.x / SIDE][place] = of_b ? element_at(in.b, column * p.b_row + k * p.b_stride, p.b_type) : 0.0;
      if (threadIdx.x < SIDE) absent[place] = k < 0;
    }
    in.window = first;
    __syncthreads();
  }
  return (int)(first - in.window);
}
