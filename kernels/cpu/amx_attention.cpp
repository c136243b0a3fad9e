// Attention by AMX tiles. Logits are computed as keys × queries and sums as values × weights, so that the queries are
// columns: sixteen of them are the lanes of a register, and a softmax is arithmetic of whole registers. Rows of keys are
// tiles as they lie in the cache; values are transposed, once for all queries of a block.
//
// A step is 32 keys, a pair is 2 · 16 queries. While tiles multiply the keys of one pair and the values of another, the
// vector units make weights of the logits of a third.
#include <immintrin.h>

#include "prefill.h"
#include "threads.h"
#include "transpose.h"
#include "weight.h"

namespace tp {
namespace {

constexpr int64_t TILE = 512, STEP = 32, PAIR = 32;  // bfloat16 of a tile, keys of a step, queries of a pair
constexpr int64_t STEPS = 4, KEYS = STEPS * STEP;    // keys that are packed at a time
constexpr float NEVER = -1e30f;                      // below all logits, but finite
constexpr float SLACK = 8;                           // weights may be so many powers of two above 1

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  // gcc 12's own intrinsic does not say that it reads memory.
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

// Memory that tiles have written is read by others, and the other way round.
inline void tiles_and_others_meet() { asm volatile("" ::: "memory"); }

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
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
}

inline __mmask32 words(int64_t n) { return n >= 32 ? ~0u : n > 0 ? (1u << n) - 1 : 0; }

// Two tiles of rows times two tiles of columns, `count` times over: a's tiles are `next` apart from one to the next, b's
// one tile. Adds to out [32 rows][32 columns]; `between` is called after every four products.
template <bool CLEAR, class Between>
inline void multiply(const uint16_t* a, int64_t half, int64_t next, const uint16_t* b, int64_t second, int64_t step,
                     int64_t count, float* out, Between&& between) {
  if (CLEAR) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, out, 128);
    _tile_loadd(1, out + 16, 128);
    _tile_loadd(2, out + 512, 128);
    _tile_loadd(3, out + 528, 128);
  }
  for (int64_t i = 0; i < count; i++, a += next, b += step) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + second, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + half, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    between();
  }
  _tile_stored(0, out, 128);
  _tile_stored(1, out + 16, 128);
  _tile_stored(2, out + 512, 128);
  _tile_stored(3, out + 528, 128);
}

// Of a pair: the logit that weights are relative to, as a power of two, and the sums of weights.
struct Softmax {
  __m512 top[2], sum[2];
};

// A pair and the steps of keys it sees: logits [keys][2 · 16 queries], and weights in tiles.
struct Task {
  int64_t pair, first, last;
  bool masked;
  float* logits;
  uint16_t* weights;
};

class Block {
 public:
  Block(const tp_attention& a, const QueryBlock& b, const uint16_t* q, const uint16_t* keys, const uint16_t* values)
      : a_(a), b_(b), q_(q), shared_(a.heads / a.kv_heads), columns_(ceil_div(a.width, 32)), width_(32 * columns_),
        rows_(b.count * shared_), pairs_(ceil_div(rows_, PAIR)), scale_(a.scale * 1.44269504f),
        source_{keys, values} {
    const int64_t queries = pairs_ * PAIR;
    // 64 bytes more than a page between what is read and written in turns: equal low bits of addresses cost time.
    const int64_t sizes[] = {2 * queries * width_, 4 * queries * width_, pairs_ * int64_t{sizeof(Softmax)},
                             2 * KEYS * width_, 2 * KEYS * width_, 8 * KEYS * PAIR, 4 * KEYS * PAIR,
                             4 * queries, 4 * queries, pairs_ * int64_t{sizeof(Task)}};
    void* parts[10];
    int64_t bytes = 0;
    for (int64_t size : sizes) bytes += place(size);
    char* p = static_cast<char*>(scratch(SLOT_PACKED, bytes));
    for (int i = 0; i < 10; i++) parts[i] = p, p += place(sizes[i]);
    packed_q_ = static_cast<uint16_t*>(parts[0]);
    sums_ = static_cast<float*>(parts[1]);
    softmax_ = static_cast<Softmax*>(parts[2]);
    packed_keys_ = static_cast<uint16_t*>(parts[3]);
    packed_values_ = static_cast<uint16_t*>(parts[4]);
    logits_ = static_cast<float*>(parts[5]);
    weights_ = static_cast<uint16_t*>(parts[6]);
    low_ = static_cast<int32_t*>(parts[7]);
    high_ = static_cast<int32_t*>(parts[8]);
    tasks_ = static_cast<Task*>(parts[9]);
  }

