// Loops over float32 values, compiled for each instruction set. The compiler vectorizes them; those that it would not,
// for they have conditions, work on registers.
#pragma once
#include <cstring>
#include <type_traits>

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

// In four streams, as products of rows read weights.
uint64_t read(const void* data, int64_t bytes) {
  typedef uint64_t Line __attribute__((vector_size(64)));
  constexpr int64_t STREAMS = 4, LINE = sizeof(Line), AHEAD = 2048;
  const char* p = static_cast<const char*>(data);
  const int64_t quarter = bytes / STREAMS / LINE * LINE;
  Line sums[STREAMS] = {};
  for (int64_t i = 0; i < quarter; i += LINE) {
#pragma GCC unroll 4
    for (int64_t s = 0; s < STREAMS; s++) {
      Line line;
      __builtin_prefetch(p + s * quarter + i + AHEAD);
      std::memcpy(&line, p + s * quarter + i, LINE);
      sums[s] ^= line;
    }
  }
  uint64_t sum = 0;
  for (int64_t i = STREAMS * quarter; i < bytes; i++) sum ^= static_cast<uint8_t>(p[i]);
  for (int64_t s = 0; s < STREAMS; s++) {
    for (int k = 0; k < 8; k++) sum ^= sums[s][k];
  }
  return sum;
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

// Rows, or registers of one, that go with four queries: as many sums as a processor has registers for.
constexpr int TOGETHER = REGISTER == 16 ? 4 : 2;

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

void gate(float* x, const float* by, int64_t n) {
  each(x, by, n, [](Lanes v, Lanes g) { return v * sigmoid(g); });
}

typedef float Quad __attribute__((vector_size(16)));

// What an operation of two makes of all lanes.
template <class Operation>
float of_lanes(const Lanes& v, Operation&& operation) {
  Quad quads[REGISTER / 4];
  std::memcpy(quads, &v, sizeof v);
  for (int i = 1; i < REGISTER / 4; i++) quads[0] = operation(quads[0], quads[i]);
  const Quad half = operation(quads[0], Quad{quads[0][2], quads[0][3]});
  return operation(half, Quad{half[1]})[0];
}

inline float sum_of(const Lanes& v) {
  return of_lanes(v, [](Quad a, Quad b) { return a + b; });
}

// out[r] = the sum of v[r]'s lanes.
template <int R>
void store_sums(const Lanes (&v)[R], float* out) {
  for (int r = 0; r < R; r++) out[r] = sum_of(v[r]);
}

#ifdef __AVX512F__
// Four at once: a third of the instructions.
template <>
inline void store_sums<4>(const Lanes (&v)[4], float* out) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512 even = _mm512_shuffle_ps(a, b, 0x44), odd = _mm512_shuffle_ps(a, b, 0xee), sum = _mm512_add_ps(even, odd);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#endif

inline float product(const float* x, const float* y, int64_t n) {
  Lanes sums{};
  int64_t i = 0;
  for (; i + REGISTER <= n; i += REGISTER) sums += lanes(x + i) * lanes(y + i);
  return sum_of(sums + lanes(x + i, n - i) * lanes(y + i, n - i));
}

// Four rows far apart at a time, as in dots.h.
void plain_products(const float* rows, int64_t n, int64_t k, const float* x, float* out) {
  constexpr int64_t TOGETHER = 4, AHEAD = 512;
  const int64_t apart = (n + TOGETHER - 1) / TOGETHER;
  for (int64_t row = 0; row < apart; row++) {
    const float* w[TOGETHER];
    for (int64_t r = 0; r < TOGETHER; r++) w[r] = rows + (r * apart + row < n ? r * apart + row : n - 1) * k;
    Lanes sums[TOGETHER] = {};
    int64_t i = 0;
    for (; i + REGISTER <= k; i += REGISTER) {
      const Lanes v = lanes(x + i);
#pragma GCC unroll 4
      for (int64_t r = 0; r < TOGETHER; r++) {
        __builtin_prefetch(w[r] + i + AHEAD);
        sums[r] += lanes(w[r] + i) * v;
      }
    }
    float found[TOGETHER];
    for (int64_t r = 0; r < TOGETHER; r++) sums[r] += lanes(w[r] + i, k - i) * lanes(x + i, k - i);
    store_sums(sums, found);
    for (int64_t r = 0; r < TOGETHER && r * apart + row < n; r++) out[r * apart + row] = found[r];
  }
}

void norm(float* x, const float* weight, int64_t n, float eps) {
  Lanes sums{};
  int64_t i = 0;
  for (; i + REGISTER <= n; i += REGISTER) sums += lanes(x + i) * lanes(x + i);
  float sum = sum_of(sums);
  for (; i < n; i++) sum += x[i] * x[i];
  const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
  for (i = 0; i < n; i++) x[i] = x[i] * factor * weight[i];
}

// scores[j][i … i + R − 1] = those rows · q[j] of Q queries that lie `apart`; rows and q have `width` values.
template <int Q, int R>
void scores_of_rows(const float* q, int64_t apart, int64_t width, const float* rows, int64_t i, float* scores) {
  Lanes sums[Q][R] = {};
  for (int64_t d = 0; d < width; d += REGISTER) {
    Lanes row[R];
    for (int r = 0; r < R; r++) row[r] = lanes(rows + (i + r) * width + d);
    for (int j = 0; j < Q; j++) {
      const Lanes query = lanes(q + j * apart + d);
      for (int r = 0; r < R; r++) sums[j][r] += row[r] * query;
    }
  }
  for (int j = 0; j < Q; j++) store_sums(sums[j], scores + j * ATTEND + i);
}

template <int Q>
void row_scores(const float* q, int64_t apart, int64_t width, const float* rows, int64_t n, float* scores) {
  int64_t i = 0;
  for (; i + TOGETHER <= n; i += TOGETHER) scores_of_rows<Q, TOGETHER>(q, apart, width, rows, i, scores);
  for (; i < n; i++) scores_of_rows<Q, 1>(q, apart, width, rows, i, scores);
}

// Calls work(count, first) with four queries at a time, and with single ones at the end.
template <class Work>
void for_queries(int64_t queries, Work&& work) {
  int64_t j = 0;
  for (; j + 4 <= queries; j += 4) work(std::integral_constant<int, 4>{}, j);
  for (; j < queries; j++) work(std::integral_constant<int, 1>{}, j);
}

void all_scores(const float* q, int64_t apart, int64_t queries, int64_t width, const float* rows, int64_t n,
                float* scores) {
  for_queries(queries, [&](auto count, int64_t j) {
    row_scores<count>(q + j * apart, apart, width, rows, n, scores + j * ATTEND);
  });
}

// results[j] += Σ scores[j][i] · rows[i] of Q queries, whose results lie `apart`, and of D registers of rows, which lie
// `row` values apart.
template <int Q, int D>
void add_columns(const float* scores, const float* rows, int64_t row, int64_t n, float* results, int64_t apart) {
  Lanes sums[Q][D];
  for (int j = 0; j < Q; j++) {
    for (int d = 0; d < D; d++) sums[j][d] = lanes(results + j * apart + d * REGISTER);
  }
  for (int64_t i = 0; i < n; i++) {
    Lanes values[D];
    for (int d = 0; d < D; d++) values[d] = lanes(rows + i * row + d * REGISTER);
    for (int j = 0; j < Q; j++) {
      for (int d = 0; d < D; d++) sums[j][d] += values[d] * scores[j * ATTEND + i];
    }
  }
  for (int j = 0; j < Q; j++) std::memcpy(results + j * apart, sums[j], sizeof sums[j]);
}

// The same of all `width` values of rows.
template <int Q>
void add_rows(const float* scores, int64_t width, const float* rows, int64_t row, int64_t n, float* results,
              int64_t apart) {
  int64_t d = 0;
  for (; d + TOGETHER * REGISTER <= width; d += TOGETHER * REGISTER) {
    add_columns<Q, TOGETHER>(scores, rows + d, row, n, results + d, apart);
  }
  for (; d < width; d += REGISTER) add_columns<Q, 1>(scores, rows + d, row, n, results + d, apart);
}

void add_all_rows(const float* scores, int64_t queries, int64_t width, const float* rows, int64_t row, int64_t n,
                  float* results, int64_t apart) {
  for_queries(queries, [&](auto count, int64_t j) {
    add_rows<count>(scores + j * ATTEND, width, rows, row, n, results + j * apart, apart);
  });
}

// Products times scale become weights relative to the largest so far, and the result so far is brought to the same.
inline void weigh(float* scores, int64_t n, float scale, float* result, int64_t width) {
  each(scores, scores, n, [&](Lanes score, Lanes) { return score * scale; });
  const int64_t whole = n / REGISTER * REGISTER;
  Lanes largest = Lanes{} + result[0], sum{};
  for (int64_t i = 0; i < whole; i += REGISTER) largest = lanes(scores + i) > largest ? lanes(scores + i) : largest;
  float most = of_lanes(largest, [](Quad a, Quad b) { return a > b ? a : b; });
  for (int64_t i = whole; i < n; i++) most = scores[i] > most ? scores[i] : most;
  // Nothing but −∞ so far, which an overflow gives, weighs nothing; what is no number is not passed over.
  if (most == -__builtin_inff()) return each(scores, scores, n, [](Lanes s, Lanes) { return s == s ? Lanes{} : s; });
  const float factor = most == result[0] ? 1.0f : exponential(Lanes{} + (result[0] - most))[0];
  each(scores, scores, n, [&](Lanes score, Lanes) { return exponential(score - most); });
  for (int64_t i = 0; i < whole; i += REGISTER) sum += lanes(scores + i);
  if (whole < n) sum += lanes(scores + whole, n - whole);
  result[0] = most;
  result[1] = result[1] * factor + sum_of(sum);
  if (factor != 1.0f) {
    for (int64_t d = 0; d < width; d++) result[2 + d] *= factor;
  }
}

inline int64_t bytes_apart(const Rows& rows) { return rows.stride * (rows.dtype == TP_FLOAT ? 4 : 2); }

// Rows as float32 [n, width], while those at `next` are fetched: they lie apart, which the processor does not foresee.
inline void plain_rows(const Rows& rows, int64_t width, const void* next, float* out) {
  const int64_t apart = bytes_apart(rows), bytes = width * (rows.dtype == TP_FLOAT ? 4 : 2);
  for (int64_t i = 0; i < rows.n; i++) {
    const char* ahead = static_cast<const char*>(next) + i * apart;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line);
    load(static_cast<const char*>(rows.data) + i * apart, rows.dtype, out + i * width, width);
  }
}

