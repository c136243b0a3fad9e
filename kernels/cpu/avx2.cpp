// AVX2 with FMA. A group is 32 columns; elements are float32 vectors of 8.
#include <immintrin.h>

#include "delta_loops.h"
#include "dots.h"
#include "elementwise.h"

namespace tp {
namespace {

struct Elements {
  __m256 value[4];
};

// F::column(i) is the column of an element's i-th value.
struct Group {
  using X = float;
  using Elements = tp::Elements;
  using Sum = __m256;
  using Item = float;
  static constexpr int group = 32, items = group, sums = 1, shared = 1;

  static Sum dot(const Elements& e, const X* x) {
    Sum sum = _mm256_mul_ps(e.value[0], _mm256_load_ps(x));
    for (int i = 1; i < 4; i++) sum = _mm256_fmadd_ps(e.value[i], _mm256_load_ps(x + 8 * i), sum);
    return sum;
  }

  static Sum add(Sum sum, const Elements& e, const X* x, __m256 scale) { return _mm256_fmadd_ps(dot(e, x), scale, sum); }

  static float reduce(Sum sum) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
  }
};

inline __m256 as_floats(__m256i v) { return _mm256_castsi256_ps(v); }

struct E2M1 {
  // Twice the elements, which are whole numbers; the scales are halved instead.
  static constexpr float unit = 0.5f;
  alignas(16) static constexpr int8_t value[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};
struct INT4 {
  static constexpr float unit = 1.0f;
  alignas(16) static constexpr int8_t value[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
};

// 16 bytes of codes: the low ones are the even columns, the high ones the odd.
template <class TABLE, int SPAN>
struct Nibbles : Group {
  using Raw = __m128i;
  static constexpr int bytes = 16, span = SPAN;

  static Raw load(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static Raw load_part(const uint8_t* p, int64_t n) {
    alignas(16) uint8_t filled[16] = {};
    std::memcpy(filled, p, n);
    return _mm_load_si128(reinterpret_cast<const __m128i*>(filled));
  }

  static Elements decode(Raw raw) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(TABLE::value)), four = _mm_set1_epi8(15);
    const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(raw, four));
    const __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(raw, 4), four));
    return {{widen(low), widen(_mm_unpackhi_epi64(low, low)), widen(high), widen(_mm_unpackhi_epi64(high, high))}};
  }

  static __m256 widen(__m128i bytes8) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes8)); }

  static void read(const Matrix& w, int64_t grid_row, Item* out) {
    read_scales(w, grid_row, SPAN, out);
    for (int64_t i = 0; i < w.w->grid_columns; i++) out[i] *= TABLE::unit;
  }

  // Values 0 … 7 and 16 … 23 are of the first half of the columns.
  static Sum add(Sum sum, const Elements& e, const X* x, const Item* scales) {
    if (SPAN == 32) return _mm256_fmadd_ps(dot(e, x), _mm256_broadcast_ss(scales), sum);
    __m256 first = _mm256_mul_ps(e.value[0], _mm256_load_ps(x)), second = _mm256_mul_ps(e.value[1], _mm256_load_ps(x + 8));
    first = _mm256_fmadd_ps(e.value[2], _mm256_load_ps(x + 16), first);
    second = _mm256_fmadd_ps(e.value[3], _mm256_load_ps(x + 24), second);
    sum = _mm256_fmadd_ps(first, _mm256_broadcast_ss(scales), sum);
    return _mm256_fmadd_ps(second, _mm256_broadcast_ss(scales + 1), sum);
  }
  static const Item* scale(const Item* scales) { return scales; }

  static constexpr int column(int i) { return i % 16 * 2 + i / 16; }
};

// e4m3 becomes float16 by a shift, at 2^−8 of its value; the scales make up for that. NaN is put back.
struct Fp8 : Group {
  using Raw = __m256i;
  static constexpr int bytes = 32, span = 32;

  static Raw load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Raw load_part(const uint8_t* p, int64_t n) {
    alignas(32) uint8_t filled[32] = {};
    std::memcpy(filled, p, n);
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(filled));
  }

  static __m256 widen(__m128i codes) {
    const __m128i words = _mm_cvtepu8_epi16(codes), size = _mm_and_si128(words, _mm_set1_epi16(0x7f));
    const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(0x80)), 8);
    return _mm256_cvtph_ps(_mm_or_si128(_mm_or_si128(_mm_slli_epi16(size, 7), sign), nan));
  }

  static Elements decode(Raw raw) {
    const __m128i low = _mm256_castsi256_si128(raw), high = _mm256_extracti128_si256(raw, 1);
    return {{widen(low), widen(_mm_unpackhi_epi64(low, low)), widen(high), widen(_mm_unpackhi_epi64(high, high))}};
  }

  static void read(const Matrix& w, int64_t grid_row, Item* out) {
    read_scales(w, grid_row, span, out);
    for (int64_t i = 0; i < ceil_div(w.w->k, span); i++) out[i] *= 256.0f;
  }
  static __m256 scale(const Item* scales) { return _mm256_broadcast_ss(scales); }

  static constexpr int column(int i) { return i; }
};

struct Bf16 : Group {
  struct Raw {
    __m256i half[2];
  };
  static constexpr int bytes = 64, span = 0;

  static Raw load(const uint8_t* p) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(p);
    return {{_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)}};
  }
  static Raw load_part(const uint8_t* p, int64_t n) {
    alignas(32) uint8_t filled[64] = {};
    std::memcpy(filled, p, n);
    return load(filled);
  }

  static __m256 even(__m256i v) { return as_floats(_mm256_slli_epi32(v, 16)); }
  static __m256 odd(__m256i v) { return as_floats(_mm256_and_si256(v, _mm256_set1_epi32(-65536))); }
  static Elements decode(Raw raw) { return {{even(raw.half[0]), odd(raw.half[0]), even(raw.half[1]), odd(raw.half[1])}}; }

  static void read(const Matrix&, int64_t, Item*) {}
  static int scale(const Item*) { return 0; }
  static Sum add(Sum sum, const Elements& e, const X* x, int) { return _mm256_add_ps(dot(e, x), sum); }

  static constexpr int column(int i) { return i / 16 * 16 + i % 8 * 2 + i % 16 / 8; }
};

}  // namespace
}  // namespace tp

#include "avx2_int8.h"

namespace tp {
#include "float_vectors.h"

constexpr Int8 INT8_FUNCTIONS = {Coded::packed_bytes, Coded::pack, Coded::dots, Coded::products};
const Isa avx2_isa = make_isa("avx2", &INT8_FUNCTIONS);

}  // namespace tp
