#include "index.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "isa.h"
#include "products.h"
#include "threads.h"

namespace tp {
namespace {

// x = (x − mean) / sqrt(variance + eps) · weight + bias, n values.
void layer_norm(float* x, const float* weight, const float* bias, int64_t n, float eps) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < n; i++) sum += x[i];
  const double mean = sum / n;
  for (int64_t i = 0; i < n; i++) squares += (x[i] - mean) * (x[i] - mean);
  const float factor = static_cast<float>(1 / std::sqrt(squares / n + eps));
  for (int64_t i = 0; i < n; i++) x[i] = (x[i] - static_cast<float>(mean)) * factor * weight[i] + bias[i];
}

// Keys [tokens, dim] as projected, normed and turned, in their places.
void place_keys(const tp_index& ix, const Turn& turn, int64_t tokens, const int64_t* slots, void* made, void* keys) {
  std::vector<float> key(ix.dim);
  for (int64_t t = 0; t < tokens; t++) {
    isa().load(at(made, ix.dtype, t * ix.dim), ix.dtype, key.data(), ix.dim);
    layer_norm(key.data(), ix.norm, ix.bias, ix.dim, ix.eps);
    isa().store(key.data(), ix.dtype, at(made, ix.dtype, t * ix.dim), ix.dim);
  }
  turn_starts(turn, tokens, 1, ix.dim, made);
  for (int64_t t = 0; t < tokens; t++) {
    std::memcpy(at(keys, ix.dtype, slots[t] * ix.dim), at(made, ix.dtype, t * ix.dim), ix.dim * item_bytes(ix.dtype));
  }
}

// scores[p] = Σ_h weights[h] · relu(q[h] · key[p]) of positions 0 … count − 1; q float32 [heads, dim].
void score(const tp_index& ix, const int64_t* table, int64_t count, const float* q, const float* weights, const void* keys,
           float* scores) {
  const int64_t piece = std::min(ATTEND, ix.block_size), pieces = ceil_div(ix.block_size, piece);
  run([&](const Member& me) {
    int64_t first, last;
    me.share(ceil_div(count, ix.block_size) * pieces, 1, first, last);
    for (; first < last; first++) {
      const int64_t inside = first % pieces * piece, start = first / pieces * ix.block_size + inside;
      const int64_t n = std::min({piece, ix.block_size - inside, count - start});
      if (n <= 0) continue;
      const Rows rows{at(keys, ix.dtype, (table[first / pieces] * ix.block_size + inside) * ix.dim), ix.dim, ix.dtype, n};
      std::fill(scores + start, scores + start + n, 0.0f);
      for (int64_t h = 0; h < ix.heads; h += ATTEND_QUERIES) {
        const int64_t heads = std::min(ATTEND_QUERIES, ix.heads - h);
        float products[ATTEND_QUERIES * ATTEND];
        isa().attend.products(rows, ix.dim, q + h * ix.dim, ix.dim, heads, products);
        for (int64_t v = 0; v < heads; v++) {
          const float* found = products + v * ATTEND;
          for (int64_t i = 0; i < n; i++) scores[start + i] += weights[h + v] * (found[i] < 0 ? 0.0f : found[i]);
        }
      }
    }
  });
}

// The positions of the `top` largest of n scores; where there are fewer, also ones behind them. What is no number counts
// as largest, as for torch.
void choose(const float* scores, int64_t n, int64_t top, std::vector<float>& room, int64_t* picks) {
  if (n <= top) {
    for (int64_t i = 0; i < top; i++) picks[i] = i;
    return;
  }
  const float most = std::numeric_limits<float>::infinity();
  const auto value = [&](int64_t i) { return std::isnan(scores[i]) ? most : scores[i]; };
  room.resize(n);
  for (int64_t i = 0; i < n; i++) room[i] = value(i);
  std::nth_element(room.begin(), room.begin() + top - 1, room.end(), [](float a, float b) { return a > b; });
  const float least = room[top - 1];
  int64_t equal = top - std::count_if(room.begin(), room.begin() + top, [&](float v) { return v > least; });
  for (int64_t i = 0; i < n; i++) {
    if (value(i) > least || (value(i) == least && equal-- > 0)) *picks++ = i;
  }
}

}  // namespace

void Picked::pick(const tp_index& ix, const tp_layout& layout, const Turn& turn, const void* x, const void* compressed,
                  const int64_t* slots, void* keys) {
  const int64_t tokens = layout.starts[layout.sequences], h = ix.k->k, width = ix.heads * ix.dim;
  const int64_t longest = *std::max_element(layout.lengths, layout.lengths + layout.sequences);
  const int64_t floats = tokens * (h + ix.heads) + width + longest;
  float* wide = static_cast<float*>(
      scratch(SLOT_FEED_FORWARD, floats * sizeof(float) + tokens * (width + ix.dim) * item_bytes(ix.dtype)));
  float *weights = wide + tokens * h, *query = weights + tokens * ix.heads, *scores = query + width;
  void *queries = wide + floats, *made = at(queries, ix.dtype, tokens * width);

  linear(*ix.k, x, tokens, ix.dtype, {}, made);
  place_keys(ix, turn, tokens, slots, made, keys);
  of_.assign(layout.sequences, nullptr);
  top_ = ix.top;
  if (longest <= top_) return;
  linear(*ix.q, compressed, tokens, ix.dtype, {}, queries);
  turn_starts(turn, tokens, ix.heads, ix.dim, queries);
  linear(*ix.weights, widened(x, tokens, h, ix.dtype, wide), tokens, TP_FLOAT, {}, weights);
  const float factor = 1 / std::sqrt(static_cast<float>(width));
  for (int64_t i = 0; i < tokens * ix.heads; i++) weights[i] *= factor;

  values_.resize(tokens * top_);
  std::vector<float> room;
  for (int64_t s = 0; s < layout.sequences; s++) {
    const int64_t start = layout.starts[s], end = layout.starts[s + 1];
    if (layout.lengths[s] <= top_ || start == end) continue;
    of_[s] = values_.data() + start * top_;
    for (int64_t t = start; t < end; t++) {
      const int64_t seen = layout.lengths[s] - (end - t) + 1;
      isa().load(at(queries, ix.dtype, t * width), ix.dtype, query, width);
      if (seen > top_) score(ix, layout.tables[s], seen, query, weights + t * ix.heads, keys, scores);
      choose(scores, seen, top_, room, values_.data() + t * top_);
    }
  }
}

}  // namespace tp
