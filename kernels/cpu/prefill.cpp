#include "prefill.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "isa.h"
#include "threads.h"
#include "weight.h"

namespace tp {
namespace {

// Tokens of a block: so many that packing keys costs little, so few that the sums of its queries stay in the second
// cache, and that every thread has several blocks.
int64_t tokens_at_a_time(const tp_attention& a, const tp_layout& layout) {
  constexpr int64_t SUMS = 1 << 17, FEWEST = 32, BLOCKS = 4;
  const int64_t members = threads(), shared = a.heads / a.kv_heads, least = layout.sequences * a.kv_heads;
  const int64_t longest = std::max<int64_t>(1, most_new(layout));
  const int64_t parts = members == 1 ? 1 : ceil_div(BLOCKS * members, least);
  const int64_t queries = std::clamp(ceil_div(longest * shared, parts), FEWEST, SUMS / a.width);
  return std::max<int64_t>(1, queries / shared);
}

// How many positions a block's queries see together, within 2.
int64_t cost(const tp_attention& a, const QueryBlock& b) {
  const int64_t first = b.position + 1, last = b.position + b.count;
  return a.window ? b.count * std::min(last, a.window) : b.count * (first + last) / 2;
}

std::vector<QueryBlock> blocks(const tp_attention& a, const tp_layout& layout, int64_t tokens) {
  std::vector<QueryBlock> found;
  for (int64_t s = 0; s < layout.sequences; s++) {
    const int64_t start = layout.starts[s], count = layout.starts[s + 1] - start, past = layout.lengths[s] - count;
    for (int64_t i = 0; i < count; i += tokens) {
      for (int64_t h = 0; h < a.kv_heads; h++) {
        found.push_back({start + i, past + i, std::min(tokens, count - i), h, layout.tables[s]});
      }
    }
  }
  // The dearest ones first: threads take the next one as they get free, and the cheapest are left for the end.
  std::stable_sort(found.begin(), found.end(), [&](auto& x, auto& y) { return cost(a, x) > cost(a, y); });
  return found;
}

bool prefills(const tp_attention& a) {
  if (!isa().tiles || a.dtype != TP_BFLOAT16 || a.cached != a.dtype || a.value_width != a.width) return false;
  return a.scale > 0;  // the largest product is taken for the largest logit
}

}  // namespace

bool prefill(const tp_attention& a, const tp_layout& layout, const void* q, const void* keys, const void* values,
             void* out) {
  if (!prefills(a)) return false;
  const Tiles* tiles = isa().tiles;
  const auto work = blocks(a, layout, tokens_at_a_time(a, layout));
  std::atomic<size_t> next{0};
  run([&](const Member&) {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < work.size();) {
      tiles->attend(a, work[i], static_cast<const uint16_t*>(q), static_cast<const uint16_t*>(keys),
                    static_cast<const uint16_t*>(values), static_cast<uint16_t*>(out));
    }
  });
  return true;
}

bool has_attention(const tp_attention& a, const tp_layout& layout) { return most_new(layout) <= FEW || prefills(a); }

bool any_attention(const tp_attention& a, const tp_layout& layout, const void* q, const void* keys, const void* values,
                   void* out) {
  if (most_new(layout) > FEW) return prefill(a, layout, q, keys, values, out);
  attention(a, layout, q, keys, values, out);
  return true;
}

}  // namespace tp
