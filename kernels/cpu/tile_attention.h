// Attention by tiles, see tiles.h. Logits are keys × queries and sums are values × weights, so queries are columns: sixteen of
// them are the lanes of a register, and a softmax is arithmetic of whole registers. Rows of keys are tiles as they are;
// values are transposed. Both are packed once for all queries of a block.
//
// A step is 32 keys, a pair is 2 · 16 queries. While tiles multiply the queries of a pair by the keys of one step, the
// vector units make weights of the logits of another. What is written for a moment only stays in the first cache:
// writing to the second one takes longer than all products, so sums are brought there once for many keys.
#pragma once
#include "prefill.h"
#include "products.h"
#include "tile_formats.h"
#include "transpose.h"

namespace tp {
namespace {

constexpr int64_t STEPS = 16, KEYS = STEPS * STEP;  // keys that are packed at a time
constexpr int64_t RING = 4;                         // steps whose logits are kept
constexpr float NEVER = -1e30f;                     // below all logits, but finite
constexpr float LOG2_E = 1.44269504f;
constexpr float HEADROOM = 32;                      // weights may be so many powers of two above 1

// 2^x to 2.6 · 10⁻⁶, 0 for −∞: a polynomial for what x is above a whole number.
inline __m512 power_of_two(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_set1_ps(0.0135341668f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0520114634f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.241442755f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693003835f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.00000259f));
  return _mm512_scalef_ps(p, x);
}

// The columns of a and of b alternate.
inline __m512i alternate(__m512 a, __m512 b) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
}

inline __mmask32 words(int64_t n) { return n >= 32 ? ~0u : n > 0 ? (1u << n) - 1 : 0; }

// Where tiles of an operand lie: two side by side are `second` apart, and those of the next product `next`.
// U::product<FRESH>(a, b, count, out, between) makes out [32][32] the sum of `count` products of two tiles of rows and two
// of columns; adds it to that unless FRESH. Where products leave other units free, `between` is called after every four.
struct Operand {
  const uint16_t* data;
  int64_t second, next;
};

// Of a pair: the whole number that exponents of weights are relative to, and the sums of weights.
struct Softmax {
  __m512 top[2], sum[2];
};

// The largest of a step's logits [32 keys][2 · 16 queries], a few keys at a time.
struct Tops {
  const float* logits;
  int64_t key = 0;
  __m512 top[2];

  explicit Tops(const float* from) : logits(from) { top[0] = top[1] = _mm512_set1_ps(-__builtin_inff()); }

  void some(int64_t n) {
    const int64_t end = key + n < STEP ? key + n : STEP;
    for (; key < end; key++) {
      top[0] = _mm512_max_ps(top[0], _mm512_load_ps(logits + key * PAIR));
      top[1] = _mm512_max_ps(top[1], _mm512_load_ps(logits + key * PAIR + 16));
    }
  }
};

// Logits of a step become weights, in tiles of [pairs of keys][queries][2], a few keys at a time.
struct Weights {
  const float* logits;
  uint16_t* weights;
  const __m512 scale;
  Softmax& softmax;
  int64_t key = 0;

  Weights(const float* from, uint16_t* to, float s, Softmax& of)
      : logits(from), weights(to), scale(_mm512_set1_ps(s)), softmax(of) {}

  void some(int64_t n) {
    const int64_t end = key + n < STEP ? key + n : STEP;
    for (; key < end; key += 2) {
#pragma GCC unroll 2
      for (int c = 0; c < 2; c++) {
        const float* from = logits + key * PAIR + 16 * c;
        const __m512 a = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(from), scale, softmax.top[c]));
        const __m512 b = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(from + PAIR), scale, softmax.top[c]));
        softmax.sum[c] = _mm512_add_ps(softmax.sum[c], _mm512_add_ps(a, b));
        _mm512_store_si512(weights + c * TILE + 16 * key, alternate(a, b));
      }
    }
  }
};

// Memory to be divided, or to be counted while there is none yet.
struct Parts {
  char* memory;
  int64_t bytes;

  template <class T>
  void take(T*& part, int64_t n) {
    if (memory) part = reinterpret_cast<T*>(memory + bytes);
    bytes += ceil_div(n * int64_t{sizeof(T)}, 64) * 64;
  }
};

template <class U>
class Block {
 public:
  Block(const tp_attention& a, const QueryBlock& b, const uint16_t* q, const uint16_t* keys, const uint16_t* values)
      : a_(a), b_(b), q_(q), keys_(keys), values_(values), shared_(a.heads / a.kv_heads),
        columns_(ceil_div(a.width, 32)), width_(32 * columns_), rows_(b.count * shared_),
        pairs_(ceil_div(rows_, PAIR)), scale_(a.scale * LOG2_E) {
    Parts parts{nullptr, 0};
    divide(parts);
    parts = {static_cast<char*>(scratch(SLOT_PACKED, parts.bytes)), 0};
    divide(parts);
  }

