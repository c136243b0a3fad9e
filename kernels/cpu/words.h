// Formats by AVX-512's products of pairs of bfloat16, for vectors that are bfloat16: half the instructions, and half the
// memory, of products in float32. Elements are exact; so are sums of their products but for float32's rounding.
#pragma once
#include "tile_formats.h"

namespace tp {
namespace {

inline __m512 add_pairs(__m512 sum, __m512i words, const uint16_t* x) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(words), reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)));
}

// What groups share. They have the order of scales that FORMAT has for float32.
template <class FORMAT>
struct Words : FORMAT {
  using X = uint16_t;
  static constexpr int sums = 16, shared = 2;
  struct Elements {
    __m512i words[FORMAT::vectors];
  };

  static __m512 dot(__m512 sum, const Elements& e, const X* x) {
#pragma GCC unroll 4
    for (int v = 0; v < FORMAT::vectors; v++) sum = add_pairs(sum, e.words[v], x + 32 * v);
    return sum;
  }

  static __m512 add(__m512 sum, const Elements& e, const X* x, __m512 scale) {
    return _mm512_fmadd_ps(dot(_mm512_setzero_ps(), e, x), scale, sum);
  }
};

// Elements of a table as bfloat16.
template <class TABLE>
constexpr const uint16_t* WORDS = nullptr;
alignas(32) constexpr uint16_t E2M1_WORDS[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
alignas(32) constexpr uint16_t INT4_WORDS[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
template <>
constexpr const uint16_t* WORDS<E2m1Table> = E2M1_WORDS;
template <>
constexpr const uint16_t* WORDS<Int4Table> = INT4_WORDS;

// The format that a format for float32 vectors is for bfloat16 ones.
template <class FORMAT>
struct InWords;

// Lane i of a sum has columns 8 · i … 8 · i + 7, as in float32.
template <class TABLE, int SPAN>
struct InWords<Nibbles<TABLE, SPAN>> : Words<Nibbles<TABLE, SPAN>> {
  using typename Words<Nibbles<TABLE, SPAN>>::Elements;
  using Raw = __m512i;
  using Group<4>::load;
  using Group<4>::load_part;
  static constexpr int column(int i) { return FourCodes::column(i); }

  // Here shifts wait for nothing, see bench/NOTES.md.
  static Elements decode(Raw raw) {
    const __m512i table = twice(WORDS<TABLE>);
    Elements e;
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) e.words[j] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4 * j), table);
    return e;
  }
};

template <int SPAN>
struct InWords<Fp8<SPAN>> : Words<Fp8<SPAN>> {
  using typename Words<Fp8<SPAN>>::Elements;
  static constexpr int column(int i) { return looked_up(i); }

  static Elements decode(__m512i raw) {
    Elements e;
    decode_e4m3(raw, e.words);
    return e;
  }
};

template <>
struct InWords<Bf16> : Words<Bf16> {
  static constexpr int column(int i) { return i; }
  static Elements decode(__m512i raw) { return {{raw}}; }
  static __m512 add(__m512 sum, const Elements& e, const X* x, int) { return dot(sum, e, x); }
};

template <class Call>
auto with_words(const tp_weight& w, Call&& call) {
  return with_format(w, [&](auto f) { return call(InWords<decltype(f)>{}); });
}

// As load_rounded; bits that this would round off are added to `lost`.
inline __m512i load_exact(const void* x, int32_t from, int64_t start, int64_t k, __m512i& lost) {
  for (int64_t half = 0; from == TP_FLOAT && half < 32; half += 16) {
    lost = _mm512_or_si512(lost, _mm512_castps_si512(load_floats(x, from, start + half, k)));
  }
  return load_rounded(x, from, start, k);
}

inline bool is_exact(__m512i lost) { return !_mm512_test_epi32_mask(lost, _mm512_set1_epi32(0xffff)); }

// A packed vector: whether it is bfloat16, its words if so, and if it came in float32 what packs such vectors.
struct alignas(64) WordsAndFloats {
  bool words;

  uint16_t* first() { return reinterpret_cast<uint16_t*>(this + 1); }
  const uint16_t* first() const { return reinterpret_cast<const uint16_t*>(this + 1); }
};

int64_t word_bytes(const tp_weight& w) {
  return with_words(w, [&](auto f) { return groups<decltype(f)>(w) * decltype(f)::group * int64_t{sizeof(uint16_t)}; });
}

int64_t packed_words_bytes(const tp_weight& w) { return int64_t{sizeof(WordsAndFloats)} + word_bytes(w) + packed_bytes(w); }

// False if a value is not bfloat16 in fact.
bool put_words(const tp_weight& w, const void* x, int32_t from, uint16_t* out) {
  return with_words(w, [&](auto f) {
    using F = decltype(f);
    constexpr int V = F::vectors;
    __m512i lost = _mm512_setzero_si512();
    for (int64_t start = 0; start < w.k; start += F::group, out += F::group) {
      __m512i plain[V], words[V];
      for (int v = 0; v < V; v++) plain[v] = load_exact(x, from, start + 32 * v, w.k, lost);
      permute(plain, ORDER<F>.column, words);
      for (int v = 0; v < V; v++) _mm512_store_si512(out + 32 * v, words[v]);
    }
    return is_exact(lost);
  });
}

void pack_as_words(const tp_weight& w, const void* x, int32_t from, void* out) {
  WordsAndFloats* packed = static_cast<WordsAndFloats*>(out);
  packed->words = put_words(w, x, from, packed->first());
  if (from != TP_BFLOAT16) pack(w, x, from, packed->first() + word_bytes(w) / 2);
}

void dots_by_words(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, float* out,
                   int64_t stride) {
  const int64_t size = word_bytes(*w.w);
  const void *words[MAX_BATCH], *floats[MAX_BATCH];
  bool all = true;
  for (int v = 0; v < vectors; v++) {
    const WordsAndFloats* x = static_cast<const WordsAndFloats*>(xs[v]);
    words[v] = x->first();
    floats[v] = x->first() + size / 2;
    all &= x->words;
  }
  if (!all) return dots_of_any(w, first, last, floats, vectors, out, stride);
  with_words(*w.w, [&](auto f) { dots_of<decltype(f)>(w, first, last, words, vectors, out, stride); });
}

}  // namespace
}  // namespace tp
