#include "layer.h"

#include <algorithm>
#include <vector>

#include "moe.h"
#include "products.h"

namespace tp {
namespace {

// total = total + x, rounded once; n values of dtype.
void add(void* total, const void* x, int64_t n, int32_t dtype) {
  constexpr int64_t STEP = 1024;
  float a[STEP], b[STEP];
  for (int64_t i = 0; i < n; i += STEP) {
    const int64_t count = std::min(STEP, n - i);
    isa().load(at(total, dtype, i), dtype, a, count);
    isa().load(at(x, dtype, i), dtype, b, count);
    isa().add_scaled(a, b, 1.0f, count);
    isa().store(a, dtype, at(total, dtype, i), count);
  }
}

}  // namespace

bool routed(const tp_experts& e, const void* x, int64_t tokens, int32_t dtype, void* out) {
  const int64_t h = e.down->n, experts = e.router->experts, chosen = e.router->chosen;
  std::vector<float> exact(dtype == TP_FLOAT ? 0 : tokens * h), logits(tokens * experts), weights(tokens * chosen);
  std::vector<int64_t> ids(tokens * chosen);
  if (dtype != TP_FLOAT) isa().load(x, dtype, exact.data(), tokens * h);
  linear(*e.router_weight, dtype == TP_FLOAT ? x : exact.data(), tokens, TP_FLOAT, e.router_bias, logits.data());
  route(logits.data(), tokens, *e.router, ids.data(), weights.data());
  Moe moe(*e.gate_up, *e.down, {e.limit, e.alpha, e.shift}, e.gate_up_bias, e.down_bias);
  return moe.run(x, ids.data(), weights.data(), tokens, chosen, dtype, out);
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
  add(x, y, tokens * h, dtype);

  rms_norm(x, tokens, h, dtype, l.post_norm, l.eps, y);
  if (!routed(*l.experts, y, tokens, dtype, z)) return false;
  add(x, z, tokens * h, dtype);
  return true;
}

}  // namespace tp
