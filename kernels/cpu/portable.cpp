// Plain C++, for any processor: what the other instruction sets are measured against.
#include "delta_loops.h"
#include "int8.h"

namespace tp {
namespace {

constexpr float E2M1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
constexpr float INT4[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};

constexpr int LANES = 16;

struct Elements {
  float value[32];
};

// 16 or 32 columns with one scale; a group's elements are a plain array of floats.
template <int COLUMNS>
struct Group {
  using X = float;
  using Elements = tp::Elements;
  using Scale = float;
  using Item = float;
  struct Sum {
    float lane[LANES];
  };
  static constexpr int group = COLUMNS, items = group, sums = 1, shared = 1;

  static void read(const Matrix& w, int64_t grid_row, Item* out) { read_scales(w, grid_row, COLUMNS, out); }
  static Scale scale(const Item* scales) { return *scales; }

  static Sum add(Sum sum, const Elements& e, const X* x, Scale scale) {
    for (int i = 0; i < LANES; i++) {
      float product = e.value[i] * x[i];
      if (COLUMNS == 32) product += e.value[i + COLUMNS - LANES] * x[i + COLUMNS - LANES];
      sum.lane[i] += product * scale;
    }
    return sum;
  }

  static float reduce(const Sum& sum) {
    float total = 0;
    for (float lane : sum.lane) total += lane;
    return total;
  }

  static constexpr int column(int i) { return i; }
};

template <int BYTES>
struct Bytes {
  uint8_t byte[BYTES];

  static Bytes load(const uint8_t* p) { return load_part(p, BYTES); }
  static Bytes load_part(const uint8_t* p, int64_t n) {
    Bytes raw{};
    std::memcpy(raw.byte, p, n);
    return raw;
  }
};

template <const float (&TABLE)[16], int COLUMNS>
struct Nibbles : Group<COLUMNS>, Bytes<COLUMNS / 2> {
  using Raw = Bytes<COLUMNS / 2>;
  static constexpr int bytes = COLUMNS / 2, span = COLUMNS;

  static Elements decode(const Raw& raw) {
    Elements e;
    for (int i = 0; i < bytes; i++) {
      e.value[2 * i] = TABLE[raw.byte[i] & 15];
      e.value[2 * i + 1] = TABLE[raw.byte[i] >> 4];
    }
    return e;
  }
};

struct Fp8 : Group<32>, Bytes<32> {
  using Raw = Bytes<32>;
  static constexpr int bytes = 32, span = 32;

  static Elements decode(const Raw& raw) {
    Elements e;
    for (int i = 0; i < 32; i++) e.value[i] = e4m3(raw.byte[i]);
    return e;
  }
};

struct Bf16 : Group<32>, Bytes<64> {
  using Raw = Bytes<64>;
  static constexpr int bytes = 64, span = 0;

  static void read(const Matrix&, int64_t, Item*) {}
  static Scale scale(const Item*) { return 1; }
  static Elements decode(const Raw& raw) {
    Elements e;
    for (int i = 0; i < 32; i++) e.value[i] = bf16(static_cast<uint16_t>(raw.byte[2 * i] | raw.byte[2 * i + 1] << 8));
    return e;
  }
};

}  // namespace

#include "float_vectors.h"

namespace {

// Vectors in int8 are rounded as such, and multiplied as the numbers that they then are: of sums of bytes compilers make
// what is slower.
void pack_rounded(const tp_weight& w, const void* x, int32_t from, void* out) {
  float* rounded = static_cast<float*>(scratch(SLOT_TILE, ceil_div(w.k, INT8_BLOCK) * INT8_BLOCK * sizeof(float)));
  load_blocks(w, x, from, INT8_BLOCK, rounded);
  for (int64_t i = 0; i < w.k; i += INT8_BLOCK) {
    int32_t code[INT8_BLOCK];
    const float scale = quantize(rounded + i, code);
    for (int j = 0; j < INT8_BLOCK; j++) rounded[i + j] = static_cast<float>(code[j]) * scale;
  }
  pack(w, rounded, TP_FLOAT, out);
}

constexpr Int8 INT8_FUNCTIONS = {packed_bytes, pack_rounded, dots_of_any, nullptr};

}  // namespace

const Isa portable_isa = make_isa("portable", &INT8_FUNCTIONS);

}  // namespace tp
