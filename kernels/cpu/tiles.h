// Matrix products by tiles, for any unit that multiplies them. Rows of a weight are decoded, with their scales, to tiles of
// 16 rows × 32 bfloat16; these are exact for FP4 formats (but for nvfp4's global factor, which is applied to the products)
// and rounded once for the others. Vectors of x are the columns of the second operand, whose rows are pairs of columns of
// the weight. A unit U has
//
//   U::FEWEST, U::FEWEST_PLAIN  vectors for which tiles pay, the latter where there is nothing to decode
//   U::MOST                     vectors whose products are made in one pass
//   U::columns                  columns to decode at a time, for a number of vectors
//   U::Configured               lives, for a number of vectors, while tiles are multiplied
//   U::multiply, U::product     see Chunk and Operand
#pragma once
#include <algorithm>
#include <type_traits>

#include "products.h"
#include "tile_attention.h"
#include "tile_formats.h"
#include "transpose.h"

namespace tp {
namespace {

inline __mmask16 lanes(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }

// Sums of one or two blocks of vectors: [4 tiles][16 rows][16 vectors]; those of three, the last or only ones, have 6 tiles.
constexpr int64_t SUMS = 4 * 256, MOST_SUMS = 6 * 256;

// Tiles of sums of half a band.
template <int BLOCKS>
constexpr int ASIDE = BLOCKS == 3 ? 3 : 2;

// Some columns of a band of rows, tiles [steps][2 halves][16 rows][32 columns], and what multiplies them: blocks of 16
// vectors, but that the last one has `last`. U::multiply<LINES> adds their products to sums [2 halves][ASIDE][16 rows]
// [16 vectors], which begin with the first columns and are complete with the last ones. A smaller block's sums have
// something in all 16 columns, which is not looked at. LINES: of what is ahead that each step fetches; none where vectors
// are more than MOST: they do not stay in the first cache, and need the same buffers.
template <int BLOCKS>
struct Chunk {
  const uint16_t* tiles;
  int64_t steps;
  const uint16_t* x[BLOCKS];
  int64_t last;
  float* sums;
  bool begins, ends;
  Ahead ahead;
};

// Calls f(number of blocks, first vector, vectors of the last block): of two blocks at a time, of three at the end.
template <class U, class F>
void for_blocks(int64_t vectors, F&& f) {
  for (int64_t v = 0; v < vectors; v += PAIR) {
    const int64_t left = vectors - v;
    if (left > PAIR && left <= U::MOST) return f(std::integral_constant<int, 3>{}, v, left - PAIR);
    if (left > BLOCK) f(std::integral_constant<int, 2>{}, v, std::min(left - BLOCK, BLOCK));
    else f(std::integral_constant<int, 1>{}, v, left);
  }
}

// Products of bands of rows with the same vectors.
template <class U, class T>
class Products {
 public:
  Products(const Matrix& w, const void* packed, int64_t vectors, int which = 0)
      : all_(groups<typename T::F>(*w.w)),
        chunk_(std::min(U::columns(vectors) / T::group, all_)),
        vectors_(vectors),
        packed_(static_cast<const uint16_t*>(packed)),
        band_(w, chunk_, which) {
    const int64_t items = ceil_div(vectors, PAIR) * SUMS + MOST_SUMS;
    sums_ = static_cast<float*>(scratch(which ? SLOT_SUMS_TOO : SLOT_SUMS, items * sizeof(float)));
  }

