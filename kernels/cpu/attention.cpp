#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "isa.h"
#include "prefill.h"
#include "products.h"
#include "threads.h"

namespace tp {
namespace {

constexpr int64_t ALONE = 1 << 16;  // multiplications that one thread is done with before others have woken up

// One new token.
struct Item {
  int64_t token, position;
  int64_t low, high;  // positions it sees, or places among its picks: low … high − 1
  const int64_t *table, *picks;
};

class Attention {
 public:
  Attention(const tp_attention& a, const tp_layout& layout, const void* q, const void* keys, const void* values,
            void* out, Picks picks)
      : a_(a), q_(q), keys_(keys), values_(values), out_(out) {
    for (int64_t s = 0; s < layout.sequences; s++) {
      const int64_t count = layout.starts[s + 1] - layout.starts[s], past = layout.lengths[s] - count;
      const int64_t* picked = picks.of ? picks.of[s] : nullptr;
      for (int64_t i = 0; i < count; i++) {
        const int64_t position = past + i, low = a.window ? std::max<int64_t>(0, position + 1 - a.window) : 0;
        Item item{layout.starts[s] + i, position, low, position + 1, layout.tables[s], nullptr};
        if (picked) item.low = 0, item.high = picks.top, item.picks = picked + i * picks.top;
        items_.push_back(item);
        multiplications_ += (item.high - item.low) * a.heads * a.width;
      }
    }
  }

  void run() {
    const int64_t items = static_cast<int64_t>(items_.size()), members = threads();
    const bool alone = multiplications_ <= ALONE || members == 1;
    // So many parts to an item that all members have some, however few items there are.
    parts_ = alone ? 1 : std::min(members, ceil_div(4 * members, items));
    partial_.resize(items * parts_ * a_.heads * result_);
    if (alone) {
      for (int64_t i = 0; i < items; i++) part(i, 0);
      for (int64_t i = 0; i < items * a_.heads; i++) merge(i / a_.heads, i % a_.heads);
      return;
    }
    tp::run([&](const Member& me) {
      int64_t first, last;
      me.share(items * parts_, 1, first, last);
      for (int64_t i = first; i < last; i++) part(i / parts_, i % parts_);
      me.barrier();
      me.share(items * a_.heads, 1, first, last);
      for (int64_t i = first; i < last; i++) merge(i / a_.heads, i % a_.heads);
    });
  }

 private:
  // [heads][result_]
  float* partial(int64_t item, int64_t part) { return partial_.data() + (item * parts_ + part) * a_.heads * result_; }

  // Sums of one part of an item's positions: of each query the largest logit, the sum of weights, and the weighted values.
  void part(int64_t index, int64_t which) {
    const Item& item = items_[index];
    const int64_t n = item.high - item.low, step = ceil_div(ceil_div(n, parts_), ATTEND) * ATTEND;
    const int64_t begin = std::min(n, which * step) + item.low, end = std::min(n, (which + 1) * step) + item.low;
    float* results = partial(index, which);
    std::fill(results, results + a_.heads * result_, 0.0f);
    for (int64_t head = 0; head < a_.heads; head++) results[head * result_] = -std::numeric_limits<float>::infinity();
    const int64_t values = a_.heads * a_.width;
    float* q = static_cast<float*>(scratch(SLOT_PLAIN, values * sizeof(float)));
    isa().load(at(q_, a_.dtype, item.token * values), a_.dtype, q, values);
    if (item.picks) picked(item, begin, end, q, results);
    else stored(item, begin, end, q, results);
  }

  // A few positions for all heads, as they lie in memory. data(pool, head) is the first row of a head of keys.
  template <class Data>
  void positions(int64_t count, int64_t apart, const float* q, float* results, Data&& data) const {
    for (int64_t head = 0, n; head < a_.heads; head += n) {
      n = std::min(ATTEND_QUERIES, queries_ - head % queries_);
      const int64_t from = head / queries_, last = a_.kv_heads - 1;
      const Rows keys{data(keys_, from), apart, a_.cached, count};
      // Blocks mostly follow each other.
      const void* next = from < last ? data(keys_, from + 1) : at(data(keys_, 0), a_.cached, count * apart);
      isa().attend.positions(q + head * a_.width, n, a_.width, a_.scale, keys, data(values_, from), a_.value_width, next,
                             results + head * result_);
    }
  }

