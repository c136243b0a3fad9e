// Matrix products by AMX tiles. Rows of a weight are decoded, with their scales, to tiles of 16 rows × 32 bfloat16;
// these are exact for FP4 formats (but for nvfp4's global factor, which is applied to the products) and rounded once for
// the others. Vectors of x are the columns of the second operand, whose rows are pairs of columns of the weight.
#include <algorithm>
#include <type_traits>

#include "avx512.h"
#include "prefill.h"
#include "products.h"
#include "transpose.h"

namespace tp {
namespace {

constexpr int TILE_ROWS = 16, STEP = 32;      // of a tile of weights: rows, and columns of bfloat16
constexpr int TILE = TILE_ROWS * STEP;        // its items
constexpr int64_t BAND = 2 * TILE_ROWS;       // rows worked on at a time
constexpr int64_t MOST = 48;                  // vectors whose sums fit into tiles at once
constexpr int64_t LINE = 64;                  // bytes that memory gives at once, as many as a group has of a row

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

// How formats get their scales onto their elements: T::Item and T::read are of a row of scales (false if one is NaN that
// T::decode would not make NaN of), T::decode makes words of raw bytes, and T::column(word) says which column of a group
// a word belongs to.

// Products of element and scale in float32, rounded to bfloat16.
template <class FORMAT>
struct Rounded : FORMAT {
  using F = FORMAT;

  static bool read(const Matrix& w, int64_t grid_row, typename F::Item* out) {
    F::read(w, grid_row, out);
    return true;
  }

  static void decode(typename F::Raw raw, const typename F::Item* scales, __m512i (&out)[F::vectors]) {
    const auto e = F::decode(raw);
    const __m512 scale = F::scale(scales);
    for (int v = 0; v < F::vectors; v++) {
      const __m512 low = _mm512_mul_ps(e.value[2 * v], scale), high = _mm512_mul_ps(e.value[2 * v + 1], scale);
      out[v] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    }
  }
};

// Products of elements and scale, rounded to bfloat16, by their bytes: tables that are made once for a block.
struct Looked : Fp8<64> {
  using F = Fp8<64>;
  struct Item {
    __m512i high[2], low[2];
  };

  static constexpr int column(int i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }

  static bool read(const Matrix& w, int64_t grid_row, Item* out) {
    const int64_t n = groups<F>(*w.w);
    float* scales = static_cast<float*>(scratch(SLOT_PLAIN, (n + SLACK) * sizeof(float)));
    F::read(w, grid_row, scales);
    for (int64_t i = 0; i < n; i++) out[i] = i && scales[i] == scales[i - 1] ? out[i - 1] : table(scales[i]);
    return true;
  }

  static Item table(float scale) {
    Item item;
    for (int half = 0; half < 2; half++) {
      __m256i highs[2], lows[2];
      for (int i = 0; i < 2; i++) {
        const float* elements = E4M3_VALUES.value + 64 * half + 32 * i;
        const __m512 a = _mm512_mul_ps(_mm512_load_ps(elements), _mm512_set1_ps(scale));
        const __m512 b = _mm512_mul_ps(_mm512_load_ps(elements + 16), _mm512_set1_ps(scale));
        const __m512i words = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
        highs[i] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8));
        lows[i] = _mm512_cvtepi16_epi8(words);
      }
      item.high[half] = _mm512_inserti64x4(_mm512_castsi256_si512(highs[0]), highs[1], 1);
      item.low[half] = _mm512_inserti64x4(_mm512_castsi256_si512(lows[0]), lows[1], 1);
    }
    return item;
  }

  static void decode(__m512i codes, const Item* table, __m512i (&out)[2]) {
    look_up(table->high, table->low, codes, _mm512_and_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80))), out);
  }
};

struct Unscaled : Bf16 {
  using F = Bf16;
  static constexpr int column(int i) { return i; }
  static bool read(const Matrix&, int64_t, Item*) { return true; }
  static void decode(__m512i raw, const Item*, __m512i (&out)[1]) { out[0] = raw; }
};

// Each 16-bit word holds four codes; word i of vector j is that of column 4 · i + j. Words a byte further on have the
// upper two where the others have the lower ones. Port 0 is what decoding waits for, so others do what they can: that
// load instead of shifts, products instead of the others, and the look-up by bytes in spread().
struct FourCodes {
  struct Raw {
    __m512i low, high;
  };
  static Raw load(const uint8_t* p) { return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 1)}; }
  static Raw load_part(const uint8_t* p, int64_t n) {
    return {_mm512_maskz_loadu_epi8(first_bytes(n), p), _mm512_maskz_loadu_epi8(first_bytes(n - 1), p + 1)};
  }
  static constexpr int column(int i) { return 4 * (i % 32) + i / 32; }
};

