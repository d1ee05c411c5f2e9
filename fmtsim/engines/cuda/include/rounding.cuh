// SPDX-License-Identifier: Apache-2.0
// How a magnitude is rounded to a coarser grid, in every mode, exactly: the one place where kernels decide that from the
// bits that are dropped (docs/semantics.md, section 1).
#pragma once
#include "common.cuh"

#define MODE_NEAREST_EVEN 0
#define MODE_NEAREST_AWAY 1
#define MODE_NEAREST_TOWARD_ZERO 2
#define MODE_TOWARD_ZERO 3
#define MODE_UP 4
#define MODE_DOWN 5
#define MODE_TO_ODD 6
#define MODE_STOCHASTIC 7

// A magnitude in units of 2^place: whole units, the first 64 bits of the rest, and whether more follows.
struct Split {
  u64 whole;
  u64 fraction;
  bool sticky;
};

DEVICE Split split(u64 significand, i32 drop) {
  Split s;
  s.whole = drop < 64 ? significand >> drop : 0;
  s.fraction = drop <= 0 ? 0 : drop <= 64 ? (drop == 64 ? significand : significand << (64 - drop))
                                          : (drop < 128 ? significand >> (drop - 64) : 0);
  s.sticky = drop > 64 && (drop >= 128 || (significand << (128 - drop)) != 0);
  return s;
}

// How is a structure with `mode`, one of these, and for stochastic rounding `random_bits`, how many a word has, and
// `variant`, 0, 1, 2 for a, b, c. It is read where it lies: copies of what most modes ignore would be loaded for all.

// Stochastic rounding: does the discarded fraction move the magnitude up?
template <typename How>
DEVICE bool stochastic_up(u64 fraction, bool sticky, u32 word, const How& how) {
  i32 r = how.random_bits;
  if (how.variant == 1) return (fraction >> (63 - r)) + 2ull * word + 1 >= (2ull << r);
  u64 steps = fraction >> (64 - r);
  if (how.variant == 2) {
    u64 rest = fraction << r;
    steps += rest > (1ull << 63) || (rest == (1ull << 63) && (sticky || (steps & 1)));
  }
  return steps + word >= (1ull << r);
}

// Whether a magnitude, odd or not, moves to the next one above it: the table of docs/semantics.md, section 1.
template <typename How>
DEVICE bool moves_up(const Split& s, bool odd, bool negative, u32 word, const How& how) {
  const u64 half = 1ull << 63;
  if (s.fraction == 0 && !s.sticky) return false;
  switch (how.mode) {
    case MODE_NEAREST_EVEN: return s.fraction > half || (s.fraction == half && (s.sticky || odd));
    case MODE_NEAREST_AWAY: return s.fraction >= half;
    case MODE_NEAREST_TOWARD_ZERO: return s.fraction > half || (s.fraction == half && s.sticky);
    case MODE_TOWARD_ZERO: return false;
    case MODE_UP: return !negative;
    case MODE_DOWN: return negative;
    case MODE_TO_ODD: return !odd;
    default: return stochastic_up(s.fraction, s.sticky, word, how);
  }
}