  void run(uint16_t* out) {
    const typename U::Configured configured(BLOCK);
    start();
    const int64_t end = b_.position + b_.count, begin = low(b_.position);
    for (int64_t chunk = begin / STEP * STEP; chunk < end; chunk += KEYS) {
      pack_chunk(chunk, begin, end);
      for (int64_t pair = 0; pair < pairs_; pair++) attend(chunk, pair);
    }
    for (int64_t column = 0; column < 2 * pairs_; column++) finish(column, out);
  }

 private:
  void divide(Parts& parts) {
    const int64_t queries = pairs_ * PAIR;
    parts.take(logits_, RING * STEP * PAIR);
    parts.take(weights_, KEYS * PAIR);
    parts.take(packed_q_, queries * width_);
    parts.take(sums_, queries * width_);
    parts.take(softmax_, pairs_);
    parts.take(packed_keys_, KEYS * width_);
    parts.take(packed_values_, KEYS * width_);
    parts.take(places_, queries);
    parts.take(low_, queries);
    parts.take(high_, queries);
  }

  // The first position that the query at `position` sees.
  int64_t low(int64_t position) const { return a_.window && position >= a_.window ? position - a_.window + 1 : 0; }

  void start() {
    for (int64_t row = 0, token = 0, head = 0; row < pairs_ * PAIR; row++) {
      places_[row] = ((b_.token + token) * a_.heads + b_.head * shared_ + head) * a_.width;
      low_[row] = static_cast<int32_t>(low(b_.position + token) - b_.position);
      high_[row] = static_cast<int32_t>(token);
      // Queries that fill up the last pair stand where the last one does.
      if (row + 1 < rows_ && ++head == shared_) head = 0, token++;
    }
    for (int64_t column = 0; column < 2 * pairs_; column++) {
      pack_queries(column);
      start_softmax(column);
    }
  }

  // Second operands: for every 32 values of 16 queries a tile, [pairs of values][queries][2].
  void pack_queries(int64_t column) {
    for (int64_t c = 0; c < columns_; c++) {
      __m512i m[16];
      for (int64_t i = 0; i < 16; i++) {
        m[i] = _mm512_maskz_loadu_epi16(words(a_.width - 32 * c), q_ + places_[16 * column + i] + 32 * c);
      }
      transpose(m);
      uint16_t* tile = packed_q_ + (column * columns_ + c) * TILE;
      for (int i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, m[i]);
    }
  }

  // A sink is a logit that comes before all others, without a value. The largest logit so far is kept as a whole number.
  void start_softmax(int64_t column) {
    alignas(64) float top[16], sum[16];
    for (int64_t i = 0; i < 16; i++) {
      const int64_t head = places_[16 * column + i] / a_.width % a_.heads;
      const float sink = a_.sinks ? a_.sinks[head] * LOG2_E : NEVER;
      top[i] = sink > NEVER ? __builtin_ceilf(sink) : NEVER;
      sum[i] = sink > NEVER ? __builtin_exp2f(sink - top[i]) : 0;
    }
    softmax_[column / 2].top[column % 2] = _mm512_load_ps(top);
    softmax_[column / 2].sum[column % 2] = _mm512_load_ps(sum);
  }

  // Rows of a step's keys and values. What lies outside begin … end − 1 is not read: it may be anything.
  struct Rows {
    const uint16_t *keys[STEP], *values[STEP];
  };

  Rows rows_from(int64_t position, int64_t begin, int64_t end) const {
    alignas(64) static const uint16_t nothing[ATTEND_WIDTH] = {};
    Rows rows;
    for (int64_t i = 0; i < STEP; i++, position++) {
      rows.keys[i] = rows.values[i] = nothing;
      if (position < begin || position >= end) continue;
      const int64_t row = b_.table[position / a_.block_size] * a_.block_size + position % a_.block_size;
      const int64_t offset = (row * a_.kv_heads + b_.head) * a_.width;
      rows.keys[i] = keys_ + offset;
      rows.values[i] = values_ + offset;
    }
    return rows;
  }

