// Attention of few tokens by AVX-512's products of pairs of bfloat16. Weights are rounded to it; queries that are not
// bfloat16 meet keys in float32.
#pragma once
#include "elementwise.h"
#include "words.h"

namespace tp {
namespace {

// out [queries, padded] = q [queries, width], with zeros behind. False if a value is not bfloat16 in fact.
bool queries_to_words(const float* q, int64_t queries, int64_t width, int64_t padded, uint16_t* out) {
  __m512i lost = _mm512_setzero_si512();
  for (int64_t j = 0; j < queries; j++) {
    for (int64_t d = 0; d < padded; d += 32) {
      _mm512_storeu_si512(out + j * padded + d, load_exact(q + j * width, TP_FLOAT, d, width, lost));
    }
  }
  return is_exact(lost);
}

// Fetches `width` words.
inline void fetch(const uint16_t* row, int64_t width) {
  for (int64_t d = 0; d < width; d += 32) __builtin_prefetch(row + d);
}

// A whole vector of a row, and a last one of which it has `left`.
inline __m512i load_whole(const uint16_t* row, int64_t) { return _mm512_loadu_si512(row); }
inline __m512i load_last(const uint16_t* row, int64_t left) { return load_words(row, 0, left); }

// scores[j · ATTEND + i] = keys[i] · q[j] of Q queries, while rows at `next` are fetched, if there are any. Those behind
// the last key are written, too, up to a multiple of four.
template <int Q>
void word_scores(const uint16_t* q, int64_t padded, int64_t width, const Rows& keys, const uint16_t* next, float* scores) {
  const uint16_t* data = static_cast<const uint16_t*>(keys.data);
  for (int64_t i = 0; i < keys.n; i += 4) {
    const uint16_t* row[4];
    for (int r = 0; r < 4; r++) {
      const int64_t place = (i + r < keys.n ? i + r : keys.n - 1) * keys.stride;
      row[r] = data + place;
      if (next) fetch(next + place, width);
    }
    __m512 sums[Q][4] = {};
    const auto add = [&](int64_t d, auto&& load) __attribute__((always_inline)) {
      __m512i words[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) words[r] = load(row[r] + d, width - d);
#pragma GCC unroll 4
      for (int j = 0; j < Q; j++) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) sums[j][r] = add_pairs(sums[j][r], words[r], q + j * padded + d);
      }
    };
    int64_t d = 0;
    for (; d + 32 <= width; d += 32) add(d, load_whole);
    if (d < width) add(d, load_last);
    for (int j = 0; j < Q; j++) store_sums(sums[j], scores + j * ATTEND + i);
  }
}

// What weigh_all leaves, rounded to bfloat16; zeros behind them.
void weights_to_words(const float* scores, int64_t n, int64_t queries, uint16_t* out) {
  for (int64_t j = 0; j < queries; j++) {
    for (int64_t i = 0; i < ATTEND; i += 32) {
      _mm512_store_si512(out + j * ATTEND + i, load_rounded(scores + j * ATTEND, TP_FLOAT, i, n));
    }
  }
}