inline __m512i nibbles(FourCodes::Raw raw, const uint16_t* table, int j) {
  const __m512i twice = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(table)));
  const __m512i words = j < 2 ? raw.low : raw.high;
  return _mm512_permutexvar_epi16(j % 2 ? _mm512_mulhi_epu16(words, _mm512_set1_epi16(1 << 12)) : words, twice);
}

// Word i of a vector has item i / PER; 16 bytes of items are read.
template <int PER>
struct WordItems {
  alignas(64) uint8_t byte[64];

  constexpr WordItems() : byte() {
    for (int i = 0; i < 64; i++) byte[i] = static_cast<uint8_t>(i / 2 / PER * 2 + i % 2);
  }
};

template <int PER>
inline __m512i spread(const uint16_t* items) {
  static constexpr WordItems<PER> which;
  const __m512i in_each_lane = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(items)));
  return _mm512_shuffle_epi8(in_each_lane, _mm512_load_si512(which.byte));
}

// mxfp4: powers of two go into the exponents. The table holds elements times 2^125, from which a saturating subtraction
// takes the rest: it leaves zeros alone. Scales below 2^−125 count as that, and what bfloat16 cannot hold as 2^125.
struct Exponents : Nibbles<E2m1Table, 32>, FourCodes {
  using F = Nibbles<E2m1Table, 32>;
  using FourCodes::column;
  using FourCodes::load;
  using FourCodes::load_part;
  using FourCodes::Raw;

  static bool read(const Matrix& w, int64_t grid_row, Item* out) {
    const int64_t n = w.w->grid_columns;
    const uint8_t* codes = w.scale + grid_row * n;
    __mmask64 nan = 0;
    for (int64_t i = 0; i < n; i += 64) {
      const __m512i code = _mm512_maskz_loadu_epi8(first_bytes(n - i), codes + i);
      nan |= _mm512_cmpeq_epi8_mask(code, _mm512_set1_epi8(-1));
      // 252 less the code, as if it were at least 2 and at most 252.
      const __m512i less = _mm512_min_epu8(_mm512_subs_epu8(_mm512_set1_epi8(static_cast<char>(252)), code),
                                           _mm512_set1_epi8(static_cast<char>(250)));
      const __m256i low = _mm512_castsi512_si256(less), high = _mm512_extracti64x4_epi64(less, 1);
      _mm512_storeu_si512(out + i, _mm512_slli_epi16(_mm512_cvtepu8_epi16(low), 7));
      _mm512_storeu_si512(out + i + 32, _mm512_slli_epi16(_mm512_cvtepu8_epi16(high), 7));
    }
    return !nan;
  }

  static void decode(Raw raw, const Item* scales, __m512i (&out)[4]) {
    alignas(32) static constexpr uint16_t large[16] = {0x0000, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40,
                                                       0x0000, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40};
    const __m512i less = spread<8>(scales);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) out[j] = _mm512_subs_epu16(nibbles(raw, large, j), less);
  }
};

// nvfp4: an element is a power of two, or 1.5 times one. A row has the bits of its scales and those of 1.5 times its
// scales; an element adds to the exponent of one of the two. As above, exponents are 200 too large at first and what is
// too much is subtracted. Bit 0 marks the elements with 1.5. Scales have no sign, as the format says.
struct Significands : Nibbles<E2m1Table, 16>, FourCodes {
  using F = Nibbles<E2m1Table, 16>;
  using FourCodes::column;
  using FourCodes::load;
  using FourCodes::load_part;
  using FourCodes::Raw;
  static constexpr int BIAS = 200 << 7;

  // What is subtracted for elements that are powers of two, and for the others; everything where the scale is zero.
  static constexpr unsigned less(int code) { return code ? BIAS - e4m3_bits(code) : 0xffff; }
  static constexpr unsigned less_more(int code) {
    const unsigned bits = e4m3_bits(code), mantissa = bits & 0x7f;
    // 1.5 · (128 + mantissa), which may need another exponent.
    const unsigned larger = 192 + mantissa + mantissa / 2;
    const unsigned more = larger < 256 ? (bits & 0x7f80) + larger - 128 : (bits & 0x7f80) + larger / 2;
    return code ? BIAS + 1 - more : 0xffff;
  }

