// Fragments of the floor kernels and their products on the fp64 tensor core.
#pragma once

// d += a b for 16 rows, 8 columns and 4 QUADS places.
template <int QUADS>
DEVICE void floor_chain(double (&d)[4], const double (&a)[2 * QUADS], const double (&b)[QUADS]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (QUADS == 4) {
    dmma_rz_16x8x16(d, a, b);
    return;
  } else if constexpr (QUADS == 2) {
    dmma_rz_16x8x8(d, a, b);
    return;
  }
#endif
  double upper[2] = {d[0], d[1]}, lower[2] = {d[2], d[3]};
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    dmma_rz_8x8x4(upper, a[2 * q], b[q]);
    dmma_rz_8x8x4(lower, a[2 * q + 1], b[q]);
  }
  d[0] = upper[0], d[1] = upper[1], d[2] = lower[0], d[3] = lower[1];
}

// Load the 16 rows `group` at `count` groups of 4 places from place `4 first` on: value[2 q + i] is row g + 8 i, place
// 4 q + t of lane (g, t).
template <int QUADS, bool WHOLE_WORDS>
DEVICE void load_values(double (&value)[2 * QUADS], const u8* values, int group, int first, int count, int lane) {
  const Words4* from = (const Words4*)values;
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    if (q >= count) continue;
    if constexpr (WHOLE_WORDS) {
      const Words4 w = from[(group * (SPAN / 4) + first + q) * 32 + lane];
      value[2 * q] = __hiloint2double(w.y, w.x);
      value[2 * q + 1] = __hiloint2double(w.w, w.z);
    } else {
      const Words2* w = (const Words2*)(from + (group * GROUPS8 + (first + q) / 2) * 32 + lane) + (first + q) % 2;
      value[2 * q] = __hiloint2double(w->x, 0);
      value[2 * q + 1] = __hiloint2double(w->y, 0);
    }
  }
}

// Load the 8 columns `half` of the 16 rows `group`: value[q] is column g, place 4 q + t.
template <int QUADS>
DEVICE void load_column(double (&value)[QUADS], const u8* values, int group, int half, int first, int lane) {
  const Words4* from = (const Words4*)values;
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    const u32* w = (const u32*)(from + (group * GROUPS8 + (first + q) / 2) * 32 + lane) + (first + q) % 2 + half * 2;
    value[q] = __hiloint2double(*w, 0);
  }
}

// Sum the powers of 16 rows and the 8 columns j of 32.
DEVICE void add_powers(float (&sums)[4], const u8* a, const u8* b, int a_group, int b_group, int j, int lane) {
  sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
  for (int pair = 0; pair < PAIRS8; ++pair) {
    const Words4 w = *(const Words4*)(a + power_place(ROWS_A, a_group, 2 * pair, lane));
    const Words2 v = *(const Words2*)(b + power_place(ROWS_B, b_group + j / 2, 2 * pair, lane) + j % 2 * 8);
    const u32 left[4] = {w.x, w.y, w.z, w.w}, right[2] = {v.x, v.y};
    hmma_bf16_16x8x16(sums, left, right);
  }
  if (SPAN % 16 == 0) return;
  const Words2 w = *(const Words2*)(a + power_place(ROWS_A, a_group, 2 * PAIRS8, lane));
  const u32 left[4] = {w.x, w.y, 0, 0};
  const u32 right[2] = {*(const u32*)(b + power_place(ROWS_B, b_group + j / 2, 2 * PAIRS8, lane) + j % 2 * 4), 0};
  hmma_bf16_16x8x16(sums, left, right);
}
