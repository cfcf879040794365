#include "moe/route.h"

namespace ktk {

void Route::build(const Choice& choice, size_t begin, size_t end, const Config& config,
                  std::span<const uint8_t> skip) {
  const size_t experts = config.num_experts;
  next_.assign(experts, 0);
  const auto runs = [&](int64_t id) {
    return id >= 0 && id < static_cast<int64_t>(experts) && !skip[static_cast<size_t>(id)];
  };
  for (size_t token = begin; token < end; ++token) {
    for (size_t slot = 0; slot < choice.top_k; ++slot) {
      const int64_t id = choice.id(token, slot);
      if (runs(id)) ++next_[static_cast<size_t>(id)];
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
  for (size_t token = begin; token < end; ++token) {
    for (size_t slot = 0; slot < choice.top_k; ++slot) {
      const int64_t id = choice.id(token, slot);
      if (!runs(id)) continue;
      const uint32_t row = next_[static_cast<size_t>(id)]++;
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
