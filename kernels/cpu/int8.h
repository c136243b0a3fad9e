// Products of FP4 and INT4 weights with vectors in int8: blocks of 32 columns under one float32 scale, the largest
// magnitude / 127, to which values are rounded, ties to even. What is not finite makes its block NaN.
//
// Sums of a block are whole numbers, so that only float32's sums of blocks depend on the order of columns. A set of
// instructions has formats Codes<TABLE, SPAN>, as dots.h describes them, whose packed vectors are Int8Groups.
#pragma once
#include "dots.h"
#include "elementwise.h"

namespace tp {
namespace {

constexpr int64_t INT8_BLOCK = 32;
constexpr int LIFT = 16;  // elements, doubled, are whole numbers; with this they have no sign

struct E2m1Codes {
  static constexpr int doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};
struct Int4Codes {
  static constexpr int doubled[16] = {0, 2, 4, 6, 8, 10, 12, 14, -16, -14, -12, -10, -8, -6, -4, -2};
};

// Elements by their codes, four times the same: some look-ups take six bits.
template <class TABLE>
struct Lifted {
  alignas(64) uint8_t value[64];

  constexpr Lifted() : value() {
    for (int i = 0; i < 64; i++) value[i] = static_cast<uint8_t>(TABLE::doubled[i % 16] + LIFT);
  }
};
template <class TABLE>
constexpr Lifted<TABLE> LIFTED;

// 8 · LANES columns. Those of lane i are 8 · i … 8 · i + 7: even ones at code[0][4 · i], odd ones at code[1][4 · i].
template <int LANES>
struct alignas(4 * LANES) Int8Group {
  int8_t code[2][4 * LANES];
  int32_t start[LANES];      // −LIFT times the sum of a lane's codes: what LIFT adds is gone before sums are rounded
  float scale[LANES];        // of doubled elements
  int32_t total[LANES / 2];  // the starts of all columns under a scale of the weight, added up
};

// Codes of a block; its scale.
inline float quantize(const float* x, int32_t* code) {
  constexpr float SMALLEST = 1.17549435e-38f, ROUNDER = 12582912.0f;  // 1.5 · 2^23: a sum's low bits are a whole number
  uint32_t largest = 0;
  for (int i = 0; i < INT8_BLOCK; i++) {
    const uint32_t size = as_bits(x[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  const bool finite = largest < 0x7f800000u;
  const float wanted = as_float(largest) / 127.0f, scale = wanted > SMALLEST ? wanted : SMALLEST;
  for (int i = 0; i < INT8_BLOCK; i++) {
    code[i] = finite ? static_cast<int32_t>(as_bits(x[i] / scale + ROUNDER) - as_bits(ROUNDER)) : 0;
  }
  return finite ? scale : __builtin_nanf("");
}

// The block of columns that begins with a lane; span: columns under a scale of the weight.
template <int LANES>
void pack_block(const float* x, int lane, int span, Int8Group<LANES>& out) {
  int32_t code[INT8_BLOCK];
  const float scale = quantize(x, code);
  for (int i = 0; i < INT8_BLOCK; i++) out.code[i % 2][4 * lane + i / 2] = static_cast<int8_t>(code[i]);
  for (int i = 0; i < INT8_BLOCK; i += span) out.total[(8 * lane + i) / span] = 0;
  for (int i = 0; i < INT8_BLOCK; i += 8, lane++) {
    int32_t start = 0;
    for (int j = i; j < i + 8; j++) start -= LIFT * code[j];
    out.start[lane] = start;
    out.scale[lane] = 0.5f * scale;
    out.total[8 * lane / span] += start;
  }
}

// x as float32, with zeros up to a multiple of `columns`; how many that makes.
inline int64_t load_blocks(const tp_weight& w, const void* x, int32_t from, int64_t columns, float* out) {
  const int64_t size = ceil_div(w.k, columns) * columns;
  load(x, from, out, w.k);
  for (int64_t i = w.k; i < size; i++) out[i] = 0;
  return size;
}

// LANES rows side by side, decoded once for many vectors: lane r of a sum is row r, and each lane of a vector meets
// elements of all rows. A format says how:
//
//   F::transpose   raw bytes of LANES rows -> those of the rows' first eight columns, of their next eight, …
//   F::whole, dot  a sum that starts with a number, and with 16 columns of a vector from a lane on
//   F::add_rows    sum + whole × scales of the rows × scale of the vector
//   F::scaled      a sum's rows times their factors, to memory
template <class F>
class Band {
 public:
  using X = typename F::X;
  using Raw = typename F::Raw;
  using Elements = typename F::Elements;
  static constexpr int ROWS = F::LANES;

  explicit Band(const Matrix& w)
      : w_(w),
        groups_(groups<F>(*w.w)),
        scales_of_row_(ceil_div(groups_ * SCALES<F>, ROWS) * ROWS),
        elements_(static_cast<Elements*>(scratch(SLOT_TILE, groups_ * ROWS * sizeof(Elements)))),
        row_scales_(static_cast<float*>(scratch(SLOT_SCALES, ROWS * scales_of_row_ * sizeof(float)))),
        scales_(static_cast<float*>(scratch(SLOT_SUMS, ROWS * scales_of_row_ * sizeof(float)))) {
    std::memset(row_scales_, 0, ROWS * scales_of_row_ * sizeof(float));
  }

  // Rows from `row` on; the last one of `rows` stands for those that are not there.
  void decode(int64_t row, int64_t rows) {
    const uint8_t *codes[ROWS], *scales[ROWS];
    for (int r = 0; r < ROWS; r++) {
      const int64_t here = row + (r < rows ? r : rows - 1);
      const Matrix::Place place = w_.place(here);
      factors_[r] = place.global;
      codes[r] = w_.data + here * w_.w->row_bytes;
      read_scales(w_, w_.scale_row(place, here), F::span, row_scales_ + r * scales_of_row_);
      scales[r] = reinterpret_cast<const uint8_t*>(row_scales_ + r * scales_of_row_);
    }
    side_by_side(codes, ceil_div(w_.w->k, 2), ROWS * w_.w->row_bytes,
                 [&](int64_t i, const Raw& words) { elements_[i] = F::decode(words); });
    side_by_side(scales, scales_of_row_ * sizeof(float), 0,
                 [&](int64_t i, const Raw& words) { std::memcpy(scales_ + i * ROWS, &words, sizeof words); });
  }

  // out[v · stride + r] of V … vectors.
  template <int... V>
  void multiply(std::integer_sequence<int, V...>, const Vectors& xs, int64_t first, float* out, int64_t stride) const {
    const X* const x[] = {vector(xs, first + V)...};
    typename F::Sum sum[sizeof...(V)] = {};
    for (int64_t g = 0; g < groups_; g++) {
#pragma GCC unroll 8
      for (int s = 0; s < SCALES<F>; s++) {
        constexpr int lanes = F::span / 8;
        typename F::Whole whole[] = {F::whole(x[V][g].total[s])...};
#pragma GCC unroll 2
        for (int lane = s * lanes; lane < (s + 1) * lanes; lane += 2) {
          ((whole[V] = F::dot(whole[V], elements_ + g * F::LANES + lane, x[V] + g, lane)), ...);
        }
        const float* scales = scales_ + (g * SCALES<F> + s) * ROWS;
        ((sum[V] = F::add_rows(sum[V], whole[V], scales, x[V][g].scale[s * lanes])), ...);
      }
    }
    (F::scaled(sum[V], factors_, out + V * stride), ...);
  }

 private:
  static const X* vector(const Vectors& xs, int64_t i) {
    return reinterpret_cast<const X*>(xs.data + (xs.which ? xs.which[i] : i) * xs.bytes);
  }

  // Calls work(i, words) with the i-th four bytes of all rows, which have `size` bytes; fetches what is `ahead`.
  template <class Work>
  static void side_by_side(const uint8_t* const (&rows)[ROWS], int64_t size, int64_t ahead, Work&& work) {
    for (int64_t at = 0; at < size; at += F::bytes) {
      Raw raw[ROWS];
      for (int r = 0; r < ROWS; r++) {
        const uint8_t* p = rows[r] + at;
        __builtin_prefetch(p + ahead);
        raw[r] = size - at > F::bytes ? F::load(p) : F::load_part(p, size - at);
      }
      F::transpose(raw);
      for (int i = 0; i < ROWS; i++) work(at / 4 + i, raw[i]);
    }
  }

  const Matrix& w_;
  const int64_t groups_, scales_of_row_;
  Elements* const elements_;                 // [lane of all groups], of all rows
  float *const row_scales_, *const scales_;  // [row][scale of it], and the other way round
  float factors_[ROWS];
};

// Products of a band with up to F::at_once vectors from `first` on.
template <class F, int... N>
void multiply(const Band<F>& band, std::integer_sequence<int, N...>, const Vectors& xs, int64_t first, int64_t count,
              float* out, int64_t stride) {
  ((count == N + 1 ? band.multiply(std::make_integer_sequence<int, N + 1>(), xs, first, out, stride) : void()), ...);
}

// As dots, of many vectors.
template <class F>
void dots_by_bands(const Matrix& w, int64_t first, int64_t last, const Vectors& xs, int64_t count, float* out,
                   int64_t stride) {
  constexpr int64_t ROWS = Band<F>::ROWS, ONCE = F::at_once;
  Band<F> band(w);
  for (int64_t row = first; row < last; row += ROWS) {
    const int64_t rows = last - row < ROWS ? last - row : ROWS;
    band.decode(row, rows);
    for (int64_t v = 0; v < count; v += ONCE) {
      const int64_t n = count - v < ONCE ? count - v : ONCE;
      float* to = out + v * stride + row - first;
      if (rows == ROWS) {
        multiply(band, std::make_integer_sequence<int, ONCE>(), xs, v, n, to, stride);
        continue;
      }
      float whole[ONCE * ROWS];
      multiply(band, std::make_integer_sequence<int, ONCE>(), xs, v, n, whole, ROWS);
      for (int64_t i = 0; i < n; i++) std::memcpy(to + i * stride, whole + i * ROWS, rows * sizeof(float));
    }
  }
}

// The functions of Int8 by the formats of an instruction set.
template <template <class, int> class Codes>
struct Int8Of {
  template <class Call>
  static auto with_codes(const tp_weight& w, Call&& call) {
    if (w.format == TP_INT4) return call(Codes<Int4Codes, 32>{});
    return w.block_columns == 16 ? call(Codes<E2m1Codes, 16>{}) : call(Codes<E2m1Codes, 32>{});
  }

  static int64_t packed_bytes(const tp_weight& w) {
    using F = Codes<E2m1Codes, 32>;
    return groups<F>(w) * int64_t{sizeof(typename F::X)};
  }

  static void pack(const tp_weight& w, const void* x, int32_t from, void* out) {
    using F = Codes<E2m1Codes, 32>;
    float* plain = static_cast<float*>(scratch(SLOT_PLAIN, groups<F>(w) * F::group * sizeof(float)));
    const int64_t size = load_blocks(w, x, from, F::group, plain);
    typename F::X* packed = static_cast<typename F::X*>(out);
    for (int64_t i = 0; i < size; i += INT8_BLOCK) {
      const int lane = static_cast<int>(i % F::group / 8), span = static_cast<int>(w.block_columns);
      pack_block(plain + i, lane, span, packed[i / F::group]);
    }
  }

  static void dots(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, float* out,
                   int64_t stride) {
    with_codes(*w.w, [&](auto f) { dots_of<decltype(f)>(w, first, last, xs, vectors, out, stride); });
  }

  static void products(const Matrix& w, int64_t first, int64_t last, const Vectors& xs, int64_t count, float* out,
                       int64_t stride) {
    with_codes(*w.w, [&](auto f) { dots_by_bands<decltype(f)>(w, first, last, xs, count, out, stride); });
  }
};

}  // namespace
}  // namespace tp