  // Calls out(sums [16 rows][16 vectors], number of the first row, rows, first vector, vectors) for each tile of sums.
  // Memory is fetched half while decoding and half while multiplying: at once it would keep all of the cache's buffers.
  template <class Out>
  void compute(int64_t row, int64_t rows, const uint8_t* next, Out&& out) {
    constexpr int LINES = BAND / T::vectors / 2;
    const bool few = vectors_ <= U::MOST;
    band_.start(row, rows, next);
    for (int64_t g = 0; g < all_; g += chunk_) {
      const int64_t end = std::min(g + chunk_, all_), steps = (end - g) * T::vectors;
      if (few) band_.template decode<2>(g, end);
      else band_.template decode<1>(g, end);
      const Ahead ahead = band_.ahead.behind(g * BAND + (end - g) * BAND / 2);
      for_blocks<U>(vectors_, [&](auto blocks, int64_t v, int64_t narrow) {
        constexpr int N = blocks();
        float* sums = sums_ + v / PAIR * SUMS;
        Chunk<N> chunk{band_.tiles, steps, {}, narrow, sums, g == 0, end == all_, ahead};
        for (int b = 0; b < N; b++) {
          chunk.x[b] = packed_ + (v + b * BLOCK) * all_ * T::group + g * T::group * (b == N - 1 ? narrow : BLOCK);
        }
        if (few) U::template multiply<LINES>(chunk);
        else U::template multiply<0>(chunk);
        if (end == all_) for_tiles<N>(sums, v, narrow, out);
      });
    }
  }

  const float* factors() const { return band_.factor; }
  float* sums() const { return sums_; }

 private:
  template <int BLOCKS, class Out>
  void for_tiles(float* sums, int64_t v, int64_t last, Out&& out) const {
    for (int64_t half = 0; half < 2 && half * TILE_ROWS < band_.rows; half++) {
      const int64_t first = half * TILE_ROWS, rows = std::min<int64_t>(band_.rows - first, TILE_ROWS);
      for (int64_t b = 0; b < BLOCKS; b++) {
        float* tile = sums + (half * ASIDE<BLOCKS> + b) * 256;
        out(tile, first, rows, v + b * BLOCK, b == BLOCKS - 1 ? last : BLOCK);
      }
    }
  }

  const int64_t all_, chunk_, vectors_;
  const uint16_t* packed_;
  Band<T> band_;
  float* sums_;
};

// Sums [16 rows][16 vectors] with the rows' factors and biases: results m[vector] of 16 rows.
inline void by_vector(const float* sums, int64_t vectors, const float* factors, const float* bias, __m512i (&m)[16]) {
  const __m512 factor = _mm512_loadu_ps(factors), more = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
  for (int i = 0; i < 16; i++) m[i] = _mm512_maskz_loadu_epi32(lanes(vectors), sums + 16 * i);
  transpose(m);
#pragma GCC unroll 16
  for (int v = 0; v < 16; v++) {
    m[v] = reinterpret_cast<__m512i>(_mm512_fmadd_ps(reinterpret_cast<__m512>(m[v]), factor, more));
  }
}

// Calls out(results [16 vectors][16 rows], first row behind that of the stretch, rows, first vector, vectors) for each tile
// of products with the rows of a stretch.
template <class U, class Out>
void for_results(const Matrix& w, const Stretch& rows, const void* packed, int64_t vectors, const float* bias, Out&& out) {
  with_tile_format(*w.w, [&](auto t) {
    const typename U::Configured configured(vectors);
    Products<U, decltype(t)> products(w, packed, vectors);
    for (int64_t row = rows.first; row < rows.last; row += BAND) {
      const auto put = [&](const float* sums, int64_t first, int64_t count, int64_t v, int64_t block) {
        const int64_t done = row - rows.first + first;
        __m512i m[16];
        by_vector(sums, block, products.factors() + first, bias ? bias + done : nullptr, m);
        out(m, done, count, v, block);
      };
      const uint8_t* next = row + BAND < rows.last ? w.row(row + BAND) : rows.next;
      products.compute(row, std::min(rows.last - row, BAND), next, put);
    }
  });
}

template <class U>
void products_of_any(const Matrix& w, int64_t first, int64_t last, const void* packed, int64_t vectors, float* out,
                     int64_t stride) {
  const auto put = [&](const __m512i (&m)[16], int64_t done, int64_t rows, int64_t v, int64_t block) {
    float* to = out + v * stride + done;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i < block) _mm512_mask_storeu_ps(to + i * stride, lanes(rows), reinterpret_cast<__m512>(m[i]));
    }
  };
  for_results<U>(w, {first, last, w.row(last)}, packed, vectors, nullptr, put);
}

