#include "small_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace tp {
namespace {

constexpr int64_t ALONE = 1 << 15;  // values that one thread is done with before others have woken up

// Calls work(i) for 0 … n − 1, on all threads where that many values are worth it.
template <class Work>
void for_each(int64_t n, int64_t values, Work&& work) {
  if (n * values <= ALONE) {
    for (int64_t i = 0; i < n; i++) work(i);
    return;
  }
  run([&](const Member& me) {
    int64_t first, last;
    me.share(n, 1, first, last);
    for (int64_t i = first; i < last; i++) work(i);
  });
}

// The calling thread's memory for n values of each of two vectors.
float* values_of(int64_t n) {
  thread_local std::vector<float> values;
  if (static_cast<int64_t>(values.size()) < 2 * n) values.resize(2 * n);
  return values.data();
}

void norm_row(const void* x, int64_t n, int32_t dtype, tp_vector weight, float eps, void* out) {
  float *y = values_of(n), *w = y + n;
  isa().load(x, dtype, y, n);
  isa().load(weight.data, weight.dtype, w, n);
  isa().norm(y, w, n, eps);
  isa().store(y, dtype, out, n);
}

// total = x + factor · added; it may be x.
void add_row(const void* x, const void* added, float factor, int64_t n, int32_t dtype, void* total) {
  float *a = values_of(n), *b = a + n;
  isa().load(x, dtype, a, n);
  isa().load(added, dtype, b, n);
  isa().add_scaled(a, b, factor, n);
  isa().store(a, dtype, total, n);
}

// Turns n pairs of a value of `first` and one of `second` by angles.
void turn_pairs(float* __restrict first, float* __restrict second, const float* cosines, const float* sines, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float a = first[i], b = second[i];
    first[i] = a * cosines[i] - b * sines[i];
    second[i] = b * cosines[i] + a * sines[i];
  }
}

// One head of token t; out may be x.
void turn_head(const Turn& turn, int64_t t, const void* x, int64_t width, void* out) {
  const int64_t half = turn.rotated / 2;
  const float *cosines = turn.cosines + t * half, *sines = turn.sines + t * half;
  float *y = values_of(width), *pairs = turn.interleaved ? y + width : y;
  isa().load(x, turn.dtype, y, width);
  if (turn.interleaved) {
    for (int64_t i = 0; i < half; i++) pairs[i] = y[2 * i], pairs[half + i] = y[2 * i + 1];
  }
  turn_pairs(pairs, pairs + half, cosines, sines, half);
  if (turn.interleaved) {
    for (int64_t i = 0; i < half; i++) y[2 * i] = pairs[i], y[2 * i + 1] = pairs[half + i];
  }
  isa().store(y, turn.dtype, out, width);
}

void place_head(const tp_heads& h, const Turn& turn, int64_t t, const void* x, const void* norm, void* out) {
  if (norm) norm_row(x, h.width, h.dtype, {norm, h.norm_dtype}, h.eps, out);
  if (h.rotated) turn_head(turn, t, norm ? out : x, h.width, out);
  else if (!norm) std::memcpy(out, x, h.width * item_bytes(h.dtype));
}

void scores_of(const float* logits, const tp_router& r, float* scores) {
  const int64_t n = r.experts;
  if (r.score == TP_SOFTMAX) {
    const float most = *std::max_element(logits, logits + n);
    float sum = 0;
    for (int64_t e = 0; e < n; e++) sum += scores[e] = std::exp(logits[e] - most);
    for (int64_t e = 0; e < n; e++) scores[e] /= sum;
  } else if (r.score == TP_SIGMOID) {
    for (int64_t e = 0; e < n; e++) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
  } else if (r.score == TP_SQRT_SOFTPLUS) {
    for (int64_t e = 0; e < n; e++) scores[e] = std::sqrt(logits[e] > 20 ? logits[e] : std::log1p(std::exp(logits[e])));
  } else {
    std::copy(logits, logits + n, scores);
  }
}

// The index of the largest value that is not taken, the first of equals; a NaN counts as largest, as for torch.
int64_t largest(const float* values, const char* taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; i++) {
    if (!taken[i] && (best < 0 || values[i] > values[best] || (std::isnan(values[i]) && !std::isnan(values[best])))) best = i;
  }
  return best;
}

