// AMX: sums stay in tiles. Others read the memory that tiles have written, and the other way round, which the compiler does
// not know.
#include "tiles.h"

namespace tp {
namespace {

inline void tiles_and_others_meet() { asm volatile("" ::: "memory"); }

// Tile registers: sums 0 … 3 (band half · 2 + block of vectors), weights 4 and 5, vectors 6 and 7; of three blocks sums
// 0 … 5 (band half · 3 + block), weights 6 and vectors 7. All have columns for the same number of vectors, for another
// configuration takes as long as a dozen products: what a smaller block's tile has in other columns are items behind the
// block's, and so are sums, which are not looked at.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int64_t vectors) {
    for (int t = 0; t < 8; t++) {
      rows[t] = TILE_ROWS;
      bytes[t] = t == 4 || t == 5 ? 64 : static_cast<uint16_t>(4 * vectors);
    }
  }

  // gcc 12's own intrinsic does not say that it reads memory.
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

template <int BLOCKS>
void load_sums(const float* sums) {
  _tile_loadd(0, sums, 64);
  _tile_loadd(1, sums + 256, 64);
  _tile_loadd(2, sums + 512, 64);
  _tile_loadd(3, sums + 768, 64);
  if (BLOCKS < 3) return;
  _tile_loadd(4, sums + 1024, 64);
  _tile_loadd(5, sums + 1280, 64);
}

template <int BLOCKS>
void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (BLOCKS < 3) return;
  _tile_zero(4);
  _tile_zero(5);
}

template <int BLOCKS>
void save_sums(float* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
  if (BLOCKS < 3) return;
  _tile_stored(4, sums + 1024, 64);
  _tile_stored(5, sums + 1280, 64);
}

// The sums of three blocks of vectors, in tiles.
template <int LINES>
void add_products(const Chunk<3>& c) {
  const uint16_t *tiles = c.tiles, *first = c.x[0], *middle = c.x[1], *end = c.x[2];
  const int narrow = static_cast<int>(4 * c.last);
  Ahead ahead = c.ahead;
  for (int64_t s = 0; s < c.steps; s++, tiles += 2 * TILE, ahead = ahead.behind(LINES)) {
    _tile_loadd(6, tiles, 64);
    _tile_loadd(7, first, 64);
    _tile_dpbf16ps(0, 6, 7);
    ahead.fetch<0, LINES / 2>();
    _tile_loadd(7, middle, 64);
    _tile_dpbf16ps(1, 6, 7);
    ahead.fetch<LINES / 2, LINES>();
    _tile_loadd(7, end, narrow);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(6, tiles + TILE, 64);
    _tile_dpbf16ps(5, 6, 7);
    _tile_loadd(7, middle, 64);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(7, first, 64);
    _tile_dpbf16ps(3, 6, 7);
    first += STEP * BLOCK, middle += STEP * BLOCK, end += STEP * c.last;
  }
}

// … and of one or two. Vectors of chunks without LINES only pass through the first cache.
template <int LINES, int BLOCKS>
void add_products(const Chunk<BLOCKS>& c) {
  constexpr bool STREAM = LINES == 0;
  const uint16_t *tiles = c.tiles, *first = c.x[0], *end = c.x[BLOCKS - 1];
  const int narrow = static_cast<int>(4 * c.last);
  Ahead ahead = c.ahead;
  for (int64_t s = 0; s < c.steps; s++, tiles += 2 * TILE, ahead = ahead.behind(LINES)) {
    if (BLOCKS == 1) _tile_loadd(6, end, narrow);
    else if (STREAM) _tile_stream_loadd(6, first, 64);
    else _tile_loadd(6, first, 64);
    _tile_loadd(4, tiles, 64);
    _tile_dpbf16ps(0, 4, 6);
    ahead.fetch<0, LINES / 2>();
    _tile_loadd(5, tiles + TILE, 64);
    _tile_dpbf16ps(2, 5, 6);
    ahead.fetch<LINES / 2, LINES>();
    if (BLOCKS == 2) {
      if (STREAM && c.last == BLOCK) _tile_stream_loadd(7, end, 64);
      else _tile_loadd(7, end, narrow);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    first += STEP * BLOCK, end += STEP * c.last;
  }
}

struct Amx {
  static constexpr int64_t FEWEST = 4, FEWEST_PLAIN = 6;
  static constexpr int64_t MOST = 48;  // whose sums fit into tiles

  // 8 KB of tiles, a sixth of the first cache. More where sums are stored in between.
  static int64_t columns(int64_t vectors) { return vectors <= MOST ? 128 : vectors <= 128 ? 256 : 512; }

  struct Configured {
    explicit Configured(int64_t vectors) { TileConfig(std::min<int64_t>(vectors, TILE_ROWS)).load(); }
    ~Configured() { _tile_release(); }
    Configured(const Configured&) = delete;
  };

  // Sums of no more than MOST vectors stay in tiles from the first columns to the last.
  template <int LINES, int BLOCKS>
  static void multiply(const Chunk<BLOCKS>& c) {
    tiles_and_others_meet();
    if (c.begins) clear_sums<BLOCKS>();
    else if (!LINES) load_sums<BLOCKS>(c.sums);
    add_products<LINES>(c);
    if (c.ends || !LINES) save_sums<BLOCKS>(c.sums);
    tiles_and_others_meet();
  }

  // Keys and values only pass through the first cache, and should not drive out what is in use there.
  template <bool FRESH, class Between>
  static void product(Operand a, Operand b, int64_t count, float* out, Between&& between) {
    tiles_and_others_meet();
    if (FRESH) {
      clear_sums<2>();
    } else {
      _tile_loadd(0, out, 128);
      _tile_loadd(1, out + 16, 128);
      _tile_loadd(2, out + 512, 128);
      _tile_loadd(3, out + 528, 128);
    }
    for (int64_t i = 0; i < count; i++, a.data += a.next, b.data += b.next) {
      _tile_stream_loadd(4, a.data, 64);
      _tile_loadd(6, b.data, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b.data + b.second, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_stream_loadd(5, a.data + a.second, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      between();
    }
    _tile_stored(0, out, 128);
    _tile_stored(1, out + 16, 128);
    _tile_stored(2, out + 512, 128);
    _tile_stored(3, out + 528, 128);
    tiles_and_others_meet();
  }
};

}  // namespace

const Isa amx_isa = {"amx", packed_bytes, pack, dots_of_any, plain_products, activate, gate, norm,
                     add_scaled, store, load, read, attend, delta, &TILES<Amx>, &avx512_int8};

}  // namespace tp
