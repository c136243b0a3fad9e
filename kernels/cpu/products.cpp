#include "products.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace tp {

const float* load_bias(tp_vector bias, int64_t first, int64_t n, float* room) {
  if (!bias.data) return nullptr;
  isa().load(at(bias.data, bias.dtype, first), bias.dtype, room, n);
  return room;
}

void add_bias(tp_vector bias, int64_t first, int64_t n, float* room, int64_t count, float* vectors, int64_t stride) {
  if (!load_bias(bias, first, n, room)) return;
  for (int64_t i = 0; i < count; i++) isa().add_scaled(vectors + i * stride, room, 1.0f, n);
}

namespace {

// Whether all values are bfloat16 in fact: logits are computed in float32, from hidden states that were rounded.
bool fits_bf16(const float* x, int64_t n) {
  uint32_t below = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    below |= bits;
  }
  return (below & 0xffff) == 0;
}

}  // namespace

bool tiles_pay(const tp_weight& w, int64_t vectors) {
  const Tiles* tiles = isa().tiles;
  return tiles && w.act == TP_AS_IT_IS && vectors >= (w.format == TP_BF16 ? tiles->fewest_plain : tiles->fewest);
}

bool tiles_are_right(const tp_weight& w, const void* x, int32_t dtype, int64_t n) {
  if (dtype == TP_BFLOAT16) return true;
  const bool exact = w.format == TP_E2M1 || w.format == TP_BF16;
  return exact && fits_bf16(static_cast<const float*>(x), n);
}

constexpr int64_t BEHIND = 64;  // bytes that the tiles of a last, smaller block may look at

Packed::Packed(const tp_weight& w, int64_t n, bool tiles, Slot slot)
    : w_(w),
      tiles_(tiles),
      int8_(w.act == TP_INT8),
      bytes_((tiles ? isa().tiles->vector_bytes : int8_ ? isa().int8->packed_bytes : isa().packed_bytes)(w)),
      data_(static_cast<char*>(scratch(slot, n * bytes_ + BEHIND))) {}

void Packed::products(const Matrix& m, int64_t first, int64_t last, const int64_t* which, int64_t start, int64_t count,
                      float* out, int64_t stride) const {
  if (tiles_) return isa().tiles->products(m, first, last, place(start), count, out, stride);
  const auto dots = int8_ ? isa().int8->dots : isa().dots;
  if (int8_ && isa().int8->products && count > MAX_BATCH) {
    return isa().int8->products(m, first, last, {place(which ? 0 : start), bytes_, which}, count, out, stride);
  }
  for (int64_t done = 0; done < count; done += MAX_BATCH) {
    const int n = static_cast<int>(std::min(MAX_BATCH, count - done));
    const void* xs[MAX_BATCH];
    for (int v = 0; v < n; v++) xs[v] = place(which ? which[done + v] : start + done + v);
    dots(m, first, last, xs, n, out + done * stride, stride);
  }
}

