// Functions of api.h on another processor: emulated.py sends the memory they are given, one block after the other, and
// is sent a status and the last block, which is what comes out.
#include <cstdio>
#include <cstring>
#include <vector>

#include "api.h"

namespace {

class Memory {
 public:
  // False at the end of what is sent.
  bool read() {
    int64_t count = 0;
    if (std::fread(&count, sizeof count, 1, stdin) != 1) return false;
    blocks_.assign(count, {});
    next_ = 0;
    for (auto& block : blocks_) {
      int64_t size = 0;
      if (std::fread(&size, sizeof size, 1, stdin) != 1) return false;
      block = std::vector<char>(size);
      if (std::fread(block.data(), 1, size, stdin) != static_cast<size_t>(size)) return false;
    }
    return true;
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

  void write(int32_t status) const {
    std::fwrite(&status, sizeof status, 1, stdout);
    std::fwrite(blocks_.back().data(), 1, blocks_.back().size(), stdout);
    std::fflush(stdout);
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

// Argument: an instruction set.
int main(int, char** argv) {
  if (tp_select(argv[1])) return TP_UNKNOWN;
  Memory memory;
  while (memory.read()) {
    const char* name = memory.take<char>();
    const int64_t* numbers = memory.take<int64_t>();
    tp_set_threads(static_cast<int32_t>(numbers[0]));
    const auto function = std::strcmp(name, "linear") == 0 ? linear : std::strcmp(name, "moe") == 0 ? moe : attend;
    memory.write(function(memory, numbers + 1));
  }
}
