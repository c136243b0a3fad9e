// Functions of api.h on another processor: emulated.py writes the memory they are given to `in`, one block after the
// other, and reads the last block, what comes out, from `out`.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "api.h"

namespace {

class Memory {
 public:
  explicit Memory(const char* path) {
    FILE* f = std::fopen(path, "rb");
    for (int64_t size; std::fread(&size, sizeof size, 1, f) == 1;) {
      blocks_.emplace_back(size);
      if (std::fread(blocks_.back().data(), 1, size, f) != static_cast<size_t>(size)) std::abort();
    }
    std::fclose(f);
  }

  // The next block, null if it is empty.
  template <class T>
  T* take() {
    auto& block = blocks_.at(next_++);
    return block.empty() ? nullptr : reinterpret_cast<T*>(block.data());
  }

  tp_weight weight() {
    tp_weight w = *take<tp_weight>();
    w.data = take<uint8_t>();
    w.scale = take<uint8_t>();
    w.global = take<float>();
    w.segments = take<int64_t>();
    return w;
  }

  void write_last(const char* path) const {
    FILE* f = std::fopen(path, "wb");
    std::fwrite(blocks_.back().data(), 1, blocks_.back().size(), f);
    std::fclose(f);
  }

 private:
  std::vector<std::vector<char>> blocks_;
  size_t next_ = 0;
};

int32_t linear(Memory& m, const int64_t* n) {
  const tp_weight w = m.weight();
  const void *x = m.take<void>(), *bias = m.take<void>();
  return tp_linear(&w, x, n[0], n[1], bias, n[2], m.take<void>());
}

int32_t moe(Memory& m, const int64_t* n) {
  const tp_weight gate_up = m.weight(), down = m.weight();
  const void* x = m.take<void>();
  const int64_t* ids = m.take<int64_t>();
  const float *weights = m.take<float>(), *clamp = m.take<float>();
  const void *first = m.take<void>(), *second = m.take<void>();
  return tp_moe(&gate_up, &down, x, ids, weights, n[0], n[1], n[2], clamp[0], clamp[1], clamp[2], first, n[3], second,
                n[4], m.take<void>());
}

int32_t attend(Memory& m, const int64_t* n) {
  tp_attention a = *m.take<tp_attention>();
  a.sinks = m.take<float>();
  const int64_t *starts = m.take<int64_t>(), *lengths = m.take<int64_t>(), *table = m.take<int64_t>();
  std::vector<const int64_t*> tables;
  for (int64_t s = 0; s < n[0]; table += (lengths[s++] + a.block_size - 1) / a.block_size) tables.push_back(table);
  const tp_layout layout{n[0], starts, lengths, tables.data()};
  const void *q = m.take<void>(), *keys = m.take<void>(), *values = m.take<void>();
  return tp_attend(&a, &layout, q, keys, values, m.take<void>());
}

}  // namespace

// Arguments: instruction set, number of threads, function, in, out.
int main(int, char** argv) {
  if (tp_select(argv[1])) return TP_UNKNOWN;
  tp_set_threads(std::atoi(argv[2]));
  Memory memory(argv[4]);
  const int64_t* numbers = memory.take<int64_t>();
  const auto function = std::strcmp(argv[3], "linear") == 0 ? linear : std::strcmp(argv[3], "moe") == 0 ? moe : attend;
  const int32_t status = function(memory, numbers);
  memory.write_last(argv[5]);
  return status;
}