// Which rows of a tile become a pair of columns of packed vectors, and the pair's place in its group.
struct Pair {
  uint8_t place, even, odd;
};

// For each 16 rows of a group.
template <class T>
struct Pairs {
  Pair of[T::group / TILE_ROWS][TILE_ROWS / 2];

  constexpr Pairs() : of() {
    int found[T::group / TILE_ROWS] = {};
    for (int i = 0; i < T::group; i += 2) {
      const int even = T::column(i), odd = T::column(i + 1), part = even / TILE_ROWS;
      if (odd / TILE_ROWS != part) throw "a pair of columns is of two tiles of rows";
      of[part][found[part]++] = {static_cast<uint8_t>(i / 2), static_cast<uint8_t>(even % TILE_ROWS),
                                 static_cast<uint8_t>(odd % TILE_ROWS)};
    }
  }
};

template <class T>
constexpr Pairs<T> PAIRS;

// Words of two vectors side by side.
struct Interleaved {
  alignas(64) uint16_t word[32];

  constexpr Interleaved() : word() {
    for (int i = 0; i < 32; i++) word[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  }
};

// Packed vectors whose columns are rows of tiles.
class Columns {
 public:
  Columns(const tp_weight& w, void* packed) : packed_(static_cast<uint32_t*>(packed)) {
    with_tile_format(w, [&](auto t) {
      using T = decltype(t);
      group_ = T::group;
      pairs_ = PAIRS<T>.of;
      padded_ = groups<typename T::F>(w) * T::group;
    });
  }

  int64_t padded() const { return padded_; }

  // values [16 rows][16 vectors] of rows from `row` on, a multiple of 16; vectors from v on, a block.
  void put(const float* values, int64_t row, int64_t v, int64_t count) const {
    static constexpr Interleaved ORDER;
    const __m512i interleaved = _mm512_load_si512(ORDER.word);
    uint32_t* group = packed_ + (v * padded_ + row / group_ * group_ * count) / 2;
    for (const Pair& pair : pairs_[row % group_ / TILE_ROWS]) {
      const __m512 even = _mm512_loadu_ps(values + 16 * pair.even), odd = _mm512_loadu_ps(values + 16 * pair.odd);
      const __m512i words = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
      _mm512_mask_storeu_epi32(group + pair.place * count, lanes(count), _mm512_permutexvar_epi16(interleaved, words));
    }
  }

