// Vectors in int8 by AVX2, see int8.h; part of avx2.cpp. Bytes are multiplied 32 at a time, of which one factor has no
// sign, and two products are added up to 16 bits; eight of them fit.
#pragma once
#include <immintrin.h>

#include "int8.h"

namespace tp {
namespace {

template <class TABLE, int SPAN>
struct Codes {
  using X = Int8Group<8>;
  using Raw = __m256i;
  using Sum = __m256;
  using Item = float;
  static constexpr int LANES = 8, group = 64, items = 1, bytes = 32, sums = 12, shared = 1, span = SPAN, at_once = 4;
  struct Elements {
    __m256i even, odd;
  };

  static Raw load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Raw load_part(const uint8_t* p, int64_t n) {
    alignas(32) uint8_t filled[32] = {};
    std::memcpy(filled, p, n);
    return load(filled);
  }

  static Elements decode(Raw raw) {
    const __m256i table = _mm256_load_si256(reinterpret_cast<const __m256i*>(LIFTED<TABLE>.value));
    const __m256i four = _mm256_set1_epi8(15);
    return {_mm256_shuffle_epi8(table, _mm256_and_si256(raw, four)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(raw, 4), four))};
  }

  static void read(const Matrix& w, int64_t grid_row, Item* out) { read_scales(w, grid_row, SPAN, out); }

  // Lane i of a sum has columns 8 · i … 8 · i + 7.
  static __m256 scale(const Item* scales) {
    const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const __m256 few = _mm256_castps128_ps256(_mm_loadu_ps(scales));
    return _mm256_permutevar8x32_ps(few, _mm256_srli_epi32(lane, SPAN == 32 ? 2 : 1));
  }

  static __m256i words(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }

  static Sum add(Sum sum, const Elements& e, const X* x, __m256 scale) {
    const __m256i even = _mm256_maddubs_epi16(e.even, words(x->code[0]));
    const __m256i odd = _mm256_maddubs_epi16(e.odd, words(x->code[1]));
    const __m256i pairs = _mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
    const __m256 whole = _mm256_cvtepi32_ps(_mm256_add_epi32(pairs, words(x->start)));
    return _mm256_fmadd_ps(whole, _mm256_mul_ps(scale, _mm256_load_ps(x->scale)), sum);
  }

  static float reduce(Sum sum) { return Group::reduce(sum); }
  static void reduce(Sum a, Sum b, Sum c, Sum d, float* out) { store_sums({a, b, c, d}, out); }

  using Whole = __m256i;

  static void transpose(Raw (&m)[8]) {
    Raw t[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_epi32(m[i], m[i + 1]);
      t[i + 1] = _mm256_unpackhi_epi32(m[i], m[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      for (int j = 0; j < 2; j++) {
        m[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
        m[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
      }
    }
    // m[4 · r + c] now has, in its half h, column 4 · h + c of rows 4 · r … 4 · r + 3.
    for (int c = 0; c < 4; c++) {
      t[c] = _mm256_permute2x128_si256(m[c], m[c + 4], 0x20);
      t[c + 4] = _mm256_permute2x128_si256(m[c], m[c + 4], 0x31);
    }
    for (int c = 0; c < 8; c++) m[c] = t[c];
  }

  static Whole whole(int32_t start) { return _mm256_set1_epi32(start); }

  static __m256i products(__m256i elements, const int8_t* four) {
    int32_t bytes;
    std::memcpy(&bytes, four, sizeof bytes);
    return _mm256_maddubs_epi16(elements, _mm256_set1_epi32(bytes));
  }

  static Whole dot(Whole whole, const Elements* e, const X* x, int lane) {
    const int8_t *even = x->code[0] + 4 * lane, *odd = x->code[1] + 4 * lane;
    const __m256i first = _mm256_add_epi16(products(e[0].even, even), products(e[0].odd, odd));
    const __m256i second = _mm256_add_epi16(products(e[1].even, even + 4), products(e[1].odd, odd + 4));
    return _mm256_add_epi32(whole, _mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1)));
  }

  static Sum add_rows(Sum sum, Whole whole, const float* scales, float scale) {
    const __m256 both = _mm256_mul_ps(_mm256_load_ps(scales), _mm256_set1_ps(scale));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), both, sum);
  }

  static void scaled(Sum sum, const float* factors, float* out) {
    _mm256_storeu_ps(out, _mm256_mul_ps(sum, _mm256_loadu_ps(factors)));
  }
};

using Coded = Int8Of<Codes>;

}  // namespace
}  // namespace tp
