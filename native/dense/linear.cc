#include "dense/linear.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

#include "core/size.h"
#include "dense/pipeline.h"
#include "moe/nodes.h"
#include "ops/select.h"

namespace ktk {
namespace {

void check_size(const char* name, size_t value) {
  if (value == 0 || value > kMostExtent) {
    throw std::invalid_argument(std::string(name) + " must be between 1 and " +
                                std::to_string(kMostExtent) + ", got " + std::to_string(value));
  }
}

}  // namespace

Linear::Linear(std::shared_ptr<const BackendTable> table, const std::string& variant, bool force,
               size_t k, size_t n, std::shared_ptr<Engine> engine, int shards)
    : table_(std::move(table)),
      variant_(table_->select(variant, force)),
      k_(k),
      n_(n),
      engine_(std::move(engine)),
      wanted_shards_(static_cast<size_t>(shards)) {
  check_size("in_features", k);
  check_size("out_features", n);
  check_shards(shards);
  ops();  // fails here rather than in the first call
}

void Linear::load(std::vector<DensePart> parts) {
  const auto turn = engine_->turn();
  for (DensePart& part : parts) {
    const ktk_format* wanted = part.stored ? &*part.stored : nullptr;
    part.stored = table_->stored(part.source.format, wanted, part.n, k_);
  }
  const size_t most = DenseWeights::most_shards(variant_, parts);
  if (wanted_shards_ > most) {
    throw std::invalid_argument("a weight of " + std::to_string(n_) +
                                " rows can be split into at most " + std::to_string(most) +
                                " shards, not " + std::to_string(wanted_shards_));
  }
  std::vector<int> nodes = shard_nodes(engine_->pool, wanted_shards_);
  if (nodes.size() > most) nodes = shard_nodes(engine_->pool, most);
  auto packed = std::make_unique<DenseWeights>(variant_, parts, k_, nodes, engine_->pool);
  auto plan = std::make_unique<DensePlan>(variant_, *packed, engine_->pool.size());
  const std::lock_guard change(changing_);
  weights_.swap(packed);
  plan_.swap(plan);
  loads_.fetch_add(1, std::memory_order_release);
}

const DenseWeights& Linear::loaded() const {
  if (!weights_) throw std::runtime_error("no weight is loaded: call load() first");
  return *weights_;
}

void Linear::forward(const Rows& x, const Rows& out, size_t tokens) {
  const auto turn = engine_->turn();  // another weight may be loaded meanwhile
  const DenseWeights& weights = loaded();
  if (tokens == 0) return;
  if (!overlap(x, k_, out, n_, tokens)) {
    return ktk::forward(*engine_, variant_, weights, *plan_, x, out, tokens);
  }
  // Workers write while others still read.
  const size_t bytes = x.bytes_of(k_);
  std::vector<char> copy(product(tokens, bytes));
  for (size_t t = 0; t < tokens; ++t) std::memcpy(copy.data() + t * bytes, x.at(t), bytes);
  const Rows kept{copy.data(), x.type, k_};
  ktk::forward(*engine_, variant_, weights, *plan_, kept, out, tokens);
}

void Linear::compute(const std::function<void(const DenseWeights&)>& body) {
  const auto turn = engine_->turn();
  body(loaded());
}

void Linear::forward_few(std::span<Linear* const> layers, const Rows& x, std::span<const Rows> outs,
                         size_t tokens) {
  const auto turn = layers[0]->engine_->turn();
  std::vector<DenseCall> calls;
  for (size_t i = 0; i < layers.size(); ++i) {
    const DenseWeights& weights = layers[i]->loaded();
    calls.push_back({layers[i]->variant_, weights, *layers[i]->plan_, outs[i]});
  }
  ktk::forward_few(*layers[0]->engine_, calls, x, tokens);
}

void Linear::look_up(std::span<const int64_t> ids, const Rows& out) {
  const auto turn = engine_->turn();
  const DenseWeights& weights = loaded();
  for (const int64_t id : ids) {
    if (id >= 0 && static_cast<uint64_t>(id) < n_) continue;
    throw std::out_of_range("id " + std::to_string(id) + " is not one of " + std::to_string(n_) +
                            " rows");
  }
  if (!ids.empty()) ktk::look_up(*engine_, variant_, weights, ids, out);
}

size_t Linear::shards() const {
  const Loaded packed = weights();
  return packed ? packed->shards().size() : shard_nodes(engine_->pool, wanted_shards_).size();
}

}  // namespace ktk
