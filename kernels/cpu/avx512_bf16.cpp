// Tiles by AVX-512's products of pairs of bfloat16: a pair of a row's columns is brought to all lanes, which are vectors.
#include "tiles.h"
#include "word_attention.h"
#include "words.h"

namespace tp {
namespace {

// Sums of ROWS rows × BLOCKS · 16 vectors, in registers; tiles of sums are [16 rows][16 vectors].
template <int ROWS, int BLOCKS>
class Sums {
 public:
  Sums(bool fresh, const float* from, int64_t apart, int64_t aside) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 3
      for (int b = 0; b < BLOCKS; b++) {
        sum_[r][b] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(from + r * apart + b * aside);
      }
    }
  }

  // Adds products of a step's rows [ROWS][32 columns] and vectors [16 pairs of columns][vectors][2].
  __attribute__((always_inline)) void add(const uint16_t* rows, const uint16_t* const (&x)[BLOCKS], int64_t last) {
#pragma GCC unroll 4
    for (int pair = 0; pair < STEP / 2; pair++) {
      __m512bh vectors[BLOCKS];
#pragma GCC unroll 3
      for (int b = 0; b < BLOCKS; b++) {
        const int64_t apart = b == BLOCKS - 1 ? last : BLOCK;
        vectors[b] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(x[b] + 2 * pair * apart));
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        int32_t columns;
        std::memcpy(&columns, rows + r * STEP + 2 * pair, sizeof columns);
        const __m512bh both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(columns));
#pragma GCC unroll 3
        for (int b = 0; b < BLOCKS; b++) sum_[r][b] = _mm512_dpbf16_ps(sum_[r][b], both, vectors[b]);
      }
    }
  }

  void save(float* to, int64_t apart, int64_t aside) const {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 3
      for (int b = 0; b < BLOCKS; b++) _mm512_store_ps(to + r * apart + b * aside, sum_[r][b]);
    }
  }

 private:
  __m512 sum_[ROWS][BLOCKS];
};

struct Avx512Bf16 {
  static constexpr int64_t FEWEST = 20, FEWEST_PLAIN = 11;
  static constexpr int64_t MOST = 48;

  static int64_t columns(int64_t) { return 256; }  // with as many of two blocks of vectors, half of the first cache

  struct Configured {
    explicit Configured(int64_t) {}
  };

  template <int LINES, int BLOCKS>
  static void multiply(const Chunk<BLOCKS>& c) {
    constexpr int ROWS = BLOCKS == 1 ? 16 : 8;
    for (int64_t row = 0; row < BAND; row += ROWS) {
      float* to = c.sums + row / TILE_ROWS * ASIDE<BLOCKS> * 256 + row % TILE_ROWS * 16;
      const uint16_t *rows = c.tiles + row * STEP, *x[BLOCKS];
      for (int b = 0; b < BLOCKS; b++) x[b] = c.x[b];
      Ahead ahead = c.ahead;
      Sums<ROWS, BLOCKS> sums(c.begins, to, 16, 256);
      for (int64_t s = 0; s < c.steps; s++, rows += 2 * TILE) {
        if (LINES && !row) {
          ahead.fetch<0, LINES>();
          ahead = ahead.behind(LINES);
        }
        sums.add(rows, x, c.last);
#pragma GCC unroll 3
        for (int b = 0; b < BLOCKS; b++) x[b] += STEP * (b == BLOCKS - 1 ? c.last : BLOCK);
      }
      sums.save(to, 16, 256);
    }
  }

  template <bool FRESH, class Between>
  static void product(Operand a, Operand b, int64_t count, float* out, Between&&) {
    constexpr int ROWS = 8;
    for (int64_t row = 0; row < 2 * TILE_ROWS; row += ROWS) {
      const uint16_t* rows = a.data + row / TILE_ROWS * a.second + row % TILE_ROWS * STEP;
      const uint16_t* x[2] = {b.data, b.data + b.second};
      Sums<ROWS, 2> sums(FRESH, out + row * PAIR, PAIR, BLOCK);
      for (int64_t i = 0; i < count; i++, rows += a.next, x[0] += b.next, x[1] += b.next) sums.add(rows, x, BLOCK);
      sums.save(out + row * PAIR, PAIR, BLOCK);
    }
  }
};

}  // namespace

const Isa avx512_bf16_isa = {"avx512_bf16", packed_words_bytes, pack_as_words, dots_by_words, plain_products,
                             activate, gate, norm, add_scaled, store, load, read, ATTEND_BY_WORDS, delta, &TILES<Avx512Bf16>, &avx512_int8};

}  // namespace tp
