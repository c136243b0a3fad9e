// Attention of few new tokens over a paged cache of latents.
#pragma once
#include <cstdint>

#include "attention.h"

extern "C" {

// As Ops.latent_attention names them: a head's query has nope + shared values, a cached entry rank + shared, and `up`
// [heads, nope + value, rank]. dtype: of all of them and of what comes out.
struct tp_latents {
  int64_t heads, nope, value, rank, shared, block_size;
  float scale;
  int32_t dtype;
};
}

namespace tp {

// q [tokens, heads, nope + shared], entries [blocks, block_size, rank + shared], out [tokens, heads, value]; rank and
// rank + shared are multiples of 16, of at most ATTEND_WIDTH.
void latent_attention(const tp_latents& l, const tp_layout& layout, const void* q, const void* entries, const void* up,
                      Picks picks, void* out);

}  // namespace tp
