#include "moe.h"

#include <algorithm>

namespace tp {
namespace {

constexpr int64_t PIECES = 8 << 20;  // values of experts' results kept before they are summed up
constexpr int64_t GRAIN = 32;        // rows that threads do not divide
constexpr int64_t FEWEST_ROWS = 256, CACHED_SUMS = 1 << 18;  // of tokens' results that are added up at a time
constexpr int64_t DECODING = 4;      // what decoding a row costs, in multiplications with it

}  // namespace

bool Moe::sort(const int64_t* ids, int64_t tokens, int64_t k) {
  tokens_ = tokens;
  k_ = k;
  const int64_t slots = tokens * k, experts = down_.experts;
  std::vector<int64_t> next(experts + 1, 0);
  for (int64_t s = 0; s < slots; s++) {
    if (ids[s] < -1 || ids[s] >= experts) return false;
    if (ids[s] >= 0) next[ids[s] + 1]++;
  }
  for (int64_t e = 0; e < experts; e++) {
    if (next[e + 1]) runs_.push_back({e, next[e], next[e + 1]});
    next[e + 1] += next[e];
  }
  order_.resize(next[experts]);
  token_of_.resize(next[experts]);
  place_of_.assign(slots, -1);
  for (int64_t s = 0; s < slots; s++) {
    if (ids[s] < 0) continue;
    const int64_t place = next[ids[s]]++;
    order_[place] = s;
    token_of_[place] = s / k;
    place_of_[s] = place;
  }
  return true;
}

// Calls work(part) for a share of `rows` rows of every run, in the order of memory. Parts of shares cost the same.
template <class Work>
void Moe::for_parts(const Share& share, int64_t rows, Work&& work) const {
  int64_t total = 0;
  for (const Run& run : runs_) total += (DECODING + run.count) * rows;
  const int64_t begin = total * share.first / share.count, end = total * share.last / share.count;
  int64_t start = 0;
  for (const Run& run : runs_) {
    const int64_t cost = DECODING + run.count;
    // The same cost always gives the same row, so that one share's last row is before the next one's first.
    const auto row = [&](int64_t at) {
      const int64_t r = (std::clamp<int64_t>(at - start, 0, cost * rows) / cost + GRAIN - 1) / GRAIN * GRAIN;
      return std::min(rows, r);
    };
    const int64_t first = row(begin), last = row(end);
    if (first < last) work(Part{&run, first, last});
    start += cost * rows;
  }
}

// inner [slots, i].
void Moe::gate_and_up(const Part& part, const Packed& x, int32_t dtype, void* inner) const {
  const Run& run = *part.run;
  const int64_t half = down_.k, rows = rows_at_a_time(run.count);
  const Matrix matrix(gate_up_, run.expert);
  float* gate = static_cast<float*>(scratch(SLOT_PRODUCTS, (2 * run.count + 1) * rows * sizeof(float)));
  float *up = gate + run.count * rows, *bias = up + run.count * rows;
  for (int64_t row = part.first; row < part.last; row += rows) {
    const int64_t n = std::min(rows, part.last - row);
    for (int64_t first : {row, half + row}) {
      float* products = first == row ? gate : up;
      x.products(matrix, first, first + n, &token_of_[run.first], run.first, run.count, products, rows);
      add_bias(gate_up_bias_, run.expert * 2 * half + first, n, bias, run.count, products, rows);
    }
    for (int64_t i = 0; i < run.count; i++) {
      isa().activate(gate + i * rows, up + i * rows, n, activation_);
      isa().store(gate + i * rows, dtype, at(inner, dtype, (run.first + i) * half + row), n);
    }
  }
}

// Rows row … row + rows − 1 of the outputs, of this member's share of the tokens' values.
void Moe::sum(const Member& me, const float* pieces, int64_t row, int64_t rows, int64_t stride, const float* weights,
              int32_t dtype, void* out) const {
  int64_t first, last;
  me.share(tokens_ * rows, 64, first, last);
  float* total = static_cast<float*>(scratch(SLOT_PRODUCTS, rows * sizeof(float)));
  while (first < last) {
    const int64_t t = first / rows, r = first % rows, n = std::min(rows - r, last - first);
    std::fill(total, total + n, 0.0f);
    for (int64_t j = t * k_; j < (t + 1) * k_; j++) {
      if (place_of_[j] >= 0) isa().add_scaled(total, pieces + place_of_[j] * stride + r, weights[j], n);
    }
    isa().store(total, dtype, at(out, dtype, t * down_.n + row + r), n);
    first += n;
  }
}

bool Moe::run(const void* x, const int64_t* ids, const float* weights, int64_t tokens, int64_t k, int32_t dtype,
              void* out) {
  if (!sort(ids, tokens, k)) return false;
  const int64_t slots = static_cast<int64_t>(order_.size());
  const int64_t mean = runs_.empty() ? 0 : ceil_div(slots, static_cast<int64_t>(runs_.size()));
  if (dtype == TP_BFLOAT16 && tiles_pay(gate_up_, mean) && tiles_pay(down_, mean)) by_tiles(x, weights, out);
  else one_by_one(x, weights, dtype, out);
  return true;
}

void Moe::one_by_one(const void* x, const float* weights, int32_t dtype, void* out) const {
  const int64_t slots = static_cast<int64_t>(order_.size()), h = down_.n, i = down_.k;
  const Packed packed(gate_up_, tokens_, false, SLOT_PACKED), packed_inner(down_, slots, false, SLOT_PACKED_INNER);
  const int64_t tile = std::clamp(PIECES / std::max<int64_t>(1, slots) / GRAIN * GRAIN, GRAIN, h + GRAIN);
  const int32_t passed = down_.act == TP_INT8 ? TP_FLOAT : dtype;  // what is quantized is not rounded before
  void* inner = scratch(SLOT_INNER, (slots * i + 1) * item_bytes(passed));
  float* pieces = static_cast<float*>(scratch(SLOT_PIECES, (slots * std::min(tile, h) + 1) * sizeof(float)));

  Shares shares;
  tp::run([&](const Member& me) {
    int64_t first, last;
    me.share(tokens_, 1, first, last);
    packed.pack(first, last, dtype, [&](int64_t t) { return at(x, dtype, t * h); });
    me.barrier();
    shares.take(me, [&](const Share& share) {
      for_parts(share, i, [&](const Part& part) { gate_and_up(part, packed, passed, inner); });
    });
    me.barrier();
    shares.renew(me);
    me.share(slots, 1, first, last);
    packed_inner.pack(first, last, passed, [&](int64_t p) { return at(inner, passed, p * i); });
    for (int64_t row = 0; row < h; row += tile) {
      const int64_t rows = std::min(tile, h - row);
      me.barrier();
      shares.take(me, [&](const Share& share) {
        for_parts(share, rows, [&](const Part& part) { down(part, packed_inner, row, rows, pieces); });
      });
      me.barrier();
      shares.renew(me);
      sum(me, pieces, row, rows, rows, weights, dtype, out);
    }
  });
}

// A token's results are added up in the order of its experts, for a stretch of rows after the other.
void Moe::by_tiles(const void* x, const float* weights, void* out) const {
  const int64_t slots = static_cast<int64_t>(order_.size()), h = down_.n;
  const Packed packed(gate_up_, slots, true, SLOT_PACKED), inner(down_, slots, true, SLOT_PACKED_INNER);
  std::vector<float> sorted(slots);
  for (int64_t p = 0; p < slots; p++) sorted[p] = weights[order_[p]];

  Shares inner_shares, out_shares;
  tp::run([&](const Member& me) {
    pack_runs(me, packed, [&](int64_t p) { return at(x, TP_BFLOAT16, token_of_[p] * h); });
    me.barrier();
    inner_shares.take(me, [&](const Share& share) {
      for_parts(share, down_.k, [&](const Part& part) { gate_and_up_by_tiles(part, packed, inner); });
    });
    me.barrier();
    out_shares.take(me, [&](const Share& share) {
      int64_t first, last;
      share.of(h, GRAIN, first, last);
      down_by_tiles(first, last, inner, sorted.data(), static_cast<uint16_t*>(out));
    });
  });
}

void Moe::gate_and_up_by_tiles(const Part& part, const Packed& x, const Packed& inner) const {
  const Run& run = *part.run;
  const int64_t half = down_.k, n = part.last - part.first;
  const Matrix matrix(gate_up_, run.expert), next(gate_up_, (part.run == &runs_.back() ? part.run : part.run + 1)->expert);
  float* room = static_cast<float*>(scratch(SLOT_PRODUCTS, 2 * (n + BLOCK) * sizeof(float)));
  const auto bias = [&](int64_t row, float* to) { return load_bias(gate_up_bias_, run.expert * 2 * half + row, n, to); };
  const Inner to{activation_, bias(part.first, room), bias(half + part.first, room + n + BLOCK), &down_,
                 inner.place(run.first)};
  isa().tiles->gate_and_up(matrix, {part.first, part.last, next.data}, x.place(run.first), run.count, to);
}

// Rows first … last − 1 of all tokens, as many at a time as the second cache holds sums of.
void Moe::down_by_tiles(int64_t first, int64_t last, const Packed& inner, const float* weights, uint16_t* out) const {
  const int64_t step = std::max(FEWEST_ROWS, CACHED_SUMS / std::max<int64_t>(1, tokens_) / GRAIN * GRAIN);
  for (int64_t row = first; row < last; row += step) {
    const int64_t n = std::min(step, last - row), stride = ceil_div(n, BLOCK) * BLOCK + BLOCK;
    float* totals = static_cast<float*>(scratch(SLOT_PIECES, tokens_ * stride * sizeof(float)));
    float* room = static_cast<float*>(scratch(SLOT_PRODUCTS, (n + BLOCK) * sizeof(float)));
    std::fill(totals, totals + tokens_ * stride, 0.0f);
    for (const Run& run : runs_) {
      const bool end = &run == &runs_.back();
      const Matrix matrix(down_, run.expert), next(down_, (end ? &runs_.front() : &run + 1)->expert);
      const float* bias = load_bias(down_bias_, run.expert * down_.n + row, n, room);
      const Totals to{bias, &token_of_[run.first], weights + run.first, totals, stride};
      const Stretch rows{row, row + n, next.row(end ? row + n : row)};
      isa().tiles->add_down(matrix, rows, inner.place(run.first), run.count, to);
    }
    for (int64_t t = 0; t < tokens_; t++) isa().store(totals + t * stride, TP_BFLOAT16, out + t * down_.n + row, n);
  }
}

// Every run is packed as a whole; members take turns at blocks of them.
template <class X>
void Moe::pack_runs(const Member& me, const Packed& packed, X&& x) const {
  int64_t block = 0;
  for (const Run& run : runs_) {
    for (int64_t done = 0; done < run.count; done += BLOCK, block++) {
      if (block % me.count != me.index) continue;
      packed.pack(run.first + done, run.first + std::min(done + BLOCK, run.count), TP_BFLOAT16, x);
    }
  }
}

// Results of the rows of `part` behind `row`, of the `rows` that pieces [slots, rows] are kept of.
void Moe::down(const Part& part, const Packed& inner, int64_t row, int64_t rows, float* pieces) const {
  const Run& run = *part.run;
  const Matrix matrix(down_, run.expert);
  float* piece = pieces + run.first * rows + part.first;
  inner.products(matrix, row + part.first, row + part.last, nullptr, run.first, run.count, piece, rows);
  const int64_t n = part.last - part.first;
  float* bias = static_cast<float*>(scratch(SLOT_PRODUCTS, n * sizeof(float)));
  add_bias(down_bias_, run.expert * down_.n + row + part.first, n, bias, run.count, piece, rows);
}

}  // namespace tp
