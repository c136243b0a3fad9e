// Attention of few tokens by AVX-512's products of pairs of bfloat16: keys are not brought to float32 for logits.
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
