// Matrix products by AMX tiles. Rows of a weight are decoded, with their scales, to tiles of 16 rows × 32 bfloat16;
// these are exact for FP4 formats (but for nvfp4's global factor, which is applied to the products) and rounded once for
// the others. Vectors of x are the columns of the second operand, whose rows are pairs of columns of the weight.
#include "avx512.h"

namespace tp {
namespace {

constexpr int TILE_ROWS = 16, STEP = 32;      // of a tile of weights: rows, and columns of bfloat16
constexpr int TILE = TILE_ROWS * STEP;        // its items
constexpr int64_t BAND = 2 * TILE_ROWS;       // rows worked on at a time
constexpr int64_t CHUNK = 512;                // columns decoded at a time: 32 KB, which the first cache holds
constexpr int64_t PAIR = 32;                  // vectors of x worked on at a time

// Tile registers: sums 0 … 3 (band half · 2 + vector half), weights 4 and 5, vectors 6 and 7.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig(int64_t first, int64_t second) {
    for (int t = 0; t < 8; t++) rows[t] = TILE_ROWS;
    bytes[4] = bytes[5] = 64;
    bytes[0] = bytes[2] = bytes[6] = static_cast<uint16_t>(4 * first);
    bytes[1] = bytes[3] = bytes[7] = static_cast<uint16_t>(4 * (second ? second : first));
  }

  // gcc 12's own intrinsic does not say that it reads memory.
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

// How each format gets its scales onto its elements.

// Products of element and scale in float32, rounded to bfloat16: even words in front of odd ones.
template <class F>
struct Scaled {
  static constexpr int column(int word) { return F::column(word / 32 * 32 + word % 16 * 2 + word % 32 / 16); }
  using Scale = float;
  static constexpr int per_group = F::span ? F::group / (F::span ? F::span : 1) : 0;

  static void read(const Matrix& w, int64_t grid_row, Scale* out) { read_scales(w, grid_row, F::span, out); }

  static void decode(__m512i raw, const Scale* scales, __m512i (&out)[F::vectors]) {
    const auto elements = F::decode(raw);
    const __m512 scale = F::scale(scales);
    for (int v = 0; v < F::vectors; v++) {
      const __m512 low = _mm512_mul_ps(even(elements.vector[v]), scale), high = _mm512_mul_ps(odd(elements.vector[v]), scale);
      out[v] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    }
  }
};

struct Unscaled {
  static constexpr int column(int word) { return word; }
  using Scale = float;
  static constexpr int per_group = 0;
  static void read(const Matrix&, int64_t, Scale*) {}
  static void decode(__m512i raw, const Scale*, __m512i (&out)[1]) { out[0] = raw; }
};

// Powers of two go into the exponents. The table holds elements times 2^125, from which a saturating subtraction takes
// the rest: it leaves zeros alone. Scales below 2^−125 count as that; NaN, and what bfloat16 cannot hold, as 2^125.
struct Exponents {
  using F = Nibbles<E2m1Table, 32>;
  static constexpr int column(int word) { return F::column(word); }
  using Scale = uint16_t;
  static constexpr int per_group = 4;

  static void read(const Matrix& w, int64_t grid_row, Scale* out) {
    const int64_t blocks = w.w->grid_columns;
    const uint8_t* codes = w.scale + grid_row * blocks;
    for (int64_t i = 0; i < blocks; i++) {
      const uint16_t code = codes[i] < 2 ? 2 : codes[i] > 252 ? 252 : codes[i];
      out[i] = static_cast<uint16_t>((252 - code) << 7);
    }
  }

  static void decode(__m512i raw, const Scale* scales, __m512i (&out)[4]) {
    alignas(32) static constexpr uint16_t large[16] = {0x0000, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40,
                                                       0x0000, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40};
    const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(large)));
    const __m512i blocks = _mm512_set_epi16(3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0,
                                            0, 0, 0, 0);
    const __m128i four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
    const __m512i less = _mm512_permutexvar_epi16(blocks, _mm512_castsi128_si512(four));
    out[0] = _mm512_subs_epu16(_mm512_permutexvar_epi16(raw, table), less);
    out[1] = _mm512_subs_epu16(_mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4), table), less);
    out[2] = _mm512_subs_epu16(_mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 8), table), less);
    out[3] = _mm512_subs_epu16(_mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 12), table), less);
  }
};

template <class FORMAT, class DECODER>
struct TileFormat : DECODER {
  using F = FORMAT;
  static constexpr int group = F::group, vectors = F::vectors, bytes = F::bytes;
};