// −∞ outside the groups whose two best sum to most.
void keep_groups(const tp_router& r, float* choice) {
  const int64_t size = r.experts / r.groups;
  std::vector<float> sums(r.groups);
  for (int64_t g = 0; g < r.groups; g++) {
    float best = -std::numeric_limits<float>::infinity(), second = size > 1 ? best : 0;
    for (int64_t e = g * size; e < (g + 1) * size; e++) {
      if (choice[e] > best) {
        if (size > 1) second = best;
        best = choice[e];
      } else if (choice[e] > second) {
        second = choice[e];
      }
    }
    sums[g] = best + second;
  }
  std::vector<char> kept(r.groups, 0);
  for (int64_t i = 0; i < r.top_groups; i++) kept[largest(sums.data(), kept.data(), r.groups)] = 1;
  for (int64_t e = 0; e < r.experts; e++) {
    if (!kept[e / size]) choice[e] = -std::numeric_limits<float>::infinity();
  }
}

void route_token(const float* logits, const tp_router& r, int64_t* ids, float* weights) {
  std::vector<float> scores(2 * r.experts);
  std::vector<char> taken(r.experts, 0);
  float* choice = scores.data() + r.experts;
  scores_of(logits, r, scores.data());
  for (int64_t e = 0; e < r.experts; e++) choice[e] = scores[e] + (r.correction ? r.correction[e] : 0.0f);
  if (r.top_groups < r.groups) keep_groups(r, choice);
  for (int64_t j = 0; j < r.chosen; j++) {
    ids[j] = largest(choice, taken.data(), r.experts);
    taken[ids[j]] = 1;
    weights[j] = scores[ids[j]];
  }
  if (r.score == TP_SOFTMAX_CHOSEN) {
    const float most = *std::max_element(weights, weights + r.chosen);
    float sum = 0;
    for (int64_t j = 0; j < r.chosen; j++) sum += weights[j] = std::exp(weights[j] - most);
    for (int64_t j = 0; j < r.chosen; j++) weights[j] /= sum;
  }
  float sum = 0;
  for (int64_t j = 0; j < r.chosen; j++) sum += weights[j];
  const float divisor = r.renormalize ? std::max(sum, r.epsilon) : 1.0f;
  for (int64_t j = 0; j < r.chosen; j++) weights[j] = weights[j] / divisor * r.scale;
}

}  // namespace

void rms_norm(const void* x, int64_t rows, int64_t n, int32_t dtype, tp_vector weight, float eps, void* out) {
  for_each(rows, n, [&](int64_t i) { norm_row(at(x, dtype, i * n), n, dtype, weight, eps, at(out, dtype, i * n)); });
}

void add_norm(const void* x, const void* added, float scale, int64_t rows, int64_t n, int32_t dtype, tp_vector weight,
              float eps, void* total, void* out) {
  for_each(rows, n, [&](int64_t i) {
    add_row(at(x, dtype, i * n), at(added, dtype, i * n), scale, n, dtype, at(total, dtype, i * n));
    norm_row(at(total, dtype, i * n), n, dtype, weight, eps, at(out, dtype, i * n));
  });
}

void swiglu(void* gate, const void* up, int64_t rows, int64_t n, int32_t dtype, Activation activation) {
  for_each(rows, n, [&](int64_t i) {
    float *g = values_of(n), *u = g + n;
    isa().load(at(gate, dtype, i * n), dtype, g, n);
    isa().load(at(up, dtype, i * n), dtype, u, n);
    isa().activate(g, u, n, activation);
    isa().store(g, dtype, at(gate, dtype, i * n), n);
  });
}

void gate(void* x, const void* gates, int64_t rows, int64_t n, int32_t dtype) {
  for_each(rows, n, [&](int64_t i) {
    float *y = values_of(n), *g = y + n;
    isa().load(at(x, dtype, i * n), dtype, y, n);
    isa().load(at(gates, dtype, i * n), dtype, g, n);
    isa().gate(y, g, n);
    isa().store(y, dtype, at(x, dtype, i * n), n);
  });
}

