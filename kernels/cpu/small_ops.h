// What a layer does between its products: norms, rotations, routing.
#pragma once
#include <cstdint>

#include "isa.h"
#include "latents.h"
#include "products.h"

extern "C" {

enum tp_score { TP_SOFTMAX = 0, TP_SIGMOID = 1, TP_SQRT_SOFTPLUS = 2, TP_SOFTMAX_CHOSEN = 3 };

// As spec.Moe and spec.Router. correction: float32 [experts] or null.
struct tp_router {
  int64_t experts, chosen, groups, top_groups;
  const float* correction;
  int32_t score, renormalize;
  float epsilon, scale;
};

// What is the same for all tokens of a layer's heads of `width` values. Norms [width] of norm_dtype are null where there
// are none; the first `rotated` values are turned: 0 leaves all.
struct tp_heads {
  int64_t heads, kv_heads, width, rotated;
  const void *q_norm, *k_norm;
  int32_t norm_dtype, interleaved, dtype;
  float eps;
};
}

namespace tp {

// out[i] = x[i] / sqrt(mean(x²) + eps) · weight, each of n values.
void rms_norm(const void* x, int64_t rows, int64_t n, int32_t dtype, tp_vector weight, float eps, void* out);

// total = x + scale · added, rounded, and `out` its norm as above; all [rows, n] of dtype. total may be x.
void add_norm(const void* x, const void* added, float scale, int64_t rows, int64_t n, int32_t dtype, tp_vector weight, float eps,
              void* total, void* out);

// gate = activation(gate, up), both [rows, n] of dtype.
void swiglu(void* gate, const void* up, int64_t rows, int64_t n, int32_t dtype, Activation activation);

// x = x · sigmoid(gates), both [rows, n] of dtype.
void gate(void* x, const void* gates, int64_t rows, int64_t n, int32_t dtype);

// x [rows, 2, n] -> first and second [rows, n], all of dtype.
void split(const void* x, int64_t rows, int64_t n, int32_t dtype, void* first, void* second);

// n values of dtype, none beyond ±limit; NaN stays.
void clip(void* x, int64_t n, int32_t dtype, float limit);

// x [rows, n] of dtype as float32: as it is, or in `room` [rows, n].
const float* widened(const void* x, int64_t rows, int64_t n, int32_t dtype, float* room);

// total += scale · factors · x, rounded once; both [rows, n] of dtype, factors [rows] or null for ones.
void add(void* total, const void* x, int64_t rows, int64_t n, int32_t dtype, float scale, const float* factors = nullptr);

// ids and weights [tokens, chosen] of logits [tokens, experts]; the best first.
void route(const float* logits, int64_t tokens, const tp_router& router, int64_t* ids, float* weights);

// Queries [tokens, heads, width] normed and turned into q_out, keys likewise and values as they are into the places
// `slots` of pools [places, kv_heads, width]. cosines and sines: [tokens, rotated / 2].
void place_heads(const tp_heads& h, int64_t tokens, const void* q, const void* k, const void* v, const float* cosines,
                 const float* sines, const int64_t* slots, void* q_out, void* keys, void* values);

// How `rotated` values are turned; cosines and sines [tokens, rotated / 2].
struct Turn {
  int64_t rotated;
  int32_t interleaved;
  const float *cosines, *sines;
  int32_t dtype;
};

// The first or last values of every head of x [tokens, heads, width], turned where they are.
void turn_starts(const Turn& turn, int64_t tokens, int64_t heads, int64_t width, void* x);
void turn_ends(const Turn& turn, int64_t tokens, int64_t heads, int64_t width, void* x);

// x [tokens, rank + shared], its latents normed, into the places `slots` of `entries`.
void place_latents(const tp_latents& l, int64_t tokens, const void* x, tp_vector norm, float eps, const int64_t* slots,
                   void* entries);

}  // namespace tp
