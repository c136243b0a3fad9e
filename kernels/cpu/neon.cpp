// NEON, which every 64-bit Arm processor has. A group is 32 columns; elements are float32 vectors of 4.
#include <arm_neon.h>

#include "delta_loops.h"
#include "int8.h"

namespace tp {
namespace {

struct Elements {
  float32x4_t value[8];
};

// F::column(i) is the column of an element's i-th value.
struct Group {
  using X = float;
  using Elements = tp::Elements;
  using Sum = float32x4_t;
  using Item = float;
  static constexpr int group = 32, items = group, sums = 1, shared = 1;

  template <int N>
  static Sum dot(const Elements& e, const X* x, const int (&which)[N]) {
    Sum sum = vmulq_f32(e.value[which[0]], vld1q_f32(x + 4 * which[0]));
#pragma GCC unroll 8
    for (int i = 1; i < N; i++) sum = vfmaq_f32(sum, e.value[which[i]], vld1q_f32(x + 4 * which[i]));
    return sum;
  }
  static Sum dot(const Elements& e, const X* x) { return dot(e, x, {0, 1, 2, 3, 4, 5, 6, 7}); }

  static Sum add(Sum sum, const Elements& e, const X* x, const Item* scales) {
    return vfmaq_n_f32(sum, dot(e, x), *scales);
  }
  static const Item* scale(const Item* scales) { return scales; }

  static float reduce(Sum sum) { return vaddvq_f32(sum); }
};

// 16 or 32 bytes of raw codes.
template <int BYTES>
struct Bytes {
  static constexpr int bytes = BYTES;
  struct Raw {
    uint8x16_t part[BYTES / 16];
  };

  static Raw load(const uint8_t* p) {
    Raw raw;
    for (int i = 0; i < BYTES / 16; i++) raw.part[i] = vld1q_u8(p + 16 * i);
    return raw;
  }
  static Raw load_part(const uint8_t* p, int64_t n) {
    uint8_t filled[BYTES] = {};
    std::memcpy(filled, p, n);
    return load(filled);
  }
};

// 16 values that bfloat16 holds, their two bytes apart.
struct Table {
  alignas(16) uint8_t high[16], low[16];

  constexpr explicit Table(const float (&values)[16]) : high(), low() {
    for (int i = 0; i < 16; i++) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, values[i]);
      high[i] = static_cast<uint8_t>(bits >> 24);
      low[i] = static_cast<uint8_t>(bits >> 16 & 0xff);
    }
  }
};

// Eight bfloat16 as float32: the high halves.
inline void widen(uint16x8_t words, float32x4_t* values) {
  const uint16x8_t zero = vdupq_n_u16(0);
  values[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, words));
  values[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, words));
}

inline void widen(uint8x16_t low, uint8x16_t high, float32x4_t* values) {
  widen(vreinterpretq_u16_u8(vzip1q_u8(low, high)), values);
  widen(vreinterpretq_u16_u8(vzip2q_u8(low, high)), values + 2);
}

constexpr Table E2M1({0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6});
constexpr Table INT4({0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1});

// Of 16 bytes the low codes are the even columns, the high ones the odd.
template <const Table& TABLE, int SPAN>
struct Nibbles : Group, Bytes<16> {
  static constexpr int span = SPAN;

  static Elements decode(Raw raw) {
    Elements e;
    look_up(vandq_u8(raw.part[0], vdupq_n_u8(15)), e.value);
    look_up(vshrq_n_u8(raw.part[0], 4), e.value + 4);
    return e;
  }

  static void look_up(uint8x16_t codes, float32x4_t* values) {
    widen(vqtbl1q_u8(vld1q_u8(TABLE.low), codes), vqtbl1q_u8(vld1q_u8(TABLE.high), codes), values);
  }

  static void read(const Matrix& w, int64_t grid_row, Item* out) { read_scales(w, grid_row, SPAN, out); }

  static Sum add(Sum sum, const Elements& e, const X* x, const Item* scales) {
    if (SPAN == 32) return Group::add(sum, e, x, scales);
    // Values 0 … 7 and 16 … 23 are of the first half of the columns.
    sum = vfmaq_n_f32(sum, dot(e, x, {0, 1, 4, 5}), scales[0]);
    return vfmaq_n_f32(sum, dot(e, x, {2, 3, 6, 7}), scales[1]);
  }

  static constexpr int column(int i) { return i % 16 * 2 + i / 16; }
};

