// Formats by AVX-512 with VBMI. A group is 64 bytes, whose elements are looked up in tables; products and sums are
// float32: vdpbf16ps takes two cycles on Intel's cores, where two fused multiply-adds of the same products take one. See
// words.h for others.
#pragma once
#include <immintrin.h>

#include "delta_loops.h"
#include "dots.h"
#include "elementwise.h"

namespace tp {
namespace {

inline __mmask64 first_bytes(int64_t n) { return n > 0 ? _bzhi_u64(~0ull, static_cast<unsigned>(n < 64 ? n : 64)) : 0; }

inline __m512 even(__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
inline __m512 odd(__m512i v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(-65536))); }

// What groups of 64 bytes share. Elements are V pairs of float32 vectors; F::column(i) is the column of their i-th value.
template <int V>
struct Group {
  using X = float;
  using Raw = __m512i;
  using Sum = __m512;
  static constexpr int vectors = V, group = 32 * V, items = group, bytes = 64, sums = 12, shared = 1;
  struct Elements {
    __m512 value[2 * V];
  };

  static Raw load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Raw load_part(const uint8_t* p, int64_t n) { return _mm512_maskz_loadu_epi8(first_bytes(n), p); }

  static Sum dot(Sum sum, const Elements& e, const X* x) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * V; i++) sum = _mm512_fmadd_ps(e.value[i], _mm512_load_ps(x + 16 * i), sum);
    return sum;
  }

  static Sum add(Sum sum, const Elements& e, const X* x, __m512 scale) {
    return _mm512_fmadd_ps(dot(_mm512_setzero_ps(), e, x), scale, sum);
  }

  static float reduce(Sum sum) { return _mm512_reduce_add_ps(sum); }
  static void reduce(Sum a, Sum b, Sum c, Sum d, float* out) { store_sums({a, b, c, d}, out); }

  // The column of value i where vectors of 32 bfloat16 were split into even and odd words.
  static constexpr int word(int i) { return i / 32 * 32 + i % 16 * 2 + i % 32 / 16; }
};

struct E2m1Table {
  static constexpr tp_scale scale(int span) { return span == 16 ? TP_SCALE_E4M3 : TP_SCALE_E8M0; }
  alignas(64) static constexpr float value[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
};
struct Int4Table {
  static constexpr tp_scale scale(int) { return TP_SCALE_BF16; }
  alignas(64) static constexpr float value[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
};

// The bfloat16 of an e4m3 without its sign.
constexpr unsigned e4m3_bits(int code) {
  const int exponent = code >> 3, mantissa = code & 7;
  if (code == 127) return 0x7fc0;
  if (exponent) return static_cast<unsigned>((exponent + 120) << 7 | mantissa << 4);
  // mantissa · 2^−9, normalized: the highest bit of the mantissa becomes the hidden one.
  const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
  return mantissa ? static_cast<unsigned>((127 - 9 + top) << 7 | ((mantissa << (7 - top)) & 0x7f)) : 0u;
}

// A table of words by the 7 bits of an e4m3's size, their two bytes apart.
struct WordTable {
  alignas(64) uint8_t high[128], low[128];

  constexpr explicit WordTable(unsigned (*word)(int)) : high(), low() {
    for (int code = 0; code < 128; code++) {
      high[code] = static_cast<uint8_t>(word(code) >> 8);
      low[code] = static_cast<uint8_t>(word(code) & 0xff);
    }
  }

};

// Words whose bytes are in two tables, in the order that looked_up() says. The bits of `sign` are changed.
inline void look_up(const __m512i (&high)[2], const __m512i (&low)[2], __m512i codes, __m512i sign, __m512i (&words)[2]) {
  const __m512i highs = _mm512_xor_si512(sign, _mm512_permutex2var_epi8(high[0], codes, high[1]));
  const __m512i lows = _mm512_permutex2var_epi8(low[0], codes, low[1]);
  words[0] = _mm512_unpacklo_epi8(lows, highs);
  words[1] = _mm512_unpackhi_epi8(lows, highs);
}

inline void look_up(const WordTable& table, __m512i codes, __m512i sign, __m512i (&words)[2]) {
  const __m512i *high = reinterpret_cast<const __m512i*>(table.high), *low = reinterpret_cast<const __m512i*>(table.low);
  look_up({high[0], high[1]}, {low[0], low[1]}, codes, sign, words);
}

// The sizes of e4m3 as float32.
struct E4m3Values {
  alignas(64) float value[128];