template <class Call>
auto with_tile_format(const tp_weight& w, Call&& call) {
  if (w.format == TP_E2M1 && w.scale_type == TP_SCALE_E8M0) return call(TileFormat<Nibbles<E2m1Table, 32>, Exponents>{});
  return with_format(w, [&](auto f) {
    using F = decltype(f);
    if constexpr (F::span == 0) return call(TileFormat<F, Unscaled>{});
    else return call(TileFormat<F, Scaled<F>>{});
  });
}

// Rows of a weight on their way to tiles.
template <class T>
struct Band {
  const Matrix& w;
  const int64_t groups_, size, scale_items;
  typename T::Scale* scales;
  uint16_t* tiles;
  float factor[BAND];
  const uint8_t* data = nullptr;
  int64_t rows = 0;

  Band(const Matrix& matrix, int64_t chunk_groups)
      : w(matrix),
        groups_(groups<typename T::F>(*matrix.w)),
        size(ceil_div(matrix.w->k * T::bytes, T::group)),
        scale_items(groups_ * T::per_group + 16) {
    const int64_t scale_bytes = BAND * scale_items * sizeof(typename T::Scale);
    scales = static_cast<typename T::Scale*>(scratch(SLOT_SCALES, scale_bytes));
    std::memset(scales, 0, scale_bytes);  // what lies behind a row's end must be finite
    const int64_t tile_bytes = BAND * chunk_groups * T::group * sizeof(uint16_t);
    tiles = static_cast<uint16_t*>(scratch(SLOT_TILE, tile_bytes));
  }

  void start(int64_t row, int64_t count) {
    rows = count;
    data = w.data + row * w.w->row_bytes;
    Matrix::Place place{0, row, 0};
    for (int64_t r = 0; r < count; r++) {
      if (row + r == place.end || r == 0) place = w.place(row + r);
      factor[r] = place.global;
      if (T::per_group) T::read(w, place.grid_row, scales + r * scale_items);
    }
    for (int64_t r = count; r < BAND; r++) factor[r] = 0;
  }

  // Tiles of groups first … last − 1, those of a step for both halves of the band side by side.
  void decode(int64_t first, int64_t last) const {
    const bool final = last == groups_;
    for (int64_t r = 0; r < rows; r++) {
      const uint8_t* p = data + r * w.w->row_bytes;
      // The same columns of the next chunk, or the first ones of the next band.
      const uint8_t* next = final ? p + BAND * w.w->row_bytes : p + last * T::bytes;
      uint16_t* out = tiles + r / TILE_ROWS * TILE + r % TILE_ROWS * STEP;
      for (int64_t g = first; g < last; g++) {
        __builtin_prefetch(next + (g - first) * T::bytes);
        const int64_t left = size - g * T::bytes;
        const __m512i raw = left >= T::bytes ? T::F::load(p + g * T::bytes) : T::F::load_part(p + g * T::bytes, left);
        __m512i words[T::vectors];
        T::decode(raw, scales + r * scale_items + g * T::per_group, words);
        for (int v = 0; v < T::vectors; v++, out += 2 * TILE) _mm512_store_si512(out, words[v]);
      }
    }
  }
};

