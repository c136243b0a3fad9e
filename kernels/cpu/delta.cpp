#include "delta.h"

#include <algorithm>
#include <cmath>

#include "isa.h"
#include "products.h"
#include "small_ops.h"
#include "threads.h"

namespace tp {
namespace {

constexpr float L2_EPS = 1e-6f;  // as in runtime/delta_net.py

// What the projections made of a token for one key head: q, k [key_dim], v, z [shared, value_dim], b, a [shared].
struct Inputs {
  const void *q, *k, *v, *z;
  const float *b, *a;
};

// Of all tokens.
class Projections {
 public:
  Projections(const tp_delta& d, const void* x, int64_t tokens) : d_(d) {
    const int64_t h = d.qkv->k, heads = d.key_heads * d.shared, rows = d.qkv->n + (d.z ? d.z->n : 0);
    const int64_t floats = tokens * (2 * heads + (d.dtype == TP_FLOAT ? 0 : h));
    b_ = static_cast<float*>(scratch(SLOT_ATTENTION, floats * sizeof(float) + tokens * rows * item_bytes(d.dtype)));
    a_ = b_ + tokens * heads;
    float* wide = a_ + tokens * heads;
    qkv_ = b_ + floats;
    z_ = at(qkv_, d.dtype, tokens * d.qkv->n);
    const Linear parts[] = {{d.qkv, {}, qkv_}, {d.z, {}, z_}};
    linears(parts, d.z ? 2 : 1, x, tokens, d.dtype);
    if (d.dtype != TP_FLOAT) widen(x, tokens, h, d.dtype, wide);
    const void* exact = d.dtype == TP_FLOAT ? x : wide;
    const Linear strengths[] = {{d.b, {}, b_}, {d.a, {}, a_}};
    linears(strengths, d.a ? 2 : 1, exact, tokens, TP_FLOAT);
  }

  Inputs of(int64_t token, int64_t head) const {
    const int64_t keys = d_.key_dim, values = d_.shared * d_.value_dim, place = token * d_.key_heads + head;
    if (!d_.z) {
      void* row = at(qkv_, d_.dtype, place * 2 * (keys + values));
      const float* b = b_ + place * 2 * d_.shared;
      const auto behind = [&](int64_t n) { return at(row, d_.dtype, n); };
      return {row, behind(keys), behind(2 * keys), behind(2 * keys + values), b, b + d_.shared};
    }
    const auto in_row = [&](int64_t n) { return at(qkv_, d_.dtype, token * d_.qkv->n + n); };
    const int64_t all = d_.key_heads * keys;
    return {in_row(head * keys), in_row(all + head * keys), in_row(2 * all + head * values),
            at(z_, d_.dtype, place * values), b_ + place * d_.shared, a_ + place * d_.shared};
  }

 private:
  const tp_delta& d_;
  float *b_, *a_;
  void *qkv_, *z_;
};

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// One key head's share of a token: out [shared, value_dim] of d.dtype; its states move on.
void recall(const tp_delta& d, int64_t head, const Inputs& in, void* tail, float* memory, void* out) {
  const int64_t keys = d.key_dim, values = d.shared * d.value_dim, all = d.key_heads * keys;
  float* q = static_cast<float*>(scratch(SLOT_PRODUCTS, (3 * keys + values + 2 * d.value_dim) * sizeof(float)));
  float *k = q + keys, *v = k + keys, *scales = v + values, *asked = scales + keys, *gate = asked + d.value_dim;
  const auto convolve = [&](int64_t channel, const void* x, int64_t n, float* to) {
    isa().delta.convolve({d.filter + channel, at(tail, d.dtype, channel), d.kernel, 2 * all + d.key_heads * values},
                         x, d.dtype, n, to);
  };
  convolve(head * keys, in.q, keys, q);
  convolve(all + head * keys, in.k, keys, k);
  convolve(2 * all + head * values, in.v, values, v);
  // A norm divides by the root of the mean square; of the sum it is here, and q is scaled like a query.
  const float size = static_cast<float>(keys), eps = L2_EPS / size;
  std::fill(scales, scales + keys, 1 / size);
  isa().norm(q, scales, keys, eps);
  std::fill(scales, scales + keys, 1 / std::sqrt(size));
  isa().norm(k, scales, keys, eps);
  for (int64_t i = 0; i < d.shared; i++) {
    const int64_t value_head = head * d.shared + i;
    const float kept = std::exp(-d.rate[value_head] * softplus(in.a[i] + d.bias[value_head]));
    const float strength = 1 / (1 + std::exp(-in.b[i]));
    isa().delta.recall(memory + i * keys * d.value_dim, keys, d.value_dim, {k, q, v + i * d.value_dim, kept, strength}, asked);
    isa().norm(asked, d.norm, d.value_dim, d.eps);
    isa().load(at(in.z, d.dtype, i * d.value_dim), d.dtype, gate, d.value_dim);
    isa().activate(gate, asked, d.value_dim, {0, 1, 0});
    isa().store(gate, d.dtype, at(out, d.dtype, i * d.value_dim), d.value_dim);
  }
}

}  // namespace

void delta(const tp_delta& d, const tp_layout& layout, const void* x, void* tails, float* memories, void* out) {
  const int64_t tokens = layout.starts[layout.sequences], values = d.shared * d.value_dim;
  const int64_t channels = d.key_heads * (2 * d.key_dim + values), memory = d.key_dim * values;
  const Projections projections(d, x, tokens);
  void* heads = scratch(SLOT_FEED_FORWARD, tokens * d.key_heads * values * item_bytes(d.dtype));
  run([&](const Member& me) {
    int64_t first, last;
    me.share(layout.sequences * d.key_heads, 1, first, last);
    for (; first < last; first++) {
      const int64_t s = first / d.key_heads, head = first % d.key_heads, slot = layout.states[s];
      for (int64_t t = layout.starts[s]; t < layout.starts[s + 1]; t++) {
        recall(d, head, projections.of(t, head), at(tails, d.dtype, slot * (d.kernel - 1) * channels),
               memories + (slot * d.key_heads + head) * memory, at(heads, d.dtype, (t * d.key_heads + head) * values));
      }
    }
  });
  linear(*d.output, heads, tokens, d.dtype, {}, out);
}

}  // namespace tp
