// Vectors in int8 by AVX-512, see int8.h: one byte where a vector as it is takes three.
#pragma once
#include "avx512.h"
#include "int8.h"
#include "transpose.h"

namespace tp {
namespace {

// Tables of the same codes in float32, whose scales are read alike.
template <class TABLE>
struct InFloat32 {
  using type = E2m1Table;
};
template <>
struct InFloat32<Int4Codes> {
  using type = Int4Table;
};

template <class TABLE, int SPAN>
struct Codes : Nibbles<typename InFloat32<TABLE>::type, SPAN> {
  using X = Int8Group<16>;
  using Raw = __m512i;
  using Group<4>::load;
  using Group<4>::load_part;
  static constexpr int LANES = 16, items = 1, at_once = 8;
  struct Elements {
    __m512i even, odd;
  };

  static Elements decode(Raw raw) {
    const __m512i table = _mm512_load_si512(LIFTED<TABLE>.value);
    return {_mm512_permutexvar_epi8(raw, table), _mm512_permutexvar_epi8(_mm512_srli_epi16(raw, 4), table)};
  }

  static __m512 add(__m512 sum, const Elements& e, const X* x, __m512 scale) {
    __m512i whole = _mm512_dpbusd_epi32(_mm512_load_si512(x->start), e.even, _mm512_load_si512(x->code[0]));
    whole = _mm512_dpbusd_epi32(whole, e.odd, _mm512_load_si512(x->code[1]));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_mul_ps(scale, _mm512_load_ps(x->scale)), sum);
  }

  using Whole = __m512i;
  static void transpose(Raw (&m)[16]) { ::tp::transpose(m); }
  static Whole whole(int32_t start) { return _mm512_set1_epi32(start); }

  static Whole products(Whole whole, __m512i elements, const int8_t* four) {
    int32_t bytes;
    std::memcpy(&bytes, four, sizeof bytes);
    return _mm512_dpbusd_epi32(whole, elements, _mm512_set1_epi32(bytes));
  }

  static Whole dot(Whole whole, const Elements* e, const X* x, int lane) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      whole = products(whole, e[i].even, x->code[0] + 4 * (lane + i));
      whole = products(whole, e[i].odd, x->code[1] + 4 * (lane + i));
    }
    return whole;
  }

  static __m512 add_rows(__m512 sum, Whole whole, const float* scales, float scale) {
    const __m512 both = _mm512_mul_ps(_mm512_load_ps(scales), _mm512_set1_ps(scale));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), both, sum);
  }

  static void scaled(__m512 sum, const float* factors, float* out) {
    _mm512_storeu_ps(out, _mm512_mul_ps(sum, _mm512_loadu_ps(factors)));
  }
};

using Coded = Int8Of<Codes>;

}  // namespace
}  // namespace tp
