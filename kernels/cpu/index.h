// Picks the positions that latent attention sees, for few new tokens: see Ops.top_positions and runtime/mla.py.
#pragma once
#include <cstdint>
#include <vector>

#include "attention.h"
#include "small_ops.h"
#include "weight.h"

extern "C" {

// See ops.Index. q [heads · dim, columns of compressed queries], k [dim, h], weights [heads, h]; norm and bias float32 [dim].
struct tp_index {
  const tp_weight *q, *k, *weights;
  const float *norm, *bias;
  int64_t heads, dim, rotated, top, block_size;
  float eps;
  int32_t interleaved, dtype;
};
}

namespace tp {

// What was picked last: layers that have no index of their own see the same.
class Picked {
 public:
  Picks picks() const { return {of_.empty() ? nullptr : of_.data(), top_}; }

  // Of sequences that have more than `top` positions; the others see all of theirs. x [tokens, h], normed, and compressed
  // queries; the new tokens' keys go into `keys` [places, dim], in blocks of block_size.
  void pick(const tp_index& index, const tp_layout& layout, const Turn& turn, const void* x, const void* compressed,
            const int64_t* slots, void* keys);

 private:
  std::vector<int64_t> values_;
  std::vector<const int64_t*> of_;
  int64_t top_ = 0;
};

}  // namespace tp