namespace {

// Tokens whose packed vectors a core's second cache holds: all rows of a weight are multiplied with them before the next.
int64_t tokens_at_a_time(const tp_weight& w) {
  constexpr int64_t CACHED = 1 << 20, FEWEST = 128;  // for fewer, decoding the weight again and again would weigh
  return std::max(FEWEST, CACHED / (2 * w.k) / PAIR * PAIR);
}

// Rows first … last − 1 of a linear's results for tokens t … t + count − 1.
void linear_part(const Packed& packed, const Linear& part, int64_t first, int64_t last, int64_t t, int64_t count,
                 int32_t dtype) {
  const Matrix matrix(*part.w, 0);
  const int64_t rows = rows_at_a_time(count);
  float* products = static_cast<float*>(scratch(SLOT_PRODUCTS, (count + 1) * rows * sizeof(float)));
  for (int64_t row = first; row < last; row += rows) {
    const int64_t n = std::min(rows, last - row);
    packed.products(matrix, row, row + n, nullptr, t, count, products, rows);
    add_bias(part.bias, row, n, products + count * rows, count, products, rows);
    for (int64_t i = 0; i < count; i++) {
      isa().store(products + i * rows, dtype, at(part.out, dtype, (t + i) * part.w->n + row), n);
    }
  }
}

bool packed_alike(const tp_weight& a, const tp_weight& b) {
  return a.k == b.k && a.format == b.format && a.block_rows == b.block_rows && a.block_columns == b.block_columns &&
         a.scale_type == b.scale_type && a.act == b.act;
}

void linears_packed_alike(const Linear* parts, int64_t count, const void* x, int64_t tokens, int32_t dtype) {
  const tp_weight& w = *parts->w;
  const Packed packed(w, tokens, tiles_pay(w, tokens) && tiles_are_right(w, x, dtype, tokens * w.k), SLOT_PACKED);
  const int64_t step = tokens_at_a_time(w);
  int64_t rows = 0;
  for (int64_t i = 0; i < count; i++) rows += parts[i].w->n;
  Shares shares;
  run([&](const Member& me) {
    int64_t first, last;
    me.share(tokens, BLOCK, first, last);
    packed.pack(first, last, dtype, [&](int64_t t) { return at(x, dtype, t * w.k); });
    me.barrier();
    shares.take(me, [&](const Share& share) {
      int64_t begin, end, start = 0;  // of this share, and of a part, among the rows of all parts
      share.of(rows, BLOCK, begin, end);
      for (int64_t i = 0; i < count; start += parts[i++].w->n) {
        const int64_t first = std::max<int64_t>(begin - start, 0), last = std::min(end - start, parts[i].w->n);
        for (int64_t t = 0; t < tokens && first < last; t += step) {
          linear_part(packed, parts[i], first, last, t, std::min(step, tokens - t), dtype);
        }
      }
    });
  });
}

// Of a plain weight in float32: a router, as a rule.
void plain_linear(const Linear& part, const void* x, int64_t tokens, int32_t dtype) {
  constexpr int64_t ROWS = 64;  // which stay in the second cache for all tokens
  const tp_weight& w = *part.w;
  float* wide = dtype == TP_FLOAT ? nullptr : static_cast<float*>(scratch(SLOT_PACKED, tokens * w.k * sizeof(float)));
  const float *rows = reinterpret_cast<const float*>(w.data), *vectors = wide ? wide : static_cast<const float*>(x);
  Shares shares;
  run([&](const Member& me) {
    int64_t first, last;
    me.share(tokens, 1, first, last);
    if (wide) isa().load(at(x, dtype, first * w.k), dtype, wide + first * w.k, (last - first) * w.k);
    me.barrier();
    shares.take(me, [&](const Share& share) {
      float products[ROWS], bias[ROWS];
      share.of(w.n, BLOCK, first, last);
      for (int64_t row = first; row < last; row += ROWS) {
        const int64_t n = std::min(ROWS, last - row);
        for (int64_t t = 0; t < tokens; t++) {
          isa().plain_products(rows + row * w.k, n, w.k, vectors + t * w.k, products);
          add_bias(part.bias, row, n, bias, 1, products, n);
          isa().store(products, dtype, at(part.out, dtype, t * w.n + row), n);
        }
      }
    });
  });
}

}  // namespace

void linears(const Linear* parts, int64_t count, const void* x, int64_t tokens, int32_t dtype) {
  for (int64_t first = 0, end; first < count; first = end) {
    if (parts[first].w->format == TP_F32) {
      plain_linear(parts[first], x, tokens, dtype);
      end = first + 1;
      continue;
    }
    for (end = first + 1; end < count && packed_alike(*parts[first].w, *parts[end].w); end++) continue;
    linears_packed_alike(parts + first, end - first, x, tokens, dtype);
  }
}

uint64_t read_all(const void* data, int64_t bytes) {
  std::vector<uint64_t> sums(threads());
  run([&](const Member& me) {
    int64_t first, last;
    me.share(bytes, 4096, first, last);
    sums[me.index] = isa().read(static_cast<const char*>(data) + first, last - first);
  });
  return std::accumulate(sums.begin(), sums.end(), uint64_t{0});
}

}  // namespace tp