  // For every group 8 items of `less`, then 8 of `less_more`.
  static bool read(const Matrix& w, int64_t grid_row, Item* out) {
    static constexpr WordTable LESS(less), LESS_MORE(less_more);
    const int64_t n = w.w->grid_columns;
    const uint8_t* codes = w.scale + grid_row * n;
    __mmask64 nan = 0;
    for (int64_t i = 0; i < n; i += 64, out += 128) {
      const __m512i code = _mm512_maskz_loadu_epi8(first_bytes(n - i), codes + i);
      const __m512i size = _mm512_and_si512(code, _mm512_set1_epi8(0x7f));
      nan |= _mm512_cmpeq_epi8_mask(size, _mm512_set1_epi8(0x7f));
      __m512i a[2], b[2];
      look_up(LESS, code, _mm512_setzero_si512(), a);
      look_up(LESS_MORE, code, _mm512_setzero_si512(), b);
      // Lane l of a[0], b[0], a[1] and b[1] make the two groups 2 · l and 2 · l + 1.
      const __m512i low0 = _mm512_shuffle_i64x2(a[0], a[1], 0x44), low1 = _mm512_shuffle_i64x2(b[0], b[1], 0x44);
      const __m512i high0 = _mm512_shuffle_i64x2(a[0], a[1], 0xee), high1 = _mm512_shuffle_i64x2(b[0], b[1], 0xee);
      const __m512i even_lanes = _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0), odd_lanes = _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2);
      _mm512_storeu_si512(out, _mm512_permutex2var_epi64(low0, even_lanes, low1));
      _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi64(low0, odd_lanes, low1));
      _mm512_storeu_si512(out + 64, _mm512_permutex2var_epi64(high0, even_lanes, high1));
      _mm512_storeu_si512(out + 96, _mm512_permutex2var_epi64(high0, odd_lanes, high1));
    }
    return !nan;
  }

  static void decode(Raw raw, const Item* scales, __m512i (&out)[4]) {
    alignas(32) static constexpr uint16_t powers[16] = {0x0000, 0x6380, 0x6400, 0x6401, 0x6480, 0x6481, 0x6500, 0x6501,
                                                        0x0000, 0xe380, 0xe400, 0xe401, 0xe480, 0xe481, 0xe500, 0xe501};
    const __m512i less = spread<4>(scales), less_more = spread<4>(scales + 8);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m512i power = nibbles(raw, powers, j);
      const __mmask32 more = _mm512_test_epi16_mask(power, _mm512_set1_epi16(1));
      out[j] = _mm512_subs_epu16(power, _mm512_mask_mov_epi16(less, more, less_more));
    }
  }
};

template <class T>
constexpr int ITEMS = SCALES<typename T::F>;  // of a row of scales, for a group
template <>
constexpr int ITEMS<Significands> = 16;
template <>
constexpr int ITEMS<Looked> = 1;

template <class Call>
auto with_tile_format(const tp_weight& w, Call&& call) {
  if (w.format == TP_E2M1) return w.block_columns == 16 ? call(Significands{}) : call(Exponents{});
  // A table costs as much as decoding a few rows of a group.
  if (w.format == TP_E4M3 && w.block_rows >= BAND && span_of(w, 64) == 64) return call(Looked{});
  return with_format(w, [&](auto f) {
    using F = decltype(f);
    if constexpr (F::span == 0) return call(Unscaled{});
    else return call(Rounded<F>{});
  });
}

// Rows of a weight on their way to tiles.
template <class T>
struct Band {
  const Matrix& w;
  const int64_t groups_, size, scale_items;
  typename T::Item* scales;  // [BAND + 1]: those that the last band ended with, and one for each row
  uint16_t* tiles;
  const typename T::Item* row_scales[BAND];
  float factor[BAND];
  const uint8_t* data = nullptr;
  int64_t rows = 0;
  Matrix::Place place{};
  int64_t read = 0;  // rows of scales
  bool numbers = true;

