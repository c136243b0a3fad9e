// How formats are decoded to AMX's tiles of 16 rows × 32 bfloat16, with their scales.
#pragma once
#include "avx512.h"

namespace tp {
namespace {

constexpr int TILE_ROWS = 16, STEP = 32;      // of a tile of weights: rows, and columns of bfloat16
constexpr int TILE = TILE_ROWS * STEP;        // its items
constexpr int64_t BAND = 2 * TILE_ROWS;       // rows worked on at a time
constexpr int64_t LINE = 64;                  // bytes that memory gives at once, as many as a group has of a row

// 32 values of x from column `start` on as bfloat16, float32 rounded to it; zeros behind its end.
inline __m512i load_rounded(const void* x, int32_t dtype, int64_t start, int64_t k) {
  if (dtype == TP_BFLOAT16) return load_words(static_cast<const uint16_t*>(x), start, k);
  const __m512 low = load_floats(x, dtype, start, k), high = load_floats(x, dtype, start + 16, k);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

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

  static constexpr int column(int i) { return looked_up(i); }

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

// A table of 16 words for a look-up that takes five bits.
inline __m512i twice(const uint16_t* table) {
  return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(table)));
}

inline __m512i nibbles(FourCodes::Raw raw, const uint16_t* table, int j) {
  const __m512i words = j < 2 ? raw.low : raw.high;
  return _mm512_permutexvar_epi16(j % 2 ? _mm512_mulhi_epu16(words, _mm512_set1_epi16(1 << 12)) : words, twice(table));
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

// What is fetched while other memory is worked on, in four streams: one alone has too few lines on their way.
struct Ahead {
  const uint8_t* data;
  int64_t quarter;

  static constexpr int STREAMS = 4;

  void fetch(int64_t i) const { __builtin_prefetch(data + i % STREAMS * quarter + i / STREAMS * LINE, 0, 2); }

  template <int FIRST, int LAST>
  void fetch() const {
#pragma GCC unroll 16
    for (int i = FIRST; i < LAST; i++) fetch(i);
  }

  // What follows so many lines, a multiple of the streams.
  Ahead behind(int64_t lines) const { return {data + lines / STREAMS * LINE, quarter}; }
};

// Rows of a weight on their way to tiles.
template <class T>
class Band {
 public:
  // Which of a thread's bands that are open at once it is.
  Band(const Matrix& matrix, int64_t chunk_groups, int which)
      : w_(matrix),
        groups_(groups<typename T::F>(*matrix.w)),
        bytes_(ceil_div(matrix.w->k * T::bytes, T::group)),
        scale_items_(groups_ * ITEMS<T> + (ITEMS<T> > 1 ? 2 * SLACK : 0)) {
    const size_t scale_bytes = (BAND + 1) * scale_items_ * sizeof(typename T::Item);
    scales_ = static_cast<typename T::Item*>(scratch(which ? SLOT_SCALES_TOO : SLOT_SCALES, scale_bytes));
    // What lies behind a row's end, where a last group may look, must be finite.
    if (ITEMS<T> > 1) std::memset(scales_, 0, scale_bytes);
    tiles = static_cast<uint16_t*>(scratch(SLOT_TILE, BAND * chunk_groups * T::group * sizeof(uint16_t)));
  }

  // Rows from `row` on; those behind them have a factor of zero. `next` is what is read after them, as many bytes.
  void start(int64_t row, int64_t count, const uint8_t* next) {
    rows = count;
    data_ = w_.row(row);
    ahead = {next, BAND / Ahead::STREAMS * w_.w->row_bytes};
    for (int64_t r = 0; r < count; r++) {
      if (w_.go_to(row + r, place_)) {
        numbers_ = T::read(w_, w_.scale_row(place_, row + r), scales_ + ++read_ % (BAND + 1) * scale_items_);
      }
      row_scales_[r] = scales_ + read_ % (BAND + 1) * scale_items_;
      factor[r] = numbers_ ? place_.global : __builtin_nanf("");
    }
    for (int64_t r = count; r < BAND; r++) factor[r] = 0;
  }

  // Tiles of groups first … last − 1, those of a step for both halves of the band side by side. For every row of a group
  // a line of what is ahead is fetched, or for every other one.
  template <int EVERY>
  void decode(int64_t first, int64_t last) const {
    int64_t line = first * BAND;
    for (int64_t g = first; g < last; g++, line += BAND / EVERY) {
      uint16_t* out = tiles + (g - first) * T::vectors * 2 * TILE;
      const int64_t left = bytes_ - g * T::bytes;
      if (left > T::bytes) decode_group<EVERY>(g, line, out, [](const uint8_t* p) { return T::load(p); });
      else decode_group<EVERY>(g, line, out, [left](const uint8_t* p) { return T::load_part(p, left); });
    }
  }

  uint16_t* tiles;
  Ahead ahead{};
  float factor[BAND];
  int64_t rows = 0;

 private:
  // A group's columns of all rows, which are rows of tiles.
  template <int EVERY, class Load>
  void decode_group(int64_t g, int64_t line, uint16_t* out, Load&& load) const {
    const uint8_t* p = data_ + g * T::bytes;
    for (int64_t r = 0; r < rows; r++, p += w_.w->row_bytes, out += STEP) {
      if (r % EVERY == 0) ahead.fetch(line + r / EVERY);
      __m512i words[T::vectors];
      T::decode(load(p), row_scales_[r] + g * ITEMS<T>, words);
#pragma GCC unroll 4
      for (int v = 0; v < T::vectors; v++) _mm512_store_si512(out + v * 2 * TILE, words[v]);
    }
  }

  const Matrix& w_;
  const int64_t groups_, bytes_, scale_items_;
  typename T::Item* scales_;  // [BAND + 1]: those that the last band ended with, and one for each row
  const typename T::Item* row_scales_[BAND];
  const uint8_t* data_ = nullptr;
  Matrix::Place place_{};
  int64_t read_ = 0;  // rows of scales
  bool numbers_ = true;
};

}  // namespace
}  // namespace tp
