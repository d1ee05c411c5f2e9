// How the kernels of units that add groups of products lay out their operands.
//
// Both operands are cut into panels of 128 rows and blocks of the unit. A panel of one block is contiguous: values,
// as fragments of the bf16 tensor core (8 tiles of 16 rows, then STEPS steps of 16 along K, then 32 lanes of 16
// bytes); exponents of scales, one word a row, one signed byte a group; and the bounds of these exponents for each 32
// rows.
//
// Macros: STEPS and GROUPS of a block, GROUP (places of a group), all from gemm_groups.py.
#pragma once
#include "common.cuh"

#define PANEL 128
#define TILES (PANEL / 16)
#define EMPTY (-128)        // the exponent of a group without products, smaller than any sum of two others
#define OUTSIDE 50          // scales beyond 2^50 or below 2^-50 leave a panel to the general path
#define PANEL_WORDS (TILES * STEPS * 32)  // of 16 bytes

DEVICE i32 byte_of(u32 word, int place) { return (i8)(word >> (8 * place)); }
DEVICE float float_power(i32 exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }
