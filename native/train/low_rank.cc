#include "train/low_rank.h"

#include <algorithm>

namespace ktk {

BackwardLora::BackwardLora(const Lora& lora, const Config& config, const Weights& weights)
    : adapter_(lora.adapters[0]),
      config_(config),
      forward_(lora, config, weights),
      backward_(lora, config, weights) {
  if (LoraRows::adapts(adapter_, LoraRows::kDown)) down_.push_back(LoraRows::kDown);
  for (const auto part : {LoraRows::kGate, LoraRows::kUp}) {
    if (LoraRows::adapts(adapter_, part)) gate_up_.push_back(part);
  }
}

void BackwardLora::place(const Route& route, size_t begin, Carver& shared) {
  forward_.place(route, begin, shared);
  backward_.place(route, begin, shared);
}

void BackwardLora::use(char* shared) {
  forward_.use(shared);
  backward_.use(shared);
}

void BackwardLora::pack_a(const Beside& beside, size_t active, size_t begin,
                          const Transposing& transposing, const TransposedMatrix& to, size_t at,
                          char* memory, char* own) const {
  const size_t rank = adapter_.rank, end = begin + to.matrix.n, stride = transposing.stride();
  float* const buffer = transposing.buffer(own);
  for (size_t done = 0; done < width(beside); done += transposing.rows()) {
    const size_t count = std::min(width(beside) - done, transposing.rows());
    for (size_t r = 0; r < count; ++r) {
      backward_.factors(adapter_, beside[(done + r) / rank], active)
          .read_a((done + r) % rank, 1, begin, end, buffer + r * stride, stride);
    }
    Transposing::pack(buffer, stride, count, to, at + done, memory);
  }
}

void BackwardLora::pack_b(size_t active, const RowsOfB& rows, const Transposing& transposing,
                          const TransposedMatrix& to, char* memory, char* own) const {
  float* const buffer = transposing.buffer(own);
  for (size_t done = 0; done < rows.rows; done += transposing.rows()) {
    const size_t count = std::min(rows.rows - done, transposing.rows());
    backward_.factors(adapter_, rows.part, active).read_b(rows.first + done, count, buffer);
    Transposing::pack(buffer, adapter_.rank, count, to, rows.at + done, memory);
  }
}

void BackwardLora::keep(LoraRows::Part part, const RowBlock& block, float* product, float* q,
                        size_t stride) const {
  const size_t rank = adapter_.rank;
  ops().scale(adapter_.scale, block.count, rank, product, stride);
  for (size_t r = 0; r < block.count; ++r) {
    std::copy_n(product + r * stride, rank, q + r * stride);
    std::copy_n(product + r * stride, rank, backward_.row(part, block.first + r));
  }
}

void BackwardLora::weigh(const RowBlock& block, const Route& route) const {
  const size_t rank = adapter_.rank;
  for (size_t r = block.first; r < block.first + block.count; ++r) {
    for (const auto part : down_) {
      ops().scale(route.weights[r], 1, rank, backward_.row(part, r), rank);
    }
  }
}

void BackwardLora::finish(const RowBlock& block, const Route& route) const {
  const size_t rank = adapter_.rank;
  forward_.finish_down(block);
  for (size_t r = block.first; r < block.first + block.count; ++r) {
    for (const auto part : down_) {
      ops().scale(route.weights[r], 1, rank, forward_.row(part, r), rank);
    }
  }
}

}  // namespace ktk
