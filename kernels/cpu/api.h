// The C interface; native.py calls it. Pointers are to contiguous memory; sizes are in items.
#pragma once
#include "attention.h"
#include "latents.h"
#include "layer.h"
#include "small_ops.h"
#include "weight.h"

#pragma GCC visibility push(default)
extern "C" {

enum tp_status { TP_OK = 0, TP_NO_SUCH_EXPERT = 1, TP_NO_MEMORY = 2, TP_UNKNOWN = 3 };

// What native.py expects of a library: changed with every change of this interface.
int32_t tp_interface();

// Chooses an instruction set by name, or the best one here if null. TP_UNKNOWN if this processor lacks it.
int32_t tp_select(const char* name);
const char* tp_selected();
// Names of those this processor has, best first, separated by commas.
const char* tp_available();

int32_t tp_threads();
void tp_set_threads(int32_t n);

// x [tokens, k] of dtype · w [n, k]ᵀ + bias [n] -> out [tokens, n] of dtype.
int32_t tp_linear(const tp_weight* w, const void* x, int64_t tokens, int32_t dtype, const void* bias,
                  int32_t bias_dtype, void* out);

// See Ops.moe. x and out [tokens, h] of dtype, ids and weights [tokens, k]; limit 0 is plain swiglu.
int32_t tp_moe(const tp_weight* gate_up, const tp_weight* down, const void* x, const int64_t* ids,
               const float* weights, int64_t tokens, int64_t k, int32_t dtype, float limit, float alpha, float shift,
               const void* gate_up_bias, int32_t gate_up_bias_dtype, const void* down_bias, int32_t down_bias_dtype,
               void* out);

// Several weights [n, k] with the same x: out has one [tokens, n] after the other. biases: null, or one each, null for none.
int32_t tp_linears(int64_t count, const tp_weight* const* ws, const void* x, int64_t tokens, int32_t dtype,
                   const void* const* biases, int32_t bias_dtype, void* out);

// See Ops.rms_norm, Ops.add_norm, Ops.route and Ops.attend; x, added, total and out [rows, n] of dtype.
int32_t tp_rms_norm(const void* x, int64_t rows, int64_t n, int32_t dtype, const void* weight, int32_t weight_dtype,
                    float eps, void* out);
int32_t tp_add_norm(const void* x, const void* added, int64_t rows, int64_t n, int32_t dtype, const void* weight,
                    int32_t weight_dtype, float eps, void* total, void* out);
int32_t tp_route(const tp_router* router, const float* logits, int64_t tokens, int64_t* ids, float* weights);
int32_t tp_place_heads(const tp_heads* heads, int64_t tokens, const void* q, const void* k, const void* v,
                       const float* cosines, const float* sines, const int64_t* slots, void* q_out, void* keys,
                       void* values);

// See Ops.attention; TP_UNKNOWN where there is no kernel, see prefill().
int32_t tp_attend(const tp_attention* attention, const tp_layout* layout, const void* q, const void* keys,
                  const void* values, void* out);

// Whether it has one.
int32_t tp_attends(const tp_attention* attention, const tp_layout* layout);

// See Ops.latent_attention; TP_UNKNOWN for more than FEW new tokens of a sequence. picks: of each sequence
// [new tokens, top], or null; or null for all.
int32_t tp_attend_latents(const tp_latents* latents, const tp_layout* layout, const void* q, const void* entries,
                          const void* up, const int64_t* const* picks, int64_t top, void* out);

// See Ops.delta_net. States as for delta().
int32_t tp_delta_net(const tp_delta* delta, const tp_layout* layout, const void* x, void* tails, float* memories,
                     void* out);

// See Ops.dense, Ops.routed and Ops.layers; TP_UNKNOWN, and nothing is done, where layers have no kernel.
int32_t tp_dense_step(const tp_dense* dense, const void* x, int64_t tokens, int32_t dtype, void* out);
int32_t tp_routed(const tp_experts* experts, const void* x, int64_t tokens, int32_t dtype, void* out);
int32_t tp_layers(int64_t n, const tp_placed_layer* layers, const tp_rotation* rotations, const tp_layout* layout,
                  void* x, int64_t tokens, const int64_t* slots);

// See Ops.logits. x [tokens, k] of dtype, norm [k], head [n, k] -> out [tokens, n].
int32_t tp_logits(const tp_weight* head, const void* x, int64_t tokens, int32_t dtype, const void* norm,
                  int32_t norm_dtype, float eps, float* out);

// Reads memory and does nothing else: the limit that products are measured against. Returns a sum of it.
uint64_t tp_read(const void* data, int64_t bytes);
}
#pragma GCC visibility pop
