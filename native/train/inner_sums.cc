#include "train/inner_sums.h"

#include <algorithm>

#include "core/size.h"
#include "ops/select.h"

namespace ktk {

InnerSums::InnerSums(const Config& config, const BackwardRequest& request, const Weights& weights)
    : config_(config), weights_(weights) {
  if (!request.forward.lora) return;
  const LoraGradients& lora = request.lora;
  for (const Factor& one : {Factor{LoraRows::kGate, lora.b.gate}, Factor{LoraRows::kUp, lora.b.up},
                            Factor{LoraRows::kDown, lora.a.down}}) {
    if (one.to) factors_[count_++] = one;
  }
  rank_ = request.forward.lora->adapters[0].rank;
  stride_ = odd_stride(config.intermediate);
  factor_floats_ = product(rank_, stride_);
}

void InnerSums::begin(const Route& route, size_t first_active, char* memory) {
  route_ = &route;
  first_active_ = first_active;
  memory_ = reinterpret_cast<float*>(memory);
}

// Units of the experts before this one have smaller numbers.
float* InnerSums::sums(size_t factor, size_t active, size_t row) const {
  const Route::Active& one = route_->active[active];
  const size_t before = one.first - route_->active[first_active_].first;
  const size_t number = units(before, active - first_active_) + (row - one.first) / unit(one.count);
  return memory_ + (number * count_ + factor) * factor_floats_;
}

void InnerSums::add(const RowBlock& block, size_t begin, size_t end, const Panels& panels,
                    const LoraRows& forward, const LoraRows& backward) const {
  const size_t step = unit(route_->active[block.active].count);
  for (size_t done = 0; done < block.count; done += step) {
    const size_t first = block.first + done, m = std::min(block.count - done, step);
    for (size_t i = 0; i < count_; ++i) {
      const LoraRows::Part part = factors_[i].part;
      const LoraRows& low = part == LoraRows::kDown ? backward : forward;
      const float* const from = part == LoraRows::kGate ? panels.gate
                                : part == LoraRows::kUp ? panels.up
                                                        : panels.h;
      float* const to = sums(i, block.active, first) + begin;
      products().gemm_of_zeros(rank_, end - begin, m, low.row(part, first), 1, low.width(),
                               from + done * panels.stride, panels.stride, to, stride_);
    }
  }
}

void InnerSums::finish(size_t active, size_t begin, size_t end, bool zero, float* own) const {
  const Route::Active& one = route_->active[active];
  const size_t step = unit(one.count);
  for (size_t i = 0; i < count_; ++i) {
    float* const total = sums(i, active, one.first) + begin;
    for (size_t done = step; done < one.count; done += step) {
      const float* const more = sums(i, active, one.first + done) + begin;
      for (size_t r = 0; r < rank_; ++r) {
        ops().add(more + r * stride_, end - begin, total + r * stride_);
      }
    }
    write(factors_[i], one.expert, begin, end, total, zero, own);
  }
}

void InnerSums::write(const Factor& factor, size_t expert, size_t begin, size_t end,
                      const float* sums, bool zero, float* own) const {
  const size_t columns = end - begin;
  float* const to = factor.to + product(expert, rank_, config_.intermediate);
  const Order& order = weights_.order(expert).down;
  const uint32_t* const place = order ? order->data() + begin : nullptr;
  const auto add = [zero](const float* from, size_t count, float* into) {
    if (zero) {
      std::copy_n(from, count, into);
    } else {
      ops().add(from, count, into);
    }
  };
  if (factor.part == LoraRows::kDown) {
    for (size_t r = 0; r < rank_; ++r) {
      float* const row = to + r * config_.intermediate;
      if (!place) add(sums + r * stride_, columns, row + begin);
      for (size_t c = 0; place && c < columns; ++c) row[place[c]] += sums[r * stride_ + c];
    }
    return;
  }
  products().transpose(rank_, columns, sums, stride_, own, rank_);
  if (!place) return add(own, columns * rank_, to + begin * rank_);
  for (size_t c = 0; c < columns; ++c) add(own + c * rank_, rank_, to + place[c] * rank_);
}

}  // namespace ktk
