// The loops of a gated delta net, compiled for each instruction set.
#pragma once
#include "elementwise.h"

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

// Columns of a memory that C registers hold, or the first n of a register's. They are read once from where they are, and
// once more from the first cache: what is asked for is put together from what there was.
template <int C>
void recall_columns(float* memory, int64_t keys, int64_t stride, int64_t n, const Recall& r, const float* v, float* out) {
  const auto get = [n](const float* p) { return C == 1 ? lanes(p, n) : lanes(p); };
  const auto put = [n](float* p, const Lanes& x) { std::memcpy(p, &x, C == 1 ? n * sizeof(float) : sizeof x); };
  Lanes known[C] = {}, asked[C] = {}, change[C];
  float met = 0;
  for (int64_t i = 0; i < keys; i++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const Lanes row = get(memory + i * stride + c * REGISTER);
      known[c] += row * r.k[i];
      asked[c] += row * r.q[i];
    }
    met += r.k[i] * r.q[i];
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) {
    change[c] = (get(v + c * REGISTER) - known[c] * r.kept) * r.strength;
    put(out + c * REGISTER, asked[c] * r.kept + change[c] * met);
  }
  for (int64_t i = 0; i < keys; i++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      float* row = memory + i * stride + c * REGISTER;
      put(row, get(row) * r.kept + change[c] * r.k[i]);
    }
  }
}

void recall(float* memory, int64_t keys, int64_t values, const Recall& r, float* out) {
  int64_t i = 0;
  for (; i + 4 * REGISTER <= values; i += 4 * REGISTER) recall_columns<4>(memory + i, keys, values, 0, r, r.v + i, out + i);
  for (; i < values; i += REGISTER) {
    const int64_t n = values - i < REGISTER ? values - i : REGISTER;
    recall_columns<1>(memory + i, keys, values, n, r, r.v + i, out + i);
  }
}

constexpr Delta delta = {convolve, recall};

}  // namespace
}  // namespace tp
