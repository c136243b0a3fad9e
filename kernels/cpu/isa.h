// What an instruction set offers: the table of functions that each of portable.cpp, avx2.cpp, … fills in.
//
// Their code is compiled with flags of its own. Everything in the headers they share is in an unnamed namespace, and
// none of them uses templates of the standard library: the linker keeps one copy of a function that several files have,
// and it could be one that the processor does not know.
#pragma once
#include <cstdint>

#include "weight.h"

struct tp_attention;

namespace tp {

struct QueryBlock;

struct Activation {
  float limit, alpha, shift;  // as spec.ClampedSwiglu; limit 0 means plain swiglu
};

// Rows first … last − 1 of a matrix, and what is read after them.
struct Stretch {
  int64_t first, last;
  const uint8_t* next;
};

// Where an expert's activation(gate, up) goes: into vectors packed for `down`. Biases are of the rows of a stretch, with
// room for 16 more, or null.
struct Inner {
  Activation activation;
  const float *gate_bias, *up_bias;
  const tp_weight* down;
  void* packed;
};

// Where an expert's results are added up: values[tokens[v] · stride + row − first] += weights[v] · (result + bias).
struct Totals {
  const float* bias;  // as above
  const int64_t* tokens;
  const float* weights;
  float* values;
  int64_t stride;
};

// What a matrix unit does, in bfloat16. Products are for many vectors; blocks of up to 16 of them are packed together.
struct Tiles {
  // For how many vectors they pay; the latter where there is nothing to decode.
  int64_t fewest, fewest_plain;

  // A block of `count` vectors takes count · vector_bytes.
  int64_t (*vector_bytes)(const tp_weight& w);
  void (*pack)(const tp_weight& w, const void* const* xs, int count, int32_t from, void* out);

  // out[v · stride + row − first] = w[row] · x[v], for rows first … last − 1 and any number of vectors, packed in whole
  // blocks and a last one that may be smaller.
  void (*products)(const Matrix& w, int64_t first, int64_t last, const void* packed, int64_t vectors, float* out,
                   int64_t stride);

  // The same vectors by an expert's rows of the gate, and as many of up behind all of these; rows start at a multiple of
  // 32 and end at one, or at the gate's end.
  void (*gate_and_up)(const Matrix& w, const Stretch& rows, const void* packed, int64_t vectors, const Inner& inner);
  void (*add_down)(const Matrix& w, const Stretch& rows, const void* packed, int64_t vectors, const Totals& totals);

  // Attention of a block of queries, see prefill.h: by the calling thread, in its scratch memory.
  void (*attend)(const tp_attention& a, const QueryBlock& block, const uint16_t* q, const uint16_t* keys,
                 const uint16_t* values, uint16_t* out);
};

// Vectors that are packed one by one, `bytes` apart: the i-th of them is number which[i], or if that is null number i.
struct Vectors {
  const char* data;
  int64_t bytes;
  const int64_t* which;
};

// The same as Isa's functions for vectors that a weight takes in int8, see int8.h.
struct Int8 {
  int64_t (*packed_bytes)(const tp_weight& w);
  void (*pack)(const tp_weight& w, const void* x, int32_t from, void* out);
  void (*dots)(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, float* out,
               int64_t stride);

  // As dots, of any number of vectors, for which a weight is decoded once; null where there is no such way.
  void (*products)(const Matrix& w, int64_t first, int64_t last, const Vectors& xs, int64_t count, float* out,
                   int64_t stride);
};

constexpr int64_t ATTEND = 32, ATTEND_WIDTH = 576, ATTEND_QUERIES = 32;  // rows, values and queries at most

// n ≤ ATTEND rows that lie `stride` items apart.
struct Rows {
  const void* data;
  int64_t stride;
  int32_t dtype;
  int64_t n;
};

// Work on rows of up to ATTEND_WIDTH values, a multiple of 16, with up to ATTEND_QUERIES vectors.
struct Attend {
  // Adds positions of one head of keys and values to what `queries` of `width` values have so far: results
  // [queries, 2 + value_width] are the largest logit, the sum of weights, and the weighted values. Logits are products
  // times scale. `values` may be the keys: then they are the first value_width of these. `next` are rows that are read
  // after them, as many.
  void (*positions)(const float* q, int64_t queries, int64_t width, float scale, Rows keys, const void* values,
                    int64_t value_width, const void* next, float* results);

  // out[v · ATTEND + i] = rows[i] · x[v], and totals[v] += Σ_i factors[v · ATTEND + i] · rows[i]; vectors x and totals
  // lie `apart`.
  void (*products)(Rows rows, int64_t width, const float* x, int64_t apart, int64_t vectors, float* out);
  void (*sums)(Rows rows, int64_t width, const float* factors, int64_t vectors, float* totals, int64_t apart);
};

// What a causal convolution has of n channels: the inputs before the newest one [kernel − 1, stride], which move on by
// one, and its filter [kernel, stride].
struct Past {
  const float* filter;
  void* tail;
  int64_t kernel, stride;
};

// What tokens that follow each other bring to a memory [keys, values]: keys and queries [tokens, keys]; values, and what the
// queries find, lie `apart`. Each token keeps a part of the memory; strengths: of its corrections.
struct Recall {
  int64_t tokens, keys, values, apart;
  const float *k, *q, *v, *kept, *strengths;
  float* found;
};

// What a gated delta net does, see runtime/delta_net.py.
struct Delta {
  // out = silu(convolution) of n channels, whose newest input is x of dtype, as is the tail.
  void (*convolve)(const Past& past, const void* x, int32_t dtype, int64_t n, float* out);

  // A memory moves on.
  void (*recall)(float* memory, const Recall& r);
};

struct Isa {
  const char* name;

  // The order of a packed vector's columns is an instruction set's and a format's own: `pack` writes x [k] of dtype
  // `from` as `packed_bytes`.
  int64_t (*packed_bytes)(const tp_weight& w);
  void (*pack)(const tp_weight& w, const void* x, int32_t from, void* out);

  // out[v · stride + row − first] = w[row] · xs[v], for rows first … last − 1 and up to MAX_BATCH vectors.
  void (*dots)(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, float* out,
               int64_t stride);

  // out[i] = rows[i] · x, n rows of k values.
  void (*plain_products)(const float* rows, int64_t n, int64_t k, const float* x, float* out);

  // gate = activation(gate, up), n values each.
  void (*activate)(float* gate, const float* up, int64_t n, Activation activation);

  // x = x · sigmoid(gate), n values each.
  void (*gate)(float* x, const float* gate, int64_t n);

  // x = x · weight / sqrt(mean(x²) + eps), n values.
  void (*norm)(float* x, const float* weight, int64_t n, float eps);

  // total[i] += factor · x[i]; and rounding to a dtype.
  void (*add_scaled)(float* total, const float* x, float factor, int64_t n);
  void (*store)(const float* x, int32_t dtype, void* out, int64_t n);
  void (*load)(const void* x, int32_t dtype, float* out, int64_t n);

  // Reads memory and does nothing else.
  uint64_t (*read)(const void* data, int64_t bytes);

  Attend attend;

  Delta delta;

  const Tiles* tiles;  // null where there are none

  const Int8* int8;
};

extern const Isa portable_isa;
#ifdef __x86_64__
extern const Isa avx2_isa, avx512_isa, avx512_bf16_isa, amx_isa;
extern const Int8 avx512_int8;  // which those with more than AVX-512 have, too
#elif defined(__aarch64__)
extern const Isa neon_isa;
#endif

// The instruction set in use: the best one here, or the one that was chosen by name.
const Isa& isa();

}  // namespace tp
