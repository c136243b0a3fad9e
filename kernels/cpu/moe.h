#pragma once
#include <cstdint>
#include <vector>

#include "isa.h"
#include "products.h"

namespace tp {

// The experts of one layer, run on tokens that are sorted by expert. A slot is one of a token's k places; slots that
// have the same expert make a run.
class Moe {
 public:
  Moe(const tp_weight& gate_up, const tp_weight& down, Activation activation, tp_vector gate_up_bias,
      tp_vector down_bias)
      : gate_up_(gate_up), down_(down), activation_(activation), gate_up_bias_(gate_up_bias), down_bias_(down_bias) {}

  // False, and nothing is done, if an id names no expert.
  bool run(const void* x, const int64_t* ids, const float* weights, int64_t tokens, int64_t k, int32_t dtype, void* out);

 private:
  struct Run {
    int64_t expert, first, count;  // slots order_[first] … order_[first + count − 1]
  };
  // Rows first … last − 1 of a run's matrix.
  struct Part {
    const Run* run;
    int64_t first, last;
  };

  bool sort(const int64_t* ids, int64_t tokens, int64_t k);
  template <class Work>
  void for_parts(const Share& share, int64_t rows, Work&& work) const;
  template <class X>
  void pack_runs(const Member& me, const Packed& packed, X&& x) const;
  void by_tiles(const void* x, const float* weights, void* out) const;  // bfloat16
  void gate_and_up_by_tiles(const Part& part, const Packed& x, const Packed& inner) const;
  void down_by_tiles(int64_t first, int64_t last, const Packed& inner, const float* weights, uint16_t* out) const;
  void one_by_one(const void* x, const float* weights, int32_t dtype, void* out) const;
  void gate_and_up(const Part& part, const Packed& x, int32_t dtype, void* inner) const;
  void down(const Part& part, const Packed& inner, int64_t row, int64_t rows, float* pieces) const;
  void sum(const Member& me, const float* pieces, int64_t row, int64_t rows, int64_t stride, const float* weights,
           int32_t dtype, void* out) const;

  const tp_weight &gate_up_, &down_;
  const Activation activation_;
  const tp_vector gate_up_bias_, down_bias_;
  int64_t tokens_ = 0, k_ = 0;
  std::vector<Run> runs_;
  std::vector<int64_t> order_;     // slots by expert
  std::vector<int64_t> token_of_;  // of each place in order_
  std::vector<int64_t> place_of_;  // of each slot in order_; −1 where it is dropped
};

}  // namespace tp
