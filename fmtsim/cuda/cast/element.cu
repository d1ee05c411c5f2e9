// Element formats, the general path: every format, rounding and overflow, the four dtypes, one element a thread.
//
// Macros: INPUT, OUTPUT (dtypes of vectors.cuh; of decode OUTPUT alone), CODES: bytes of a code as it is stored.
#include "common.cuh"
#include "element.cuh"
#include "philox.cuh"
#include "vectors.cuh"

typedef Stored<INPUT>::type Input;
typedef Stored<OUTPUT>::type Output;
template <int Bytes> struct CodeOf;
template <> struct CodeOf<1> { typedef u8 type; };
template <> struct CodeOf<2> { typedef u16 type; };
template <> struct CodeOf<4> { typedef u32 type; };
template <> struct CodeOf<8> { typedef u64 type; };
typedef CodeOf<CODES>::type Code;

#define THREAD ((i64)blockIdx.x * blockDim.x + threadIdx.x)

DEVICE u64 code_at(const Input* x, i64 i, const Element& e, const Tables& t, const Draw& d, const i64* given) {
  return element_code(real_of(loaded<INPUT>(x[i])), random_integer((u64)i, d, given), e, t);
}

// A value in the output's dtype, rounded once to float32 where that is narrower than the format.
DEVICE Output narrowed(double value) {
  if constexpr (OUTPUT == FLOAT64) return value;
  else return stored<OUTPUT>(float_of_value(value));
}

KERNEL quantize(const Input* x, Output* y, i64 count, const Element e, const Tables t, const Draw d, const i64* given) {
  i64 i = THREAD;
  if (i < count) y[i] = narrowed(element_value(code_at(x, i, e, t, d, given), e, t));
}

KERNEL encode(const Input* x, Code* codes, i64 count, const Element e, const Tables t, const Draw d, const i64* given) {
  i64 i = THREAD;
  if (i < count) codes[i] = (Code)code_at(x, i, e, t, d, given);
}

// Packed codes of at most 32 bits: a thread packs eight codes of a row, as many bytes as a code has bits.
KERNEL encode_rows(
    const Input* x, u8* codes, i64 rows, i64 columns, i32 width, const Element e, const Tables t, const Draw d,
    const i64* given) {
  i64 groups = (columns + 7) / 8, thread = THREAD;
  if (thread >= rows * groups) return;
  i64 row = thread / groups, column = thread % groups * 8, bytes = (columns * width + 7) / 8;
  u8* to = codes + row * bytes + column / 8 * width;
  u64 held = 0;
  i32 bits = 0;
  for (i64 k = column; k < columns && k < column + 8; k++) {
    held |= code_at(x, row * columns + k, e, t, d, given) << bits;
    for (bits += width; bits >= 8; bits -= 8, held >>= 8) *to++ = (u8)held;
  }
  if (bits) *to = (u8)held;
}

KERNEL decode(const Code* codes, Output* y, i64 count, const Element e, const Tables t) {
  i64 i = THREAD;
  if (i < count) y[i] = narrowed(element_value((u64)codes[i] & e.code_mask, e, t));
}
