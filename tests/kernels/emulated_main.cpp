// A linear of every format on another processor: reads `in`, written by test_cpu_emulated.py, and writes `out`.
#include <cstdio>
#include <vector>

#include "api.h"

namespace {

template <class T>
std::vector<T> read(FILE* f) {
  int64_t n = 0;
  if (std::fread(&n, sizeof n, 1, f) != 1) return {};
  std::vector<T> items(n);
  if (n && std::fread(items.data(), sizeof(T), n, f) != static_cast<size_t>(n)) items.clear();
  return items;
}

}  // namespace

int main(int, char** argv) {
  FILE *in = std::fopen(argv[1], "rb"), *out = std::fopen(argv[2], "wb");
  // n, k, row bytes, grid columns, rows and columns of a block, format, type of scale, tokens
  const auto h = read<int64_t>(in);
  const auto data = read<uint8_t>(in), scale = read<uint8_t>(in);
  const auto factor = read<float>(in), x = read<float>(in);
  tp_weight w{};
  w.data = data.data();
  w.scale = scale.data();
  w.global = factor.empty() ? nullptr : factor.data();
  w.segments = &h[0];
  w.segment_count = 1;
  w.experts = 1;
  w.n = h[0], w.k = h[1], w.row_bytes = h[2], w.grid_columns = h[3], w.block_rows = h[4], w.block_columns = h[5];
  w.format = static_cast<int32_t>(h[6]), w.scale_type = static_cast<int32_t>(h[7]);
  tp_set_threads(2);
  std::vector<float> y(h[8] * w.n);
  const int32_t status = tp_linear(&w, x.data(), h[8], TP_FLOAT, nullptr, 0, y.data());
  std::fwrite(y.data(), sizeof(float), y.size(), out);
  std::fclose(out);
  return status;
}