  constexpr E4m3Values() : value() {
    for (int code = 0; code < 127; code++) {
      const int exponent = code >> 3, mantissa = code & 7;
      float v = static_cast<float>(exponent ? 8 + mantissa : mantissa) / 512;  // of exponent 0 and 1
      for (int e = 1; e < exponent; e++) v *= 2;
      value[code] = v;
    }
    value[127] = __builtin_nanf("");
  }
};

constexpr E4m3Values E4M3_VALUES;
constexpr WordTable E4M3_WORDS(e4m3_bits);

inline void decode_e4m3(__m512i codes, __m512i (&words)[2]) {
  look_up(E4M3_WORDS, codes, _mm512_and_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80))), words);
}

// A row of n scales as bfloat16, which holds exactly what a type of scales can be. Whole vectors are written.
template <tp_scale TYPE>
void to_words(const uint8_t* scales, int64_t n, uint16_t* out);

template <>
inline void to_words<TP_SCALE_E8M0>(const uint8_t* scales, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += 32) {
    const __m256i codes = _mm256_maskz_loadu_epi8(static_cast<__mmask32>(first_bytes(n - i)), scales + i);
    __m512i words = _mm512_max_epu16(_mm512_slli_epi16(_mm512_cvtepu8_epi16(codes), 7), _mm512_set1_epi16(0x0040));
    words = _mm512_mask_mov_epi16(words, _mm256_cmpeq_epi8_mask(codes, _mm256_set1_epi8(-1)), _mm512_set1_epi16(0x7fc0));
    _mm512_storeu_si512(out + i, words);
  }
}

template <>
inline void to_words<TP_SCALE_E4M3>(const uint8_t* scales, int64_t n, uint16_t* out) {
  const __m512i order = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  for (int64_t i = 0; i < n; i += 64) {
    __m512i words[2];
    decode_e4m3(_mm512_maskz_loadu_epi8(first_bytes(n - i), scales + i), words);
    _mm512_storeu_si512(out + i, _mm512_permutex2var_epi64(words[0], order, words[1]));
    const __m512i after = _mm512_add_epi64(order, _mm512_set1_epi64(4));
    _mm512_storeu_si512(out + i + 32, _mm512_permutex2var_epi64(words[0], after, words[1]));
  }
}

template <>
inline void to_words<TP_SCALE_BF16>(const uint8_t* scales, int64_t n, uint16_t* out) {
  std::memcpy(out, scales, n * sizeof *out);
}

// Each 32-bit word holds eight codes, of columns 8 · i … 8 · i + 7 for word i. The look-up takes the lowest four bits of
// a word: the lower codes of its four bytes come by loads from the next three bytes, which are cheaper than shifts.
template <class TABLE, int SPAN>
struct Nibbles : Group<4> {
  using Item = uint16_t;
  static constexpr int span = SPAN;
  struct Raw {
    __m512i from[4];  // byte 0 … 3
  };

  static Raw load(const uint8_t* p) {
    return {{_mm512_loadu_si512(p), _mm512_loadu_si512(p + 1), _mm512_loadu_si512(p + 2), _mm512_loadu_si512(p + 3)}};
  }

  static Raw load_part(const uint8_t* p, int64_t n) {
    return {{_mm512_maskz_loadu_epi8(first_bytes(n), p), _mm512_maskz_loadu_epi8(first_bytes(n - 1), p + 1),
             _mm512_maskz_loadu_epi8(first_bytes(n - 2), p + 2), _mm512_maskz_loadu_epi8(first_bytes(n - 3), p + 3)}};
  }

