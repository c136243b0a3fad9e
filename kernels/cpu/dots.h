// Products of packed rows with a few vectors, for any format F of an instruction set:
//
//   F::X                  item of a packed vector
//   F::group, F::bytes    columns worked on at a time, and the bytes they take in a row
//   F::span               columns that one item of a row of scales stands for; 0 without scales
//   F::load, F::load_part the raw bytes of a group, whole or cut short (filled up with zeros)
//   F::decode             raw bytes -> elements without their scales
//   F::scale              scales of a group -> what add() takes
//   F::add                sum + (elements · x) × scale
//   F::reduce             a sum's lanes -> float
//   F::arrange            columns of a group, in order -> as items of a packed vector
#pragma once
#include "isa.h"
#include "scales.h"
#include "threads.h"

namespace tp {
namespace {

constexpr int64_t AHEAD = 4096;  // bytes of a weight fetched ahead of their use; hardware stops at a page's end

template <class F>
int64_t groups(const tp_weight& w) {
  return ceil_div(w.k, F::group);
}

template <class F, int M>
struct Rows {
  typename F::Sum sum[M];
  const typename F::X* x[M];

  void add(int64_t g, typename F::Raw raw, const float* scales) {
    const auto elements = F::decode(raw);
    const auto scale = F::scale(scales + g * (F::span ? F::group / F::span : 0));
    for (int v = 0; v < M; v++) sum[v] = F::add(sum[v], elements, x[v] + g * F::group, scale);
  }

  // One row: `size` bytes at `data`.
  void multiply(const uint8_t* data, int64_t size, const float* scales) {
    for (int v = 0; v < M; v++) sum[v] = typename F::Sum{};
    const int64_t whole = size / F::bytes;
    for (int64_t g = 0; g < whole; g++) {
      __builtin_prefetch(data + g * F::bytes + AHEAD);
      add(g, F::load(data + g * F::bytes), scales);
    }
    if (whole * F::bytes < size) add(whole, F::load_part(data + whole * F::bytes, size - whole * F::bytes), scales);
  }
};

template <class F, int M>
void dots(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int parts, float* out, int64_t stride) {
  Rows<F, M> rows;
  for (int v = 0; v < M; v++) rows.x[v] = static_cast<const typename F::X*>(xs[v]);
  const int64_t size = ceil_div(w.w->k * F::bytes, F::group);
  float* scales = F::span ? scale_buffer(*w.w, F::group, F::span ? F::span : 1) : nullptr;
  Matrix::Place place{0, first, 0};
  for (int64_t row = first; row < last; row++) {
    if (row == place.end) {
      place = w.place(row);
      if (F::span) read_scales(w, place.grid_row, F::span ? F::span : 1, scales);
    }
    rows.multiply(w.data + row * w.w->row_bytes, size, scales);
    for (int v = 0; v < M; v += parts) {
      float total = 0;
      for (int part = v; part < v + parts && part < M; part++) total += F::reduce(rows.sum[part]);
      out[v / parts * stride + row - first] = total * place.global;
    }
  }
}

template <class F>
void dots_of(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, int parts, float* out,
             int64_t stride) {
  static_assert(MAX_BATCH == 8, "one case per number of vectors");
  switch (vectors) {
    case 1: return dots<F, 1>(w, first, last, xs, parts, out, stride);
    case 2: return dots<F, 2>(w, first, last, xs, parts, out, stride);
    case 3: return dots<F, 3>(w, first, last, xs, parts, out, stride);
    case 4: return dots<F, 4>(w, first, last, xs, parts, out, stride);
    case 5: return dots<F, 5>(w, first, last, xs, parts, out, stride);
    case 6: return dots<F, 6>(w, first, last, xs, parts, out, stride);
    case 7: return dots<F, 7>(w, first, last, xs, parts, out, stride);
    case 8: return dots<F, 8>(w, first, last, xs, parts, out, stride);
  }
}

}  // namespace
}  // namespace tp
