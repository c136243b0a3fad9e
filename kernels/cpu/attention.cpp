#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "isa.h"
#include "prefill.h"
#include "products.h"
#include "threads.h"

namespace tp {
namespace {

constexpr int64_t ALONE = 1 << 16;  // multiplications that one thread is done with before others have woken up

// One new token and one head of keys, with the query heads that read it.
struct Item {
  int64_t token, head, low, high;  // positions it sees: low … high − 1
  const int64_t* table;
};

class Attention {
 public:
  Attention(const tp_attention& a, const tp_layout& layout, const void* q, const void* keys, const void* values, void* out)
      : a_(a), q_(q), keys_(keys), values_(values), out_(out), queries_(a.heads / a.kv_heads), result_(a.width + 2) {
    for (int64_t s = 0; s < layout.sequences; s++) {
      const int64_t count = layout.starts[s + 1] - layout.starts[s], past = layout.lengths[s] - count;
      for (int64_t i = 0; i < count; i++) {
        const int64_t high = past + i + 1, low = a.window ? std::max<int64_t>(0, high - a.window) : 0;
        for (int64_t h = 0; h < a.kv_heads; h++) items_.push_back({layout.starts[s] + i, h, low, high, layout.tables[s]});
        positions_ += (high - low) * a.kv_heads;
      }
    }
  }

  void run() {
    const int64_t items = static_cast<int64_t>(items_.size()), members = threads();
    const bool alone = positions_ * queries_ * a_.width <= ALONE || members == 1;
    // So many parts to an item that all members have some, however few items there are.
    parts_ = alone ? 1 : std::min(members, ceil_div(4 * members, items));
    partial_.resize(items * parts_ * queries_ * result_);
    if (alone) {
      for (int64_t i = 0; i < items; i++) part(i, 0), merge(i);
      return;
    }
    tp::run([&](const Member& me) {
      int64_t first, last;
      me.share(items * parts_, 1, first, last);
      for (int64_t i = first; i < last; i++) part(i / parts_, i % parts_);
      me.barrier();
      me.share(items, 1, first, last);
      for (int64_t i = first; i < last; i++) merge(i);
    });
  }

 private:
  float* partial(int64_t item, int64_t part) { return partial_.data() + (item * parts_ + part) * queries_ * result_; }

  // Sums of one part of an item's positions: of each query the largest logit, the sum of weights, and the weighted values.
  void part(int64_t index, int64_t which) {
    const Item& item = items_[index];
    const int64_t n = item.high - item.low, step = ceil_div(ceil_div(n, parts_), ATTEND) * ATTEND;
    const int64_t begin = std::min(n, which * step) + item.low, end = std::min(n, (which + 1) * step) + item.low;
    float* results = partial(index, which);
    for (int64_t j = 0; j < queries_; j++) {
      std::fill(results + j * result_, results + (j + 1) * result_, 0.0f);
      results[j * result_] = -std::numeric_limits<float>::infinity();
    }
    float* scaled = static_cast<float*>(scratch(SLOT_PLAIN, queries_ * a_.width * sizeof(float)));
    isa().load(at(q_, a_.dtype, (item.token * a_.heads + item.head * queries_) * a_.width), a_.dtype, scaled, queries_ * a_.width);
    for (int64_t i = 0; i < queries_ * a_.width; i++) scaled[i] *= a_.scale;
    for (int64_t position = begin; position < end;) {
      const int64_t place = position % a_.block_size, count = std::min({a_.block_size - place, end - position, ATTEND});
      const int64_t row = item.table[position / a_.block_size] * a_.block_size + place;
      const int64_t offset = (row * a_.kv_heads + item.head) * a_.width;
      isa().attend(scaled, queries_, a_.width, at(keys_, a_.dtype, offset), at(values_, a_.dtype, offset),
                   a_.kv_heads * a_.width, a_.dtype, count, results);
      position += count;
    }
  }

  void merge(int64_t index) {
    const Item& item = items_[index];
    float* total = static_cast<float*>(scratch(SLOT_PRODUCTS, a_.width * sizeof(float)));
    for (int64_t j = 0; j < queries_; j++) {
      const int64_t head = item.head * queries_ + j;
      float most = a_.sinks ? a_.sinks[head] : -std::numeric_limits<float>::infinity();
      for (int64_t p = 0; p < parts_; p++) most = std::max(most, partial(index, p)[j * result_]);
      float sum = a_.sinks ? std::exp(a_.sinks[head] - most) : 0.0f;
      std::fill(total, total + a_.width, 0.0f);
      for (int64_t p = 0; p < parts_; p++) {
        const float* part = partial(index, p) + j * result_;
        const float factor = std::exp(part[0] - most);
        sum += factor * part[1];
        isa().add_scaled(total, part + 2, factor, a_.width);
      }
      for (int64_t i = 0; i < a_.width; i++) total[i] /= sum;
      isa().store(total, a_.dtype, at(out_, a_.dtype, (item.token * a_.heads + head) * a_.width), a_.width);
    }
  }

  const tp_attention& a_;
  const void *q_, *keys_, *values_;
  void* out_;
  const int64_t queries_, result_;
  std::vector<Item> items_;
  std::vector<float> partial_;
  int64_t positions_ = 0, parts_ = 1;
};

// A matrix unit is faster from two tokens of a sequence on, if there are heads enough for all threads.
bool many(const tp_attention& a, const tp_layout& layout) {
  return layout.starts[layout.sequences] >= 2 * layout.sequences && layout.sequences * a.kv_heads >= threads();
}

}  // namespace

void attention(const tp_attention& a, const tp_layout& layout, const void* q, const void* keys, const void* values,
               void* out) {
  if (many(a, layout) && prefill(a, layout, q, keys, values, out)) return;
  Attention(a, layout, q, keys, values, out).run();
}

}  // namespace tp
