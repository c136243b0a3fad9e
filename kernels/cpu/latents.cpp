#include "latents.h"

#include <algorithm>
#include <vector>

#include "isa.h"
#include "products.h"
#include "threads.h"

namespace tp {
namespace {

// Calls work(rows, row, head, token, tokens) for rows first … last − 1 of each head's `up`, as many at a time as
// are taken together, and so for the tokens. Members share the heads.
template <class Work>
void for_rows(const tp_latents& l, const void* up, int64_t tokens, int64_t first, int64_t last, Work&& work) {
  run([&](const Member& me) {
    int64_t head, end;
    me.share(l.heads, 1, head, end);
    for (; head < end; head++) {
      for (int64_t row = first; row < last; row += ATTEND) {
        const int64_t place = head * (l.nope + l.value) + row;
        const Rows rows{at(up, l.dtype, place * l.rank), l.rank, l.dtype, std::min(ATTEND, last - row)};
        for (int64_t t = 0; t < tokens; t += ATTEND_QUERIES) {
          work(rows, row, head, t, std::min(ATTEND_QUERIES, tokens - t));
        }
      }
    }
  });
}

// A query times the key's part of `up`, which then meets latents as they are; its shared part stays: out, float32
// [tokens, heads, rank + shared].
void absorb(const tp_latents& l, const void* q, const void* up, int64_t tokens, float* out) {
  const int64_t query = l.nope + l.shared, entry = l.rank + l.shared;
  for_rows(l, up, tokens, 0, l.nope, [&](const Rows& rows, int64_t row, int64_t head, int64_t t, int64_t count) {
    float factors[ATTEND_QUERIES * ATTEND];
    for (int64_t i = 0; i < count; i++) {
      const int64_t at_head = (t + i) * l.heads + head;
      float* to = out + at_head * entry;
      isa().load(at(q, l.dtype, at_head * query + row), l.dtype, factors + i * ATTEND, rows.n);
      if (row) continue;
      std::fill(to, to + l.rank, 0.0f);
      isa().load(at(q, l.dtype, at_head * query + l.nope), l.dtype, to + l.rank, l.shared);
    }
    isa().attend.sums(rows, l.rank, factors, count, out + (t * l.heads + head) * entry, l.heads * entry);
  });
}

// What was attended to, float32 [tokens, heads, rank], times the value's part of `up`.
void expand(const tp_latents& l, const float* latents, const void* up, int64_t tokens, void* out) {
  const int64_t last = l.nope + l.value;
  for_rows(l, up, tokens, l.nope, last, [&](const Rows& rows, int64_t row, int64_t head, int64_t t, int64_t count) {
    float products[ATTEND_QUERIES * ATTEND];
    isa().attend.products(rows, l.rank, latents + (t * l.heads + head) * l.rank, l.heads * l.rank, count, products);
    for (int64_t i = 0; i < count; i++) {
      const int64_t to = ((t + i) * l.heads + head) * l.value + row - l.nope;
      isa().store(products + i * ATTEND, l.dtype, at(out, l.dtype, to), rows.n);
    }
  });
}

}  // namespace

void latent_attention(const tp_latents& l, const tp_layout& layout, const void* q, const void* entries, const void* up,
                      Picks picks, void* out) {
  const int64_t tokens = layout.starts[layout.sequences], entry = l.rank + l.shared;
  std::vector<float> queries(tokens * l.heads * entry), latents(tokens * l.heads * l.rank);
  const tp_attention a{l.heads, 1, entry, l.rank, l.block_size, 0, nullptr, l.scale, TP_FLOAT, l.dtype};
  absorb(l, q, up, tokens, queries.data());
  attention(a, layout, queries.data(), entries, entries, latents.data(), picks);
  expand(l, latents.data(), up, tokens, out);
}

}  // namespace tp
