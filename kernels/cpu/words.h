// Formats by AVX-512's products of pairs of bfloat16, for vectors that are bfloat16: half the instructions, and half the
// memory, of products in float32. Elements are exact; so are sums of their products but for float32's rounding.
#pragma once
#include "tile_formats.h"

namespace tp {
namespace {

inline __m512 add_pairs(__m512 sum, __m512i words, const uint16_t* x) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(words), reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)));
}

// A group whose words are decoded to V vectors, in FORMAT's order of scales.
template <class FORMAT, int V>
struct Words : FORMAT {
  using X = uint16_t;
  static constexpr int sums = 16, shared = 2;
  struct Elements {
    __m512i words[V];
  };

  static __m512 dot(__m512 sum, const Elements& e, const X* x) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sum = add_pairs(sum, e.words[v], x + 32 * v);
    return sum;
  }

  static __m512 add(__m512 sum, const Elements& e, const X* x, __m512 scale) {
    return _mm512_fmadd_ps(dot(_mm512_setzero_ps(), e, x), scale, sum);
  }
};

// Elements of a table as bfloat16.
template <class TABLE>
constexpr const uint16_t* WORDS = nullptr;
alignas(32) constexpr uint16_t E2M1_WORDS[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
alignas(32) constexpr uint16_t INT4_WORDS[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
template <>
constexpr const uint16_t* WORDS<E2m1Table> = E2M1_WORDS;
template <>
constexpr const uint16_t* WORDS<Int4Table> = INT4_WORDS;

// Lane i of a sum has columns 8 · i … 8 · i + 7, as in float32.
template <class TABLE, int SPAN>
struct NibbleWords : Words<Nibbles<TABLE, SPAN>, 4>, FourCodes {
  using typename Words<Nibbles<TABLE, SPAN>, 4>::Elements;
  using FourCodes::column;
  using FourCodes::load;
  using FourCodes::load_part;
  using FourCodes::Raw;

  static Elements decode(Raw raw) {
    Elements e;
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) e.words[j] = nibbles(raw, WORDS<TABLE>, j);
    return e;
  }
};

template <int SPAN>
struct Fp8Words : Words<Fp8<SPAN>, 2> {
  using typename Words<Fp8<SPAN>, 2>::Elements;
  static constexpr int column(int i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }

  static Elements decode(__m512i raw) {
    Elements e;
    decode_e4m3(raw, e.words);
    return e;
  }
};

struct PlainWords : Words<Bf16, 1> {
  static constexpr int column(int i) { return i; }
  static Elements decode(__m512i raw) { return {{raw}}; }
  static __m512 add(__m512 sum, const Elements& e, const X* x, int) { return dot(sum, e, x); }
};

// 32 columns of x as bfloat16; bits of float32 that it has not are added to `lost`.
inline __m512i load_exact(const void* x, int32_t from, int64_t start, int64_t k, __m512i& lost) {
  if (from == TP_BFLOAT16) return load_words(static_cast<const uint16_t*>(x), start, k);
  const __m512i low = _mm512_castps_si512(load_floats(x, from, start, k));
  const __m512i high = _mm512_castps_si512(load_floats(x, from, start + 16, k));
  lost = _mm512_or_si512(lost, _mm512_or_si512(low, high));
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(low, 16));
  return _mm512_inserti64x4(_mm512_castsi256_si512(words), _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16)), 1);
}

template <class Call>
auto with_words(const tp_weight& w, Call&& call) {
  switch (w.format) {
    case TP_E2M1: return w.block_columns == 16 ? call(NibbleWords<E2m1Table, 16>{}) : call(NibbleWords<E2m1Table, 32>{});
    case TP_INT4: return call(NibbleWords<Int4Table, 32>{});
    case TP_E4M3: return span_of(w, 64) == 64 ? call(Fp8Words<64>{}) : call(Fp8Words<32>{});
    default: return call(PlainWords{});
  }
}

// A packed vector: whether it is bfloat16, its words if so, and if it came in float32 what packs such vectors.
struct alignas(64) WordsAndFloats {
  bool words;

  uint16_t* first() { return reinterpret_cast<uint16_t*>(this + 1); }
  const uint16_t* first() const { return reinterpret_cast<const uint16_t*>(this + 1); }
};

int64_t word_bytes(const tp_weight& w) {
  return with_words(w, [&](auto f) { return groups<decltype(f)>(w) * decltype(f)::group * int64_t{sizeof(uint16_t)}; });
}

int64_t packed_words_bytes(const tp_weight& w) { return int64_t{sizeof(WordsAndFloats)} + word_bytes(w) + packed_bytes(w); }

