// Rows of block scales as float32, compiled for each instruction set (branches are written so that they vectorize).
#pragma once
#include <cstring>

#include "threads.h"
#include "weight.h"

namespace tp {
namespace {

inline float as_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t as_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

// 2^(code − 127); code 0 is a subnormal number, 255 is NaN.
inline float e8m0(uint8_t code) {
  const uint32_t special = code == 0 || code == 255 ? 0x00400000u : 0u;
  return as_float(static_cast<uint32_t>(code) << 23 | special);
}

// All ones if a < b, else 0, for what is below 2^31. No condition that a compiler sees: it would move arithmetic behind
// it, and loops of that are not vectorized.
inline uint32_t mask_less(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<int32_t>(a - b) >> 31); }

inline float e4m3(uint8_t code) {
  const uint32_t size = code & 0x7f, normal = (size << 20) + (120u << 23);
  // With an exponent of 0 there is no hidden bit: 2 · (1 + m/8) · 2^−7 − 2^−6 = m · 2^−9.
  const uint32_t small = as_bits(2.0f * as_float(normal) - 0.015625f), is_small = mask_less(size, 8);
  const uint32_t value = (small & is_small) | (normal & ~is_small), nan = 0x7fc00000u & mask_less(0x7e, size);
  return as_float(value | nan | static_cast<uint32_t>(code & 0x80) << 24);
}

inline float bf16(uint16_t bits) { return as_float(static_cast<uint32_t>(bits) << 16); }

// Columns that one item of a row of scales stands for, at most a group: what block_columns allows.
inline int64_t span_of(const tp_weight& w, int64_t group) {
  if (w.block_columns >= w.k || w.block_columns % group == 0) return group;
  return w.block_columns;
}

// out[i] is the scale of columns i · span …, of a row of the grid.
inline void read_scales(const Matrix& m, int64_t grid_row, int64_t span, float* out) {
  const tp_weight& w = *m.w;
  const int64_t blocks = w.grid_columns, start = grid_row * blocks;
  const uint8_t* bytes = m.scale + start;
  switch (w.scale_type) {
    case TP_SCALE_E8M0:
      for (int64_t i = 0; i < blocks; i++) out[i] = e8m0(bytes[i]);
      break;
    case TP_SCALE_E4M3:
      for (int64_t i = 0; i < blocks; i++) out[i] = e4m3(bytes[i]);
      break;
    case TP_SCALE_BF16:
      for (int64_t i = 0; i < blocks; i++) out[i] = bf16(reinterpret_cast<const uint16_t*>(m.scale)[start + i]);
      break;
    default: std::memcpy(out, reinterpret_cast<const float*>(m.scale) + start, blocks * sizeof(float));
  }
  const int64_t items = ceil_div(w.k, span), repeat = w.block_columns >= w.k ? items : w.block_columns / span;
  if (repeat > 1) {
    for (int64_t i = items - 1; i > 0; i--) out[i] = out[i / repeat];
  }
}

}  // namespace
}  // namespace tp
