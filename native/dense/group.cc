#include "dense/group.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "core/size.h"
#include "dense/plan.h"

namespace ktk {
namespace {

constexpr int kMostWasted = 8;

}  // namespace

LinearGroup::LinearGroup(std::vector<std::shared_ptr<Linear>> members)
    : members_(std::move(members)), kept_(members_.size()) {
  if (members_.size() < 2) throw std::invalid_argument("a group has two layers at least");
  for (const std::shared_ptr<Linear>& one : members_) {
    if (one->k() != members_[0]->k() || one->engine() != members_[0]->engine()) {
      throw std::invalid_argument("layers of a group have inputs of one width and one pool");
    }
  }
}

void LinearGroup::forward(size_t index, const Rows& x, const Rows& out, size_t tokens) {
  process_.check();
  {
    const std::lock_guard lock(mutex_);
    const bool few = tokens > 0 && tokens <= DensePlan::kPrivateTokens;
    if (few && out.type == x.type && wasted_ < kMostWasted) {
      if (!same_input(x, tokens) || !take(index, out)) compute(index, x, out, tokens);
      return;
    }
  }
  members_.at(index)->forward(x, out, tokens);
}

bool LinearGroup::gave_up() {
  process_.check();
  const std::lock_guard lock(mutex_);
  return wasted_ >= kMostWasted;
}

bool LinearGroup::same_input(const Rows& x, size_t tokens) const {
  if (tokens != tokens_ || x.type != type_) return false;
  const size_t bytes = x.bytes_of(members_[0]->k());
  for (size_t t = 0; t < tokens; ++t) {
    if (std::memcmp(input_.data() + t * bytes, x.at(t), bytes) != 0) return false;
  }
  return true;
}

bool LinearGroup::take(size_t index, const Rows& out) {
  Kept& kept = kept_.at(index);
  if (!kept.there || kept.loads != members_[index]->loads()) return false;
  const size_t bytes = out.bytes_of(members_[index]->n());
  for (size_t t = 0; t < tokens_; ++t) {
    std::memcpy(out.at(t), kept.bytes.data() + t * bytes, bytes);
  }
  kept.there = false;
  return true;
}

void LinearGroup::compute(size_t index, const Rows& x, const Rows& out, size_t tokens) {
  const bool waste = std::any_of(kept_.begin(), kept_.end(), [](const Kept& k) { return k.there; });
  wasted_ = waste ? wasted_ + 1 : 0;
  for (Kept& kept : kept_) kept.there = false;
  tokens_ = 0;  // should the rest throw
  const size_t k = members_[0]->k(), bytes = x.bytes_of(k);
  input_.resize(product(tokens, bytes));
  for (size_t t = 0; t < tokens; ++t) std::memcpy(input_.data() + t * bytes, x.at(t), bytes);
  std::vector<Linear*> layers;
  std::vector<Rows> outs;
  for (size_t i = 0; i < members_.size(); ++i) {
    const size_t n = members_[i]->n();
    layers.push_back(members_[i].get());
    kept_[i].loads = members_[i]->loads();
    if (i != index) kept_[i].bytes.resize(product(tokens, x.bytes_of(n)));
    outs.push_back(i == index ? out : Rows{kept_[i].bytes.data(), x.type, n});
  }
  Linear::forward_few(layers, {input_.data(), x.type, k}, outs, tokens);
  for (size_t i = 0; i < members_.size(); ++i) kept_[i].there = i != index;
  type_ = x.type;
  tokens_ = tokens;
}

}  // namespace ktk
