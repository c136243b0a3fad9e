// Matrix products by AMX tiles. Rows of a weight are decoded, with their scales, to tiles of 16 rows × 32 bfloat16;
// these are exact for FP4 formats (but for nvfp4's global factor, which is applied to the products) and rounded once for
// the others. Vectors of x are the columns of the second operand, whose rows are pairs of columns of the weight.
#include <algorithm>
#include <type_traits>

#include "prefill.h"
#include "products.h"
#include "tile_formats.h"
#include "transpose.h"

namespace tp {
namespace {

constexpr int64_t MOST = 48;  // vectors whose sums fit into tiles at once

// Columns decoded at a time: 8 KB of tiles, a sixth of the first cache. More where sums are stored in between.
int64_t columns_at_a_time(int64_t vectors) { return vectors <= MOST ? 128 : vectors <= 128 ? 256 : 512; }

// Tile registers: sums 0 … 3 (band half · 2 + block of vectors), weights 4 and 5, vectors 6 and 7; of three blocks sums
// 0 … 5 (band half · 3 + block), weights 6 and vectors 7. All have columns for the same number of vectors, for another
// configuration takes as long as a dozen products: what a smaller block's tile has in other columns are items behind the
// block's, and so are sums, which are not looked at.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int64_t vectors) {
    for (int t = 0; t < 8; t++) {
      rows[t] = TILE_ROWS;
      bytes[t] = t == 4 || t == 5 ? 64 : static_cast<uint16_t>(4 * vectors);
    }
  }

