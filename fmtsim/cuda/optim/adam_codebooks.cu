// A step of Adam on many parameters at once, whose moments are codes of codebooks with a scale a block (or float32):
// decode, update, encode from one read. The update is that of fmtsim/optim/rules.py, the codes those of
// fmtsim/optim/codec.py; how a code is found is said at fmtsim.rounding.codebooks.Table.
//
// Macros: BLOCK, elements of a block: 128, 256, 512, 1024 or 2048. BITS, of a code: 8, or 4, two a byte, the even
// element's in the low half. Those of adam.cuh.
#include "adam.cuh"

#define LANES (BLOCK < 256 ? BLOCK / 8 : 32)  // of a warp that share a block; a lane has eight elements
#define WARPS (BLOCK / 256)
#define SIZE (1 << BITS)

struct alignas(16) Book {
  i32 buckets, lowest, zero, signs;  // signs: 2, or 1 for numbers that are never negative
  float least;
  i32 unused[3];
};

DEVICE u32 code_of(float x, float divisor, const u32* words, const Book& book) {
  float y = __fdiv_rn(x, divisor);
  u32 bits = __float_as_uint(y), magnitude = bits & MAGNITUDE, negative = (u32)((i32)bits >> 31);
  i32 key = (i32)(magnitude >> 16) - book.lowest;
  key = key < 0 ? 0 : key >= book.buckets ? book.buckets - 1 : key;
  u32 word = words[key + (book.signs == 2 ? (i32)negative & book.buckets : 0)];
  u32 code = (word >> 17) + (((bits ^ negative) & 0xFFFFu) >= (word & 0x1FFFFu));
  if (magnitude > INFINITE) code = 0;
  return code - ((i32)code == book.zero && (i32)__float_as_uint(x) < 0);
}

DEVICE u32 four_codes(const float* x, float divisor, const u32* words, const Book& book) {
  u32 codes = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) codes |= (code_of(x[k], divisor, words, book) & (SIZE - 1)) << (BITS * k);
  return codes;
}

// The codes of four neighbours, BITS each, and back. at: of the first of them, a multiple of four.
template <class Count>
DEVICE u32 read_packed(const void* from, i64 at, Count count) {
  if (BITS == 8) return read_codes((const u8*)from, at, count);
  const u8* bytes = (const u8*)from + at / 2;
  if (at + 4 <= count) return *(const u16*)bytes;
  return (at < count ? bytes[0] : 0) | (at + 2 < count ? (u32)bytes[1] << 8 : 0);
}

template <class Count>
DEVICE void write_packed(void* to, i64 at, Count count, u32 codes) {
  if (BITS == 8) return write_codes((u8*)to, at, count, codes);
  u8* bytes = (u8*)to + at / 2;
  if (at + 4 <= count) {
    *(u16*)bytes = (u16)codes;
    return;
  }
  if (at >= count) return;
  bytes[0] = (u8)(at + 1 < count ? codes : codes & 0xF);  // the half of a last byte that is no element is 0
  if (at + 2 < count) bytes[1] = (u8)(codes >> 8 & 0xF);  // no four are there, so no fourth
}

DEVICE float scale_of(u32 top, const Book& book) {
  u32 least = __float_as_uint(book.least);
  return __uint_as_float(top > least ? top : least);
}

struct Tables {
  const float *m_values, *v_values;
  const u32 *m_words, *v_words;
  u32* tops;
};

// A chunk of a parameter whose moments are codes. All threads of a block come here together.
template <class Count>
DEVICE u32 step_codes(
    const Entry& e, i64 start, Count count, const Numbers& n, const Tables& t, const Book& mb, const Book& vb) {
  i64 place = start + threadIdx.x / (BLOCK / 8) * BLOCK, block = place / BLOCK;  // of the first element of the block
  bool present = place < count;
  i64 at = place + threadIdx.x % (BLOCK / 8) * 4;
  float m[8], v[8];
  u32 bad = 0, m_top = 0, v_top = 0;
  float m_scale = present ? e.m_scales[block] : 0.0f, v_scale = present ? e.v_scales[block] : 0.0f;
#pragma unroll
  for (int group = 0; group < 2; group++) {
    i64 here = at + group * (BLOCK / 2);
    Four p = read(e.p, here, count), g = read(e.g, here, count);
    u32 mc = read_packed(e.m, here, count), vc = read_packed(e.v, here, count);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float& a = m[4 * group + k];
      float& b = v[4 * group + k];
      a = __fmul_rn(t.m_values[mc >> (BITS * k) & (SIZE - 1)], m_scale);
      b = __fmul_rn(t.v_values[vc >> (BITS * k) & (SIZE - 1)], v_scale);
      if (here + k >= count) a = b = 0.0f;
      bad += update(p.x[k], g.x[k], a, b, n);
      u32 x = __float_as_uint(a) & MAGNITUDE, y = __float_as_uint(b) & MAGNITUDE;
      m_top = x > m_top ? x : m_top;
      v_top = y > v_top ? y : v_top;
    }
    write(e.p, here, count, p);
  }
  m_scale = scale_of(largest_of_block<LANES, WARPS>(m_top, t.tops), mb);
  v_scale = scale_of(largest_of_block<LANES, WARPS>(v_top, t.tops), vb);
  if (present && threadIdx.x % (BLOCK / 8) == 0) {
    e.m_scales[block] = m_scale;
    e.v_scales[block] = v_scale;
  }
  m_scale = m_scale == 0.0f ? 1.0f : m_scale;
  v_scale = v_scale == 0.0f ? 1.0f : v_scale;
#pragma unroll
  for (int group = 0; group < 2; group++) {
    i64 here = at + group * (BLOCK / 2);
    write_packed(e.m, here, count, four_codes(m + 4 * group, m_scale, t.m_words, mb));
    write_packed(e.v, here, count, four_codes(v + 4 * group, v_scale, t.v_words, vb));
  }
  return bad;
}

// Blocks of 256 threads take the chunks in turn. values: float32 [2 SIZE], first of m. words: of m, then of v, each
// with buckets * signs words. nonfinite: counts the elements of gradients that are NaN or infinite.
KERNEL __launch_bounds__(256) adam(
    const Entries entries, i32 count, i64 chunks, const Numbers n, const Book mb, const Book vb, const float* values,
    const u32* words, u64* nonfinite) {
  DYNAMIC_SHARED(memory);
  float* held = (float*)memory;
  u32* table = (u32*)(held + 2 * SIZE);
  __shared__ u32 tops[8];
  i32 m_size = mb.buckets * mb.signs, size = m_size + vb.buckets * vb.signs;
  for (i32 i = threadIdx.x; i < 2 * SIZE; i += 256) held[i] = values[i];
  for (i32 i = threadIdx.x; i < size; i += 256) table[i] = words[i];
  __syncthreads();
  Tables t = {held, held + SIZE, table, table + m_size, tops};
  u32 bad = 0;
  i32 which = 0;
  for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    while (which + 1 < count && entries.of[which + 1].first <= chunk) which++;
    const Entry& e = entries.of[which];
    i64 start = (chunk - e.first) * CHUNK;
    if (e.plain) bad += step_plainly(e, start, e.count, n);
    else if (start + CHUNK <= e.count) bad += step_codes(e, start, Endless(), n, t, mb, vb);
    else bad += step_codes(e, start, e.count, n, t, mb, vb);
  }
  if (bad) atomicAdd(nonfinite, (u64)bad);
}
