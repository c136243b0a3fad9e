#include "layer.h"

#include <cmath>
#include <vector>

#include "moe.h"
#include "products.h"

namespace tp {
namespace {

// The shared experts' part of `total` [tokens, h]. exact: x in float32, in which a gate is computed as a router is.
void add_shared(const tp_experts& e, const void* x, const float* exact, int64_t tokens, int32_t dtype, void* total) {
  const int64_t h = e.down->n;
  std::vector<char> part(tokens * h * item_bytes(dtype));
  std::vector<float> gates(e.shared_gate ? tokens : 0);
  dense(*e.shared, x, tokens, dtype, part.data());
  if (e.shared_gate) linear(*e.shared_gate, exact, tokens, TP_FLOAT, {}, gates.data());
  for (float& gate : gates) gate = 1.0f / (1.0f + std::exp(-gate));
  add(total, part.data(), tokens, h, dtype, e.shared_gate ? gates.data() : nullptr);
}

}  // namespace

void dense(const tp_dense& d, const void* x, int64_t tokens, int32_t dtype, void* out) {
  const int64_t n = d.weights[2]->k;
  std::vector<char> room(2 * tokens * n * item_bytes(dtype));
  void *gate = room.data(), *up = at(gate, dtype, tokens * n);
  linear(*d.weights[0], x, tokens, dtype, d.biases[0], gate);
  linear(*d.weights[1], x, tokens, dtype, d.biases[1], up);
  swiglu(gate, up, tokens, n, dtype, {d.limit, d.alpha, d.shift});
  linear(*d.weights[2], gate, tokens, dtype, d.biases[2], out);
}

bool routed(const tp_experts& e, const void* x, int64_t tokens, int32_t dtype, void* out) {
  const int64_t h = e.down->n, experts = e.router->experts, chosen = e.router->chosen;
  std::vector<float> wide(dtype == TP_FLOAT ? 0 : tokens * h), logits(tokens * experts), weights(tokens * chosen);
  std::vector<int64_t> ids(tokens * chosen);
  if (dtype != TP_FLOAT) isa().load(x, dtype, wide.data(), tokens * h);
  const float* exact = dtype == TP_FLOAT ? static_cast<const float*>(x) : wide.data();
  linear(*e.router_weight, exact, tokens, TP_FLOAT, e.router_bias, logits.data());
  route(logits.data(), tokens, *e.router, ids.data(), weights.data());
  Moe moe(*e.gate_up, *e.down, {e.limit, e.alpha, e.shift}, e.gate_up_bias, e.down_bias);
  if (!moe.run(x, ids.data(), weights.data(), tokens, chosen, dtype, out)) return false;
  if (e.shared) add_shared(e, x, exact, tokens, dtype, out);
  return true;
}

bool layer(const tp_layer& l, const tp_layout& layout, void* x, int64_t tokens, const float* cosines, const float* sines,
           const int64_t* slots, void* keys, void* values) {
  const tp_heads& heads = *l.heads;
  const int32_t dtype = heads.dtype;
  const int64_t h = l.weights[0]->k, width = heads.heads * heads.width, kv = heads.kv_heads * heads.width;
  std::vector<char> room(tokens * (2 * h + 2 * width + 2 * kv) * item_bytes(dtype));
  void *y = room.data(), *z = at(y, dtype, tokens * h), *q = at(z, dtype, tokens * h), *turned = at(q, dtype, tokens * width);
  void *k = at(turned, dtype, tokens * width), *v = at(k, dtype, tokens * kv);

  rms_norm(x, tokens, h, dtype, l.input_norm, l.eps, y);
  void* projected[] = {q, k, v};
  for (int i = 0; i < 3; i++) linear(*l.weights[i], y, tokens, dtype, l.biases[i], projected[i]);
  place_heads(heads, tokens, q, k, v, cosines, sines, slots, turned, keys, values);
  attention(*l.attention, layout, turned, keys, values, q);
  linear(*l.weights[3], q, tokens, dtype, l.biases[3], y);
  add(x, y, tokens, h, dtype);

  rms_norm(x, tokens, h, dtype, l.post_norm, l.eps, y);
  if (l.dense) dense(*l.dense, y, tokens, dtype, z);
  else if (!routed(*l.experts, y, tokens, dtype, z)) return false;
  add(x, z, tokens, h, dtype);
  return true;
}

}  // namespace tp