// False if a value is not bfloat16 in fact.
bool put_words(const tp_weight& w, const void* x, int32_t from, uint16_t* out) {
  return with_words(w, [&](auto f) {
    using F = decltype(f);
    constexpr int V = F::group / 32;
    __m512i lost = _mm512_setzero_si512();
    for (int64_t start = 0; start < w.k; start += F::group, out += F::group) {
      __m512i plain[V], words[V];
      for (int v = 0; v < V; v++) plain[v] = load_exact(x, from, start + 32 * v, w.k, lost);
      permute(plain, ORDER<F>.column, words);
      for (int v = 0; v < V; v++) _mm512_store_si512(out + 32 * v, words[v]);
    }
    return !_mm512_test_epi32_mask(lost, _mm512_set1_epi32(0xffff));
  });
}

void pack_as_words(const tp_weight& w, const void* x, int32_t from, void* out) {
  WordsAndFloats* packed = static_cast<WordsAndFloats*>(out);
  packed->words = put_words(w, x, from, packed->first());
  if (from != TP_BFLOAT16) pack(w, x, from, packed->first() + word_bytes(w) / 2);
}

void dots_by_words(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, float* out,
                   int64_t stride) {
  const int64_t size = word_bytes(*w.w);
  const void *words[MAX_BATCH], *floats[MAX_BATCH];
  bool all = true;
  for (int v = 0; v < vectors; v++) {
    const WordsAndFloats* x = static_cast<const WordsAndFloats*>(xs[v]);
    words[v] = x->first();
    floats[v] = x->first() + size / 2;
    all &= x->words;
  }
  if (!all) return dots_of_any(w, first, last, floats, vectors, out, stride);
  with_words(*w.w, [&](auto f) { dots_of<decltype(f)>(w, first, last, words, vectors, out, stride); });
}

// out [queries, padded] = q [queries, width], with zeros behind. False if a value is not bfloat16 in fact.
bool queries_to_words(const float* q, int64_t queries, int64_t width, int64_t padded, uint16_t* out) {
  __m512i lost = _mm512_setzero_si512();
  for (int64_t j = 0; j < queries; j++) {
    for (int64_t d = 0; d < padded; d += 32) {
      _mm512_storeu_si512(out + j * padded + d, load_exact(q + j * width, TP_FLOAT, d, width, lost));
    }
  }
  return !_mm512_test_epi32_mask(lost, _mm512_set1_epi32(0xffff));
}

// scores[j · ATTEND + i] = keys[i] · q[j] of Q queries, while rows at `next` are fetched. Those behind the last key are
// written, too, up to a multiple of four.
template <int Q>
void word_scores(const uint16_t* q, int64_t padded, int64_t width, const Rows& keys, const void* next, float* scores) {
  const uint16_t* data = static_cast<const uint16_t*>(keys.data);
  for (int64_t i = 0; i < keys.n; i += 4) {
    const uint16_t* row[4];
    for (int r = 0; r < 4; r++) {
      const int64_t place = (i + r < keys.n ? i + r : keys.n - 1) * keys.stride;
      row[r] = data + place;
      for (int64_t d = 0; d < width; d += 32) __builtin_prefetch(static_cast<const uint16_t*>(next) + place + d);
    }
    Lanes sums[Q][4] = {};
    for (int64_t d = 0; d < padded; d += 32) {
      __m512i words[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) words[r] = load_words(row[r], d, width);
#pragma GCC unroll 4
      for (int j = 0; j < Q; j++) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) sums[j][r] = add_pairs(sums[j][r], words[r], q + j * padded + d);
      }
    }
    for (int j = 0; j < Q; j++) store_sums(sums[j], scores + j * ATTEND + i);
  }
}

// As attend_positions, which it leaves to that where queries or keys are not bfloat16.
void attend_words(const float* q, int64_t queries, int64_t width, float scale, Rows keys, const void* values,
                  int64_t value_width, const void* next, float* results) {
  alignas(64) uint16_t words[ATTEND_QUERIES * ATTEND_WIDTH];
  const int64_t padded = ceil_div(width, 32) * 32;
  if (keys.dtype != TP_BFLOAT16 || !queries_to_words(q, queries, width, padded, words)) {
    return attend_positions(q, queries, width, scale, keys, values, value_width, next, results);
  }
  alignas(64) float rows[ATTEND * ATTEND_WIDTH], scores[ATTEND_QUERIES * ATTEND];
  int64_t j = 0;
  for (; j + 4 <= queries; j += 4) word_scores<4>(words + j * padded, padded, width, keys, values, scores + j * ATTEND);
  for (; j < queries; j++) word_scores<1>(words + j * padded, padded, width, keys, values, scores + j * ATTEND);
  weigh_all(scores, keys.n, scale, queries, results, value_width);
  plain_rows({values, keys.stride, keys.dtype, keys.n}, value_width, next, rows);
  add_all_rows(scores, queries, value_width, rows, value_width, keys.n, results + 2, value_width + 2);
}

constexpr Attend ATTEND_BY_WORDS = {attend_words, row_products, row_sums};

}  // namespace
}  // namespace tp
