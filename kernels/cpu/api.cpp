#include "api.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <system_error>

#include "isa.h"
#include "moe.h"
#include "prefill.h"
#include "products.h"
#include "threads.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tp {
namespace {

#ifdef __x86_64__
struct Cpu {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;
  bool amd = false;

  Cpu() {
    unsigned a, b, c, d, b7, c7, d7, a71;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return;
    amd = b == signature_AMD_ebx;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
    const bool fma = c & bit_FMA && c & bit_F16C;
    const uint64_t saved = xgetbv();
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return;
    if (!__get_cpuid_count(7, 1, &a71, &b, &c, &d)) a71 = 0;
    avx2 = fma && b7 & bit_AVX2 && (saved & 0x6) == 0x6;
    const unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL | bit_BMI2;
    avx512 = avx2 && (b7 & wide) == wide && c7 & bit_AVX512VBMI && c7 & bit_AVX512VNNI && (saved & 0xe0) == 0xe0;
    avx512_bf16 = avx512 && a71 & 1u << 5;
    amx = avx512_bf16 && d7 & 1u << 22 && d7 & 1u << 24 && (saved & 0x60000) == 0x60000 && may_use_tiles();
  }

  static uint64_t xgetbv() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
  }

  // Linux gives a process the state of tiles only when it asks.
  static bool may_use_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  }
};
#endif

// Best first.
struct Available {
  const Isa* list[5];
  int count = 0;
  std::string names;

  Available() {
#ifdef __x86_64__
    const Cpu cpu;
    if (cpu.amx) add(amx_isa);
    // Products of pairs take two cycles of Intel's cores, and two of float32 one.
    if (cpu.avx512_bf16 && cpu.amd) add(avx512_bf16_isa);
    if (cpu.avx512) add(avx512_isa);
    if (cpu.avx512_bf16 && !cpu.amd) add(avx512_bf16_isa);
    if (cpu.avx2) add(avx2_isa);
#elif defined(__aarch64__)
    add(neon_isa);
#endif
    add(portable_isa);
  }

  void add(const Isa& isa) {
    list[count++] = &isa;
    names += (names.empty() ? "" : ",") + std::string(isa.name);
  }
};

const Available& available() {
  static const Available found;
  return found;
}

const Isa* selected = nullptr;

template <class Work>
int32_t guarded(Work&& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    drop_scratch();  // fewer tokens may fit then
    return TP_NO_MEMORY;
  } catch (const std::system_error&) {  // threads are refused for want of memory too
    return TP_NO_MEMORY;
  }
}

}  // namespace

const Isa& isa() { return *(selected ? selected : selected = available().list[0]); }

}  // namespace tp

using namespace tp;

