// The loops of a gated delta net, compiled for each instruction set.
#pragma once
#include "elementwise.h"
#include "threads.h"

namespace tp {
namespace {

// A few channels at a time, whose sums stay in the first cache.
void convolve(const Past& past, const void* x, int32_t dtype, int64_t n, float* out) {
  constexpr int64_t PIECE = 256;
  const int64_t item = dtype == TP_FLOAT ? sizeof(float) : sizeof(uint16_t);
  for (int64_t first = 0; first < n; first += PIECE) {
    const int64_t count = n - first < PIECE ? n - first : PIECE;
    float input[PIECE], sum[PIECE] = {};
    char* before = nullptr;
    for (int64_t j = 0; j < past.kernel; j++) {
      char* kept = static_cast<char*>(past.tail) + (j * past.stride + first) * item;
      const void* from = j + 1 < past.kernel ? kept : static_cast<const char*>(x) + first * item;
      load(from, dtype, input, count);
      const float* filter = past.filter + j * past.stride + first;
      for (int64_t i = 0; i < count; i++) sum[i] += input[i] * filter[i];
      if (before) std::memcpy(before, from, count * item);
      before = kept;
    }
    each(sum, sum, count, [](Lanes y, Lanes) { return y * sigmoid(y); });
    std::memcpy(out + first, sum, count * sizeof(float));
  }
}

// Columns of a memory that C registers hold, or the first n of a register's; its rows lie `stride` apart. What a query
// finds is put together from what there was before its token, so every token passes over the memory once.
template <int C>
void recall_columns(float* memory, int64_t stride, const Recall& r, int64_t column, int64_t n) {
  const auto get = [n](const float* p) { return C == 1 ? lanes(p, n) : lanes(p); };
  const auto put = [n](float* p, const Lanes& x) { std::memcpy(p, &x, C == 1 ? n * sizeof(float) : sizeof x); };
  Lanes known[C] = {}, asked[C] = {}, change[C];
  for (int64_t i = 0; i < r.keys; i++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const Lanes row = get(memory + i * stride + c * REGISTER);
      known[c] += row * r.k[i];
      asked[c] += row * r.q[i];
    }
  }
  for (int64_t t = 0; t < r.tokens; t++) {
    const float *k = r.k + t * r.keys, *q = r.q + t * r.keys, kept = r.kept[t], met = product(k, q, r.keys);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const int64_t place = t * r.apart + column + c * REGISTER;
      change[c] = (get(r.v + place) - known[c] * kept) * r.strengths[t];
      put(r.found + place, asked[c] * kept + change[c] * met);
      known[c] = asked[c] = Lanes{};
    }
    const bool last = t + 1 == r.tokens;
    const float *next_k = last ? k : k + r.keys, *next_q = last ? q : q + r.keys;
    for (int64_t i = 0; i < r.keys; i++) {
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        float* to = memory + i * stride + c * REGISTER;
        const Lanes row = get(to) * kept + change[c] * k[i];
        put(to, row);
        known[c] += row * next_k[i];
        asked[c] += row * next_q[i];
      }
    }
  }
}

// Columns of many tokens are worked on elsewhere, without the gaps between them, for which the first cache has no room.
template <int C>
void recall_elsewhere(float* memory, const Recall& r, int64_t column, int64_t n) {
  constexpr int64_t WIDTH = C * REGISTER;
  if (r.tokens == 1) return recall_columns<C>(memory + column, r.values, r, column, n);
  float* copy = static_cast<float*>(scratch(SLOT_SUMS, r.keys * WIDTH * sizeof(float)));
  for (int64_t i = 0; i < r.keys; i++) std::memcpy(copy + i * WIDTH, memory + i * r.values + column, n * sizeof(float));
  recall_columns<C>(copy, WIDTH, r, column, n);
  for (int64_t i = 0; i < r.keys; i++) std::memcpy(memory + i * r.values + column, copy + i * WIDTH, n * sizeof(float));
}

void recall(float* memory, const Recall& r) {
  constexpr int64_t WIDTH = TOGETHER * REGISTER;
  int64_t column = 0;
  for (; column + WIDTH <= r.values; column += WIDTH) recall_elsewhere<TOGETHER>(memory, r, column, WIDTH);
  for (; column < r.values; column += REGISTER) {
    recall_elsewhere<1>(memory, r, column, r.values - column < REGISTER ? r.values - column : REGISTER);
  }
}

constexpr Delta delta = {convolve, recall};

}  // namespace
}  // namespace tp