  // Where a position's first head is, in items from the start of a pool.
  int64_t offset(const Item& item, int64_t position) const {
    const int64_t row = item.table[position / a_.block_size] * a_.block_size + position % a_.block_size;
    return row * a_.kv_heads * a_.width;
  }

  void stored(const Item& item, int64_t begin, int64_t end, const float* q, float* results) const {
    for (int64_t position = begin; position < end;) {
      const int64_t count = std::min({a_.block_size - position % a_.block_size, end - position, ATTEND});
      positions(count, a_.kv_heads * a_.width, q, results, [&, from = offset(item, position)](const void* pool, int64_t head) {
        return at(pool, a_.cached, from + head * a_.width);
      });
      position += count;
    }
  }

  // Of places begin … end − 1 among the item's picks, which are brought together. There is one head of keys, and values
  // are where the keys are.
  void picked(const Item& item, int64_t begin, int64_t end, const float* q, float* results) const {
    const int64_t bytes = a_.width * item_bytes(a_.cached);
    char* rows = static_cast<char*>(scratch(SLOT_PICKED, ATTEND * bytes));
    for (int64_t i = begin; i < end;) {
      int64_t count = 0;
      for (; i < end && count < ATTEND; i++) {
        if (item.picks[i] > item.position) continue;
        std::memcpy(rows + count++ * bytes, at(keys_, a_.cached, offset(item, item.picks[i])), bytes);
      }
      if (count) positions(count, a_.width, q, results, [&](const void*, int64_t) -> const void* { return rows; });
    }
  }

  void merge(int64_t index, int64_t head) {
    float* total = static_cast<float*>(scratch(SLOT_PRODUCTS, a_.value_width * sizeof(float)));
    float most = a_.sinks ? a_.sinks[head] : -std::numeric_limits<float>::infinity();
    for (int64_t p = 0; p < parts_; p++) most = std::max(most, partial(index, p)[head * result_]);
    float sum = a_.sinks ? std::exp(a_.sinks[head] - most) : 0.0f;
    std::fill(total, total + a_.value_width, 0.0f);
    for (int64_t p = 0; p < parts_; p++) {
      const float* part = partial(index, p) + head * result_;
      const float factor = std::exp(part[0] - most);
      sum += factor * part[1];
      isa().add_scaled(total, part + 2, factor, a_.value_width);
    }
    for (int64_t i = 0; i < a_.value_width; i++) total[i] /= sum;
    const int64_t place = (items_[index].token * a_.heads + head) * a_.value_width;
    isa().store(total, a_.dtype, at(out_, a_.dtype, place), a_.value_width);
  }

  const tp_attention& a_;
  const void *q_, *keys_, *values_;
  void* out_;
  const int64_t queries_ = a_.heads / a_.kv_heads, result_ = a_.value_width + 2;
  std::vector<Item> items_;
  std::vector<float> partial_;
  int64_t multiplications_ = 0, parts_ = 1;
};

// A matrix unit is faster from two tokens of a sequence on, if there are heads enough for all threads.
bool many(const tp_attention& a, const tp_layout& layout) {
  return layout.starts[layout.sequences] >= 2 * layout.sequences && layout.sequences * a.kv_heads >= threads();
}

}  // namespace

int64_t most_new(const tp_layout& layout) {
  int64_t most = 0;
  for (int64_t s = 0; s < layout.sequences; s++) most = std::max(most, layout.starts[s + 1] - layout.starts[s]);
  return most;
}

void attention(const tp_attention& a, const tp_layout& layout, const void* q, const void* keys, const void* values,
               void* out, Picks picks) {
  if (!picks.of && many(a, layout) && prefill(a, layout, q, keys, values, out)) return;
  Attention(a, layout, q, keys, values, out, picks).run();
}

}  // namespace tp
