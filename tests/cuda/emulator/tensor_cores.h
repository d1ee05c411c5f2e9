// SPDX-License-Identifier: Apache-2.0
// The wrappers that common.cuh has in assembly: products of matrices, fragments laid out as in the PTX manual, and
// asynchronous copies, which land when they are waited for and leave rubbish until then.
#pragma once

namespace host {

template <class D, class A, class B>
struct Product { D* d; const A* a; const B* b; };

// Per output a chain of fused multiply-adds in the order of k, each rounded toward zero. `Rows` is 8 or 16.
template <int Rows, int K>
__attribute__((noinline, noipa)) void finish_dmma(unsigned, void** slots) {
  typedef Product<double, double, double> Lane;
  Rounded scope(RZ);
  for (int row = 0; row < Rows; ++row)
    for (int column = 0; column < 8; ++column) {
      double& d = ((Lane*)slots[row % 8 * 4 + column / 2])->d[row / 8 * 2 + column % 2];
      double sum = d;
      for (int k = 0; k < K; ++k) {
        double a = ((Lane*)slots[row % 8 * 4 + k % 4])->a[k / 4 * (Rows / 8) + row / 8];
        double b = ((Lane*)slots[column * 4 + k % 4])->b[k / 4];
        OPAQUE(a);
        sum = fused(a, b, sum);
        OPAQUE(sum);
      }
      d = sum;
    }
}

inline float bfloat16(unsigned word, int place) {
  return bits<float>(place ? word & 0xffff0000u : word << 16);
}

// The exact sum (double holds it wherever the result needs no more than 53 bits), truncated to float32. Hardware
// aligns and truncates products; the two agree wherever nothing is lost.
inline void finish_hmma(unsigned, void** slots) {
  typedef Product<float, unsigned, unsigned> Lane;
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float& d = ((Lane*)slots[row % 8 * 4 + column / 2])->d[row / 8 * 2 + column % 2];
      double sum = d;
      for (int k = 0; k < 16; ++k) {
        unsigned a = ((Lane*)slots[row % 8 * 4 + k % 8 / 2])->a[k / 8 * 2 + row / 8];
        unsigned b = ((Lane*)slots[column * 4 + k % 8 / 2])->b[k / 8];
        sum += (double)bfloat16(a, k % 2) * bfloat16(b, k % 2);
      }
      d = narrow<RZ>(sum);
    }
}

template <class D, class A, class B>
inline void multiply_matrices(D* d, const A* a, const B* b, Finish finish) {
  Product<D, A, B> mine = {d, a, b};
  meet("mma.sync", ~0u, finish, &mine);
}

}  // namespace host

#if __CUDA_ARCH__ >= 900
inline void dmma_rz_16x8x16(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
  host::multiply_matrices(d, a, b, host::finish_dmma<16, 16>);
}
inline void dmma_rz_16x8x8(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  host::multiply_matrices(d, a, b, host::finish_dmma<16, 8>);
}
#endif
inline void dmma_rz_8x8x4(double (&d)[2], double a, double b) {
  host::multiply_matrices(d, &a, &b, host::finish_dmma<8, 4>);
}
inline void hmma_bf16_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  host::multiply_matrices(d, a, b, host::finish_hmma);
}

inline void copy16_async(void* shared, const void* global) {
  if (((uintptr_t)shared | (uintptr_t)global) % 16) host::fail("copy16_async: an address is no multiple of 16");
  memset(shared, 0xCD, 16);
  unsigned group = host::current->open_group;
  host::current->copies.push_back({(unsigned char*)shared, (const unsigned char*)global, 16, group});
}
inline void commit_copies() { ++host::current->open_group; }
template <int N>
inline void wait_copies() {
  std::vector<host::Copy>& copies = host::current->copies;
  size_t landed = 0;
  while (landed < copies.size() && copies[landed].group + N < host::current->open_group) {
    memcpy(copies[landed].to, copies[landed].from, copies[landed].bytes);
    ++landed;
  }
  copies.erase(copies.begin(), copies.begin() + landed);
}
