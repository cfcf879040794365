#include "train/low_rank.h"

#include <algorithm>

#include "ops/select.h"

namespace ktk {
namespace {

constexpr LoraRows::Part kGateUp[] = {LoraRows::kGate, LoraRows::kUp};

}  // namespace

void BackwardLora::place(const Route& route, size_t begin, Carver& shared) {
  forward_.place(route, begin, shared);
  backward_.place(route, begin, shared);
}

void BackwardLora::use(char* shared) {
  forward_.use(shared);
  backward_.use(shared);
}

void BackwardLora::start(const RowBlock& block, const float* dy, char* own) const {
  const size_t m = block.count, width = backward_.width();
  for (const auto part : {LoraRows::kGate, LoraRows::kUp, LoraRows::kDown}) {
    std::fill_n(backward_.row(part, block.first), m * width, 0.0f);
  }
  forward_.clear_down(block);
  if (!wants_dy()) return;
  float* const q = backward_.row(LoraRows::kDown, block.first);
  backward_.factors(adapter_, LoraRows::kDown, block.active)
      .reduce_back(0, config_.hidden, m, dy, config_.hidden, q, width, forward_.low_rank(own));
  ops().scale(adapter_.scale, m, width, q, width);
}

void BackwardLora::add_down(const RowBlock& block, size_t begin, size_t end, float* dh,
                            size_t stride, char* own) const {
  if (!wants_dy()) return;
  backward_.factors(adapter_, LoraRows::kDown, block.active)
      .expand_back(begin, end, block.count, backward_.row(LoraRows::kDown, block.first),
                   backward_.width(), dh, stride, forward_.low_rank(own));
}

void BackwardLora::reduce(const RowBlock& block, size_t begin, size_t end, const float* gate,
                          const float* up, const float* h, size_t stride, char* own) const {
  for (const auto part : kGateUp) {
    if (!LoraRows::adapts(adapter_, part)) continue;
    backward_.factors(adapter_, part, block.active)
        .reduce_back(begin, end, block.count, part == LoraRows::kGate ? gate : up, stride,
                     backward_.row(part, block.first), backward_.width(), forward_.low_rank(own));
  }
  forward_.reduce_down(block, begin, end, h, stride, own);
}

void BackwardLora::finish(const RowBlock& block, const Route& route) const {
  const size_t m = block.count, width = backward_.width();
  for (const auto part : kGateUp) {
    ops().scale(adapter_.scale, m, width, backward_.row(part, block.first), width);
  }
  for (size_t r = block.first; r < block.first + m; ++r) {
    ops().scale(route.weights[r], 1, width, backward_.row(LoraRows::kDown, r), width);
    for (const auto part : kGateUp) {
      ops().scale(route.input_weight(r), 1, width, forward_.row(part, r), width);
    }
  }
  forward_.finish_down(block);
}

void BackwardLora::add_hidden(const RowBlock& block, size_t begin, size_t end, float* dx,
                              size_t stride, char* own) const {
  for (const auto part : kGateUp) {
    if (!LoraRows::adapts(adapter_, part)) continue;
    backward_.factors(adapter_, part, block.active)
        .expand_back(begin, end, block.count, backward_.row(part, block.first), backward_.width(),
                     dx, stride, forward_.low_rank(own));
  }
}

}  // namespace ktk
