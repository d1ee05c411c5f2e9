// SPDX-License-Identifier: Apache-2.0
// What a host compiler needs to run a kernel file: CUDA's keywords, types, threads (fibers.h), intrinsics and wrappers.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <type_traits>
#include <utility>
#include <vector>

#define __CUDACC__ 1
#define __device__
#define __host__
#define __global__
#define __constant__
#define __grid_constant__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __builtin_assume(condition) ((void)0)

#define VECTOR_TYPES(name, type)                                                              \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                    \
  struct name##3 { type x, y, z; };                                                           \
  struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                 \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTOR_TYPES(char, signed char)
VECTOR_TYPES(uchar, unsigned char)
VECTOR_TYPES(short, short)
VECTOR_TYPES(ushort, unsigned short)
VECTOR_TYPES(int, int)
VECTOR_TYPES(uint, unsigned)
VECTOR_TYPES(longlong, long long)
VECTOR_TYPES(ulonglong, unsigned long long)
VECTOR_TYPES(float, float)
VECTOR_TYPES(double, double)
#undef VECTOR_TYPES

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#include "fibers.h"
#include "warps.h"
#include "arithmetic.h"
#include "integers.h"
#include "halves.h"
#include "tensor_cores.h"
#include "warpgroups.h"
