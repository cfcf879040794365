#include "moe/lora.h"

#include <algorithm>

#include "core/size.h"
#include "format/elements.h"

namespace ktk {
namespace {

// `count` elements from `at` on as f32: where they lie, or in `buffer`.
const float* read(const LoraFactor& factor, size_t at, size_t count, float* buffer) {
  const char* const from =
      static_cast<const char*>(factor.data) + block_of(factor.type).bytes_of(at);
  if (factor.type == KTK_F32) return reinterpret_cast<const float*>(from);
  ops().to_f32(from, factor.type, count, buffer);
  return buffer;
}

}  // namespace

const Adapter* Lora::of(size_t token) const {
  const int64_t number = of_tokens ? of_tokens[token] : 0;
  if (number < 0 || number >= static_cast<int64_t>(adapters.size())) return nullptr;
  return &adapters[static_cast<size_t>(number)];
}

size_t LowRank::own_bytes(size_t rank) {
  return product(2 * width(rank), product(kBlock, sizeof(float)));
}

void LowRank::reduce(size_t begin, size_t end, size_t m, const float* x, size_t x_row, float* p,
                     size_t p_row, char* own) const {
  const size_t stride = width(rank_);
  float* const raw = reinterpret_cast<float*>(own);
  float* const turned = raw + stride * kBlock;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t depth = std::min(end - at, kBlock);
    if (stride != rank_) std::fill_n(turned, depth * stride, 0.0f);
    for (size_t r = 0; r < rank_; ++r) {
      const float* const row =
          read(a_, (expert_ * rank_ + r) * columns_ + at, depth, raw + r * kBlock);
      if (row != raw + r * kBlock) std::copy_n(row, depth, raw + r * kBlock);
    }
    products().transpose(rank_, depth, raw, kBlock, KTK_F32, turned, stride);
    products().gemm(m, stride, depth, x + (at - begin), x_row, 1, turned, stride, p, p_row);
  }
}

void LowRank::expand(size_t begin, size_t end, size_t m, const float* p, size_t p_row, float* y,
                     size_t y_row, char* own) const {
  float* const raw = reinterpret_cast<float*>(own);
  float* const turned = raw + width(rank_) * kBlock;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(end - at, kBlock);
    const float* const rows = read(b_, (expert_ * rows_ + at) * rank_, count * rank_, raw);
    products().transpose(count, rank_, rows, rank_, KTK_F32, turned, kBlock);
    products().gemm(m, count, rank_, p, p_row, 1, turned, kBlock, y + (at - begin), y_row);
  }
}

void LowRank::reduce_back(size_t begin, size_t end, size_t m, const float* dy, size_t dy_row,
                          float* q, size_t q_row, char* own) const {
  float* const raw = reinterpret_cast<float*>(own);
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t depth = std::min(end - at, kBlock);
    const float* const rows = read(b_, (expert_ * rows_ + at) * rank_, depth * rank_, raw);
    products().gemm(m, rank_, depth, dy + (at - begin), dy_row, 1, rows, rank_, q, q_row);
  }
}

void LowRank::expand_back(size_t begin, size_t end, size_t m, const float* q, size_t q_row,
                          float* dx, size_t dx_row, char* own) const {
  float* const raw = reinterpret_cast<float*>(own);
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(end - at, kBlock);
    const size_t first = expert_ * rank_ * columns_ + at;
    const float* rows = raw;
    size_t stride = kBlock;
    if (a_.type == KTK_F32) {
      rows = static_cast<const float*>(a_.data) + first;
      stride = columns_;
    } else {
      for (size_t r = 0; r < rank_; ++r) {
        read(a_, first + r * columns_, count, raw + r * kBlock);
      }
    }
    products().gemm(m, count, rank_, q, q_row, 1, rows, stride, dx + (at - begin), dx_row);
  }
}

}  // namespace ktk
