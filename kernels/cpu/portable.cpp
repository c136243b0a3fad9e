// Plain C++, for any processor: what the other instruction sets are measured against.
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
  static constexpr int group = COLUMNS, items = group, together = 1;

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

// Vectors in int8, see int8.h.
template <class TABLE, int SPAN>
struct Codes : Bytes<16> {
  static constexpr int LANES = 4;
  using X = Int8Group<LANES>;
  using Raw = Bytes<16>;
  using Scale = const float*;
  using Item = float;
  static constexpr int group = 8 * LANES, items = 1, bytes = 16, together = 1, span = SPAN, many = 0;
  struct Elements {
    uint8_t even[16], odd[16];
  };
  struct Sum {
    float lane[LANES];
  };

  static Elements decode(const Raw& raw) {
    Elements e;
    for (int i = 0; i < 16; i++) {
      e.even[i] = LIFTED<TABLE>.value[raw.byte[i] & 15];
      e.odd[i] = LIFTED<TABLE>.value[raw.byte[i] >> 4];
    }
    return e;
  }

  static void read(const Matrix& w, int64_t grid_row, Item* out) { read_scales(w, grid_row, SPAN, out); }
  static Scale scale(const Item* scales) { return scales; }

  static Sum add(Sum sum, const Elements& e, const X* x, Scale scale) {
    for (int i = 0; i < LANES; i++) {
      int32_t whole = x->start[i];
      for (int j = 4 * i; j < 4 * i + 4; j++) whole += e.even[j] * x->code[0][j] + e.odd[j] * x->code[1][j];
      sum.lane[i] += static_cast<float>(whole) * (scale[8 * i / SPAN] * x->scale[i]);
    }
    return sum;
  }

  static float reduce(const Sum& sum) { return (sum.lane[0] + sum.lane[1]) + (sum.lane[2] + sum.lane[3]); }
};

}  // namespace

#include "float_vectors.h"

const Isa portable_isa = make_isa("portable");

}  // namespace tp