void split(const void* x, int64_t rows, int64_t n, int32_t dtype, void* first, void* second) {
  for_each(rows, 2 * n, [&](int64_t i) {
    std::memcpy(at(first, dtype, i * n), at(x, dtype, 2 * i * n), n * item_bytes(dtype));
    std::memcpy(at(second, dtype, i * n), at(x, dtype, (2 * i + 1) * n), n * item_bytes(dtype));
  });
}

void clip(void* x, int64_t n, int32_t dtype, float limit) {
  constexpr int64_t PIECE = 4096;
  for_each(ceil_div(n, PIECE), PIECE, [&](int64_t i) {
    const int64_t count = std::min(PIECE, n - i * PIECE);
    float* y = values_of(count);
    isa().load(at(x, dtype, i * PIECE), dtype, y, count);
    for (int64_t j = 0; j < count; j++) y[j] = y[j] > limit ? limit : y[j] < -limit ? -limit : y[j];
    isa().store(y, dtype, at(x, dtype, i * PIECE), count);
  });
}

const float* widened(const void* x, int64_t rows, int64_t n, int32_t dtype, float* room) {
  if (dtype == TP_FLOAT) return static_cast<const float*>(x);
  for_each(rows, n, [&](int64_t i) { isa().load(at(x, dtype, i * n), dtype, room + i * n, n); });
  return room;
}

void add(void* total, const void* x, int64_t rows, int64_t n, int32_t dtype, float scale, const float* factors) {
  for_each(rows, n, [&](int64_t i) {
    void* sum = at(total, dtype, i * n);
    add_row(sum, at(x, dtype, i * n), factors ? scale * factors[i] : scale, n, dtype, sum);
  });
}

void route(const float* logits, int64_t tokens, const tp_router& r, int64_t* ids, float* weights) {
  for_each(tokens, r.experts * r.chosen, [&](int64_t t) {
    route_token(logits + t * r.experts, r, ids + t * r.chosen, weights + t * r.chosen);
  });
}

void place_heads(const tp_heads& h, int64_t tokens, const void* q, const void* k, const void* v, const float* cosines,
                 const float* sines, const int64_t* slots, void* q_out, void* keys, void* values) {
  const int64_t kv = h.kv_heads * h.width;
  const Turn turn{h.rotated, h.interleaved, cosines, sines, h.dtype};
  for_each(tokens, (h.heads + 2 * h.kv_heads) * h.width, [&](int64_t t) {
    for (int64_t i = t * h.heads; i < (t + 1) * h.heads; i++) {
      place_head(h, turn, t, at(q, h.dtype, i * h.width), h.q_norm, at(q_out, h.dtype, i * h.width));
    }
    for (int64_t i = 0; i < h.kv_heads; i++) {
      void* to = at(keys, h.dtype, slots[t] * kv + i * h.width);
      place_head(h, turn, t, at(k, h.dtype, t * kv + i * h.width), h.k_norm, to);
    }
    std::memcpy(at(values, h.dtype, slots[t] * kv), at(v, h.dtype, t * kv), kv * item_bytes(h.dtype));
  });
}

void turn_starts(const Turn& turn, int64_t tokens, int64_t heads, int64_t width, void* x) {
  for_each(tokens * heads, turn.rotated, [&](int64_t i) {
    void* start = at(x, turn.dtype, i * width);
    turn_head(turn, i / heads, start, turn.rotated, start);
  });
}

void turn_ends(const Turn& turn, int64_t tokens, int64_t heads, int64_t width, void* x) {
  for_each(tokens * heads, turn.rotated, [&](int64_t i) {
    void* end = at(x, turn.dtype, (i + 1) * width - turn.rotated);
    turn_head(turn, i / heads, end, turn.rotated, end);
  });
}

void place_latents(const tp_latents& l, int64_t tokens, const void* x, tp_vector norm, float eps, const int64_t* slots,
                   void* entries) {
  const int64_t entry = l.rank + l.shared;
  for_each(tokens, entry, [&](int64_t t) {
    void* to = at(entries, l.dtype, slots[t] * entry);
    std::memcpy(to, at(x, l.dtype, t * entry), entry * item_bytes(l.dtype));
    norm_row(to, l.rank, l.dtype, norm, eps, to);
  });
}

}  // namespace tp