  void pack_chunk(int64_t chunk, int64_t begin, int64_t end) {
    Rows rows = rows_from(chunk, begin, end);
    for (int64_t step = 0; step < STEPS && chunk + step * STEP < end; step++) {
      const Rows next = rows_from(chunk + (step + 1) * STEP, begin, end);
      // Rows of one head lie apart, which the processor does not foresee.
      for (int64_t i = 0; i < STEP; i++) {
        for (int64_t c = 0; c < columns_; c++) {
          __builtin_prefetch(next.keys[i] + 32 * c);
          __builtin_prefetch(next.values[i] + 32 * c);
        }
      }
      pack_keys(rows.keys, packed_keys_ + step * STEP * width_);
      pack_values(rows.values, packed_values_ + step * STEP * width_);
      rows = next;
    }
  }

  // First operands: for every 16 keys and 32 of their values a tile.
  void pack_keys(const uint16_t* const* rows, uint16_t* out) const {
    for (int64_t i = 0; i < STEP; i++) {
      uint16_t* row = out + i / 16 * columns_ * TILE + i % 16 * 32;
      for (int64_t c = 0; c < columns_; c++) {
        _mm512_store_si512(row + c * TILE, _mm512_maskz_loadu_epi16(words(a_.width - 32 * c), rows[i] + 32 * c));
      }
    }
  }

