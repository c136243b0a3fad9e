// Attention of few new tokens over a paged cache.
#pragma once
#include <cstdint>

extern "C" {

// Where sequences stand, see ops.Layout: starts [sequences + 1], lengths and tables [sequences].
struct tp_layout {
  int64_t sequences;
  const int64_t *starts, *lengths;
  const int64_t* const* tables;
};

// window 0 sees all. sinks: float32 [heads] or null. dtype: of queries, keys, values and what comes out.
struct tp_attention {
  int64_t heads, kv_heads, width, block_size, window;
  const float* sinks;
  float scale;
  int32_t dtype;
};
}

namespace tp {

// q and out [tokens, heads, width]; keys and values [blocks, block_size, kv_heads, width], width a multiple of 16.
void attention(const tp_attention& a, const tp_layout& layout, const void* q, const void* keys, const void* values,
               void* out);

}  // namespace tp
