// SPDX-License-Identifier: Apache-2.0
// Operands of products: elements of every dtype (FP8, 16 bits, float32, float64, 8-bit integers) read as doubles.
#pragma once
#include "numbers.cuh"

// Dtypes of operands; job.py has the same numbers.
#define TYPE_E4M3FN 0
#define TYPE_E5M2 1
#define TYPE_E4M3FNUZ 2
#define TYPE_E5M2FNUZ 3
#define TYPE_E8M0 4
#define TYPE_BF16 5
#define TYPE_FP16 6
#define TYPE_FP32 7
#define TYPE_FP64 8
#define TYPE_INT8 9
#define TYPE_UINT8 10

// A code of 8 bits: 7 bits of exponent and mantissa become those of a float32 with another bias.
DEVICE float float8(u32 code, int type) {
  u32 magnitude = code & 0x7F;
  float x;
  bool nan;
  if (type == TYPE_E8M0) return as_float(code == 255 ? 0x7FFFFFFFu : code == 0 ? 0x00400000u : code << 23);
  if (type == TYPE_E4M3FN) { x = as_float(magnitude << 20) * 0x1p120f; nan = magnitude == 0x7F; }
  else if (type == TYPE_E4M3FNUZ) { x = as_float(magnitude << 20) * 0x1p119f; nan = code == 0x80; }
  else if (type == TYPE_E5M2FNUZ) { x = as_float(magnitude << 21) * 0x1p111f; nan = code == 0x80; }
  else {
    x = as_float(magnitude << 21) * 0x1p112f;
    nan = magnitude > 0x7C;
    if (magnitude == 0x7C) x = as_float(0x7F800000u);
  }
  if (nan) x = as_float(0x7FFFFFFFu);
  return as_float(as_bits(x) | (code & 0x80) << 24);
}

DEVICE float float16(u32 code) {
  u32 magnitude = code & 0x7FFF;
  float x = as_float(magnitude << 13) * 0x1p112f;
  if (magnitude >= 0x7C00) x = as_float(0x7F800000u | (magnitude & 0x3FF) << 13);
  return as_float(as_bits(x) | (code & 0x8000) << 16);
}

DEVICE double value_of(u64 raw, int type) {
  if (type == TYPE_FP64) return as_double(raw);
  if (type == TYPE_FP32) return as_float((u32)raw);
  if (type == TYPE_BF16) return as_float((u32)raw << 16);
  if (type == TYPE_FP16) return float16((u32)raw);
  if (type == TYPE_INT8) return (i8)raw;
  return type == TYPE_UINT8 ? (double)raw : (double)float8((u32)raw, type);
}

DEVICE int bytes_of(int type) {
  if (type == TYPE_BF16 || type == TYPE_FP16) return 2;
  return type == TYPE_FP64 ? 8 : type == TYPE_FP32 ? 4 : 1;
}

DEVICE u64 raw_at(const void* base, i64 place, int bytes) {
  if (bytes == 2) return ((const u16*)base)[place];
  if (bytes == 4) return ((const u32*)base)[place];
  return bytes == 1 ? ((const u8*)base)[place] : ((const u64*)base)[place];
}

DEVICE double element_at(const void* base, i64 place, int type) {
  return value_of(raw_at(base, place, bytes_of(type)), type);
}

#ifdef TYPE
// An element of a dtype that is a macro, as float32, which holds its values; of float64 as it is.
#if TYPE == TYPE_FP64
typedef double Value;
#else
typedef float Value;
#endif

DEVICE Value read_value(const void* x, i64 place) { return (Value)element_at(x, place, TYPE); }
#endif
