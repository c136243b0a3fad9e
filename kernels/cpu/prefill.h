// Attention of many new tokens over a paged cache, as products of matrices.
#pragma once
#include "attention.h"

namespace tp {

// Following tokens of a sequence, and one head of keys: the queries that are worked on together.
struct QueryBlock {
  int64_t token, position, count;  // the first one's place in the batch and in its sequence, and how many there are
  int64_t head;
  const int64_t* table;
};

// As attention(), for any number of tokens. False, and nothing is done, where there is no kernel: the instruction set in
// use has none for this dtype, or the scale is not positive.
bool prefill(const tp_attention& a, const tp_layout& layout, const void* q, const void* keys, const void* values,
             void* out);

// Whether any_attention() has a kernel for that many new tokens.
bool has_attention(const tp_attention& a, const tp_layout& layout);

// Few tokens by attention(), many by prefill(). False as there.
bool any_attention(const tp_attention& a, const tp_layout& layout, const void* q, const void* keys, const void* values,
                   void* out);

}  // namespace tp
