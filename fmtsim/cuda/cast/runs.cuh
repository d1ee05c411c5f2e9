// SPDX-License-Identifier: Apache-2.0
// Runs of memory that share scales, over the lanes of a warp, which share the work on the scales. A lane has VECTORS
// vectors of VECTOR elements in one of three layouts:
//
//   LAYOUT 0   neighbouring lanes hold neighbouring vectors, and the next vector of a lane lies a warp further.
//   LAYOUT 1   16 VECTORS elements belong to 16 / VECTOR lanes, and a lane holds vectors at distance 16; two lanes of 64:
//                lane 0:  0 ... 7   16 ... 23   32 ... 39   48 ... 55
//                lane 1:  8 ... 15  24 ... 31   40 ... 47   56 ... 63
//              so that blocks need fewer shuffles, a lane fewer scales, and one Philox call gives the words of four
//              elements of a lane (docs/semantics.md, section 9).
//   LAYOUT 2   a vector is a block, and those of a lane follow each other: no shuffles.
//
// RUN is the elements of a block, a power of two from 16 on that fits a warp, or 0 where scales are found otherwise:
// for BLOCKS_OF_LANE blocks of a lane then.
#pragma once
#include "amax.cuh"
#include "scale.cuh"

#define PER_LANE (VECTORS * VECTOR)
#define LANES (16 / VECTOR)  // that hold neighbours in LAYOUT 1
#define DISTANCE (LAYOUT == 2 ? VECTOR : LAYOUT == 1 ? 16 : 32 * VECTOR)  // between the vectors of a lane
#if RUN == 0
#define BLOCKS BLOCKS_OF_LANE
#define SPAN 1
#else
#define BLOCKS (LAYOUT != 1 ? VECTORS : RUN < 16 * VECTORS ? 16 * VECTORS / RUN : 1)
#define SPAN (LAYOUT == 2 ? 1 : LAYOUT == 0 ? RUN / VECTOR : RUN > 16 * VECTORS ? RUN / PER_LANE : LANES)  // lanes
#endif
#define EACH (VECTORS / BLOCKS)  // vectors of a block in a lane

// Where a lane's first element lies.
DEVICE u64 first_of_lane(u64 thread) {
  if (LAYOUT == 2) return thread * PER_LANE;
  if (LAYOUT == 1) return thread / LANES * (16 * VECTORS) + thread % LANES * VECTOR;
  return thread / 32 * (32 * PER_LANE) + thread % 32 * VECTOR;
}

// The scales of a lane's blocks from their statistics. Divisions are dear: the lanes that share blocks share those,
// too.
template <bool Folds, typename Statistic, typename Make>
DEVICE void find_scales(Scale (&scale)[BLOCKS], const Statistic (&statistic)[BLOCKS], const Make& make) {
  constexpr int SHARES = BLOCKS < SPAN ? BLOCKS : SPAN;  // lanes that take one of as many blocks each
  u32 share = threadIdx.x % SHARES;
  UNROLLED for (int b = 0; b < BLOCKS; b += SHARES) {
    Statistic a = statistic[b];
    UNROLLED for (int k = 1; k < SHARES; k++) a = share == k ? statistic[b + k] : a;
    Scale own_scale = make(a);
    UNROLLED for (int k = 0; k < SHARES; k++) {
      scale[b + k].stored = SHARES == 1 ? own_scale.stored : __shfl_sync(~0u, own_scale.stored, k, SHARES);
      scale[b + k].factor = SHARES == 1 ? own_scale.factor : __shfl_sync(~0u, own_scale.factor, k, SHARES);
      scale[b + k].fold = SHARES == 1 || !Folds ? own_scale.fold : __shfl_sync(~0u, own_scale.fold, k, SHARES);
    }
  }
}
