#pragma once
#include <cstdint>

#include "isa.h"
#include "threads.h"

namespace tp {

void linear(const tp_weight& w, const void* x, int64_t tokens, int32_t dtype, tp_vector bias, void* out);
uint64_t read_all(const void* data, int64_t bytes);

constexpr int64_t ROWS = 64;  // of a weight that are multiplied at a time: they and their products stay in the cache

inline int64_t item_bytes(int32_t dtype) { return dtype == TP_FLOAT ? 4 : 2; }

inline const void* at(const void* x, int32_t dtype, int64_t item) {
  return static_cast<const char*>(x) + item * item_bytes(dtype);
}

inline void* at(void* x, int32_t dtype, int64_t item) { return static_cast<char*>(x) + item * item_bytes(dtype); }

// out[i] = the bias's items from `first` on; zeros where there is none.
void load_bias(tp_vector bias, int64_t first, int64_t n, float* out);

// Vectors of x as the products of one weight want them.
class Packed {
 public:
  // Room for n vectors of x, in the calling thread's slot.
  Packed(const tp_weight& w, int32_t dtype, int64_t n, Slot slot);

  int parts() const { return parts_; }
  int64_t batch() const { return MAX_BATCH / parts_; }

  void pack(int64_t i, const void* x, int32_t from) const;

  // Products of rows first … last − 1 with the vectors `which`[0 … count − 1], any number: out[i · stride + row − first].
  void dots(const Matrix& m, int64_t first, int64_t last, const int64_t* which, int64_t count, float* out,
            int64_t stride) const;

 private:
  const tp_weight& w_;
  int parts_;
  int64_t bytes_;
  char* data_;
};

}  // namespace tp
