// Formats by AVX-512 with VBMI. A group is 64 bytes, decoded by table look-ups to bfloat16, in which elements are exact;
// products and sums are float32. vdpbf16ps would take two cycles where two fused multiply-adds of the same products take
// one, see bench/NOTES.md.
#pragma once
#include <immintrin.h>

#include "dots.h"
#include "elementwise.h"

namespace tp {
namespace {

inline __m512bh as_bh(__m512i v) { return reinterpret_cast<__m512bh>(v); }
inline __mmask64 first_bytes(int64_t n) { return _bzhi_u64(~0ull, static_cast<unsigned>(n)); }

inline __m512 even(__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
inline __m512 odd(__m512i v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(-65536))); }

// What groups of 64 bytes share: V vectors of 32 bfloat16. Packed x has, for each of them, the columns of its even words
// and then those of its odd ones.
template <int V>
struct Group {
  using X = float;
  using Raw = __m512i;
  using Sum = __m512;
  static constexpr int vectors = V, group = 32 * V, bytes = 64;
  struct Elements {
    __m512i vector[V];
  };

  static Raw load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Raw load_part(const uint8_t* p, int64_t n) { return _mm512_maskz_loadu_epi8(first_bytes(n), p); }

  static Sum dot(Sum sum, const Elements& e, const X* x) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      sum = _mm512_fmadd_ps(even(e.vector[v]), _mm512_load_ps(x + 32 * v), sum);
      sum = _mm512_fmadd_ps(odd(e.vector[v]), _mm512_load_ps(x + 32 * v + 16), sum);
    }
    return sum;
  }

  static Sum add(Sum sum, const Elements& e, const X* x, __m512 scale) {
    return _mm512_fmadd_ps(dot(_mm512_setzero_ps(), e, x), scale, sum);
  }

  static float reduce(Sum sum) { return _mm512_reduce_add_ps(sum); }
};

// 16 values of four bits as bfloat16 (twice: vpermw takes five bits of its index).
struct E2m1Table {
  static constexpr uint16_t value[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                         0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
};
struct Int4Table {
  static constexpr uint16_t value[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                         0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
};

// Each 16-bit word holds four codes. Vector j holds nibble j of all words, which is column 4 · i + j for word i.
template <class TABLE, int SPAN>
struct Nibbles : Group<4> {
  static constexpr int span = SPAN;

  static Elements decode(Raw raw) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(TABLE::value));
    const __m512i table = _mm512_broadcast_i64x4(half);
    return {{_mm512_permutexvar_epi16(raw, table), _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4), table),
             _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 8), table), _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 12), table)}};
  }

  // Lane i of a sum has columns 8 · i … 8 · i + 7.
  static __m512 scale(const float* scales) {
    if (SPAN == 32) {
      const __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(scales));
      return _mm512_permutevar_ps(four, _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0));
    }
    const __m512i pairs = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return _mm512_permutexvar_ps(pairs, _mm512_castps256_ps512(_mm256_loadu_ps(scales)));
  }

  static constexpr int column(int word) { return 4 * (word % 32) + word / 32; }
};

// The two bytes of a bfloat16 looked up by the 7 bits of an e4m3's size.
struct E4m3Bytes {
  uint8_t high[128], low[128];

  constexpr E4m3Bytes() : high(), low() {
    for (int code = 0; code < 128; code++) {
      int exponent = code >> 3, mantissa = code & 7;
      unsigned bits = static_cast<unsigned>((exponent + 120) << 7 | mantissa << 4);
      if (exponent == 0) {
        // mantissa · 2^−9, normalized: the highest bit of the mantissa becomes the hidden one.
        const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
        bits = mantissa ? static_cast<unsigned>((127 - 9 + top) << 7 | ((mantissa << (7 - top)) & 0x7f)) : 0u;
      }
      if (code == 127) bits = 0x7fc0;
      high[code] = static_cast<uint8_t>(bits >> 8);
      low[code] = static_cast<uint8_t>(bits & 0xff);
    }
  }
};

alignas(64) constexpr E4m3Bytes E4M3_BYTES;

// Interleaving bytes within 128-bit lanes leaves columns 16 · l + i in vector 0 and 16 · l + 8 + i in vector 1, i < 8.
template <int SPAN>
struct Fp8 : Group<2> {
  static constexpr int span = SPAN;

  static Elements decode(Raw raw) {
    const __m512i* high = reinterpret_cast<const __m512i*>(E4M3_BYTES.high);
    const __m512i* low = reinterpret_cast<const __m512i*>(E4M3_BYTES.low);
    const __m512i sign = _mm512_and_si512(raw, _mm512_set1_epi8(static_cast<char>(0x80)));
    const __m512i h = _mm512_or_si512(sign, _mm512_permutex2var_epi8(high[0], raw, high[1]));
    const __m512i l = _mm512_permutex2var_epi8(low[0], raw, low[1]);
    return {{_mm512_unpacklo_epi8(l, h), _mm512_unpackhi_epi8(l, h)}};
  }

