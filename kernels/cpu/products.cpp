#include "products.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

namespace tp {

void load_bias(tp_vector bias, int64_t first, int64_t n, float* out) {
  if (bias.data) isa().load(at(bias.data, bias.dtype, first), bias.dtype, out, n);
  else std::fill(out, out + n, 0.0f);
}

Packed::Packed(const tp_weight& w, int32_t dtype, int64_t n, Slot slot)
    : w_(w), parts_(isa().parts(dtype)), bytes_(isa().packed_bytes(w)) {
  data_ = static_cast<char*>(scratch(slot, n * parts_ * bytes_));
}

void Packed::pack(int64_t i, const void* x, int32_t from) const {
  isa().pack(w_, x, from, parts_, data_ + i * parts_ * bytes_);
}

void Packed::dots(const Matrix& m, int64_t first, int64_t last, const int64_t* which, int64_t count, float* out,
                  int64_t stride) const {
  for (int64_t start = 0; start < count; start += batch()) {
    const int64_t n = std::min(batch(), count - start);
    const void* xs[MAX_BATCH];
    for (int64_t v = 0; v < n * parts_; v++) xs[v] = data_ + (which[start + v / parts_] * parts_ + v % parts_) * bytes_;
    isa().dots(m, first, last, xs, static_cast<int>(n * parts_), parts_, out + start * stride, stride);
  }
}

void linear(const tp_weight& w, const void* x, int64_t tokens, int32_t dtype, tp_vector bias, void* out) {
  const Packed packed(w, dtype, tokens, SLOT_PACKED);
  const Matrix matrix(w, 0);
  std::vector<int64_t> all(tokens);
  std::iota(all.begin(), all.end(), 0);
  run([&](const Member& me) {
    int64_t first, last;
    me.share(tokens, 1, first, last);
    for (int64_t t = first; t < last; t++) packed.pack(t, at(x, dtype, t * w.k), dtype);
    me.barrier();
    float* products = static_cast<float*>(scratch(SLOT_PRODUCTS, (tokens + 1) * ROWS * sizeof(float)));
    float* biases = products + tokens * ROWS;
    me.share(w.n, 8, first, last);
    for (int64_t row = first; row < last; row += ROWS) {
      const int64_t n = std::min(ROWS, last - row);
      packed.dots(matrix, row, row + n, all.data(), tokens, products, ROWS);
      load_bias(bias, row, n, biases);
      for (int64_t t = 0; t < tokens; t++) {
        if (bias.data) isa().add_scaled(products + t * ROWS, biases, 1.0f, n);
        isa().store(products + t * ROWS, dtype, at(out, dtype, t * w.n + row), n);
      }
    }
  });
}

uint64_t read_all(const void* data, int64_t bytes) {
  std::vector<uint64_t> sums(threads());
  run([&](const Member& me) {
    int64_t first, last;
    me.share(bytes, 4096, first, last);
    sums[me.index] = isa().read(static_cast<const char*>(data) + first, last - first);
  });
  return std::accumulate(sums.begin(), sums.end(), uint64_t{0});
}

}  // namespace tp
