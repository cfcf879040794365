#include "moe/lora.h"

#include <algorithm>
#include <cstring>

#include "core/size.h"
#include "format/elements.h"

namespace ktk {
namespace {

// `count` elements from `at` on as f32: in `to`; or where they lie, or else in `buffer`.
void copy(const LoraFactor& factor, size_t at, size_t count, float* to) {
  const char* const from =
      static_cast<const char*>(factor.data) + block_of(factor.type).bytes_of(at);
  ops().to_f32(from, factor.type, count, to);
}
const float* read(const LoraFactor& factor, size_t at, size_t count, float* buffer) {
  if (factor.type == KTK_F32) return static_cast<const float*>(factor.data) + at;
  copy(factor, at, count, buffer);
  return buffer;
}

// Elements of a row that begins at `first`, in an order.
void gather(const LoraFactor& factor, size_t first, const uint32_t* order, size_t count,
            float* to) {
  const char* const row =
      static_cast<const char*>(factor.data) + block_of(factor.type).bytes_of(first);
  if (factor.type == KTK_F32) {
    const float* const from = reinterpret_cast<const float*>(row);
    for (size_t i = 0; i < count; ++i) to[i] = from[order[i]];
    return;
  }
  uint16_t items[LowRank::kBlock];
  for (size_t at = 0; at < count; at += LowRank::kBlock) {
    const size_t some = std::min(count - at, LowRank::kBlock);
    for (size_t i = 0; i < some; ++i) {
      std::memcpy(&items[i], row + order[at + i] * sizeof items[0], sizeof items[0]);
    }
    ops().to_f32(items, factor.type, some, to + at);
  }
}

}  // namespace

const Adapter* Lora::of(size_t token) const {
  const int64_t number = of_tokens ? of_tokens[token] : 0;
  if (number < 0 || number >= static_cast<int64_t>(adapters.size())) return nullptr;
  return &adapters[static_cast<size_t>(number)];
}

size_t Lora::most_rank() const {
  size_t most = 0;
  for (const Adapter& adapter : adapters) most = std::max(most, adapter.rank);
  return most;
}

size_t LowRank::own_bytes(size_t rank) {
  return product(2 * width(rank), product(kBlock, sizeof(float)));
}

void LowRank::turn_a(size_t begin, size_t end, float* to, char* own) const {
  const size_t stride = width(rank_);
  float* const raw = reinterpret_cast<float*>(own);
  for (size_t at = begin; at < end; at += kBlock, to += kBlock * stride) {
    const size_t depth = std::min(end - at, kBlock);
    if (stride != rank_) std::fill_n(to, depth * stride, 0.0f);
    if (a_.type == KTK_F32 && !column_order_) {
      const float* const rows = static_cast<const float*>(a_.data) + expert_ * rank_ * columns_;
      products().transpose(rank_, depth, rows + at, columns_, to, stride);
    } else {
      read_a(0, rank_, at, at + depth, raw, kBlock);
      products().transpose(rank_, depth, raw, kBlock, to, stride);
    }
  }
}

void LowRank::reduce(size_t begin, size_t end, size_t m, const float* x, size_t x_row, float* p,
                     size_t p_row, char* own) const {
  const size_t stride = width(rank_);
  float* const turned = reinterpret_cast<float*>(own) + stride * kBlock;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t depth = std::min(end - at, kBlock);
    turn_a(at, at + depth, turned, own);
    products().gemm(m, stride, depth, x + (at - begin), x_row, 1, turned, stride, p, p_row);
  }
}

void LowRank::expand(size_t begin, size_t end, size_t m, const float* p, size_t p_row, float* y,
                     size_t y_row, char* own) const {
  float* const raw = reinterpret_cast<float*>(own);
  float* const turned = raw + width(rank_) * kBlock;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(end - at, kBlock);
    const float* rows = raw;
    if (row_order_) {
      read_b(at, count, raw);
    } else {
      rows = read(b_, (expert_ * rows_ + at) * rank_, count * rank_, raw);
    }
    products().transpose(count, rank_, rows, rank_, turned, kBlock);
    products().gemm(m, count, rank_, p, p_row, 1, turned, kBlock, y + (at - begin), y_row);
  }
}

void LowRank::read_a(size_t first, size_t count, size_t begin, size_t end, float* to,
                     size_t stride) const {
  for (size_t r = 0; r < count; ++r) {
    const size_t row = (expert_ * rank_ + first + r) * columns_;
    if (column_order_) {
      gather(a_, row, column_order_ + begin, end - begin, to + r * stride);
    } else {
      copy(a_, row + begin, end - begin, to + r * stride);
    }
  }
}

void LowRank::read_b(size_t first, size_t count, float* to) const {
  const size_t of_expert = expert_ * rows_;
  if (!row_order_) return copy(b_, (of_expert + first) * rank_, count * rank_, to);
  for (size_t r = 0; r < count; ++r, to += rank_) {
    copy(b_, (of_expert + row_order_[first + r]) * rank_, rank_, to);
  }
}

}  // namespace ktk