  static Elements decode(Raw raw) {
    const __m512 table = _mm512_load_ps(TABLE::value);
    Elements e;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      e.value[2 * i] = _mm512_permutexvar_ps(raw.from[i], table);
      e.value[2 * i + 1] = _mm512_permutexvar_ps(_mm512_srli_epi32(raw.from[i], 4), table);
    }
    return e;
  }

  static void read(const Matrix& w, int64_t grid_row, Item* out) {
    constexpr tp_scale type = TABLE::scale(SPAN);
    const int64_t n = w.w->grid_columns;
    to_words<type>(w.scale + grid_row * n * Matrix::scale_bytes(type), n, out);
  }

  // Lane i of a sum has columns 8 · i … 8 · i + 7. A bfloat16 is the high half of a float32.
  static __m512 scale(const Item* scales) {
    const __m128i few = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i high = _mm512_slli_epi32(_mm512_srli_epi32(lane, SPAN == 32 ? 2 : 1), 16);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, high, _mm512_castsi128_si512(few)));
  }

  static constexpr int column(int i) { return 8 * (i % 16) + i / 16; }
};

// Each eight columns of x as whole numbers times a power of two. The largest has 22 or 23 bits: bfloat16 up to 2^14 times
// smaller lose nothing. What others lose is no more than float32's sums do, in a vector without outliers; see Spread.
struct FixedPoint {
  int8_t digit[3][2][64];  // to base 256, −128 … 127; [most significant first][even and odd columns]
  int32_t start[16];       // the sum of eight times −OFFSET
  float scale[16];         // for twice the elements; negative in the first group of a vector that is not to be taken so
};

// A single vector: processors multiply bytes 64 at a time, of which one factor has no sign, and add up four products.
// Elements, doubled, are whole numbers; with OFFSET they have no sign.
constexpr int OFFSET = 16;

template <class TABLE, int SPAN>
struct Digits : Nibbles<TABLE, SPAN> {
  using X = FixedPoint;
  using Raw = __m512i;
  using Group<4>::load;
  using Group<4>::load_part;
  static constexpr int items = 1;
  struct Elements {
    __m512i even, odd;
  };
  struct Table {
    alignas(64) int8_t value[64];  // four times the same: the look-up takes six bits

    constexpr Table() : value() {
      for (int i = 0; i < 64; i++) value[i] = static_cast<int8_t>(2 * TABLE::value[i % 16] + OFFSET);
    }
  };

  static Elements decode(Raw raw) {
    static constexpr Table WHOLE;
    const __m512i table = _mm512_load_si512(WHOLE.value);
    return {_mm512_permutexvar_epi8(raw, table), _mm512_permutexvar_epi8(_mm512_srli_epi16(raw, 4), table)};
  }

  static __m512i dot(__m512i sum, const Elements& e, const int8_t (&digit)[2][64]) {
    sum = _mm512_dpbusd_epi32(sum, e.even, _mm512_load_si512(digit[0]));
    return _mm512_dpbusd_epi32(sum, e.odd, _mm512_load_si512(digit[1]));
  }

  static __m512 add(__m512 sum, const Elements& e, const X* x, __m512 scale) {
    const __m512i high = dot(_mm512_setzero_si512(), e, x->digit[0]), middle = dot(_mm512_setzero_si512(), e, x->digit[1]);
    const __m512i low = dot(_mm512_load_si512(x->start), e, x->digit[2]);
    const __m512i upper = _mm512_add_epi32(_mm512_slli_epi32(high, 8), middle);
    const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(upper, 8), low);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_mul_ps(scale, _mm512_load_ps(x->scale)), sum);
  }
};

