// A whole layer of grouped-query attention and a feed-forward block, for few tokens.
#pragma once
#include <cstdint>

#include "attention.h"
#include "small_ops.h"
#include "weight.h"

extern "C" {

// Weights and biases of gate, up and down, see Ops.dense.
struct tp_dense {
  const tp_weight* weights[3];
  tp_vector biases[3];
  float limit, alpha, shift;
};

// A router [experts, h] and its experts, see Ops.routed. shared and its gate [1, h] may be null.
struct tp_experts {
  const tp_weight *router_weight, *gate_up, *down;
  const tp_router* router;
  tp_vector router_bias, gate_up_bias, down_bias;
  float limit, alpha, shift;
  const tp_dense* shared;
  const tp_weight* shared_gate;
};

// See ops.Layer. Weights and biases of queries, keys, values and output; norms [h]; one of experts and dense.
struct tp_layer {
  tp_vector input_norm, post_norm;
  const tp_weight* weights[4];
  tp_vector biases[4];
  const tp_heads* heads;
  const tp_attention* attention;
  const tp_experts* experts;
  const tp_dense* dense;
  float eps;
};
}

namespace tp {

// x and out [tokens, h].
void dense(const tp_dense& d, const void* x, int64_t tokens, int32_t dtype, void* out);

// x and out [tokens, h]. False, and out undefined, if the router picked no expert that exists.
bool routed(const tp_experts& experts, const void* x, int64_t tokens, int32_t dtype, void* out);

// x [tokens, h] becomes what the layer makes of it. The rest is as in place_heads and attention.
bool layer(const tp_layer& l, const tp_layout& layout, void* x, int64_t tokens, const float* cosines, const float* sines,
           const int64_t* slots, void* keys, void* values);

}  // namespace tp
