// A gated delta net: see runtime/delta_net.py, which has the formulas.
#pragma once
#include <cstdint>

#include "attention.h"
#include "weight.h"

extern "C" {

// See ops.Delta. Rows are grouped by key head where z is null: then qkv and b have those of z and a, too.
struct tp_delta {
  const tp_weight *qkv, *z, *b, *a, *output;
  const float* filter;  // [kernel, channels]
  const float *rate, *bias, *norm;
  int64_t key_heads, shared, key_dim, value_dim, kernel;  // shared: value heads of a key head
  float eps;
  int32_t dtype;
};
}

namespace tp {

// x and out [tokens, h] of d.dtype. States of the sequences' slots: tails [slots, kernel − 1, channels] of d.dtype and
// memories [slots, key heads, shared, key_dim, value_dim].
void delta(const tp_delta& d, const tp_layout& layout, const void* x, void* tails, float* memories, void* out);

}  // namespace tp