extern "C" {

int32_t tp_interface() { return 10; }

int32_t tp_select(const char* name) {
  const Available& all = available();
  for (int i = 0; i < all.count; i++) {
    if (!name || std::strcmp(all.list[i]->name, name) == 0) {
      selected = all.list[i];
      return TP_OK;
    }
  }
  return TP_UNKNOWN;
}

const char* tp_selected() { return isa().name; }
const char* tp_available() { return available().names.c_str(); }
int32_t tp_threads() { return threads(); }
void tp_set_threads(int32_t n) { set_threads(n); }

int32_t tp_linear(const tp_weight* w, const void* x, int64_t tokens, int32_t dtype, const void* bias,
                  int32_t bias_dtype, void* out) {
  return guarded([&] {
    linear(*w, x, tokens, dtype, {bias, bias_dtype}, out);
    return TP_OK;
  });
}

int32_t tp_moe(const tp_weight* gate_up, const tp_weight* down, const void* x, const int64_t* ids,
               const float* weights, int64_t tokens, int64_t k, int32_t dtype, float limit, float alpha, float shift,
               const void* gate_up_bias, int32_t gate_up_bias_dtype, const void* down_bias, int32_t down_bias_dtype,
               void* out) {
  return guarded([&] {
    Moe moe(*gate_up, *down, {limit, alpha, shift}, {gate_up_bias, gate_up_bias_dtype}, {down_bias, down_bias_dtype});
    return moe.run(x, ids, weights, tokens, k, dtype, out) ? TP_OK : TP_NO_SUCH_EXPERT;
  });
}

int32_t tp_linears(int64_t count, const tp_weight* const* ws, const void* x, int64_t tokens, int32_t dtype,
                   const void* const* biases, int32_t bias_dtype, void* out) {
  return guarded([&] {
    std::vector<Linear> parts;
    for (int64_t i = 0; i < count; i++) {
      parts.push_back({ws[i], {biases ? biases[i] : nullptr, bias_dtype}, out});
      out = at(out, dtype, tokens * ws[i]->n);
    }
    linears(parts.data(), count, x, tokens, dtype);
    return TP_OK;
  });
}

int32_t tp_rms_norm(const void* x, int64_t rows, int64_t n, int32_t dtype, const void* weight, int32_t weight_dtype,
                    float eps, void* out) {
  return guarded([&] {
    rms_norm(x, rows, n, dtype, {weight, weight_dtype}, eps, out);
    return TP_OK;
  });
}

int32_t tp_add_norm(const void* x, const void* added, int64_t rows, int64_t n, int32_t dtype, const void* weight,
                    int32_t weight_dtype, float eps, void* total, void* out) {
  return guarded([&] {
    add_norm(x, added, 1.0f, rows, n, dtype, {weight, weight_dtype}, eps, total, out);
    return TP_OK;
  });
}

int32_t tp_route(const tp_router* router, const float* logits, int64_t tokens, int64_t* ids, float* weights) {
  return guarded([&] {
    route(logits, tokens, *router, ids, weights);
    return TP_OK;
  });
}

int32_t tp_place_heads(const tp_heads* heads, int64_t tokens, const void* q, const void* k, const void* v,
                       const float* cosines, const float* sines, const int64_t* slots, void* q_out, void* keys,
                       void* values) {
  return guarded([&] {
    place_heads(*heads, tokens, q, k, v, cosines, sines, slots, q_out, keys, values);
    return TP_OK;
  });
}

int32_t tp_attend(const tp_attention* a, const tp_layout* layout, const void* q, const void* keys, const void* values,
                  void* out) {
  return guarded([&] { return any_attention(*a, *layout, q, keys, values, out) ? TP_OK : TP_UNKNOWN; });
}

int32_t tp_attends(const tp_attention* a, const tp_layout* layout) { return has_attention(*a, *layout); }

int32_t tp_attend_latents(const tp_latents* l, const tp_layout* layout, const void* q, const void* entries,
                          const void* up, const int64_t* const* picks, int64_t top, void* out) {
  return guarded([&] {
    if (most_new(*layout) > FEW) return TP_UNKNOWN;
    latent_attention(*l, *layout, q, entries, up, {picks, top}, out);
    return TP_OK;
  });
}

int32_t tp_delta_net(const tp_delta* d, const tp_layout* layout, const void* x, void* tails, float* memories,
                     void* out) {
  return guarded([&] {
    delta(*d, *layout, x, tails, memories, out);
    return TP_OK;
  });
}

int32_t tp_dense_step(const tp_dense* d, const void* x, int64_t tokens, int32_t dtype, void* out) {
  return guarded([&] {
    dense(*d, x, tokens, dtype, out);
    return TP_OK;
  });
}

int32_t tp_routed(const tp_experts* experts, const void* x, int64_t tokens, int32_t dtype, void* out) {
  return guarded([&] { return routed(*experts, x, tokens, dtype, out) ? TP_OK : TP_NO_SUCH_EXPERT; });
}

int32_t tp_layers(int64_t n, const tp_placed_layer* layers, const tp_rotation* rotations, const tp_layout* layout,
                  void* x, int64_t tokens, const int64_t* slots) {
  return guarded([&] {
    for (int64_t i = 0; i < n; i++) {
      if (!has_layer(*layers[i].layer, *layout)) return TP_UNKNOWN;
    }
    Step step{*layout, tokens, slots, rotations, {}};
    for (int64_t i = 0; i < n; i++) {
      if (!layer(layers[i], step, x)) return TP_NO_SUCH_EXPERT;
    }
    return TP_OK;
  });
}

int32_t tp_logits(const tp_weight* head, const void* x, int64_t tokens, int32_t dtype, const void* norm,
                  int32_t norm_dtype, float eps, float* out) {
  return guarded([&] {
    logits(*head, x, tokens, dtype, {norm, norm_dtype}, eps, out);
    return TP_OK;
  });
}

uint64_t tp_read(const void* data, int64_t bytes) { return read_all(data, bytes); }
}
