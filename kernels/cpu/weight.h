// What the kernels are given: a weight as it lies in the artifact. Part of the C interface, see native.py.
#pragma once
#include <cstdint>

extern "C" {

enum tp_format { TP_E2M1 = 0, TP_INT4 = 1, TP_E4M3 = 2, TP_BF16 = 3, TP_F32 = 4 };
enum tp_scale { TP_NO_SCALE = 0, TP_SCALE_F32 = 1, TP_SCALE_E8M0 = 2, TP_SCALE_E4M3 = 3, TP_SCALE_BF16 = 4 };
enum tp_act { TP_AS_IT_IS = 0, TP_INT8 = 1 };
enum tp_dtype { TP_FLOAT = 0, TP_BFLOAT16 = 1 };

// A matrix [n, k], or a stack [experts, n, k], of F32 only the former. Strides are in bytes, those of scales and global factors in items.
// act: how it takes vectors; int8 is for E2M1 and INT4.
struct tp_weight {
  const uint8_t* data;
  const uint8_t* scale;    // [grid rows, grid columns] per expert
  const float* global;     // [segments] per expert, or null
  const int64_t* segments; // rows of each segment; the block grid restarts at every one
  int64_t experts, n, k;
  int64_t row_bytes, expert_bytes;
  int64_t grid_columns, expert_scales;
  int64_t block_rows, block_columns;
  int32_t segment_count, format, scale_type, act;
};

// A vector of float32 or bfloat16, or null: a bias.
struct tp_vector {
  const void* data;
  int32_t dtype;
};
}

namespace tp {

constexpr int64_t MAX_BATCH = 8;  // vectors of x that one pass over a weight multiplies with

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One expert's matrix.
struct Matrix {
  const tp_weight* w;
  const uint8_t* data;
  const uint8_t* scale;
  const float* global;

  Matrix(const tp_weight& weight, int64_t expert)
      : w(&weight),
        data(weight.data + expert * weight.expert_bytes),
        scale(weight.scale + expert * weight.expert_scales * scale_bytes(weight.scale_type)),
        global(weight.global ? weight.global + expert * weight.segment_count : nullptr) {}

  // The same of a copy of the weight.
  Matrix as(const tp_weight& copy) const {
    Matrix m = *this;
    m.w = &copy;
    return m;
  }

  const uint8_t* row(int64_t row) const { return data + row * w->row_bytes; }

  static int64_t scale_bytes(int32_t type) { return type == TP_SCALE_F32 ? 4 : type == TP_SCALE_BF16 ? 2 : type ? 1 : 0; }

  // Rows first … end − 1 of a segment share a global factor, and a row of scales unless each has its own.
  struct Place {
    int64_t first, end, grid_row;
    float global;
  };

  bool has_scales_by_row() const { return w->block_rows == 1; }

  // Goes on to a row: whether its scales are others than those of the row before.
  [[gnu::always_inline]] bool go_to(int64_t row, Place& at) const {
    const bool next = row >= at.end;
    if (next) at = place(row);
    return next || has_scales_by_row();
  }

  int64_t scale_row(const Place& place, int64_t row) const {
    return has_scales_by_row() ? row : place.grid_row;
  }

  // A row's own scales are so short that the processor does not foresee the next.
  [[gnu::always_inline]] void fetch_scales(int64_t row) const {
    if (!has_scales_by_row()) return;
    const int64_t size = w->grid_columns * scale_bytes(w->scale_type);
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(scale + row * size + i);
  }

  // Inlined, as is go_to: the linker keeps one copy of a function, see isa.h.
  [[gnu::always_inline]] Place place(int64_t row) const {
    int64_t start = 0, grid = 0;
    for (int32_t s = 0; s < w->segment_count; s++) {
      const int64_t end = start + w->segments[s];
      const float factor = global ? global[s] : 1.0f;
      if (row < end && has_scales_by_row()) return {start, end, grid, factor};
      if (row < end) {
        const int64_t block = (row - start) / w->block_rows, first = start + block * w->block_rows;
        return {first, first + w->block_rows < end ? first + w->block_rows : end, grid + block, factor};
      }
      start = end;
      grid += ceil_div(w->segments[s], w->block_rows);
    }
    return {0, 0, 0, 0.0f};  // not reached: rows are checked by the caller
  }
};

}  // namespace tp