  // gcc 12's own intrinsic does not say that it reads memory.
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

// x: blocks of 16 vectors, but that the last one has `last`. LINES: of what is ahead that each step fetches; none where
// vectors are too many to stay in the first cache, for they need the same buffers.
template <int BLOCKS, int LINES>
void multiply(const uint16_t* tiles, int64_t steps, const uint16_t* const (&x)[BLOCKS], int64_t last, Ahead ahead) {
  constexpr bool STREAM = LINES == 0;
  const int narrow = static_cast<int>(4 * last);
  for (int64_t s = 0; s < steps; s++, tiles += 2 * TILE, ahead = ahead.behind(LINES)) {
    const uint16_t *first = x[0] + s * STEP * (BLOCKS == 1 ? last : BLOCK), *end = x[BLOCKS - 1] + s * STEP * last;
    if constexpr (BLOCKS == 3) {
      const uint16_t* middle = x[1] + s * STEP * BLOCK;
      _tile_loadd(6, tiles, 64);
      _tile_loadd(7, first, 64);
      _tile_dpbf16ps(0, 6, 7);
      ahead.fetch<0, LINES / 2>();
      _tile_loadd(7, middle, 64);
      _tile_dpbf16ps(1, 6, 7);
      ahead.fetch<LINES / 2, LINES>();
      _tile_loadd(7, end, narrow);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(6, tiles + TILE, 64);
      _tile_dpbf16ps(5, 6, 7);
      _tile_loadd(7, middle, 64);
      _tile_dpbf16ps(4, 6, 7);
      _tile_loadd(7, first, 64);
      _tile_dpbf16ps(3, 6, 7);
    } else {
      if (BLOCKS == 1) _tile_loadd(6, end, narrow);
      else if (STREAM) _tile_stream_loadd(6, first, 64);
      else _tile_loadd(6, first, 64);
      _tile_loadd(4, tiles, 64);
      _tile_dpbf16ps(0, 4, 6);
      ahead.fetch<0, LINES / 2>();
      _tile_loadd(5, tiles + TILE, 64);
      _tile_dpbf16ps(2, 5, 6);
      ahead.fetch<LINES / 2, LINES>();
      if (BLOCKS == 1) continue;
      if (STREAM && last == BLOCK) _tile_stream_loadd(7, end, 64);
      else _tile_loadd(7, end, narrow);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

inline __mmask16 lanes(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }

// Sums of two blocks of vectors: [4 tiles][16 rows][16 vectors]; those of three, the last or only ones, have 6 tiles.
constexpr int64_t SUMS = 4 * 256, MOST_SUMS = 6 * 256;

template <int BLOCKS>
void load_sums(const float* sums) {
  _tile_loadd(0, sums, 64);
  _tile_loadd(1, sums + 256, 64);
  _tile_loadd(2, sums + 512, 64);
  _tile_loadd(3, sums + 768, 64);
  if (BLOCKS < 3) return;
  _tile_loadd(4, sums + 1024, 64);
  _tile_loadd(5, sums + 1280, 64);
}

template <int BLOCKS>
void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (BLOCKS < 3) return;
  _tile_zero(4);
  _tile_zero(5);
}

template <int BLOCKS>
void save_sums(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
  if (BLOCKS == 3) {
    _tile_stored(4, sums + 1024, 64);
    _tile_stored(5, sums + 1280, 64);
  }
  asm volatile("" ::: "memory");
}

// Calls f(number of blocks, first vector, vectors of the last block): of two blocks at a time, of three at the end.
template <class F>
void for_blocks(int64_t vectors, F&& f) {
  for (int64_t v = 0; v < vectors; v += PAIR) {
    const int64_t left = vectors - v;
    if (left > PAIR && left <= MOST) return f(std::integral_constant<int, 3>{}, v, left - PAIR);
    if (left > BLOCK) f(std::integral_constant<int, 2>{}, v, std::min(left - BLOCK, BLOCK));
    else f(std::integral_constant<int, 1>{}, v, left);
  }
}

// Products of bands of rows with the same vectors.
template <class T>
class Products {
 public:
  Products(const Matrix& w, const void* packed, int64_t vectors, int which = 0)
      : all_(groups<typename T::F>(*w.w)),
        chunk_(std::min(columns_at_a_time(vectors) / T::group, all_)),
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
    const bool few = vectors_ <= MOST;
    band_.start(row, rows, next);
    for (int64_t g = 0; g < all_; g += chunk_) {
      const int64_t end = std::min(g + chunk_, all_), steps = (end - g) * T::vectors;
      if (few) band_.template decode<2>(g, end);
      else band_.template decode<1>(g, end);
      const Ahead ahead = band_.ahead.behind(g * BAND + (end - g) * BAND / 2);
      asm volatile("" ::: "memory");
      for_blocks(vectors_, [&](auto blocks, int64_t v, int64_t narrow) {
        constexpr int N = blocks();
        const uint16_t* x[N];
        for (int b = 0; b < N; b++) {
          x[b] = packed_ + (v + b * BLOCK) * all_ * T::group + g * T::group * (b == N - 1 ? narrow : BLOCK);
        }
        float* kept = sums_ + v / PAIR * SUMS;
        if (g == 0) clear_sums<N>();
        else if (!few) load_sums<N>(kept);
        if (few) multiply<N, LINES>(band_.tiles, steps, x, narrow, ahead);
        else multiply<N, 0>(band_.tiles, steps, x, narrow, ahead);
        if (end == all_ || !few) save_sums<N>(kept);
        if (end == all_) for_tiles<N>(kept, v, narrow, out);
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
        float* tile = sums + (half * (BLOCKS == 3 ? 3 : 2) + b) * 256;
        out(tile, first, rows, v + b * BLOCK, b == BLOCKS - 1 ? last : BLOCK);
      }
    }
  }

  const int64_t all_, chunk_, vectors_;
  const uint16_t* packed_;
  Band<T> band_;
  float* sums_;
};

// Tiles are configured for as long as it lives.
struct Configured {
  explicit Configured(int64_t vectors) { TileConfig(std::min<int64_t>(vectors, TILE_ROWS)).load(); }
  ~Configured() { _tile_release(); }
  Configured(const Configured&) = delete;
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
template <class Out>
void for_results(const Matrix& w, const Stretch& rows, const void* packed, int64_t vectors, const float* bias, Out&& out) {
  with_tile_format(*w.w, [&](auto t) {
    const Configured configured(vectors);
    Products<decltype(t)> products(w, packed, vectors);
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

void products_of_any(const Matrix& w, int64_t first, int64_t last, const void* packed, int64_t vectors, float* out,
                     int64_t stride) {
  const auto put = [&](const __m512i (&m)[16], int64_t done, int64_t rows, int64_t v, int64_t block) {
    float* to = out + v * stride + done;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      if (i < block) _mm512_mask_storeu_ps(to + i * stride, lanes(rows), reinterpret_cast<__m512>(m[i]));
    }
  };
  for_results(w, {first, last, w.row(last)}, packed, vectors, nullptr, put);
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

void gate_and_up(const Matrix& w, const Stretch& rows, const void* packed, int64_t vectors, const Inner& inner) {
  alignas(64) static constexpr float NOTHING[256] = {};
  const int64_t half = inner.down->k;
  const Columns columns(*inner.down, inner.packed);
  with_tile_format(*w.w, [&](auto t) {
    const Configured configured(vectors);
    Products<decltype(t)> gate(w, packed, vectors), up(w, packed, vectors, 1);
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
  for_results(w, rows, packed, vectors, totals.bias, add);
}

int64_t vector_bytes(const tp_weight& w) {
  return with_tile_format(w, [&](auto t) { return groups<typename decltype(t)::F>(w) * decltype(t)::F::group * int64_t{2}; });
}

// 32 values of x from column `start` on as bfloat16, float32 rounded to it; zeros behind its end.
__m512i load_rounded(const void* x, int32_t dtype, int64_t start, int64_t k) {
  if (dtype == TP_BFLOAT16) return load_words(static_cast<const uint16_t*>(x), start, k);
  const __m512 low = load_floats(x, dtype, start, k), high = load_floats(x, dtype, start + 16, k);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
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

constexpr Tiles TILES = {vector_bytes, pack_tiles, products_of_any, gate_and_up, add_down, attend_by_amx};

}  // namespace

const Isa amx_isa = {"amx", packed_bytes, pack, dots_of_any, activate, add_scaled, store, load, read, attend, &TILES,
                     &avx512_int8};

}  // namespace tp
