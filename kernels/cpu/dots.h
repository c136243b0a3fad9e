// Products of packed rows with a few vectors, for any format F of an instruction set:
//
//   F::X, F::items        item of a packed vector, and how many of them a group has
//   F::group, F::bytes    columns worked on at a time, and the bytes they take in a row
//   F::sums               sums that registers are left for: as many rows are worked on at a time, but no more than four
//   F::shared             rows for which vectors are read once, where as many are worked on
//   F::span               columns that one item of a row of scales stands for; 0 without scales
//   F::Item, F::read      item of a row of scales, and how a row is read
//   F::load, F::load_part the raw bytes of a group, whole or cut short (filled up with zeros)
//   F::decode             raw bytes -> elements without their scales
//   F::scale              scales of a group -> what add() takes
//   F::add                sum + (elements · x) × scale
//   F::reduce             a sum's lanes -> float; also those of four at once, where four rows are worked on
//   F::column             which column of a group the i-th item of a packed vector is
#pragma once
#include <utility>

#include "isa.h"
#include "scales.h"
#include "threads.h"

namespace tp {
namespace {

constexpr int64_t AHEAD = 8192;  // bytes of a weight fetched ahead of their use; hardware stops at a page's end
constexpr int SLACK = 64;        // items behind a row of scales

template <class F>
int64_t groups(const tp_weight& w) {
  return ceil_div(w.k, F::group);
}

template <class F>
constexpr int SCALES = F::span ? F::group / (F::span ? F::span : 1) : 0;  // of a group

// Room for rows of scales; what lies behind a row's end, where a last group may look, is zero.
template <class F>
typename F::Item* scale_rows(const tp_weight& w, int64_t rows, int64_t& stride) {
  stride = groups<F>(w) * SCALES<F> + SLACK;
  const size_t size = rows * stride * sizeof(typename F::Item);
  void* items = scratch(SLOT_SCALES, size);
  std::memset(items, 0, size);
  return static_cast<typename F::Item*>(items);
}

// Products of R rows with M vectors. The vectors are a parameter pack and not a loop, so that the compiler sees sums with
// constant indices and keeps them in registers.
template <class F, int R, class V>
struct Together;

template <class F, int R, int... V>
struct Together<F, R, std::integer_sequence<int, V...>> {
  static constexpr int count = sizeof...(V), SHARED = R % F::shared ? 1 : F::shared;
  using X = typename F::X;
  using Sum = typename F::Sum;
  using Item = typename F::Item;

  const uint8_t* data[R];
  const Item* scales[R];

  // Group g of rows r … r + SHARED − 1. What they have of a vector is read once.
  template <class Load>
  __attribute__((always_inline)) void add(Sum (&sum)[R][count], const X* const (&x)[count], int64_t g, int r,
                                          Load&& load) const {
    decltype(F::decode(load(data[0]))) elements[SHARED];
    decltype(F::scale(scales[0])) scale[SHARED];
#pragma GCC unroll 4
    for (int i = 0; i < SHARED; i++) {
      elements[i] = F::decode(load(data[r + i] + g * F::bytes));
      scale[i] = F::scale(scales[r + i] + g * SCALES<F>);
    }
    (add_vector<V>(sum, x[V] + g * F::items, r, elements, scale), ...);
  }

  template <int VECTOR, class Elements, class Scale>
  __attribute__((always_inline)) static void add_vector(Sum (&sum)[R][count], const X* x, int r,
                                                        const Elements (&elements)[SHARED], const Scale (&scale)[SHARED]) {
#pragma GCC unroll 4
    for (int i = 0; i < SHARED; i++) sum[r + i][VECTOR] = F::add(sum[r + i][VECTOR], elements[i], x, scale[i]);
  }

  // Rows of `size` bytes; out[v][r] are the sums over all columns.
  void multiply(int64_t size, const void* const* xs, float (&out)[count][R]) const {
    const X* const x[count] = {static_cast<const X*>(xs[V])...};
    Sum sum[R][count] = {};
    // The last group is read as if it were cut short: nothing behind a row's end is touched by any format.
    const int64_t whole = (size - 1) / F::bytes;
    for (int64_t g = 0; g < whole; g++) {
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) __builtin_prefetch(data[r] + g * F::bytes + AHEAD / R);
#pragma GCC unroll 4
      for (int r = 0; r < R; r += SHARED) add(sum, x, g, r, [](const uint8_t* p) { return F::load(p); });
    }
    const int64_t left = size - whole * F::bytes;
#pragma GCC unroll 4
    for (int r = 0; r < R; r += SHARED) add(sum, x, whole, r, [left](const uint8_t* p) { return F::load_part(p, left); });
    if constexpr (R == 4) {
      (F::reduce(sum[0][V], sum[1][V], sum[2][V], sum[3][V], out[V]), ...);
    } else {
      for (int r = 0; r < R; r++) ((out[V][r] = F::reduce(sum[r][V])), ...);
    }
  }
};

// Rows worked on at a time.
template <class F, int M>
constexpr int ROWS = F::sums >= 4 * M ? 4 : F::sums >= 2 * M ? 2 : 1;

// Rows far apart are worked on together: memory gives several streams faster than one.
template <class F, int M>
void dots(const Matrix& matrix, int64_t first, int64_t last, const void* const* xs, float* out, int64_t stride) {
  constexpr int R = ROWS<F, M>;
  // A copy that no store can change, as far as the compiler knows: what is the same for all rows is computed once.
  const tp_weight weight = *matrix.w;
  const Matrix w = matrix.as(weight);
  const int64_t size = ceil_div(w.w->k * F::bytes, F::group), apart = ceil_div(last - first, R);
  int64_t scale_stride;
  typename F::Item* scales = scale_rows<F>(*w.w, R, scale_stride);
  Matrix::Place place[R] = {};
  Together<F, R, std::make_integer_sequence<int, M>> rows;
  for (int64_t i = 0; i < apart; i++) {
    int64_t row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      row[r] = first + r * apart + i;
      if (row[r] >= last) row[r] = last - 1;  // once more
      rows.data[r] = w.data + row[r] * w.w->row_bytes;
      rows.scales[r] = scales + r * scale_stride;
      if (w.go_to(row[r], place[r])) F::read(w, w.scale_row(place[r], row[r]), scales + r * scale_stride);
      w.fetch_scales(row[r] + 1);
    }
    float products[M][R];
    rows.multiply(size, xs, products);
    for (int v = 0; v < M; v++) {
      for (int r = 0; r < R; r++) out[v * stride + row[r] - first] = products[v][r] * place[r].global;
    }
  }
}

template <class F>
void dots_of(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, float* out, int64_t stride) {
  static_assert(MAX_BATCH == 8, "one case per number of vectors");
  switch (vectors) {
    case 1: return dots<F, 1>(w, first, last, xs, out, stride);
    case 2: return dots<F, 2>(w, first, last, xs, out, stride);
    case 3: return dots<F, 3>(w, first, last, xs, out, stride);
    case 4: return dots<F, 4>(w, first, last, xs, out, stride);
    case 5: return dots<F, 5>(w, first, last, xs, out, stride);
    case 6: return dots<F, 6>(w, first, last, xs, out, stride);
    case 7: return dots<F, 7>(w, first, last, xs, out, stride);
    case 8: return dots<F, 8>(w, first, last, xs, out, stride);
  }
}

}  // namespace
}  // namespace tp
