// Loops over float32 values, compiled for each instruction set. The compiler vectorizes them; those that it would not,
// for they have conditions, work on registers.
#pragma once
#include <cstring>

#include "isa.h"
#include "scales.h"

namespace tp {
namespace {

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

// As many values as a register holds.
#ifdef __AVX512F__
constexpr int REGISTER = 16;
#elif defined(__AVX__)
constexpr int REGISTER = 8;
#else
constexpr int REGISTER = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * REGISTER)));

inline Lanes lanes(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// e^x to two units in the last place; 0 below −87, 2^126 from 88 on, which is all that a sigmoid or softmax needs.
inline Lanes exponential(Lanes x) {
  typedef int32_t Integers __attribute__((vector_size(4 * REGISTER)));
  const Lanes low = Lanes{} - 87.3f, high = Lanes{} + 87.3f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const float rounding = 12582912.0f;  // 1.5 · 2^23: adding it leaves an integer in the low bits
  const Lanes shifted = x * 1.44269504f + rounding;
  const Lanes n = shifted - rounding;
  const Lanes r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
  Lanes p = r * 1.3888889e-3f + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * reinterpret_cast<Lanes>((reinterpret_cast<Integers>(shifted) + 127) << 23);
}

inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

// The first n lanes; zeros in the others.
inline Lanes lanes(const float* p, int64_t n) {
  Lanes v{};
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}

// x[i] = work(x[i], y[i]), a register at a time.
template <class Work>
void each(float* x, const float* y, int64_t n, Work&& work) {
  int64_t i = 0;
  for (; i + REGISTER <= n; i += REGISTER) {
    const Lanes v = work(lanes(x + i), lanes(y + i));
    std::memcpy(x + i, &v, sizeof v);
  }
  if (i == n) return;
  const Lanes v = work(lanes(x + i, n - i), lanes(y + i, n - i));
  std::memcpy(x + i, &v, (n - i) * sizeof(float));
}

void activate(float* gate, const float* up, int64_t n, Activation a) {
  if (a.limit == 0) return each(gate, up, n, [](Lanes g, Lanes u) { return g * sigmoid(g) * u; });
  const Lanes low = Lanes{} - a.limit, high = Lanes{} + a.limit;
  each(gate, up, n, [&](Lanes g, Lanes u) {
    g = g > high ? high : g;
    u = u > high ? high : u;
    u = u < low ? low : u;
    return g * sigmoid(g * a.alpha) * (u + a.shift);
  });
}

inline float sum_of(const Lanes& v) {
  typedef float Quad __attribute__((vector_size(16)));
  Quad quads[REGISTER / 4];
  std::memcpy(quads, &v, sizeof v);
  Quad sum = quads[0];
  for (int i = 1; i < REGISTER / 4; i++) sum += quads[i];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// scores[n] = rows[n] · q of up to 4 queries; rows and q have `width` values.
template <int Q>
void row_scores(const float* q, int64_t width, const float* rows, int64_t n, float* scores) {
  for (int64_t i = 0; i < n; i++) {
    Lanes sums[Q] = {};
    for (int64_t d = 0; d < width; d += REGISTER) {
      const Lanes row = lanes(rows + i * width + d);
      for (int j = 0; j < Q; j++) sums[j] += row * lanes(q + j * width + d);
    }
    for (int j = 0; j < Q; j++) scores[j * ATTEND + i] = sum_of(sums[j]);
  }
}

// results[j] += Σ scores[j][i] · rows[i] of up to 4 queries, whose results lie `stride` apart.
template <int Q>
void add_rows(const float* scores, int64_t width, const float* rows, int64_t n, float* results, int64_t stride) {
  for (int64_t d = 0; d < width; d += REGISTER) {
    Lanes sums[Q];
    for (int j = 0; j < Q; j++) sums[j] = lanes(results + j * stride + d);
    for (int64_t i = 0; i < n; i++) {
      const Lanes row = lanes(rows + i * width + d);
      for (int j = 0; j < Q; j++) sums[j] += row * scores[j * ATTEND + i];
    }
    for (int j = 0; j < Q; j++) std::memcpy(results + j * stride + d, &sums[j], sizeof(Lanes));
  }
}

// Logits become weights relative to the largest so far, and the result so far is brought to the same.
inline void weigh(float* scores, int64_t n, float* result, int64_t width) {
  float most = result[0];
  for (int64_t i = 0; i < n; i++) most = scores[i] > most ? scores[i] : most;
  const float factor = exponential(Lanes{} + (result[0] - most))[0];
  each(scores, scores, n, [&](Lanes score, Lanes) { return exponential(score - most); });
  result[0] = most;
  result[1] *= factor;
  for (int64_t i = 0; i < n; i++) result[1] += scores[i];
  if (factor != 1.0f) {
    for (int64_t d = 0; d < width; d++) result[2 + d] *= factor;
  }
}

void attend(const float* q, int64_t queries, int64_t width, const void* keys, const void* values, int64_t stride,
            int32_t dtype, int64_t n, float* results) {
  alignas(64) float rows[ATTEND * ATTEND_WIDTH], scores[ATTEND_QUERIES * ATTEND];
  const int64_t item = dtype == TP_FLOAT ? 4 : 2, result = width + 2, by_four = queries / 4 * 4;
  const auto plain = [&](const void* from, const void* next) {
    for (int64_t i = 0; i < n; i++) {
      const int64_t place = i * stride * item;
      for (int64_t line = 0; line < width * item; line += 64) __builtin_prefetch(static_cast<const char*>(next) + place + line);
      load(static_cast<const char*>(from) + place, dtype, rows + i * width, width);
    }
  };
  // Rows of one head lie apart, which the processor does not foresee. Blocks mostly follow each other.
  plain(keys, values);
  for (int64_t j = 0; j < by_four; j += 4) row_scores<4>(q + j * width, width, rows, n, scores + j * ATTEND);
  for (int64_t j = by_four; j < queries; j++) row_scores<1>(q + j * width, width, rows, n, scores + j * ATTEND);
  for (int64_t j = 0; j < queries; j++) weigh(scores + j * ATTEND, n, results + j * result, width);
  plain(values, static_cast<const char*>(keys) + n * stride * item);
  for (int64_t j = 0; j < by_four; j += 4) add_rows<4>(scores + j * ATTEND, width, rows, n, results + j * result + 2, result);
  for (int64_t j = by_four; j < queries; j++) add_rows<1>(scores + j * ATTEND, width, rows, n, results + j * result + 2, result);
}

}  // namespace
}  // namespace tp
