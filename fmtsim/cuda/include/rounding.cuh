// SPDX-License-Identifier: Apache-2.0
// Rounding of a magnitude to a coarser grid, in every mode, exactly: the one place where kernels decide by the bits
// that are dropped (docs/semantics.md, section 1). A mode's number is the truth table of its condition
// (fmtsim/rounding/modes.py, Rule.code); the names here are of the modes that some kernel treats on its own.
#pragma once
#include "common.cuh"

#define MODE_NEAREST_EVEN 0xfc00
#define MODE_NEAREST_AWAY 0xff00
#define MODE_TOWARD_ZERO 0x0
#define MODE_DOWN 0xaaa0
#define MODE_STOCHASTIC 0x1fff0

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

// A mode's decision by the round bit, the sticky bit, the candidate's parity and the sign.
DEVICE bool by_mode(i32 mode, u32 half, bool sticky, bool odd, bool negative) {
  return mode >> (8 * half + 4 * sticky + 2 * odd + negative) & 1;
}
DEVICE bool ties_toward_zero(i32 mode) { return !(mode & 0xf00); }
DEVICE bool leaves_range(i32 mode, bool negative) { return mode >> (14 + negative) & 1; }

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
  if (how.mode == MODE_STOCHASTIC) return stochastic_up(s.fraction, s.sticky, word, how);
  return by_mode(how.mode, s.fraction >> 63, s.sticky || (s.fraction << 1) != 0, odd, negative);
}
