// A whole layer of attention and a feed-forward block.
#pragma once
#include <cstdint>

#include "attention.h"
#include "delta.h"
#include "index.h"
#include "latents.h"
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

// See ops.Grouped. Weights and biases of queries, keys, values and output. norms: of queries and of keys, `normed` values
// each; they are null, and clip 0, where there are none.
struct tp_grouped {
  const tp_weight* weights[4];
  tp_vector biases[4];
  const tp_heads* heads;
  const tp_attention* attention;
  tp_vector norms[2];
  int64_t normed[2];
  float clip;
  int32_t gated;
};

// See ops.Latent. Weights and biases of q_down, q_up, kv_down and output; q_down, and the index, are null where there are
// none.
struct tp_latent {
  const tp_weight* weights[4];
  tp_vector biases[4];
  tp_vector q_norm, kv_norm;
  const void* up;
  const tp_latents* latents;
  const tp_index* index;
  float eps;
  int32_t interleaved, reuses;  // the positions that were picked last
};

// See ops.Layer. Norms [h]; one of grouped, latent and delta, and one of experts and dense.
struct tp_layer {
  tp_vector input_norm, post_norm;
  const tp_grouped* grouped;
  const tp_latent* latent;
  const tp_delta* delta;
  const tp_experts* experts;
  const tp_dense* dense;
  float eps, scale;
  int32_t dtype;
};

// See Ops.rotation: of each new token.
struct tp_rotation {
  const float *cosines, *sines;
};

// With the rotations that it and its index take, −1 for none, and what it keeps: of tokens keys and values, or entries and
// an index's keys; of sequences a delta net's states.
struct tp_placed_layer {
  const tp_layer* layer;
  int64_t rotation, index_rotation;
  void* pools[2];
};
}

namespace tp {

// x and out [tokens, h].
void dense(const tp_dense& d, const void* x, int64_t tokens, int32_t dtype, void* out);

// x and out [tokens, h]. False, and out undefined, if the router picked no expert that exists.
bool routed(const tp_experts& experts, const void* x, int64_t tokens, int32_t dtype, void* out);

// The new tokens, how they are turned, and where they are stored: see place_heads; and what layers pick for others.
struct Step {
  const tp_layout& layout;
  int64_t tokens;
  const int64_t* slots;
  const tp_rotation* rotations;
  Picked picked;
};

// Whether there are kernels for all of the layer and that many tokens.
bool has_layer(const tp_layer& l, const tp_layout& layout);

// x [tokens, h] becomes what the layer makes of it. False, and x undefined, as for routed.
bool layer(const tp_placed_layer& placed, Step& step, void* x);

// head · norm(x), x [tokens, k] and out [tokens, n].
void logits(const tp_weight& head, const void* x, int64_t tokens, int32_t dtype, tp_vector norm, float eps, float* out);

}  // namespace tp
