#include "moe/lora_rows.h"

#include <algorithm>

#include "core/size.h"

namespace ktk {
namespace {

template <typename T>
const T& part_of(const Parts<T>& parts, LoraRows::Part part) {
  return part == LoraRows::kGate ? parts.gate : part == LoraRows::kUp ? parts.up : parts.down;
}

}  // namespace

std::vector<RowBlock> row_blocks(const Route& route, size_t most) {
  std::vector<RowBlock> blocks;
  for (size_t i = 0; i < route.active.size(); ++i) {
    const Route::Active& active = route.active[i];
    for (size_t done = 0; done < active.count; done += most) {
      blocks.push_back({i, active.first + done, std::min<size_t>(active.count - done, most)});
    }
  }
  return blocks;
}

LoraRows::LoraRows(const Lora& lora, const Config& config, const Weights& weights)
    : lora_(lora),
      config_(config),
      weights_(weights),
      width_(LowRank::width(lora.most_rank())),
      own_low_rank_(own_.add(LowRank::own_bytes(width_))),
      own_turned_(own_.add(product(2, LowRank::kBlock), product(width_, sizeof(float)))),
      own_x_(own_.add(kDecodedRows, product(odd_stride(LowRank::kBlock), sizeof(float)))) {}

void LoraRows::place(const Route& route, size_t begin, Carver& shared) {
  route_ = &route;
  begin_ = begin;
  blocks_ = row_blocks(route, kMaxRows);
  for (size_t& at : at_) at = shared.add(route.tokens.size(), product(width_, sizeof(float)));
}

bool LoraRows::adapts(const Adapter& adapter, Part part) { return bool(part_of(adapter.a, part)); }

LowRank LoraRows::factors(const Adapter& adapter, Part part, size_t active) const {
  const size_t h = config_.hidden, i = config_.intermediate;
  const size_t expert = route_->active[active].expert;
  // Rows of gate and up are where down has its columns; x is as it comes.
  const Order& order = weights_.order(expert).down;
  const uint32_t* const inner = order ? order->data() : nullptr;
  return {adapter.rank,
          part_of(adapter.a, part),
          part_of(adapter.b, part),
          expert,
          part == kDown ? h : i,
          part == kDown ? i : h,
          part == kDown ? nullptr : inner,
          part == kDown ? inner : nullptr};
}

void LoraRows::reduce_hidden(const RowBlock& block, const Rows& hidden, char* own) const {
  for (const Part part : {kGate, kUp}) {
    std::fill_n(row(part, block.first), block.count * width_, 0.0f);
  }
  for_adapters(lora_, *route_, begin_, block.first, block.count,
               [&](const Adapter& adapter, size_t first, size_t count) {
                 for (size_t at = 0; at < config_.hidden; at += LowRank::kBlock) {
                   reduce_columns(adapter, {block.active, first, count}, hidden, at,
                                  std::min(at + LowRank::kBlock, config_.hidden), own);
                 }
                 for (const Part part : {kGate, kUp}) {
                   ops().scale(adapter.scale, count, width_, row(part, first), width_);
                 }
               });
}

// Each row is decoded once for both factors, and each factor is turned once for all rows.
void LoraRows::reduce_columns(const Adapter& adapter, const RowBlock& block, const Rows& hidden,
                              size_t begin, size_t end, char* own) const {
  const size_t depth = end - begin, x_row = odd_stride(LowRank::kBlock);
  const size_t stride = LowRank::width(adapter.rank);
  float* const x = reinterpret_cast<float*>(own + own_x_);
  float* const turned = reinterpret_cast<float*>(own + own_turned_);
  for (const Part part : {kGate, kUp}) {
    if (!adapts(adapter, part)) continue;
    factors(adapter, part, block.active)
        .turn_a(begin, end, turned + part * LowRank::kBlock * stride, low_rank(own));
  }
  const size_t last = block.first + block.count;
  for (size_t first = block.first; first < last; first += kDecodedRows) {
    const size_t m = std::min(kDecodedRows, last - first);
    for (size_t i = 0; i < m; ++i) {
      const size_t token = begin_ + route_->tokens[first + i];
      ops().to_f32(hidden.at(token, begin), hidden.type, depth, x + i * x_row);
    }
    for (const Part part : {kGate, kUp}) {
      if (!adapts(adapter, part)) continue;
      products().gemm(m, stride, depth, x, x_row, 1, turned + part * LowRank::kBlock * stride,
                      stride, row(part, first), width_);
    }
  }
}

void LoraRows::clear_down(const RowBlock& block) const {
  std::fill_n(row(kDown, block.first), block.count * width_, 0.0f);
}

void LoraRows::reduce_down(const RowBlock& block, size_t begin, size_t end, const float* h,
                           size_t h_row, char* own) const {
  for_adapters(lora_, *route_, begin_, block.first, block.count,
               [&](const Adapter& adapter, size_t first, size_t count) {
                 if (!adapts(adapter, kDown)) return;
                 factors(adapter, kDown, block.active)
                     .reduce(begin, end, count, h + (first - block.first) * h_row, h_row,
                             row(kDown, first), width_, low_rank(own));
               });
}

void LoraRows::finish_down(const RowBlock& block) const {
  for_adapters(lora_, *route_, begin_, block.first, block.count,
               [&](const Adapter& adapter, size_t first, size_t count) {
                 ops().scale(adapter.scale, count, width_, row(kDown, first), width_);
               });
}

void LoraRows::add(Part part, const RowBlock& block, size_t begin, size_t end, float* panel,
                   size_t stride, char* own) const {
  for_adapters(lora_, *route_, begin_, block.first, block.count,
               [&](const Adapter& adapter, size_t first, size_t count) {
                 if (!adapts(adapter, part)) return;
                 factors(adapter, part, block.active)
                     .expand(begin, end, count, row(part, first), width_,
                             panel + (first - block.first) * stride, stride, low_rank(own));
               });
}

}  // namespace ktk
