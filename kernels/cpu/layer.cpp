#include "layer.h"

#include <cmath>

#include "moe.h"
#include "prefill.h"
#include "products.h"

namespace tp {
namespace {

// The shared experts' part of `total` [tokens, h]. exact: x in float32, in which a gate is computed as a router is.
void add_shared(const tp_experts& e, const void* x, const float* exact, int64_t tokens, int32_t dtype, void* total) {
  const int64_t h = e.down->n, gated = e.shared_gate ? tokens : 0;
  float* gates = static_cast<float*>(scratch(SLOT_SHARED, gated * sizeof(float) + tokens * h * item_bytes(dtype)));
  void* part = gates + gated;
  dense(*e.shared, x, tokens, dtype, part);
  if (gated) linear(*e.shared_gate, exact, tokens, TP_FLOAT, {}, gates);
  for (int64_t t = 0; t < gated; t++) gates[t] = 1.0f / (1.0f + std::exp(-gates[t]));
  add(total, part, tokens, h, dtype, 1.0f, gated ? gates : nullptr);
}

}  // namespace

void dense(const tp_dense& d, const void* x, int64_t tokens, int32_t dtype, void* out) {
  const int64_t n = d.weights[2]->k;
  void *gate = scratch(SLOT_FEED_FORWARD, 2 * tokens * n * item_bytes(dtype)), *up = at(gate, dtype, tokens * n);
  const Linear parts[] = {{d.weights[0], d.biases[0], gate}, {d.weights[1], d.biases[1], up}};
  linears(parts, 2, x, tokens, dtype);
  swiglu(gate, up, tokens, n, dtype, {d.limit, d.alpha, d.shift});
  linear(*d.weights[2], gate, tokens, dtype, d.biases[2], out);
}

bool routed(const tp_experts& e, const void* x, int64_t tokens, int32_t dtype, void* out) {
  const int64_t h = e.down->n, experts = e.router->experts, chosen = e.router->chosen;
  const int64_t floats = tokens * (chosen + experts + (dtype == TP_FLOAT ? 0 : h));
  int64_t* ids = static_cast<int64_t*>(scratch(SLOT_EXPERTS, tokens * chosen * sizeof(int64_t) + floats * sizeof(float)));
  float *weights = reinterpret_cast<float*>(ids + tokens * chosen), *logits = weights + tokens * chosen;
  const float* exact = widened(x, tokens, h, dtype, logits + tokens * experts);
  linear(*e.router_weight, exact, tokens, TP_FLOAT, e.router_bias, logits);
  route(logits, tokens, *e.router, ids, weights);
  Moe moe(*e.gate_up, *e.down, {e.limit, e.alpha, e.shift}, e.gate_up_bias, e.down_bias);
  if (!moe.run(x, ids, weights, tokens, chosen, dtype, out)) return false;
  if (e.shared) add_shared(e, x, exact, tokens, dtype, out);
  return true;
}

namespace {

tp_rotation rotation_of(int64_t which, const Step& step) {
  return which < 0 ? tp_rotation{nullptr, nullptr} : step.rotations[which];
}

// What comes between projections of n values each and the heads: norms and a clip.
void prepare(const tp_grouped& g, void* const (&parts)[3], const int64_t (&n)[3]) {
  const int32_t dtype = g.heads->dtype;
  for (int i = 0; i < 2 && g.norms[i].data; i++) {
    rms_norm(parts[i], n[i] / g.normed[i], g.normed[i], dtype, g.norms[i], g.heads->eps, parts[i]);
  }
  for (int i = 0; i < 3 && g.clip != 0; i++) clip(parts[i], n[i], dtype, g.clip);
}

// x and out [tokens, h].
void grouped(const tp_placed_layer& placed, const Step& step, const void* x, void* out) {
  const tp_grouped& g = *placed.layer->grouped;
  const tp_heads& heads = *g.heads;
  const int32_t dtype = heads.dtype;
  const int64_t width = step.tokens * heads.heads * heads.width, kv = step.tokens * heads.kv_heads * heads.width;
  void* q = scratch(SLOT_ATTENTION, (2 * width + 2 * kv + (g.gated ? 3 * width : 0)) * item_bytes(dtype));
  void *turned = at(q, dtype, width), *k = at(turned, dtype, width), *v = at(k, dtype, kv);
  void *gates = at(v, dtype, kv), *both = g.gated ? at(gates, dtype, width) : q;
  const Linear parts[] = {{g.weights[0], g.biases[0], both}, {g.weights[1], g.biases[1], k}, {g.weights[2], g.biases[2], v}};
  linears(parts, 3, x, step.tokens, dtype);
  if (g.gated) split(both, step.tokens * heads.heads, heads.width, dtype, q, gates);
  prepare(g, {q, k, v}, {width, kv, kv});
  void *keys = placed.pools[0], *values = placed.pools[1];
  const tp_rotation by = rotation_of(placed.rotation, step);
  place_heads(heads, step.tokens, q, k, v, by.cosines, by.sines, step.slots, turned, keys, values);
  any_attention(*g.attention, step.layout, turned, keys, values, q);
  if (g.gated) gate(q, gates, step.tokens, width / step.tokens, dtype);
  linear(*g.weights[3], q, step.tokens, dtype, g.biases[3], out);
}

// The same by latents, of as many queries.
void latent(const tp_placed_layer& placed, Step& step, const void* x, void* out) {
  enum { Q_DOWN, Q_UP, KV_DOWN, OUTPUT };
  const tp_latent& g = *placed.layer->latent;
  const tp_latents& l = *g.latents;
  const int64_t rank = g.weights[Q_UP]->k, width = g.weights[Q_UP]->n, entry = l.rank + l.shared;
  const int64_t tokens = step.tokens, made = l.heads * l.value;
  const int64_t items = tokens * (2 * rank + width + entry + made);
  void *down = scratch(SLOT_ATTENTION, items * item_bytes(l.dtype)), *normed = at(down, l.dtype, tokens * rank);
  void* q = at(normed, l.dtype, tokens * rank);
  void *kv = at(q, l.dtype, tokens * width), *heads = at(kv, l.dtype, tokens * entry);
  const auto part = [&](int i, void* to) { return Linear{g.weights[i], g.biases[i], to}; };
  const auto project = [&](int i, const void* from, void* to) {
    linear(*g.weights[i], from, tokens, l.dtype, g.biases[i], to);
  };
  const Linear of_x[] = {g.weights[Q_DOWN] ? part(Q_DOWN, down) : part(Q_UP, q), part(KV_DOWN, kv)};
  linears(of_x, 2, x, tokens, l.dtype);
  if (g.weights[Q_DOWN]) {
    rms_norm(down, tokens, rank, l.dtype, g.q_norm, g.eps, normed);
    project(Q_UP, normed, q);
  }
  if (g.index) {
    const tp_rotation by = rotation_of(placed.index_rotation, step);
    const Turn turn{g.index->rotated, g.index->interleaved, by.cosines, by.sines, l.dtype};
    step.picked.pick(*g.index, step.layout, turn, x, g.weights[Q_DOWN] ? normed : x, step.slots, placed.pools[1]);
  }
  const tp_rotation by = rotation_of(placed.rotation, step);
  const Turn turn{l.shared, g.interleaved, by.cosines, by.sines, l.dtype};
  turn_ends(turn, tokens, l.heads, l.nope + l.shared, q);
  turn_ends(turn, tokens, 1, entry, kv);
  place_latents(l, tokens, kv, g.kv_norm, g.eps, step.slots, placed.pools[0]);
  const Picks picks = g.index || g.reuses ? step.picked.picks() : Picks{};
  latent_attention(l, step.layout, q, placed.pools[0], g.up, picks, heads);
  project(OUTPUT, heads, out);
}

}  // namespace

bool has_layer(const tp_layer& l, const tp_layout& layout) {
  return l.grouped ? has_attention(*l.grouped->attention, layout) : l.delta || most_new(layout) <= FEW;
}

namespace {

void attention_of(const tp_placed_layer& placed, Step& step, const void* x, void* out) {
  const tp_layer& l = *placed.layer;
  if (l.grouped) grouped(placed, step, x, out);
  else if (l.latent) latent(placed, step, x, out);
  else delta(*l.delta, step.layout, x, placed.pools[0], static_cast<float*>(placed.pools[1]), out);
}

}  // namespace

bool layer(const tp_placed_layer& placed, Step& step, void* x) {
  const tp_layer& l = *placed.layer;
  const int64_t h = (l.experts ? l.experts->down : l.dense->weights[2])->n, tokens = step.tokens;
  void *y = scratch(SLOT_LAYER, 2 * tokens * h * item_bytes(l.dtype)), *z = at(y, l.dtype, tokens * h);
  rms_norm(x, tokens, h, l.dtype, l.input_norm, l.eps, y);
  attention_of(placed, step, y, z);
  add_norm(x, z, l.scale, tokens, h, l.dtype, l.post_norm, l.eps, x, y);
  if (l.dense) dense(*l.dense, y, tokens, l.dtype, z);
  else if (!routed(*l.experts, y, tokens, l.dtype, z)) return false;
  add(x, z, tokens, h, l.dtype, l.scale);
  return true;
}

void logits(const tp_weight& head, const void* x, int64_t tokens, int32_t dtype, tp_vector norm, float eps, float* out) {
  float* wide = static_cast<float*>(scratch(SLOT_LAYER, tokens * head.k * (sizeof(float) + item_bytes(dtype))));
  void* normed = dtype == TP_FLOAT ? wide : wide + tokens * head.k;
  rms_norm(x, tokens, head.k, dtype, norm, eps, normed);
  linear(head, widened(normed, tokens, head.k, dtype, wide), tokens, TP_FLOAT, {}, out);
}

}  // namespace tp