 private:
  uint32_t* packed_;
  int64_t group_ = 0, padded_ = 0;
  const Pair (*pairs_)[TILE_ROWS / 2] = nullptr;
};

// Sums [16 rows][16 vectors] with the rows' factors and biases; zeros behind the last row and vector.
void finish(float* sums, int64_t rows, int64_t vectors, const float* factors, const float* bias) {
  for (int64_t r = 0; r < 16; r++) {
    __m512 value = _mm512_setzero_ps();
    if (r < rows) {
      const __m512 sum = _mm512_maskz_loadu_ps(lanes(vectors), sums + 16 * r);
      value = _mm512_fmadd_ps(sum, _mm512_set1_ps(factors[r]), _mm512_set1_ps(bias ? bias[r] : 0.0f));
    }
    _mm512_storeu_ps(sums + 16 * r, value);
  }
}

template <class U>
void gate_and_up(const Matrix& w, const Stretch& rows, const void* packed, int64_t vectors, const Inner& inner) {
  alignas(64) static constexpr float NOTHING[256] = {};
  const int64_t half = inner.down->k;
  const Columns columns(*inner.down, inner.packed);
  with_tile_format(*w.w, [&](auto t) {
    const typename U::Configured configured(vectors);
    Products<U, decltype(t)> gate(w, packed, vectors), up(w, packed, vectors, 1);
    for (int64_t row = rows.first; row < rows.last; row += BAND) {
      const int64_t n = std::min(rows.last - row, BAND), done = row - rows.first;
      const auto put = [&](float* ups, int64_t r, int64_t count, int64_t v, int64_t block) {
        float* gates = gate.sums() + (ups - up.sums());
        finish(gates, count, block, gate.factors() + r, inner.gate_bias ? inner.gate_bias + done + r : nullptr);
        finish(ups, count, block, up.factors() + r, inner.up_bias ? inner.up_bias + done + r : nullptr);
        activate(gates, ups, 256, inner.activation);
        columns.put(gates, row + r, v, block);
      };
      gate.compute(row, n, w.row(half + row), [](float*, int64_t, int64_t, int64_t, int64_t) {});
      up.compute(half + row, n, row + BAND < rows.last ? w.row(row + BAND) : rows.next, put);
    }
  });
  if (rows.last < half) return;
  for (int64_t row = ceil_div(half, TILE_ROWS) * TILE_ROWS; row < columns.padded(); row += TILE_ROWS) {
    for (int64_t v = 0; v < vectors; v += BLOCK) columns.put(NOTHING, row, v, std::min(vectors - v, BLOCK));
  }
}

template <class U>
void add_down(const Matrix& w, const Stretch& rows, const void* packed, int64_t vectors, const Totals& totals) {
  const auto add = [&](const __m512i (&m)[16], int64_t done, int64_t count, int64_t v, int64_t block) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i >= block) continue;
      float* total = totals.values + totals.tokens[v + i] * totals.stride + done;
      const __m512 weight = _mm512_set1_ps(totals.weights[v + i]), old = _mm512_maskz_loadu_ps(lanes(count), total);
      _mm512_mask_storeu_ps(total, lanes(count), _mm512_fmadd_ps(weight, reinterpret_cast<__m512>(m[i]), old));
    }
  };
  for_results<U>(w, rows, packed, vectors, totals.bias, add);
}

int64_t vector_bytes(const tp_weight& w) {
  return with_tile_format(w, [&](auto t) { return groups<typename decltype(t)::F>(w) * decltype(t)::F::group * int64_t{2}; });
}

// Pairs of columns of all vectors side by side: out[pair][vector][2].
void pack_tiles(const tp_weight& w, const void* const* xs, int count, int32_t from, void* out) {
  with_tile_format(w, [&](auto t) {
    using T = decltype(t);
    uint32_t* pairs = static_cast<uint32_t*>(out);
    for (int64_t start = 0; start < w.k; start += T::group) {
      __m512i words[16][T::vectors];
      for (int i = 0; i < count; i++) {
        __m512i plain[T::vectors];
        for (int v = 0; v < T::vectors; v++) plain[v] = load_rounded(xs[i], from, start + 32 * v, w.k);
        permute(plain, ORDER<T>.column, words[i]);
      }
      for (int v = 0; v < T::vectors; v++, pairs += 16 * count) {
        __m512i m[16];
        for (int i = 0; i < 16; i++) m[i] = i < count ? words[i][v] : _mm512_setzero_si512();
        if (count == 1) {
          _mm512_storeu_si512(pairs, m[0]);
          continue;
        }
        transpose(m);
#pragma GCC unroll 16
        for (int pair = 0; pair < 16; pair++) _mm512_mask_storeu_epi32(pairs + pair * count, lanes(count), m[pair]);
      }
    }
  });
}

template <class U>
constexpr Tiles TILES = {U::FEWEST, U::FEWEST_PLAIN, vector_bytes, pack_tiles, products_of_any<U>, gate_and_up<U>,
                         add_down<U>, attend_by_tiles<U>};

}  // namespace
}  // namespace tp
