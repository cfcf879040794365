#include "stream/deferral.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/size.h"

namespace ktk {
namespace {

// Marks the entries of one token that stay, those with the highest weights.
class Protected {
 public:
  Protected(size_t top_k, size_t most) : order_(top_k), stays_(top_k), deferred_(most) {}

  const std::vector<uint8_t>& of(const float* weights) {
    std::iota(order_.begin(), order_.end(), size_t{0});
    const auto above = [&](size_t a, size_t b) {
      const bool nan_a = std::isnan(weights[a]), nan_b = std::isnan(weights[b]);
      return nan_a != nan_b ? nan_a : weights[a] > weights[b];
    };
    std::stable_sort(order_.begin(), order_.end(), above);
    const size_t stay = order_.size() - std::min(deferred_, order_.size());
    for (size_t i = 0; i < order_.size(); ++i) stays_[order_[i]] = i < stay;
    return stays_;
  }

 private:
  std::vector<size_t> order_;
  std::vector<uint8_t> stays_;
  size_t deferred_;
};

}  // namespace

Halves split_deferred(const Choice& choice, const Deferral& deferral, const Config& config) {
  const size_t k = choice.top_k, entries = product(choice.tokens, k);
  Halves halves{std::vector<int64_t>(entries, -1), std::vector<int64_t>(entries, -1)};
  Protected protect(k, deferral.most);
  const auto weights = [&](size_t token) { return choice.weights + token * choice.weights_stride; };

  std::vector<uint8_t> kept(deferral.batch_union ? config.num_experts : 0);
  for (size_t token = 0; deferral.batch_union && token < choice.tokens; ++token) {
    const std::vector<uint8_t>& stays = protect.of(weights(token));
    for (size_t slot = 0; slot < k; ++slot) {
      const int64_t id = choice.id(token, slot);
      if (stays[slot] && config.is_expert(id)) kept[static_cast<size_t>(id)] = 1;
    }
  }
  for (size_t token = 0; token < choice.tokens; ++token) {
    const std::vector<uint8_t>& stays = protect.of(weights(token));
    for (size_t slot = 0; slot < k; ++slot) {
      const int64_t id = choice.id(token, slot);
      if (config.is_zero_expert(id)) halves.now[token * k + slot] = id;
      if (!config.is_expert(id)) continue;
      const bool now = deferral.batch_union ? kept[static_cast<size_t>(id)] : stays[slot];
      (now ? halves.now : halves.later)[token * k + slot] = id;
    }
  }
  return halves;
}

}  // namespace ktk