  // First operands: for every 16 columns a tile [columns][32 keys].
  void pack_values(const uint16_t* const* rows, uint16_t* out) const {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t c = 0; c < columns_; c++) {
      __m512i m[2][16];
      for (int i = 0; i < 16; i++) {
        const __m512i a = _mm512_maskz_loadu_epi16(words(a_.width - 32 * c), rows[2 * i] + 32 * c);
        const __m512i b = _mm512_maskz_loadu_epi16(words(a_.width - 32 * c), rows[2 * i + 1] + 32 * c);
        m[0][i] = _mm512_permutex2var_epi16(a, low, b);
        m[1][i] = _mm512_permutex2var_epi16(a, high, b);
      }
      for (int half = 0; half < 2; half++, out += TILE) {
        transpose(m[half]);
        for (int i = 0; i < 16; i++) _mm512_store_si512(out + 32 * i, m[half][i]);
      }
    }
  }

  // What a pair sees of a chunk is added to its sums.
  void attend(int64_t chunk, int64_t pair) {
    const int64_t row = pair * PAIR, first = b_.position + high_[row], last = b_.position + high_[row + PAIR - 1];
    const int64_t from = low(first) > chunk ? (low(first) - chunk) / STEP : 0;
    const int64_t seen = ceil_div(last + 1 - chunk, STEP), to = seen < STEPS ? seen : STEPS;
    if (from >= to) return;
    const bool fresh = chunk <= low(first);
    Softmax softmax = softmax_[pair];
    logits(pair, from, [] {});
    if (from + 1 < to) logits(pair, from + 1, [] {});
    hide(chunk, pair, from);
    Tops tops(ring(from));
    tops.some(STEP);
    raise(pair, softmax, tops.top, from, from, fresh);
    const int64_t few = ceil_div(STEP / 2, columns_) * 2;
    for (int64_t s = from; s < to; s++) {
      Weights weights(ring(s), weights_ + s * 2 * TILE, scale_, softmax);
      if (s + 1 < to) {
        hide(chunk, pair, s + 1);
        Tops next(ring(s + 1));
        if (s + 2 < to) logits(pair, s + 2, [&] { weights.some(few), next.some(few); });
        weights.some(STEP);
        next.some(STEP);
        raise(pair, softmax, next.top, from, s + 1, fresh);
      } else {
        weights.some(STEP);
      }
      }
    softmax_[pair] = softmax;
    if (fresh) add_values<true>(pair, from, to);
    else add_values<false>(pair, from, to);
  }

  float* ring(int64_t step) const { return logits_ + step % RING * STEP * PAIR; }

  template <class Between>
  void logits(int64_t pair, int64_t step, Between&& between) const {
    const Operand keys{packed_keys_ + step * STEP * width_, columns_ * TILE, TILE};
    const Operand queries{packed_q_ + pair * PAIR * width_, columns_ * TILE, TILE};
    U::template product<true>(keys, queries, columns_, ring(step), between);
  }

  template <bool FRESH>
  void add_values(int64_t pair, int64_t from, int64_t to) const {
    const Operand weights{weights_ + from * 2 * TILE, TILE, 2 * TILE};
    for (int64_t c = 0; c < columns_; c++) {
      const Operand values{packed_values_ + from * STEP * width_ + 2 * c * TILE, TILE, STEP * width_};
      U::template product<FRESH>(values, weights, to - from, sums_ + (pair * width_ + 32 * c) * PAIR, [] {});
    }
  }

  // Logits that a query does not see become −∞.
  void hide(int64_t chunk, int64_t pair, int64_t step) const {
    const int64_t row = pair * PAIR, start = chunk + step * STEP - b_.position;
    if (start >= low_[row + PAIR - 1] && start + STEP - 1 <= high_[row]) return;
    for (int c = 0; c < 2; c++) {
      const __m512i low = _mm512_loadu_si512(low_ + row + 16 * c), high = _mm512_loadu_si512(high_ + row + 16 * c);
      for (int64_t k = 0; k < STEP; k++) {
        const __m512i here = _mm512_set1_epi32(static_cast<int32_t>(start + k));
        const __mmask16 unseen = _mm512_cmplt_epi32_mask(here, low) | _mm512_cmpgt_epi32_mask(here, high);
        _mm512_mask_store_ps(ring(step) + k * PAIR + 16 * c, unseen, _mm512_set1_ps(-__builtin_inff()));
      }
    }
  }

  // Where a logit is so large that its weight could become too large, weights become relative to it: those of the
  // chunk's steps from `from` to `step`, and the sums, if there are any yet. Factors are powers of two, so nothing is
  // rounded.
  void raise(int64_t pair, Softmax& softmax, const __m512 (&largest)[2], int64_t from, int64_t step, bool fresh) const {
    for (int c = 0; c < 2; c++) {
      const __m512 logit = _mm512_mul_ps(largest[c], _mm512_set1_ps(scale_)), old = softmax.top[c];
      const __mmask16 larger = _mm512_cmp_ps_mask(logit, _mm512_add_ps(old, _mm512_set1_ps(HEADROOM)), _CMP_GT_OQ);
      if (!larger) continue;
      softmax.top[c] = _mm512_mask_roundscale_ps(old, larger, logit, _MM_FROUND_TO_POS_INF);
      const __m512 factor = _mm512_scalef_ps(_mm512_set1_ps(1), _mm512_sub_ps(old, softmax.top[c]));
      softmax.sum[c] = _mm512_mul_ps(softmax.sum[c], factor);
      for (int64_t s = from; s < step; s++) multiply_words(weights_ + (2 * s + c) * TILE, factor);
      float* sums = sums_ + pair * width_ * PAIR + 16 * c;
      for (int64_t d = 0; d < width_ && !fresh; d++) {
        _mm512_store_ps(sums + d * PAIR, _mm512_mul_ps(_mm512_load_ps(sums + d * PAIR), factor));
      }
    }
  }

  // A tile of weights of 16 queries.
  static void multiply_words(uint16_t* tile, __m512 factor) {
    const __m512i high = _mm512_set1_epi32(-65536);
    for (int i = 0; i < 16; i++) {
      const __m512i both = _mm512_load_si512(tile + 32 * i);
      const __m512 a = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), factor);
      const __m512 b = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(both, high)), factor);
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
      _mm512_store_si512(tile + 32 * i, _mm512_or_si512(low, _mm512_and_si512(_mm512_castps_si512(b), high)));
    }
  }

  // Sums of 16 queries, [column of values][query], become rows of the result.
  void finish(int64_t column, uint16_t* out) const {
    const __m512 share = _mm512_div_ps(_mm512_set1_ps(1), softmax_[column / 2].sum[column % 2]);
    const float* sums = sums_ + column / 2 * width_ * PAIR + column % 2 * 16;
    for (int64_t d = 0; d < a_.width; d += 16) {
      __m512i m[16];
      for (int64_t i = 0; i < 16; i++) {
        m[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(sums + (d + i) * PAIR), share));
      }
      transpose(m);
      for (int64_t i = 0; i < 16 && 16 * column + i < rows_; i++) {
        const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_castsi512_ps(m[i])));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + places_[16 * column + i] + d), rounded);
      }
    }
  }

  const tp_attention& a_;
  const QueryBlock& b_;
  const uint16_t *q_, *keys_, *values_;
  const int64_t shared_, columns_, width_;  // columns_: tiles of 32 values; width_: their values
  const int64_t rows_, pairs_;
  const float scale_;  // to powers of two

  uint16_t *packed_q_, *packed_keys_, *packed_values_, *weights_;
  float *sums_, *logits_;
  Softmax* softmax_;
  int64_t* places_;       // of every query: where it begins
  int32_t *low_, *high_;  // … and the first and last position it sees, from the block's first one on
};

template <class U>
void attend_by_tiles(const tp_attention& a, const QueryBlock& block, const uint16_t* q, const uint16_t* keys,
                     const uint16_t* values, uint16_t* out) {
  Block<U>(a, block, q, keys, values).run(out);
}

}  // namespace
}  // namespace tp
