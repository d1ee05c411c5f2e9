// SPDX-License-Identifier: Apache-2.0
// Operands of products under a recipe's scale rule (fmtsim.formats.scaling.Scaling), elements under a known scale: what
// scaled_rows.cu and scaled_tiles.cu share.
//
// Macros: INPUT (a dtype of vectors.cuh), those of grid.cuh for the elements, TIES: ties go to even, toward zero or
// away from it (0, 1, 2); DIVIDES: elements are x / factor; FOLDS: values are element times block scale; MASKS: where
// gradients pass is written too; WORDS: random words are not drawn, drawn by groups of 64 neighbours, or one by one (0,
// 1, 2).
#pragma once
#include "grid.cuh"
#include "philox.cuh"
#include "scale.cuh"
#include "amax.cuh"

// The element of a number, which is not NaN where Clean; rest: what its random word lacks of 2^32 - 1.
template <bool Clean>
DEVICE float element_of(float y, u32 rest, const Grid& g) {
#if TIES == 0
  if (Clean && !SPECIAL) return rounded_number(y, rest, g);
  return cast_with_rest(y, rest, g);
#else
  // 1. saturate, and round to nearest even by the magic number, 2^23 of whose last places are those of the grid
  float a = clamped<ASYMMETRIC>(y, g), magic = METHOD == FIXED ? g.base : magic_of(a, g);
  float place = METHOD == FIXED ? g.step : magic * 0x1p-23f, rounded = (a + magic) - magic, off = a - rounded;
  // 2. a tie went to even: take it back where that was up (toward zero), or go on where it was down (away)
  if (fabsf(off) + fabsf(off) == place) {
    if (TIES == 1 && off < 0.0f) rounded = rounded - place;
    if (TIES == 2 && off > 0.0f) rounded = rounded + place;
  }
  // 3. sign, overflow, NaN
  float q = finished<SPECIAL, KEEPS>(rounded, y, g);
  if (Clean && !SPECIAL) return q;
  return becomes_nan<SPECIAL>(q, y) ? g.nan_value : q;
#endif
}

// A value as bfloat16; passes: whether the gradient does.
template <bool Clean>
DEVICE u32 cast_element(float x, const Scale& s, u32 rest, const Rule& r, const Grid& g, u32& passes) {
  float y = DIVIDES ? __fdiv_rn(x, s.factor) : __fmul_rn(x, s.factor);  // 1. over the scale
  float q = element_of<Clean>(y, rest, g);                             // 2. onto the grid
#if MASKS
  passes = r.mask == CLIP ? fabsf(y) < r.limit : fabsf(__fsub_rn(y, q)) <= r.limit;
#endif
  // 3. times the scale, rounded once more where bfloat16 is subnormal; an element alone is a bfloat16 already
  return FOLDS ? bfloat16_bits<Clean && !SPECIAL>(__fmul_rn(q, s.fold)) : as_bits(q) >> 16;
}

// Eight results: values, and a byte of mask each.
struct Results {
  u32 word[4];
  u32 mask[2];

  DEVICE void clear() {
    UNROLLED for (int i = 0; i < 4; i++) word[i] = 0;
    mask[0] = mask[1] = 0;
  }
  DEVICE void put(int i, u32 value, u32 passes) {
    word[i / 2] |= value << (16 * (i % 2));
#if MASKS
    mask[i / 4] |= passes << (8 * (i % 4));
#endif
  }
  DEVICE void store(u16* y, u8* masks, u64 place) const {
    store_words<false>(y + place, word[0], word[1], word[2], word[3]);
#if MASKS
    *(Words2*)(masks + place) = Words2{mask[0], mask[1]};
#endif
  }
};