  Band(const Matrix& matrix, int64_t chunk_groups)
      : w(matrix),
        groups_(groups<typename T::F>(*matrix.w)),
        size(ceil_div(matrix.w->k * T::bytes, T::group)),
        scale_items(groups_ * ITEMS<T> + (ITEMS<T> > 1 ? 2 * SLACK : 0)) {
    const size_t scale_bytes = (BAND + 1) * scale_items * sizeof(typename T::Item);
    scales = static_cast<typename T::Item*>(scratch(SLOT_SCALES, scale_bytes));
    // What lies behind a row's end, where a last group may look, must be finite.
    if (ITEMS<T> > 1) std::memset(scales, 0, scale_bytes);
    tiles = static_cast<uint16_t*>(scratch(SLOT_TILE, BAND * chunk_groups * T::group * sizeof(uint16_t)));
  }

  void start(int64_t row, int64_t count) {
    rows = count;
    data = w.data + row * w.w->row_bytes;
    for (int64_t r = 0; r < count; r++) {
      if (w.go_to(row + r, place)) {
        numbers = T::read(w, w.scale_row(place, row + r), scales + ++read % (BAND + 1) * scale_items);
      }
      row_scales[r] = scales + read % (BAND + 1) * scale_items;
      factor[r] = numbers ? place.global : __builtin_nanf("");
    }
    for (int64_t r = count; r < BAND; r++) factor[r] = 0;
  }

  // Where the next band has what is as many columns as groups first … of this one: its memory is fetched in order.
  const uint8_t* soon(int64_t first) const { return data + BAND * (w.w->row_bytes + first * T::bytes); }

  // Tiles of groups first … last − 1, those of a step for both halves of the band side by side. For every row of a group
  // as many bytes of the next band are fetched.
  void decode(int64_t first, int64_t last, int64_t bytes) const {
    for (int64_t g = first; g < last; g++) {
      uint16_t* out = tiles + (g - first) * T::vectors * 2 * TILE;
      const uint8_t* next = soon(first) + (g - first) * BAND * bytes;
      const int64_t left = size - g * T::bytes;
      if (left > T::bytes) decode_group(g, next, bytes, out, [](const uint8_t* p) { return T::load(p); });
      else decode_group(g, next, bytes, out, [left](const uint8_t* p) { return T::load_part(p, left); });
    }
  }

 private:
  // A group's columns of all rows, which are rows of tiles.
  template <class Load>
  void decode_group(int64_t g, const uint8_t* next, int64_t bytes, uint16_t* out, Load&& load) const {
    const uint8_t* p = data + g * T::bytes;
    for (int64_t r = 0; r < rows; r++, p += w.w->row_bytes, out += STEP) {
      __builtin_prefetch(next + r * bytes, 0, 2);
      __m512i words[T::vectors];
      T::decode(load(p), row_scales[r] + g * ITEMS<T>, words);
#pragma GCC unroll 4
      for (int v = 0; v < T::vectors; v++) _mm512_store_si512(out + v * 2 * TILE, words[v]);
    }
  }
};

template <int LINES>
inline void fetch(const uint8_t* lines) {
#pragma GCC unroll 16
  for (int i = 0; i < LINES; i++) __builtin_prefetch(lines + i * LINE, 0, 2);
}