// NaN and the sizes 0 … 14 of an e4m3, behind it by number: those of exponent 0 have no hidden bit.
constexpr float UNIT = 1.0f / 512;
constexpr Table SMALL({__builtin_nanf(""), 0, UNIT, 2 * UNIT, 3 * UNIT, 4 * UNIT, 5 * UNIT, 6 * UNIT, 7 * UNIT,
                       8 * UNIT, 9 * UNIT, 10 * UNIT, 11 * UNIT, 12 * UNIT, 13 * UNIT, 14 * UNIT});

// A bfloat16 is the code's size shifted by 4, with 120 added to its exponent. What this is wrong for is looked up.
struct Fp8 : Group, Bytes<32> {
  static constexpr int span = 32;
  alignas(16) static constexpr uint8_t HIGH[16] = {60, 61, 62, 63, 64, 65, 66, 67, 60, 61, 62, 63, 64, 65, 66, 67};

  static Elements decode(const Raw& raw) {
    Elements e;
    look_up(raw.part[0], e.value);
    look_up(raw.part[1], e.value + 4);
    return e;
  }

  static void look_up(uint8x16_t codes, float32x4_t* values) {
    const uint8x16_t next = vandq_u8(vaddq_u8(codes, vdupq_n_u8(1)), vdupq_n_u8(127));
    const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(codes, 4), vld1q_u8(SMALL.low), next);
    const uint8x16_t normal = vqtbl1q_u8(vld1q_u8(HIGH), vshrq_n_u8(codes, 4));
    const uint8x16_t high = vqtbx1q_u8(normal, vld1q_u8(SMALL.high), next);
    widen(low, vbslq_u8(vdupq_n_u8(128), codes, high), values);
  }

  static void read(const Matrix& w, int64_t grid_row, Item* out) { read_scales(w, grid_row, span, out); }
  static constexpr int column(int i) { return i; }
};

struct Bf16 : Group, Bytes<64> {
  static constexpr int span = 0;

  static Elements decode(const Raw& raw) {
    Elements e;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) widen(vreinterpretq_u16_u8(raw.part[i]), e.value + 2 * i);
    return e;
  }

  static void read(const Matrix&, int64_t, Item*) {}
  static Sum add(Sum sum, const Elements& e, const X* x, const Item*) { return vaddq_f32(sum, dot(e, x)); }
  static constexpr int column(int i) { return i; }
};

// Vectors in int8, see int8.h. Two products of bytes, and the next two, are added up to 16 bits.
template <class TABLE, int SPAN>
struct Codes : Nibbles<E2M1, SPAN> {  // whose scales are read so, whatever their elements
  using X = Int8Group<4>;
  static constexpr int items = 1;
  struct Elements {
    int8x16_t even, odd;
  };

  static Elements decode(typename Nibbles<E2M1, SPAN>::Raw raw) {
    const uint8x16_t table = vld1q_u8(LIFTED<TABLE>.value);
    return {vreinterpretq_s8_u8(vqtbl1q_u8(table, vandq_u8(raw.part[0], vdupq_n_u8(15)))),
            vreinterpretq_s8_u8(vqtbl1q_u8(table, vshrq_n_u8(raw.part[0], 4)))};
  }

  // Lane i of a sum has columns 8 · i … 8 · i + 7.
  static float32x4_t scale(const float* scales) {
    if (SPAN == 32) return vdupq_n_f32(*scales);
    return vcombine_f32(vdup_n_f32(scales[0]), vdup_n_f32(scales[1]));
  }

  static float32x4_t add(float32x4_t sum, const Elements& e, const X* x, float32x4_t scale) {
    const int8x16_t even = vld1q_s8(x->code[0]), odd = vld1q_s8(x->code[1]);
    const int16x8_t first = vmull_s8(vget_low_s8(e.even), vget_low_s8(even));
    const int16x8_t low = vmlal_s8(first, vget_low_s8(e.odd), vget_low_s8(odd));
    const int16x8_t high = vmlal_high_s8(vmull_high_s8(e.even, even), e.odd, odd);
    const int32x4_t whole = vpadalq_s16(vld1q_s32(x->start), vpaddq_s16(low, high));
    return vfmaq_f32(sum, vcvtq_f32_s32(whole), vmulq_f32(scale, vld1q_f32(x->scale)));
  }
};

using Coded = Int8Of<Codes>;

}  // namespace

#include "float_vectors.h"

constexpr Int8 INT8_FUNCTIONS = {Coded::packed_bytes, Coded::pack, Coded::dots, nullptr};
const Isa neon_isa = make_isa("neon", &INT8_FUNCTIONS);

}  // namespace tp