template <bool TWO>
void multiply(const uint16_t* tiles, int64_t steps, const uint16_t* x0, int64_t c0, const uint16_t* x1, int64_t c1) {
  for (int64_t s = 0; s < steps; s++, tiles += 2 * TILE) {
    _tile_loadd(6, x0 + s * STEP * c0, static_cast<int>(4 * c0));
    _tile_loadd(4, tiles, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, tiles + TILE, 64);
    _tile_dpbf16ps(2, 5, 6);
    if (TWO) {
      _tile_loadd(7, x1 + s * STEP * c1, static_cast<int>(4 * c1));
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// 16 × 16 float32, rows become columns.
inline void transpose(__m512 (&m)[16]) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(m[i], m[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(m[i], m[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; j++) {
      const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      m[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      m[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(m[i], m[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(m[i], m[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(m[i + 8], m[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(m[i + 8], m[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    m[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    m[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    m[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    m[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

inline __mmask16 lanes(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }

// The sums of 16 rows and up to 16 vectors, [row][vector], to out[vector · stride + row].
void store_sums(const float* sums, int64_t rows, int64_t vectors, const float* factor, float* out, int64_t stride) {
  const __m512 factors = _mm512_loadu_ps(factor);
  __m512 m[16];
  for (int i = 0; i < 16; i++) m[i] = _mm512_maskz_loadu_ps(lanes(vectors), sums + 16 * i);
  transpose(m);
#pragma GCC unroll 16
  for (int v = 0; v < 16; v++) {
    if (v < vectors) _mm512_mask_storeu_ps(out + v * stride, lanes(rows), _mm512_mul_ps(m[v], factors));
  }
}

void store_all(const float* factor, int64_t rows, int64_t c0, int64_t c1, float* out, int64_t stride) {
  alignas(64) float sums[4][16 * 16];
  _tile_stored(0, sums[0], 64);
  _tile_stored(2, sums[2], 64);
  if (c1) {
    _tile_stored(1, sums[1], 64);
    _tile_stored(3, sums[3], 64);
  }
  asm volatile("" ::: "memory");
  for (int64_t half = 0; half < 2 && half * TILE_ROWS < rows; half++) {
    const int64_t left = rows - half * TILE_ROWS, n = left < TILE_ROWS ? left : TILE_ROWS;
    store_sums(sums[2 * half], n, c0, factor + half * TILE_ROWS, out + half * TILE_ROWS, stride);
    if (c1) store_sums(sums[2 * half + 1], n, c1, factor + half * TILE_ROWS, out + half * TILE_ROWS + 16 * stride, stride);
  }
}

template <class T>
void products(const Matrix& w, int64_t first, int64_t last, const uint16_t* packed, int64_t vectors, float* out,
              int64_t stride) {
  const int64_t all = groups<typename T::F>(*w.w), padded = all * T::group;
  // Sums of one pair of blocks stay in their tiles from chunk to chunk; for more, rows are decoded as a whole.
  const int64_t chunk = vectors <= PAIR ? (CHUNK / T::group < all ? CHUNK / T::group : all) : all;
  Band<T> band(w, chunk);
  int64_t configured0 = -1, configured1 = -1;
  for (int64_t row = first; row < last; row += BAND) {
    band.start(row, last - row < BAND ? last - row : BAND);
    for (int64_t g = 0; g < all; g += chunk) {
      const int64_t end = g + chunk < all ? g + chunk : all, steps = (end - g) * T::vectors;
      band.decode(g, end);
      asm volatile("" ::: "memory");
      for (int64_t v = 0; v < vectors; v += PAIR) {
        const int64_t left = vectors - v, c0 = left < 16 ? left : 16, c1 = left < 32 ? left - c0 : 16;
        if (c0 != configured0 || c1 != configured1) {
          TileConfig(c0, c1).load();
          configured0 = c0, configured1 = c1;
        }
        if (g == 0) {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
        }
        const uint16_t *x0 = packed + v * padded + g * T::group * c0, *x1 = packed + (v + 16) * padded + g * T::group * c1;
        if (c1) multiply<true>(band.tiles, steps, x0, c0, x1, c1);
        else multiply<false>(band.tiles, steps, x0, c0, nullptr, 0);
        if (end == all) store_all(band.factor, band.rows, c0, c1, out + v * stride + row - first, stride);
      }
    }
  }
  _tile_release();
}

void products_of_any(const Matrix& w, int64_t first, int64_t last, const void* packed, int64_t vectors, float* out,
                     int64_t stride) {
  with_tile_format(*w.w, [&](auto t) {
    products<decltype(t)>(w, first, last, static_cast<const uint16_t*>(packed), vectors, out, stride);
  });
}

int64_t vector_bytes(const tp_weight& w) {
  return with_tile_format(w, [&](auto t) { return groups<typename decltype(t)::F>(w) * decltype(t)::group * int64_t{2}; });
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
        for (int v = 0; v < T::vectors; v++) plain[v] = load_words(xs[i], from, start + 32 * v, w.k);
        permute(plain, ORDER<T>.column, words[i]);
      }
      for (int v = 0; v < T::vectors; v++, pairs += 16 * count) {
        __m512 m[16];
        for (int i = 0; i < 16; i++) m[i] = i < count ? _mm512_castsi512_ps(words[i][v]) : _mm512_setzero_ps();
        if (count == 1) {
          _mm512_storeu_ps(pairs, m[0]);
          continue;
        }
        transpose(m);
#pragma GCC unroll 16
        for (int pair = 0; pair < 16; pair++) _mm512_mask_storeu_ps(pairs + pair * count, lanes(count), m[pair]);
      }
    }
  });
}

constexpr Tiles TILES = {vector_bytes, pack_tiles, products_of_any};

}  // namespace

const Isa amx_isa = {"amx", packed_bytes, pack, dots_of_any, activate, add_scaled, store, load, read, attend, &TILES};

}  // namespace tp