  // Lane i of a sum has columns of 16 · (i / 4) … + 15.
  static __m512 scale(const float* scales) {
    if (SPAN == 64) return _mm512_set1_ps(*scales);
    const __m512 two = _mm512_castps128_ps512(_mm_castpd_ps(_mm_load_sd(reinterpret_cast<const double*>(scales))));
    return _mm512_permutexvar_ps(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0), two);
  }

  static constexpr int column(int word) { return word % 32 / 8 * 16 + word / 32 * 8 + word % 8; }
};

struct Bf16 : Group<1> {
  static constexpr int span = 0;

  static Elements decode(Raw raw) { return {{raw}}; }
  static int scale(const float*) { return 0; }
  static Sum add(Sum sum, const Elements& e, const X* x, int) { return dot(sum, e, x); }
  static constexpr int column(int word) { return word; }
};

template <class Call>
auto with_format(const tp_weight& w, Call&& call) {
  switch (w.format) {
    case TP_E2M1: return w.block_columns == 16 ? call(Nibbles<E2m1Table, 16>{}) : call(Nibbles<E2m1Table, 32>{});
    case TP_INT4: return call(Nibbles<Int4Table, 32>{});
    case TP_E4M3: return span_of(w, 64) == 64 ? call(Fp8<64>{}) : call(Fp8<32>{});
    default: return call(Bf16{});
  }
}

// 32 values of x from column `start` on as bfloat16, float32 rounded to it; zeros behind its end.
inline __m512i load_words(const void* x, int32_t dtype, int64_t start, int64_t k) {
  const int64_t n = k - start;
  if (dtype == TP_BFLOAT16) {
    const __mmask32 words = n >= 32 ? ~0u : n > 0 ? _bzhi_u32(~0u, static_cast<unsigned>(n)) : 0;
    return _mm512_maskz_loadu_epi16(words, static_cast<const uint16_t*>(x) + start);
  }
  const auto lanes = [](int64_t left) { return static_cast<__mmask16>(left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0); };
  const float* values = static_cast<const float*>(x) + start;
  const __m512 low = _mm512_maskz_loadu_ps(lanes(n), values), high = _mm512_maskz_loadu_ps(lanes(n - 16), values + 16);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Words of a group in another order: words[i] of the result is word order[i] of `in`.
template <int V>
void permute(const __m512i (&in)[V], const uint16_t* order, __m512i (&out)[V]) {
  for (int v = 0; v < V; v++) {
    const __m512i index = _mm512_loadu_si512(order + 32 * v);
    if (V == 1) {
      out[v] = _mm512_permutexvar_epi16(index, in[0]);
    } else {
      out[v] = _mm512_permutex2var_epi16(in[0], index, in[V > 1]);
      const __m512i high = _mm512_permutex2var_epi16(in[V > 2 ? 2 : 0], index, in[V > 2 ? 3 : 0]);
      if (V > 2) out[v] = _mm512_mask_mov_epi16(out[v], _mm512_test_epi16_mask(index, _mm512_set1_epi16(64)), high);
    }
  }
}

template <class F>
struct Order {
  uint16_t column[F::group];

  constexpr Order() : column() {
    for (int i = 0; i < F::group; i++) column[i] = static_cast<uint16_t>(F::column(i));
  }
};

template <class F>
constexpr Order<F> ORDER;

int64_t packed_bytes(const tp_weight& w) {
  return with_format(w, [&](auto f) { return groups<decltype(f)>(w) * decltype(f)::group * int64_t{sizeof(float)}; });
}

template <class F>
void pack_words(const void* x, int64_t start, int64_t k, float* out) {
  __m512i plain[F::vectors], words[F::vectors];
  for (int v = 0; v < F::vectors; v++) plain[v] = load_words(x, TP_BFLOAT16, start + 32 * v, k);
  permute(plain, ORDER<F>.column, words);
  for (int v = 0; v < F::vectors; v++) {
    _mm512_store_ps(out + 32 * v, even(words[v]));
    _mm512_store_ps(out + 32 * v + 16, odd(words[v]));
  }
}

template <class F>
void pack_floats(const float* x, int64_t start, int64_t k, float* out) {
  for (int i = 0; i < F::group; i++) {
    const int word = i / 32 * 32 + i % 16 * 2 + i % 32 / 16;
    const int64_t column = start + F::column(word);
    out[i] = column < k ? x[column] : 0.0f;
  }
}

void pack(const tp_weight& w, const void* x, int32_t from, void* out) {
  with_format(w, [&](auto f) {
    using F = decltype(f);
    float* packed = static_cast<float*>(out);
    for (int64_t start = 0; start < w.k; start += F::group) {
      if (from == TP_BFLOAT16) pack_words<F>(x, start, w.k, packed + start);
      else pack_floats<F>(static_cast<const float*>(x), start, w.k, packed + start);
    }
  });
}

void dots_of_any(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, float* out,
                 int64_t stride) {
  with_format(*w.w, [&](auto f) { dots_of<decltype(f)>(w, first, last, xs, vectors, out, stride); });
}

}  // namespace
}  // namespace tp
