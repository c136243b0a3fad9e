// Transposition within registers of AVX-512.
#pragma once
#include <immintrin.h>

namespace tp {
namespace {

// 16 × 16 words of 32 bits, rows become columns.
inline void transpose(__m512i (&m)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; j++) {
      m[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      m[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  }
  // m[4 · r + c] now has, in its lane l, column 4 · l + c of rows 4 · r … 4 · r + 3.
  for (int c = 0; c < 4; c++) {
    t[c] = _mm512_shuffle_i64x2(m[c], m[c + 4], 0x88);
    t[c + 4] = _mm512_shuffle_i64x2(m[c], m[c + 4], 0xdd);
    t[c + 8] = _mm512_shuffle_i64x2(m[c + 8], m[c + 12], 0x88);
    t[c + 12] = _mm512_shuffle_i64x2(m[c + 8], m[c + 12], 0xdd);
  }
  for (int c = 0; c < 4; c++) {
    m[c] = _mm512_shuffle_i64x2(t[c], t[c + 8], 0x88);
    m[c + 8] = _mm512_shuffle_i64x2(t[c], t[c + 8], 0xdd);
    m[c + 4] = _mm512_shuffle_i64x2(t[c + 4], t[c + 12], 0x88);
    m[c + 12] = _mm512_shuffle_i64x2(t[c + 4], t[c + 12], 0xdd);
  }
}

}  // namespace
}  // namespace tp
