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
    qkv_ = b_ + floats;
    z_ = at(qkv_, d.dtype, tokens * d.qkv->n);
    const Linear parts[] = {{d.qkv, {}, qkv_}, {d.z, {}, z_}};
    linears(parts, d.z ? 2 : 1, x, tokens, d.dtype);
    const float* exact = widened(x, tokens, h, d.dtype, a_ + tokens * heads);
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

constexpr int64_t PIECE = 32;  // tokens of a key head that are worked on together

// What up to PIECE tokens have of a key head, once convolved: k and q [tokens, keys], v and what is found [tokens, values].
struct Head {
  float *k, *q, *v, *found, *scales, *gate;

  explicit Head(const tp_delta& d) {
    const int64_t keys = d.key_dim, values = d.shared * d.value_dim;
    k = static_cast<float*>(scratch(SLOT_PRODUCTS, (PIECE * 2 * (keys + values) + keys + d.value_dim) * sizeof(float)));
    q = k + PIECE * keys;
    v = q + PIECE * keys;
    found = v + PIECE * values;
    scales = found + PIECE * values;
    gate = scales + keys;
  }
};

// Token number i of a piece: its inputs, through the convolution.
void convolve(const tp_delta& d, int64_t head, const Inputs& in, void* tail, const Head& h, int64_t i) {
  const int64_t keys = d.key_dim, values = d.shared * d.value_dim, all = d.key_heads * keys;
  const auto channels = [&](int64_t first, const void* x, int64_t n, float* to) {
    const Past past{d.filter + first, at(tail, d.dtype, first), d.kernel, 2 * all + d.key_heads * values};
    isa().delta.convolve(past, x, d.dtype, n, to);
  };
  float *k = h.k + i * keys, *q = h.q + i * keys;
  channels(head * keys, in.q, keys, q);
  channels(all + head * keys, in.k, keys, k);
  channels(2 * all + head * values, in.v, values, h.v + i * values);
  // A norm divides by the root of the mean square; of the sum it is here, and q is scaled like a query.
  const float size = static_cast<float>(keys), eps = L2_EPS / size;
  std::fill(h.scales, h.scales + keys, 1 / size);
  isa().norm(q, h.scales, keys, eps);
  std::fill(h.scales, h.scales + keys, 1 / std::sqrt(size));
  isa().norm(k, h.scales, keys, eps);
}

// What was found, normed and gated by z: out [shared, value_dim] of d.dtype.
void finish(const tp_delta& d, const void* z, float* found, float* gate, void* out) {
  for (int64_t i = 0; i < d.shared; i++, found += d.value_dim) {
    isa().norm(found, d.norm, d.value_dim, d.eps);
    isa().load(at(z, d.dtype, i * d.value_dim), d.dtype, gate, d.value_dim);
    isa().activate(gate, found, d.value_dim, {0, 1, 0});
    isa().store(gate, d.dtype, at(out, d.dtype, i * d.value_dim), d.value_dim);
  }
}

// Tokens first … last − 1 of a sequence, at most PIECE, through one key head; heads [tokens, heads, value_dim] of d.dtype.
void pass(const tp_delta& d, const Projections& projections, int64_t head, int64_t first, int64_t last, void* tail,
          float* memory, void* heads) {
  const int64_t n = last - first, values = d.shared * d.value_dim;
  const Head h(d);
  for (int64_t i = 0; i < n; i++) convolve(d, head, projections.of(first + i, head), tail, h, i);
  for (int64_t s = 0; s < d.shared; s++) {
    const int64_t value_head = head * d.shared + s, at_head = s * d.value_dim;
    float kept[PIECE], strengths[PIECE];
    for (int64_t i = 0; i < n; i++) {
      const Inputs in = projections.of(first + i, head);
      kept[i] = std::exp(-d.rate[value_head] * softplus(in.a[s] + d.bias[value_head]));
      strengths[i] = 1 / (1 + std::exp(-in.b[s]));
    }
    isa().delta.recall(memory + at_head * d.key_dim, {n, d.key_dim, d.value_dim, values, h.k, h.q, h.v + at_head, kept,
                                                      strengths, h.found + at_head});
  }
  for (int64_t i = 0; i < n; i++) {
    void* out = at(heads, d.dtype, ((first + i) * d.key_heads + head) * values);
    finish(d, projections.of(first + i, head).z, h.found + i * values, h.gate, out);
  }
}

}  // namespace

void delta(const tp_delta& d, const tp_layout& layout, const void* x, void* tails, float* memories, void* out) {
  const int64_t tokens = layout.starts[layout.sequences], values = d.shared * d.value_dim;
  const int64_t channels = d.key_heads * (2 * d.key_dim + values);
  const Projections projections(d, x, tokens);
  void* heads = scratch(SLOT_FEED_FORWARD, tokens * d.key_heads * values * item_bytes(d.dtype));
  run([&](const Member& me) {
    int64_t first, last;
    me.share(layout.sequences * d.key_heads, 1, first, last);  // some heads of all sequences, which may be of any length
    for (; first < last; first++) {
      const int64_t s = first % layout.sequences, head = first / layout.sequences, slot = layout.states[s];
      void* tail = at(tails, d.dtype, slot * (d.kernel - 1) * channels);
      float* memory = memories + (slot * d.key_heads + head) * d.key_dim * values;
      for (int64_t t = layout.starts[s], end = layout.starts[s + 1]; t < end; t += PIECE) {
        pass(d, projections, head, t, std::min(t + PIECE, end), tail, memory, heads);
      }
    }
  });
  linear(*d.output, heads, tokens, d.dtype, {}, out);
}

}  // namespace tp
