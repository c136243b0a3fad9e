// Formats by AVX-512's products of pairs of bfloat16, for vectors that are bfloat16: half the instructions, and half the
// memory, of products in float32. Elements are exact; so are sums of their products but for float32's rounding.
#pragma once
#include "tile_formats.h"

namespace tp {
namespace {

inline __m512 add_pairs(__m512 sum, __m512i words, const uint16_t* x) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(words), reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)));
}

// A group whose words are decoded to V vectors, in FORMAT's order of scales.
template <class FORMAT, int V>
struct Words : FORMAT {
  using X = uint16_t;
  static constexpr int sums = 16, shared = 2;
  struct Elements {
    __m512i words[V];
  };

  static __m512 dot(__m512 sum, const Elements& e, const X* x) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sum = add_pairs(sum, e.words[v], x + 32 * v);
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

// Lane i of a sum has columns 8 · i … 8 · i + 7, as in float32.
template <class TABLE, int SPAN>
struct NibbleWords : Words<Nibbles<TABLE, SPAN>, 4>, FourCodes {
  using typename Words<Nibbles<TABLE, SPAN>, 4>::Elements;
  using FourCodes::column;
  using FourCodes::load;
  using FourCodes::load_part;
  using FourCodes::Raw;

  static Elements decode(Raw raw) {
    Elements e;
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) e.words[j] = nibbles(raw, WORDS<TABLE>, j);
    return e;
  }
};

template <int SPAN>
struct Fp8Words : Words<Fp8<SPAN>, 2> {
  using typename Words<Fp8<SPAN>, 2>::Elements;
  static constexpr int column(int i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }

  static Elements decode(__m512i raw) {
    Elements e;
    decode_e4m3(raw, e.words);
    return e;
  }
};

struct PlainWords : Words<Bf16, 1> {
  static constexpr int column(int i) { return i; }
  static Elements decode(__m512i raw) { return {{raw}}; }
  static __m512 add(__m512 sum, const Elements& e, const X* x, int) { return dot(sum, e, x); }
};

template <class Call>
auto with_words(const tp_weight& w, Call&& call) {
  switch (w.format) {
    case TP_E2M1: return w.block_columns == 16 ? call(NibbleWords<E2m1Table, 16>{}) : call(NibbleWords<E2m1Table, 32>{});
    case TP_INT4: return call(NibbleWords<Int4Table, 32>{});
    case TP_E4M3: return span_of(w, 64) == 64 ? call(Fp8Words<64>{}) : call(Fp8Words<32>{});
    default: return call(PlainWords{});
  }
}

// A packed vector: whether it is bfloat16, and its words or what packs other vectors.
struct alignas(64) WordsOrFloats {
  bool words;

  void* behind() { return this + 1; }
  const void* behind() const { return this + 1; }
};

int64_t packed_words_bytes(const tp_weight& w) { return int64_t{sizeof(WordsOrFloats)} + packed_bytes(w); }

void pack_as_words(const tp_weight& w, const void* x, int32_t from, void* out) {
  WordsOrFloats* packed = static_cast<WordsOrFloats*>(out);
  packed->words = from == TP_BFLOAT16;
  if (!packed->words) return pack(w, x, from, packed->behind());
  with_words(w, [&](auto f) {
    using F = decltype(f);
    constexpr int V = F::group / 32;
    __m512i* to = static_cast<__m512i*>(packed->behind());
    for (int64_t start = 0; start < w.k; start += F::group, to += V) {
      __m512i plain[V], words[V];
      for (int v = 0; v < V; v++) plain[v] = load_words(static_cast<const uint16_t*>(x), start + 32 * v, w.k);
      permute(plain, ORDER<F>.column, words);
      for (int v = 0; v < V; v++) _mm512_store_si512(to + v, words[v]);
    }
  });
}

void dots_by_words(const Matrix& w, int64_t first, int64_t last, const void* const* xs, int vectors, float* out,
                   int64_t stride) {
  const void* behind[MAX_BATCH];
  for (int v = 0; v < vectors; v++) behind[v] = static_cast<const WordsOrFloats*>(xs[v])->behind();
  if (!static_cast<const WordsOrFloats*>(*xs)->words) return dots_of_any(w, first, last, behind, vectors, out, stride);
  with_words(*w.w, [&](auto f) { dots_of<decltype(f)>(w, first, last, behind, vectors, out, stride); });
}

}  // namespace
}  // namespace tp