// The code that a word of look_up() belongs to: interleaving within 128-bit lanes leaves codes 16 · l + i in vector 0 and
// 16 · l + 8 + i in vector 1, i < 8.
constexpr int looked_up(int word) { return word % 32 / 8 * 16 + word / 32 * 8 + word % 8; }

template <int SPAN>
struct Fp8 : Group<2> {
  using Item = float;
  static constexpr int span = SPAN;

  static Elements decode(Raw raw) {
    __m512i words[2];
    decode_e4m3(raw, words);
    return {{even(words[0]), odd(words[0]), even(words[1]), odd(words[1])}};
  }

  static void read(const Matrix& w, int64_t grid_row, Item* out) { read_scales(w, grid_row, SPAN, out); }

  // Lane i of a sum has columns of 16 · (i / 4) … + 15.
  static __m512 scale(const float* scales) {
    if (SPAN == 64) return _mm512_set1_ps(*scales);
    const __m512 two = _mm512_castps128_ps512(_mm_castpd_ps(_mm_load_sd(reinterpret_cast<const double*>(scales))));
    return _mm512_permutexvar_ps(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0), two);
  }

  static constexpr int column(int i) { return looked_up(word(i)); }
};

struct Bf16 : Group<1> {
  using Item = float;
  static constexpr int span = 0;

  static Elements decode(Raw raw) { return {{even(raw), odd(raw)}}; }
  static void read(const Matrix&, int64_t, Item*) {}
  static int scale(const Item*) { return 0; }
  static Sum add(Sum sum, const Elements& e, const X* x, int) { return dot(sum, e, x); }
  static constexpr int column(int i) { return word(i); }
};

template <class Call>
auto with_format(const tp_weight& w, Call&& call) {
  switch (w.format) {
    case TP_E2M1: return w.block_columns == 16 ? call(Nibbles<E2m1Table, 16>{}) : call(Nibbles<E2m1Table, 32>{});
    case TP_INT4: return call(Nibbles<Int4Table, 32>{});
    case TP_E4M3: return span_of(w, 64) == 64 ? call(Fp8<64>{}) : call(Fp8<32>{});
    default: return call(Bf16{});
  }
}

// 32 words of x from column `start` on; zeros behind its end.
inline __m512i load_words(const uint16_t* x, int64_t start, int64_t k) {
  const int64_t n = k - start;
  const __mmask32 words = n >= 32 ? ~0u : n > 0 ? _bzhi_u32(~0u, static_cast<unsigned>(n)) : 0;
  return _mm512_maskz_loadu_epi16(words, x + start);
}

// Words of a group in another order: words[i] of the result is word order[i] of `in`.
template <int V>
void permute(const __m512i (&in)[V], const uint16_t* order, __m512i (&out)[V]) {
  for (int v = 0; v < V; v++) {
    const __m512i index = _mm512_loadu_si512(order + 32 * v);
    if (V == 1) {
      out[v] = _mm512_permutexvar_epi16(index, in[0]);
    } else {
      out[v] = _mm512_permutex2var_epi16(in[0], index, in[V > 1]);
      const __m512i high = _mm512_permutex2var_epi16(in[V > 2 ? 2 : 0], index, in[V > 2 ? 3 : 0]);
      if (V > 2) out[v] = _mm512_mask_mov_epi16(out[v], _mm512_test_epi16_mask(index, _mm512_set1_epi16(64)), high);
    }
  }
}

template <class F>
struct Order {
  uint16_t column[F::group];

  constexpr Order() : column() {
    for (int i = 0; i < F::group; i++) column[i] = static_cast<uint16_t>(F::column(i));
  }
};

template <class F>
constexpr Order<F> ORDER;

// How a single vector is multiplied.
template <class F>
struct Single {
  using type = F;
  static constexpr bool digits = false;
};
template <class TABLE, int SPAN>
struct Single<Nibbles<TABLE, SPAN>> {
  using type = Digits<TABLE, SPAN>;
  static constexpr bool digits = true;
};

