// SPDX-License-Identifier: Apache-2.0
// Layout of the operands of aligned_fp64_mma.cu (fp64 tensor core), which aligned_fp64_mma_pack.cu writes.
//
// An operand is divided into panels of ROWS rows; a panel's block of products is one record, records of a panel follow
// each other in the accumulation order. A record holds, for SPAN places (the block's length rounded up to 8):
//   values   every number as a double, in fragments of 16 rows and 4 places for the fp64 tensor core: lane (g, t) holds
//            rows g and g + 8 at place t. TWO_WORDS: both words, [16 rows][4 places][lane][row]; else the high words
//            alone (the low ones are zero), [16 rows][8 places][lane][4 places][row] or, second, [lane][row][4 places].
//   powers   2^(spacing e) of its exponent e in bfloat16, zero for a zero, in fragments of 16 rows and 16 places for
//            the bf16 tensor core, [16 rows][16 places][lane][8 places][row] or, for the second operand,
//            [16 rows][16 places][lane][row][8 places], a pair of places in a word.
//   signs    a bit per place: [32 places][32 rows][place of row], see sign_place.
//   numbers  if WIDE: likewise a bit per place that is not zero.
// Where terms are truncated, a zero is a tiny value with its sign: its products are floored to 0 or -1 as any
// other tiny product's are, so that the count of negative signs is right for it as well.
#pragma once
#include "common.cuh"

#define GROUPS8 (SPAN / 8)
#define PAIRS8 (SPAN / 16)
#define WORDS ((SPAN + 31) / 32)

// What row_exponents and pack_operand say about a row: its base (the largest exponent, 0 if not WIDE), or one of these.
#define FAR (1 << 20)  // from any exponent
#define ROW_OF_ZEROS (-FAR)
#define ROW_OF_SPECIALS (2 * FAR)

DEVICE constexpr int value_bytes(int rows, bool whole) { return rows * SPAN * (whole ? 8 : 4); }
DEVICE constexpr int power_bytes(int rows) { return rows * SPAN * 2; }
DEVICE constexpr int sign_bytes(int rows) { return rows * WORDS * 4; }
DEVICE constexpr int record_bytes(int rows, bool whole, bool wide) {
  return value_bytes(rows, whole) + power_bytes(rows) + sign_bytes(rows) * (wide ? 2 : 1);
}

// Where a fragment of powers lies: 16 rows `group`, 8 places `eight`; an odd last eight stands behind all pairs.
DEVICE constexpr int power_place(int rows, int group, int eight, int lane) {
  return eight < 2 * PAIRS8 ? ((group * PAIRS8 + eight / 2) * 32 + lane) * 16 + (eight & 1) * 8
                            : rows * PAIRS8 * 32 + (group * 32 + lane) * 8;
}

// Where the sign word of a row of 32 lies: lane (g, t) needs rows g, g + 8, g + 16, g + 24 of the first operand, and
// rows 8 j + 2 t, 8 j + 2 t + 1 of the second, which it finds side by side.
DEVICE constexpr int sign_place(int row, bool first) {
  return first ? (row & 7) * 4 + (row >> 3) : ((row & 7) >> 1) * 8 + (row >> 3) * 2 + (row & 1);
}
