// Loops over float32 values, compiled for each instruction set; the compiler vectorizes them.
#pragma once
#include <cstring>

#include "isa.h"
#include "scales.h"

namespace tp {
namespace {

// e^x to two units in the last place; 0 below −87, 2^126 from 88 on, which is all that a sigmoid or softmax needs.
inline float exponential(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 87.3f ? 87.3f : x;
  const float rounding = 12582912.0f;  // 1.5 · 2^23: adding it leaves an integer in the low bits
  const float shifted = x * 1.44269504f + rounding;
  const float n = shifted - rounding;
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
  float p = 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * as_float((as_bits(shifted) + 127u) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

void load(const void* x, int32_t dtype, float* out, int64_t n) {
  if (dtype == TP_FLOAT) {
    std::memcpy(out, x, n * sizeof(float));
  } else {
    for (int64_t i = 0; i < n; i++) out[i] = bf16(static_cast<const uint16_t*>(x)[i]);
  }
}

void store(const float* x, int32_t dtype, void* out, int64_t n) {
  if (dtype == TP_FLOAT) {
    std::memcpy(out, x, n * sizeof(float));
  } else {
    for (int64_t i = 0; i < n; i++) static_cast<uint16_t*>(out)[i] = to_bf16(x[i]);
  }
}

uint64_t read(const void* data, int64_t bytes) {
  uint64_t sums[32] = {};
  const char* p = static_cast<const char*>(data);
  for (; bytes >= 256; p += 256, bytes -= 256) {
    __builtin_prefetch(p + 4096);
    __builtin_prefetch(p + 4096 + 64);
    __builtin_prefetch(p + 4096 + 128);
    __builtin_prefetch(p + 4096 + 192);
    uint64_t items[32];
    std::memcpy(items, p, 256);
    for (int i = 0; i < 32; i++) sums[i] ^= items[i];
  }
  for (; bytes > 0; p++, bytes--) sums[0] ^= static_cast<uint8_t>(*p);
  for (int i = 1; i < 32; i++) sums[0] ^= sums[i];
  return sums[0];
}

void add_scaled(float* total, const float* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) total[i] += factor * x[i];
}

void activate(float* gate, const float* up, int64_t n, Activation a) {
  if (a.limit == 0) {
    for (int64_t i = 0; i < n; i++) gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    const float g = gate[i] > a.limit ? a.limit : gate[i];
    float u = up[i] > a.limit ? a.limit : up[i];
    u = u < -a.limit ? -a.limit : u;
    gate[i] = g * sigmoid(a.alpha * g) * (u + a.shift);
  }
}

}  // namespace
}  // namespace tp