  void run(uint16_t* out) {
    Config().load();
    start();
    const int64_t end = b_.position + b_.count, begin = low(b_.position);
    for (int64_t chunk = begin / STEP * STEP; chunk < end; chunk += KEYS) {
      pack_chunk(chunk, begin, end);
      attend(find_tasks(chunk));
    }
    _tile_release();
    tiles_and_others_meet();
    for (int64_t column = 0; column < 2 * pairs_; column++) finish(column, out);
  }

 private:
  static int64_t place(int64_t size) { return ceil_div(size, 4096) * 4096 + 192; }

  // The first position that the query at `position` sees.
  int64_t low(int64_t position) const { return a_.window && position >= a_.window ? position - a_.window + 1 : 0; }

  // Where in [tokens, heads, width] row `row` of the block begins.
  int64_t place_of(int64_t row) const {
    return ((b_.token + row / shared_) * a_.heads + b_.head * shared_ + row % shared_) * a_.width;
  }

  // Queries as second operands: for every 16 of them and 32 of their values, [pairs of values][queries][2].
  void start() {
    for (int64_t column = 0; column < 2 * pairs_; column++) {
      for (int64_t c = 0; c < columns_; c++) {
        __m512i m[16];
        for (int64_t i = 0; i < 16; i++) {
          const int64_t row = 16 * column + i;
          m[i] = row < rows_ ? _mm512_maskz_loadu_epi16(words(a_.width - 32 * c), q_ + place_of(row) + 32 * c) : _mm512_setzero_si512();
        }
        transpose(m);
        uint16_t* tile = packed_q_ + (column * columns_ + c) * TILE;
        for (int i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, m[i]);
      }
      start_softmax(column);
    }
    for (int64_t i = 0; i < pairs_ * PAIR * width_; i += 16) _mm512_store_ps(sums_ + i, _mm512_setzero_ps());
  }

  // A sink is a logit that comes before all others, without a value.
  void start_softmax(int64_t column) {
    alignas(64) float top[16];
    for (int64_t i = 0; i < 16; i++) {
      const int64_t row = 16 * column + i, token = row < rows_ ? row / shared_ : b_.count - 1;
      const float sink = a_.sinks ? a_.sinks[b_.head * shared_ + row % shared_] * 1.44269504f : NEVER;
      top[i] = sink > NEVER ? sink : NEVER;
      low_[row] = static_cast<int32_t>(low(b_.position + token) - b_.position);
      high_[row] = static_cast<int32_t>(token);
    }
    Softmax& s = softmax_[column / 2];
    s.top[column % 2] = _mm512_load_ps(top);
    const __mmask16 sinks = _mm512_cmp_ps_mask(s.top[column % 2], _mm512_set1_ps(NEVER), _CMP_GT_OQ);
    s.sum[column % 2] = _mm512_maskz_mov_ps(sinks, _mm512_set1_ps(1));
  }

