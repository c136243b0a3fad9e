// The C interface; native.py calls it. Pointers are to contiguous memory; sizes are in items.
#pragma once
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

// Reads memory and does nothing else: the limit that products are measured against. Returns a sum of it.
uint64_t tp_read(const void* data, int64_t bytes);
}
#pragma GCC visibility pop
