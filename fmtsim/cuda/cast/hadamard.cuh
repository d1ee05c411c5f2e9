// SPDX-License-Identifier: Apache-2.0
// Sylvester's Hadamard matrix as butterflies (fmtsim/scaling/hadamard.py has the order of operations): at distances
// below Held within the neighbours that a lane holds, from there on with other lanes.
#pragma once
#include "common.cuh"

// RN32(1 / sqrt(size)).
DEVICE constexpr u32 root_bits(int size) {
  return size == 16    ? 0x3E800000u
         : size == 32  ? 0x3E3504F3u
         : size == 64  ? 0x3E000000u
         : size == 128 ? 0x3DB504F3u
         : size == 256 ? 0x3D800000u
                       : 0x3D3504F3u;
}

// The transforms of groups of Size, not yet multiplied with their root; lane: the number of one.
template <int Size, int Held>
DEVICE void butterflies(float (&y)[Held], u32 lane) {
  UNROLLED for (int distance = 1; distance < (Size < Held ? Size : Held); distance *= 2) {
    UNROLLED for (int i = 0; i < Held; ++i) {
      if (i & distance) continue;
      float a = y[i], b = y[i + distance];
      y[i] = __fadd_rn(a, b);
      y[i + distance] = __fsub_rn(a, b);
    }
  }
  UNROLLED for (int flip = 1; flip < Size / Held; flip *= 2) {
    float sign = lane & flip ? -1.0f : 1.0f;
    UNROLLED for (int i = 0; i < Held; ++i) y[i] = __fmaf_rn(y[i], sign, __shfl_xor_sync(~0u, y[i], flip));
  }
}