inline const void* behind(const Rows& rows) {
  return static_cast<const char*>(rows.data) + rows.n * bytes_apart(rows);
}

void weigh_all(float* scores, int64_t n, float scale, int64_t queries, float* results, int64_t width) {
  for (int64_t j = 0; j < queries; j++) weigh(scores + j * ATTEND, n, scale, results + j * (width + 2), width);
}

void attend_positions(const float* q, int64_t queries, int64_t width, float scale, Rows keys, const void* values,
                      int64_t value_width, const void* next, float* results) {
  alignas(64) float rows[ATTEND * ATTEND_WIDTH], scores[ATTEND_QUERIES * ATTEND];
  const bool same = values == keys.data;
  plain_rows(keys, width, same ? next : values, rows);
  all_scores(q, width, queries, width, rows, keys.n, scores);
  weigh_all(scores, keys.n, scale, queries, results, value_width);
  if (!same) plain_rows({values, keys.stride, keys.dtype, keys.n}, value_width, next, rows);
  add_all_rows(scores, queries, value_width, rows, same ? width : value_width, keys.n, results + 2, value_width + 2);
}

void row_products(Rows rows, int64_t width, const float* x, int64_t apart, int64_t vectors, float* out) {
  alignas(64) float plain[ATTEND * ATTEND_WIDTH];
  plain_rows(rows, width, behind(rows), plain);
  all_scores(x, apart, vectors, width, plain, rows.n, out);
}

void row_sums(Rows rows, int64_t width, const float* factors, int64_t vectors, float* totals, int64_t apart) {
  alignas(64) float plain[ATTEND * ATTEND_WIDTH];
  plain_rows(rows, width, behind(rows), plain);
  add_all_rows(factors, vectors, width, plain, width, rows.n, totals, apart);
}

constexpr Attend attend = {attend_positions, row_products, row_sums};

}  // namespace
}  // namespace tp
