// How operands of any dtype up to float32 are read, as float32. Macro: TYPE (general_operands.cuh).
#pragma once
#include "general_operands.cuh"

DEVICE float read_value(const void* x, i64 place) {
#if TYPE == TYPE_FP32
  return ((const float*)x)[place];
#elif TYPE == TYPE_BF16
  return __uint_as_float((u32)((const u16*)x)[place] << 16);
#elif TYPE == TYPE_FP16
  return float16(((const u16*)x)[place]);
#else
  return float8(((const u8*)x)[place], TYPE);
#endif
}