// A packed vector: float32, then digits where the format has a use for them.
template <class F>
int64_t float_bytes(const tp_weight& w) {
  return groups<F>(w) * F::group * int64_t{sizeof(float)};
}

int64_t packed_bytes(const tp_weight& w) {
  return with_format(w, [&](auto f) {
    using F = decltype(f);
    return float_bytes<F>(w) + (Single<F>::digits ? groups<F>(w) * int64_t{sizeof(FixedPoint)} : 0);
  });
}

template <class F>
void pack_words(const uint16_t* x, int64_t start, int64_t k, float* out) {
  __m512i plain[F::vectors], words[F::vectors];
  for (int v = 0; v < F::vectors; v++) plain[v] = load_words(x, start + 32 * v, k);
  permute(plain, ORDER<F>.column, words);
  for (int v = 0; v < F::vectors; v++) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(words[v]));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words[v], 1));
    _mm512_store_si512(out + 32 * v, _mm512_slli_epi32(low, 16));
    _mm512_store_si512(out + 32 * v + 16, _mm512_slli_epi32(high, 16));
  }
}

template <class F>
void pack_floats(const float* x, int64_t start, int64_t k, float* out) {
  for (int i = 0; i < F::group; i++) out[i] = start + F::column(i) < k ? x[start + F::column(i)] : 0.0f;
}

// 16 columns of x as float32, zeros behind its end.
inline __m512 load_floats(const void* x, int32_t dtype, int64_t start, int64_t k) {
  const __mmask16 left = static_cast<__mmask16>(k - start >= 16 ? 0xffff : k > start ? (1u << (k - start)) - 1 : 0);
  if (dtype == TP_FLOAT) return _mm512_maskz_loadu_ps(left, static_cast<const float*>(x) + start);
  const __m256i words = _mm256_maskz_loadu_epi16(left, static_cast<const uint16_t*>(x) + start);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

// Results of an operation of two vectors among each eight lanes, in all of these lanes.
template <class V, class Operation>
V of_eight(V v, Operation&& operation) {
  v = operation(v, reinterpret_cast<V>(_mm512_shuffle_epi32(reinterpret_cast<__m512i>(v), _MM_PERM_CDAB)));
  v = operation(v, reinterpret_cast<V>(_mm512_shuffle_epi32(reinterpret_cast<__m512i>(v), _MM_PERM_BADC)));
  return operation(v, reinterpret_cast<V>(_mm512_shuffle_i64x2(reinterpret_cast<__m512i>(v), reinterpret_cast<__m512i>(v), 0xb1)));
}

// Exponents of the largest of each eight columns. An outlier takes bits from its neighbours, which matters where it meets
// a weight of zero: the largest may be 2^8 times as large as the geometric mean. Vectors of nothing but very small values,
// and of what is no number, are left to float32, too.
class Spread {
 public:
  void add(__m512i exponent, __mmask16 lanes) {
    largest_ = _mm512_max_epi32(largest_, exponent);
    sum_ = _mm512_mask_add_epi32(sum_, lanes, sum_, exponent);
    count_ += __builtin_popcount(lanes);
  }

  bool is_narrow() const {
    constexpr int LEAST = 60, MOST = 254, APART = 8;
    const int64_t largest = _mm512_reduce_max_epi32(largest_), sum = _mm512_reduce_add_epi32(sum_);
    return !count_ || (largest >= LEAST && largest <= MOST && largest * count_ <= sum + APART * count_);
  }

 private:
  __m512i largest_ = _mm512_setzero_si512(), sum_ = _mm512_setzero_si512();
  int64_t count_ = 0;
};

// Columns 16 · i … 16 · i + 15 of a group: their digits in the order of columns, [digit][column].
inline void to_digits(__m512 x, int i, uint8_t (&digits)[3][128], FixedPoint& out, Spread& spread) {
  const __m512i size = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  const __m512i largest = of_eight(size, [](__m512i a, __m512i b) { return _mm512_max_epu32(a, b); });
  // Rounded up where the highest digit could become 128; what is smaller than 2^−100 counts as that.
  __m512i exponent = _mm512_srli_epi32(_mm512_add_epi32(largest, _mm512_set1_epi32(0x20000)), 23);
  spread.add(exponent, _mm512_test_epi32_mask(largest, largest));
  exponent = _mm512_max_epi32(exponent, _mm512_set1_epi32(27));
  const __m512i unit = _mm512_slli_epi32(_mm512_sub_epi32(exponent, _mm512_set1_epi32(22)), 23);
  const __m512i inverse = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(276), exponent), 23);
  const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_castsi512_ps(inverse)));
  __m512i left = whole;
  for (int d = 2; d >= 0; d--) {
    _mm_store_si128(reinterpret_cast<__m128i*>(digits[d] + 16 * i), _mm512_cvtepi32_epi8(left));
    left = _mm512_srai_epi32(_mm512_add_epi32(left, _mm512_set1_epi32(128)), 8);
  }
  const __m512i sum = of_eight(whole, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
  const __m512i start = _mm512_mullo_epi32(sum, _mm512_set1_epi32(-OFFSET));
  const __m512 scale = _mm512_mul_ps(_mm512_castsi512_ps(unit), _mm512_set1_ps(0.5f));
  _mm512_mask_compressstoreu_epi32(out.start + 2 * i, 0x0101, start);
  _mm512_mask_compressstoreu_ps(out.scale + 2 * i, 0x0101, scale);
}

