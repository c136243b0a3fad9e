// The functions of an Isa whose packed vectors are float32, included inside its namespace behind its formats: Nibbles (with
// tables E2M1 and INT4), Fp8 and Bf16.
namespace {

// Calls call(F{}) for the format F of a weight.
template <class Call>
auto with_format(const tp_weight& w, Call&& call) {
  switch (w.format) {
    case TP_E2M1: return w.block_columns == 16 ? call(Nibbles<E2M1, 16>{}) : call(Nibbles<E2M1, 32>{});
    case TP_INT4: return call(Nibbles<INT4, 32>{});
    case TP_E4M3: return call(Fp8{});
    default: return call(Bf16{});
  }
}

int64_t packed_bytes(const tp_weight& w) {
  return with_format(w, [&](auto f) { return groups<decltype(f)>(w) * decltype(f)::group * int64_t{sizeof(float)}; });
}

void pack(const tp_weight& w, const void* x, int32_t from, void* out) {
  with_format(w, [&](auto f) {
    using F = decltype(f);
    float* packed = static_cast<float*>(out);
    const int64_t size = groups<F>(w) * F::group;
    float* plain = static_cast<float*>(scratch(SLOT_PLAIN, size * sizeof(float)));
    load(x, from, plain, w.k);
    for (int64_t i = w.k; i < size; i++) plain[i] = 0;
    for (int64_t start = 0; start < size; start += F::group) {
      for (int i = 0; i < F::group; i++) packed[start + i] = plain[start + F::column(i)];
    }
  });
}

void dots_of_any(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, float* out,
                 int64_t stride) {
  with_format(*w.w, [&](auto f) { dots_of<decltype(f)>(w, first, last, xs, vectors, out, stride); });
}

constexpr Isa make_isa(const char* name, const Int8* int8) {
  return {name, packed_bytes, pack, dots_of_any, plain_products, activate, gate, norm, add_scaled, store, load, read, attend, delta,
          nullptr, int8};
}

}  // namespace