  void pack_chunk(int64_t chunk, int64_t begin, int64_t end) {
    alignas(64) static const uint16_t nothing[512] = {};
    for (int64_t step = 0; step < STEPS && chunk + step * STEP < end; step++) {
      const uint16_t *keys[STEP], *values[STEP];
      for (int64_t i = 0; i < STEP; i++) {
        const int64_t position = chunk + step * STEP + i;
        keys[i] = values[i] = nothing;  // what lies outside is not read: it may be anything
        if (position < begin || position >= end) continue;
        const int64_t row = b_.table[position / a_.block_size] * a_.block_size + position % a_.block_size;
        const int64_t offset = (row * a_.kv_heads + b_.head) * a_.width;
        keys[i] = source_[0] + offset;
        values[i] = source_[1] + offset;
      }
      pack_keys(keys, packed_keys_ + step * STEP * width_);
      pack_values(values, packed_values_ + step * STEP * width_);
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
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
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

  // The pairs that see some of a chunk's keys.
  int64_t find_tasks(int64_t chunk) {
    chunk_ = chunk;
    int64_t count = 0;
    for (int64_t pair = 0; pair < pairs_; pair++) {
      const int64_t row = pair * PAIR, last_row = (row + PAIR < rows_ ? row + PAIR : rows_) - 1;
      const int64_t first = b_.position + row / shared_, last = b_.position + last_row / shared_;
      const int64_t from = low(first) > chunk ? (low(first) - chunk) / STEP : 0;
      const int64_t steps = ceil_div(last + 1 - chunk, STEP), to = steps < STEPS ? steps : STEPS;
      if (from >= to) continue;
      const bool masked = chunk + to * STEP > first + 1 || chunk + from * STEP < low(last);
      tasks_[count] = {pair, from, to, masked, logits_ + count % 2 * KEYS * PAIR, weights_ + count % 2 * KEYS * PAIR};
      count++;
    }
    return count;
  }

  // Largest logits of a task, a few keys at a time. Logits that a query does not see become −∞.
  struct Tops {
    const Block& block;
    const Task* task;
    int64_t key = 0, keys = 0;
    __m512 top[2];

    Tops(const Block& b, const Task* t) : block(b), task(t), keys(t ? (t->last - t->first) * STEP : 0) {
      top[0] = top[1] = _mm512_set1_ps(NEVER);
    }

    void some(int64_t n) {
      const int64_t end = key + n < keys ? key + n : keys;
      if (key < end && task->masked) mask(end);
      for (; key < end; key++) {
        for (int c = 0; c < 2; c++) top[c] = _mm512_max_ps(top[c], _mm512_load_ps(task->logits + key * PAIR + 16 * c));
      }
    }

    void mask(int64_t end) {
      for (int c = 0; c < 2; c++) {
        const __m512i low = _mm512_loadu_si512(block.low_ + task->pair * PAIR + 16 * c);
        const __m512i high = _mm512_loadu_si512(block.high_ + task->pair * PAIR + 16 * c);
        for (int64_t k = key; k < end; k++) {
          const int64_t position = block.chunk_ + task->first * STEP + k - block.b_.position;
          const __m512i here = _mm512_set1_epi32(static_cast<int32_t>(position));
          const __mmask16 unseen = _mm512_cmplt_epi32_mask(here, low) | _mm512_cmpgt_epi32_mask(here, high);
          _mm512_mask_store_ps(task->logits + k * PAIR + 16 * c, unseen, _mm512_set1_ps(-__builtin_inff()));
        }
      }
    }
  };

  // Weights of a task, a few keys at a time.
  struct Weights {
    const Task* task;
    const __m512 scale;
    int64_t key = 0, keys = 0;
    __m512 top[2], sum[2];

    Weights(const Block& b, const Task* t) : task(t), scale(_mm512_set1_ps(b.scale_)), keys(t ? (t->last - t->first) * STEP : 0) {
      for (int c = 0; c < 2; c++) {
        top[c] = t ? b.softmax_[t->pair].top[c] : _mm512_setzero_ps();
        sum[c] = _mm512_setzero_ps();
      }
    }

    void some(int64_t n) {
      const int64_t end = key + n < keys ? key + n : keys;
      for (; key < end; key += 2) {
        const float* from = task->logits + key * PAIR;
        uint16_t* to = task->weights + key / STEP * 2 * TILE + key % STEP * 16;
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++) {
          const __m512 a = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(from + 16 * c), scale, top[c]));
          const __m512 b = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(from + PAIR + 16 * c), scale, top[c]));
          sum[c] = _mm512_add_ps(sum[c], _mm512_add_ps(a, b));
          _mm512_store_si512(to + c * TILE, alternate(a, b));
        }
      }
    }
  };

  // Task by task: logits of the next one and sums of the previous one, while the weights of this one are made.
  void attend(int64_t count) {
    const auto nothing = [] {};
    if (count) logits(tasks_[0], nothing);
    tiles_and_others_meet();
    if (count) first_tops(tasks_[0]);
    for (int64_t t = 0; t <= count; t++) {
      const Task* now = t < count ? &tasks_[t] : nullptr;
      const Task* next = t + 1 < count ? &tasks_[t + 1] : nullptr;
      Weights weights(*this, now);
      Tops tops(*this, next);
      if (next) logits(*next, [&] { weights.some(4); });
      tiles_and_others_meet();
      if (t) add_values(tasks_[t - 1], [&] { tops.some(8), weights.some(4); });
      weights.some(KEYS);
      tops.some(KEYS);
      if (now) {
        for (int c = 0; c < 2; c++) softmax_[now->pair].sum[c] = _mm512_add_ps(softmax_[now->pair].sum[c], weights.sum[c]);
      }
      if (next) raise(next->pair, tops.top);
      tiles_and_others_meet();
    }
  }

  void first_tops(const Task& task) {
    Tops tops(*this, &task);
    tops.some(KEYS);
    raise(task.pair, tops.top);
  }

  template <class Between>
  void logits(const Task& t, Between&& between) const {
    const uint16_t* q = packed_q_ + t.pair * 2 * columns_ * TILE;
    for (int64_t s = t.first; s < t.last; s++) {
      multiply<true>(packed_keys_ + s * STEP * width_, columns_ * TILE, TILE, q, columns_ * TILE, TILE, columns_,
                     t.logits + (s - t.first) * STEP * PAIR, between);
    }
  }

  template <class Between>
  void add_values(const Task& t, Between&& between) const {
    for (int64_t c = 0; c < columns_; c++) {
      multiply<false>(packed_values_ + t.first * STEP * width_ + 2 * c * TILE, TILE, STEP * width_, t.weights, TILE, 2 * TILE,
                      t.last - t.first, sums_ + (t.pair * width_ + 32 * c) * PAIR, between);
    }
  }

  // Weights become relative to a larger logit, where one is so much larger that they could become too large.
  void raise(int64_t pair, const __m512 (&largest)[2]) {
    Softmax& s = softmax_[pair];
    for (int c = 0; c < 2; c++) {
      const __m512 top = _mm512_max_ps(s.top[c], _mm512_mul_ps(largest[c], _mm512_set1_ps(scale_)));
      if (!_mm512_cmp_ps_mask(top, _mm512_add_ps(s.top[c], _mm512_set1_ps(SLACK)), _CMP_GT_OQ)) continue;
      const __m512 factor = power_of_two(_mm512_sub_ps(s.top[c], top));
      s.top[c] = top;
      s.sum[c] = _mm512_mul_ps(s.sum[c], factor);
      float* sums = sums_ + pair * width_ * PAIR + 16 * c;
      for (int64_t d = 0; d < width_; d++) _mm512_store_ps(sums + d * PAIR, _mm512_mul_ps(_mm512_load_ps(sums + d * PAIR), factor));
    }
  }

  // Sums of 16 queries, [column of values][query], become rows of the result.
  void finish(int64_t column, uint16_t* out) const {
    const __m512 sum = softmax_[column / 2].sum[column % 2];
    const float* sums = sums_ + column / 2 * width_ * PAIR + column % 2 * 16;
    for (int64_t d = 0; d < a_.width; d += 16) {
      __m512i m[16];
      for (int64_t i = 0; i < 16; i++) m[i] = _mm512_castps_si512(_mm512_div_ps(_mm512_load_ps(sums + (d + i) * PAIR), sum));
      transpose(m);
      for (int64_t i = 0; i < 16 && 16 * column + i < rows_; i++) {
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_castsi512_ps(m[i]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + place_of(16 * column + i) + d), reinterpret_cast<__m256i>(rounded));
      }
    }
  }

  const tp_attention& a_;
  const QueryBlock& b_;
  const uint16_t* q_;
  const int64_t shared_, columns_, width_;  // columns_: tiles of 32 values; width_: their values
  const int64_t rows_, pairs_;
  const float scale_;  // to powers of two
  const uint16_t* source_[2];
  int64_t chunk_ = 0;

  uint16_t *packed_q_, *packed_keys_, *packed_values_, *weights_;
  float *sums_, *logits_;
  int32_t *low_, *high_;  // of every query: the first and last position it sees, from the block's first one on
  Softmax* softmax_;
  Task* tasks_;
};

}  // namespace

void attend_by_amx(const tp_attention& a, const QueryBlock& block, const uint16_t* q, const uint16_t* keys,
                   const uint16_t* values, uint16_t* out) {
  Block(a, block, q, keys, values).run(out);
}

}  // namespace tp