inline void pack_group(const void* x, int32_t from, int64_t start, int64_t k, FixedPoint& out, Spread& spread) {
  alignas(64) uint8_t digits[3][128];
  for (int i = 0; i < 8; i++) to_digits(load_floats(x, from, start + 16 * i, k), i, digits, out, spread);
  for (int d = 0; d < 3; d++) {
    const __m512i low = _mm512_load_si512(digits[d]), high = _mm512_load_si512(digits[d] + 64);
    for (int odd = 0; odd < 2; odd++) {
      const __m256i a = _mm512_cvtepi16_epi8(_mm512_srli_epi16(low, 8 * odd));
      const __m256i b = _mm512_cvtepi16_epi8(_mm512_srli_epi16(high, 8 * odd));
      _mm512_store_si512(out.digit[d][odd], _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
    }
  }
}

inline void pack_digits(const void* x, int32_t from, int64_t k, FixedPoint* out) {
  Spread spread;
  for (int64_t start = 0; start < k; start += 128) pack_group(x, from, start, k, out[start / 128], spread);
  if (!spread.is_narrow()) out->scale[0] = -1;
}

void pack(const tp_weight& w, const void* x, int32_t from, void* out) {
  with_format(w, [&](auto f) {
    using F = decltype(f);
    float* packed = static_cast<float*>(out);
    for (int64_t start = 0; start < w.k; start += F::group) {
      if (from == TP_BFLOAT16) pack_words<F>(static_cast<const uint16_t*>(x), start, w.k, packed + start);
      else pack_floats<F>(static_cast<const float*>(x), start, w.k, packed + start);
    }
    if (Single<F>::digits) pack_digits(x, from, w.k, reinterpret_cast<FixedPoint*>(static_cast<char*>(out) + float_bytes<F>(w)));
  });
}

void dots_of_any(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, float* out,
                 int64_t stride) {
  with_format(*w.w, [&](auto f) {
    using F = decltype(f);
    const void* digits = static_cast<const char*>(*xs) + float_bytes<F>(*w.w);
    if (Single<F>::digits && vectors == 1 && static_cast<const FixedPoint*>(digits)->scale[0] >= 0) {
      return dots<typename Single<F>::type, 1>(w, first, last, &digits, out, stride);
    }
    dots_of<F>(w, first, last, xs, vectors, out, stride);
  });
}

}  // namespace
}  // namespace tp