// results[j] += Σ weights[j · ATTEND + i] · values[i] of Q queries, whose results lie `apart`, and of D times 32 columns,
// of which there are `width`; rows at `next` are fetched as above. Two rows at a time: a product adds up a pair.
template <int Q, int D, class Load>
void add_word_columns(const uint16_t* weights, const uint16_t* values, int64_t stride, int64_t n, int64_t width,
                      const uint16_t* next, float* results, int64_t apart, Load&& load) {
  __m512 sums[Q][2 * D] = {};
  for (int64_t i = 0; i < n; i += 2) {
    const uint16_t* row = values + i * stride;
    for (int64_t r = i; next && r < i + 2; r++) fetch(next + r * stride, 32 * D);
    __m512i pairs[2 * D];
#pragma GCC unroll 2
    for (int d = 0; d < D; d++) {
      const __m512i a = load(row + 32 * d, width - 32 * d);
      const __m512i b = i + 1 < n ? load(row + stride + 32 * d, width - 32 * d) : _mm512_setzero_si512();
      pairs[2 * d] = _mm512_unpacklo_epi16(a, b);
      pairs[2 * d + 1] = _mm512_unpackhi_epi16(a, b);
    }
#pragma GCC unroll 4
    for (int j = 0; j < Q; j++) {
      int32_t both;
      std::memcpy(&both, weights + j * ATTEND + i, sizeof both);
      const __m512bh weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
#pragma GCC unroll 4
      for (int d = 0; d < 2 * D; d++) {
        sums[j][d] = _mm512_dpbf16_ps(sums[j][d], reinterpret_cast<__m512bh>(pairs[d]), weight);
      }
    }
  }
  // Interleaving left columns 8 · g + 0 … 3 in one vector and 8 · g + 4 … 7 in the other.
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int j = 0; j < Q; j++) {
    for (int d = 0; d < D; d++) {
      float* to = results + j * apart + 32 * d;
      const __m512 low = _mm512_permutex2var_ps(sums[j][2 * d], first, sums[j][2 * d + 1]);
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), low));
      if (width - 32 * d < 32) continue;  // widths are multiples of 16
      const __m512 high = _mm512_permutex2var_ps(sums[j][2 * d], second, sums[j][2 * d + 1]);
      _mm512_storeu_ps(to + 16, _mm512_add_ps(_mm512_loadu_ps(to + 16), high));
    }
  }
}

// The same of all columns.
template <int Q>
void add_word_rows(const uint16_t* weights, const uint16_t* values, int64_t stride, int64_t n, int64_t width,
                   const uint16_t* next, float* results, int64_t apart) {
  const auto from = [&](int64_t d) { return next ? next + d : nullptr; };
  int64_t d = 0;
  for (; d + 64 <= width; d += 64) {
    add_word_columns<Q, 2>(weights, values + d, stride, n, 64, from(d), results + d, apart, load_whole);
  }
  for (; d < width; d += 32) {
    add_word_columns<Q, 1>(weights, values + d, stride, n, width - d, from(d), results + d, apart, load_last);
  }
}

// scores[j · ATTEND + i] = keys[i] · q[j] of all queries [queries, width], while rows at `next` are fetched.
void all_word_scores(const float* q, int64_t queries, int64_t width, const Rows& keys, const void* next, float* scores) {
  alignas(64) uint16_t words[ATTEND_QUERIES * ATTEND_WIDTH];
  const int64_t padded = ceil_div(width, 32) * 32;
  if (queries_to_words(q, queries, width, padded, words)) {
    return for_queries(queries, [&](auto count, int64_t j) {
      const void* once = j ? nullptr : next;
      word_scores<count>(words + j * padded, padded, width, keys, static_cast<const uint16_t*>(once), scores + j * ATTEND);
    });
  }
  alignas(64) float rows[ATTEND * ATTEND_WIDTH];
  plain_rows(keys, width, next, rows);
  all_scores(q, width, queries, width, rows, keys.n, scores);
}

// As attend_positions, which it leaves keys and values to that are not bfloat16.
void attend_words(const float* q, int64_t queries, int64_t width, float scale, Rows keys, const void* values,
                  int64_t value_width, const void* next, float* results) {
  if (keys.dtype != TP_BFLOAT16) {
    return attend_positions(q, queries, width, scale, keys, values, value_width, next, results);
  }
  alignas(64) float scores[ATTEND_QUERIES * ATTEND];
  alignas(64) uint16_t weights[ATTEND_QUERIES * ATTEND];
  const bool same = values == keys.data;
  all_word_scores(q, queries, width, keys, same ? next : values, scores);
  weigh_all(scores, keys.n, scale, queries, results, value_width);
  weights_to_words(scores, keys.n, queries, weights);
  for_queries(queries, [&](auto count, int64_t j) {
    const void* once = j || same ? nullptr : next;
    add_word_rows<count>(weights + j * ATTEND, static_cast<const uint16_t*>(values), keys.stride, keys.n, value_width,
                         static_cast<const uint16_t*>(once), results + j * (value_width + 2) + 2, value_width + 2);
  });
}

constexpr Attend ATTEND_BY_WORDS = {attend_words, row_products, row_sums};

}  // namespace
}  // namespace tp