// x: blocks of 16 vectors, but that the last one has `last`. LINES: of weights to come, from `soon` on, that each step
// fetches; none where vectors are too many to stay in the first cache, for they need the same buffers.
template <int BLOCKS, int LINES>
void multiply(const uint16_t* tiles, int64_t steps, const uint16_t* const (&x)[BLOCKS], int64_t last, const uint8_t* soon) {
  constexpr bool STREAM = LINES == 0;
  const int narrow = static_cast<int>(4 * last);
  for (int64_t s = 0; s < steps; s++, tiles += 2 * TILE, soon += LINES * LINE) {
    const uint16_t *first = x[0] + s * STEP * (BLOCKS == 1 ? last : BLOCK), *end = x[BLOCKS - 1] + s * STEP * last;
    if constexpr (BLOCKS == 3) {
      const uint16_t* middle = x[1] + s * STEP * BLOCK;
      _tile_loadd(6, tiles, 64);
      _tile_loadd(7, first, 64);
      _tile_dpbf16ps(0, 6, 7);
      fetch<LINES / 2>(soon);
      _tile_loadd(7, middle, 64);
      _tile_dpbf16ps(1, 6, 7);
      fetch<LINES / 2>(soon + LINES / 2 * LINE);
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
      fetch<LINES / 2>(soon);
      _tile_loadd(5, tiles + TILE, 64);
      _tile_dpbf16ps(2, 5, 6);
      fetch<LINES / 2>(soon + LINES / 2 * LINE);
      if (BLOCKS == 1) continue;
      if (STREAM && last == BLOCK) _tile_stream_loadd(7, end, 64);
      else _tile_loadd(7, end, narrow);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

inline __mmask16 lanes(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }

// The sums of 16 rows and up to 16 vectors, [row][vector], to out[vector · stride + row].
void store_sums(const float* sums, int64_t rows, int64_t vectors, const float* factor, float* out, int64_t stride) {
  const __m512 factors = _mm512_loadu_ps(factor);
  __m512i m[16];
  for (int i = 0; i < 16; i++) m[i] = _mm512_maskz_loadu_epi32(lanes(vectors), sums + 16 * i);
  transpose(m);
#pragma GCC unroll 16
  for (int v = 0; v < 16; v++) {
    if (v < vectors) _mm512_mask_storeu_ps(out + v * stride, lanes(rows), _mm512_mul_ps(_mm512_castsi512_ps(m[v]), factors));
  }
}

// Sums of two blocks are on their way between chunks: [4 tiles][16 rows][16 vectors]; those of three, the last or only
// ones, have 6 tiles.
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

template <int BLOCKS>
void store_products(const float* sums, const float* factor, int64_t rows, int64_t last, float* out, int64_t stride) {
  for (int64_t half = 0; half < 2 && half * TILE_ROWS < rows; half++) {
    const int64_t left = rows - half * TILE_ROWS, n = left < TILE_ROWS ? left : TILE_ROWS;
    for (int64_t b = 0; b < BLOCKS; b++) {
      const float* from = sums + (half * (BLOCKS == 3 ? 3 : 2) + b) * 256;
      float* to = out + half * TILE_ROWS + b * BLOCK * stride;
      store_sums(from, n, b == BLOCKS - 1 ? last : BLOCK, factor + half * TILE_ROWS, to, stride);
    }
  }
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

template <class T>
void products(const Matrix& w, int64_t first, int64_t last, const uint16_t* packed, int64_t vectors, float* out,
              int64_t stride) {
  const int64_t all = groups<typename T::F>(*w.w), padded = all * T::group;
  const int64_t chunk = std::min(columns_at_a_time(vectors) / T::group, all);
  Band<T> band(w, chunk);
  float* sums = static_cast<float*>(scratch(SLOT_SUMS, (ceil_div(vectors, PAIR) * SUMS + MOST_SUMS) * sizeof(float)));
  // Memory is fetched half while decoding and half while multiplying: at once it would keep all of the cache's buffers.
  constexpr int LINES = BAND / T::vectors / 2;
  const int64_t bytes = vectors > MOST ? LINE : LINE / 2;
  TileConfig(std::min<int64_t>(vectors, TILE_ROWS)).load();
  for (int64_t row = first; row < last; row += BAND) {
    band.start(row, std::min(last - row, BAND));
    for (int64_t g = 0; g < all; g += chunk) {
      const int64_t end = std::min(g + chunk, all), steps = (end - g) * T::vectors;
      band.decode(g, end, bytes);
      const uint8_t* soon = band.soon(g) + (end - g) * BAND / 2 * LINE;
      asm volatile("" ::: "memory");
      for_blocks(vectors, [&](auto blocks, int64_t v, int64_t narrow) {
        constexpr int N = blocks();
        const uint16_t* x[N];
        for (int b = 0; b < N; b++) {
          x[b] = packed + (v + b * BLOCK) * padded + g * T::group * (b == N - 1 ? narrow : BLOCK);
        }
        float* kept = sums + v / PAIR * SUMS;
        if (g == 0) clear_sums<N>();
        else if (vectors > MOST) load_sums<N>(kept);
        if (vectors > MOST) multiply<N, 0>(band.tiles, steps, x, narrow, nullptr);
        else multiply<N, LINES>(band.tiles, steps, x, narrow, soon);
        if (end == all || vectors > MOST) save_sums<N>(kept);
        if (end == all) store_products<N>(kept, band.factor, band.rows, narrow, out + v * stride + row - first, stride);
      });
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

constexpr Tiles TILES = {vector_bytes, pack_tiles, products_of_any, attend_by_amx};

}  // namespace

const Isa amx_isa = {"amx", packed_bytes, pack, dots_of_any, activate, add_scaled, store, load, read, attend, &TILES,
                     &avx512_int8};

}  // namespace tp
