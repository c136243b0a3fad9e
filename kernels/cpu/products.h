#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace tp {

// A linear and where its results go, [tokens, n].
struct Linear {
  const tp_weight* w;
  tp_vector bias;
  void* out;
};

// Linears of the same x [tokens, k]: those next to each other that want it packed alike are one job.
void linears(const Linear* parts, int64_t count, const void* x, int64_t tokens, int32_t dtype);

inline void linear(const tp_weight& w, const void* x, int64_t tokens, int32_t dtype, tp_vector bias, void* out) {
  const Linear one{&w, bias, out};
  linears(&one, 1, x, tokens, dtype);
}
uint64_t read_all(const void* data, int64_t bytes);

constexpr int64_t BLOCK = 16;  // vectors that tiles take together
constexpr int64_t PAIR = 32;   // and two blocks of them at once

// Rows of a weight that are multiplied at a time: many, for memory is read in several streams as long as that, but so few
// that their products with all vectors stay in the second cache.
inline int64_t rows_at_a_time(int64_t vectors) {
  constexpr int64_t PRODUCTS = 32768, FEWEST = 64, MOST = 1024;
  return std::clamp(PRODUCTS / (vectors ? vectors : 1) / FEWEST * FEWEST, FEWEST, MOST);
}

inline int64_t item_bytes(int32_t dtype) { return dtype == TP_FLOAT ? 4 : 2; }

inline const void* at(const void* x, int32_t dtype, int64_t item) {
  return static_cast<const char*>(x) + item * item_bytes(dtype);
}

inline void* at(void* x, int32_t dtype, int64_t item) { return static_cast<char*>(x) + item * item_bytes(dtype); }

// Adds n items of a bias, from `first` on, to each of `count` vectors that lie `stride` apart; there may be none.
// `room` [n] is for the bias in float32.
void add_bias(tp_vector bias, int64_t first, int64_t n, float* room, int64_t count, float* vectors, int64_t stride);

// The n items themselves in `room` [n], or null where there are none.
const float* load_bias(tp_vector bias, int64_t first, int64_t n, float* room);

// Whether products with so many vectors are cheaper by tiles.
bool tiles_pay(const tp_weight& w, int64_t vectors);

// Whether tiles lose nothing that a result of this dtype has: they take weights and x, n values, as bfloat16.
bool tiles_are_right(const tp_weight& w, const void* x, int32_t dtype, int64_t n);

// Vectors in the order that the products of a weight want, one by one or in blocks for tiles.
class Packed {
 public:
  // Room for n vectors, in the calling thread's slot.
  Packed(const tp_weight& w, int64_t n, bool tiles, Slot slot);

  // Packs vectors first … last − 1 of a range that is packed together; x(i) is where vector i is.
  template <class X>
  void pack(int64_t first, int64_t last, int32_t from, X&& x) const {
    if (!tiles_) {
      const auto pack = int8_ ? isa().int8->pack : isa().pack;
      for (int64_t i = first; i < last; i++) pack(w_, x(i), from, place(i));
      return;
    }
    for (int64_t i = first; i < last; i += BLOCK) {
      const void* xs[BLOCK];
      const int count = static_cast<int>(last - i < BLOCK ? last - i : BLOCK);
      for (int j = 0; j < count; j++) xs[j] = x(i + j);
      isa().tiles->pack(w_, xs, count, from, place(i));
    }
  }

  // Products of rows first … last − 1 with `count` vectors: out[i · stride + row − first]. The vectors are
  // which[0 … count − 1], or if it is null those from `start` on. Tiles take whole ranges as they were packed.
  void products(const Matrix& m, int64_t first, int64_t last, const int64_t* which, int64_t start, int64_t count,
                float* out, int64_t stride) const;

  char* place(int64_t i) const { return data_ + i * bytes_; }

 private:
  const tp_weight& w_;
  const bool tiles_, int8_;
  const int64_t bytes_;
  char* const data_;
};

}  // namespace tp
