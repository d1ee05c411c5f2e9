// The random integer of each sum that a unit rounds stochastically (docs/semantics.md, section 9).
#pragma once
#include "general_formats.cuh"

// Philox4x32-10: the word at one of four places of a counter.
DEVICE u32 philox_word(u64 counter, u64 offset, u64 seed, int place) {
  u32 x0 = (u32)counter, x1 = (u32)(counter >> 32), x2 = (u32)offset, x3 = (u32)(offset >> 32);
  u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    u64 product0 = (u64)x0 * 0xD2511F53u, product2 = (u64)x2 * 0xCD9E8D57u;
    x0 = (u32)(product2 >> 32) ^ x1 ^ key0;
    x1 = (u32)product2;
    x2 = (u32)(product0 >> 32) ^ x3 ^ key1;
    x3 = (u32)product0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return place == 0 ? x0 : place == 1 ? x1 : place == 2 ? x2 : x3;
}

DEVICE u32 random_word(u64 index, u64 seed, u64 offset) {
  return philox_word((index >> 6) * 16 + (index & 15), offset, seed, (int)(index >> 4) & 3);
}

// The integer of how.bits bits that element `index` draws; layout 1 shares words as Blackwell's cvt.rs does.
DEVICE u32 random_integer(u64 index, u64 seed, u64 offset, const Rounding& how) {
  if (how.layout == 0) return random_word(index, seed, offset) >> (32 - how.bits);
  if (how.bits == 8) {
    int place = (int)(index & 3), byte = place ^ 1;  // byte 1, byte 0 backwards, byte 3, byte 2 backwards
    u32 taken = random_word(index >> 2, seed, offset) >> (8 * byte) & 0xFF;
    return index & 1 ? __brev(taken) >> 24 : taken;
  }
  return random_word(index >> 1, seed, offset) >> (16 * (int)(index & 1)) & ((1u << how.bits) - 1);
}
