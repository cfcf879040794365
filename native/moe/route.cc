#include "moe/route.h"

#include <algorithm>

namespace ktk {

std::span<const Route::Passed> Route::passed_of(size_t token) const {
  const auto before = [](const Passed& one, size_t of) { return one.token < of; };
  const auto first = std::lower_bound(passed.begin(), passed.end(), token, before);
  const auto last = std::lower_bound(first, passed.end(), token + 1, before);
  return {first, last};
}

uint32_t Route::expert_of(size_t row) const {
  const auto behind =
      std::upper_bound(active.begin(), active.end(), row,
                       [](size_t value, const Active& one) { return value < one.first; });
  return (behind - 1)->expert;
}

void Route::build(const Choice& choice, size_t begin, size_t end, const Config& config,
                  std::span<const uint8_t> skip) {
  const size_t experts = config.num_experts;
  next_.assign(experts, 0);
  // The caller may change ids meanwhile, so each is read once: rows are counted, then filled.
  constexpr uint32_t kNone = UINT32_MAX;
  chosen_.assign((end - begin) * choice.top_k, kNone);
  passed.clear();
  uint32_t* chosen = chosen_.data();
  for (size_t token = begin; token < end; ++token) {
    for (size_t slot = 0; slot < choice.top_k; ++slot, ++chosen) {
      const int64_t id = choice.id(token, slot);
      if (config.is_expert(id)) {
        if (skip[static_cast<size_t>(id)]) continue;
        *chosen = static_cast<uint32_t>(id);
        ++next_[*chosen];
      } else if (config.is_zero_expert(id)) {
        passed.push_back({static_cast<uint32_t>(token - begin), static_cast<uint32_t>(slot),
                          choice.weights[token * choice.weights_stride + slot]});
      }
    }
  }
  active.clear();
  uint32_t rows = 0;
  for (uint32_t expert = 0; expert < experts; ++expert) {
    const uint32_t count = next_[expert];
    next_[expert] = rows;
    if (count) active.push_back({expert, rows, count});
    rows += count;
  }
  tokens.resize(rows);
  slots.resize(rows);
  weights.resize(rows);
  chosen = chosen_.data();
  for (size_t token = begin; token < end; ++token) {
    for (size_t slot = 0; slot < choice.top_k; ++slot, ++chosen) {
      if (*chosen == kNone) continue;
      const uint32_t row = next_[*chosen]++;
      tokens[row] = static_cast<uint32_t>(token - begin);
      slots[row] = static_cast<uint32_t>(slot);
      weights[row] = choice.weights[token * choice.weights_stride + slot];
    }
  }
  input_weights.clear();
  if (config.weight_on_input) {
    input_weights.swap(weights);
    weights.assign(rows, 1.0f);
  }
}

}  // namespace ktk
