// Attention of few new tokens over a paged cache.
#pragma once
#include <cstdint>

extern "C" {

// Where sequences stand, see ops.Layout: starts [sequences + 1], lengths, tables and states [sequences]; the last is null
// for models that keep none.
struct tp_layout {
  int64_t sequences;
  const int64_t *starts, *lengths;
  const int64_t* const* tables;
  const int64_t* states;
};

// window 0 sees all. sinks: float32 [heads] or null. dtype: of queries and what comes out; cached: of keys and values.
struct tp_attention {
  int64_t heads, kv_heads, width, value_width, block_size, window;
  const float* sinks;
  float scale;
  int32_t dtype, cached;
};
}

namespace tp {

constexpr int64_t FEW = 8;  // new tokens of a sequence that are taken one by one

// New tokens of the sequence that has most.
int64_t most_new(const tp_layout& layout);

// Of each sequence the `top` positions [new tokens, top] that its tokens see if they are not behind them; null: all.
struct Picks {
  const int64_t* const* of;
  int64_t top;
};

// q [tokens, heads, width] and out [tokens, heads, value_width]; keys [blocks, block_size, kv_heads, width], and values
// likewise, or the same: then they are the first value_width of the keys. Widths are multiples of 16.
void attention(const tp_attention& a, const tp_layout& layout, const void* q, const void* keys, const void* values,
               void* out, Picks picks = {});

}  // namespace tp
