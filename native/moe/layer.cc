#include "moe/layer.h"

#include <algorithm>
#include <atomic>

#include "moe/nodes.h"
#include "moe/pipeline.h"
#include "moe/zero_experts.h"
#include "ops/select.h"

namespace ktk {
namespace {

constexpr size_t kTokens = 4096;  // that a route has where nothing is loaded

void check_positive(const char* name, size_t value, size_t most) {
  if (value == 0 || value > most) {
    throw std::invalid_argument(std::string(name) + " must be between 1 and " +
                                std::to_string(most) + ", got " + std::to_string(value));
  }
}

}  // namespace

Layer::Layer(std::shared_ptr<const BackendTable> table, const std::string& variant, bool force,
             const Config& config, std::shared_ptr<Engine> engine, int shards,
             const Parts<std::optional<ktk_format>>& wanted)
    : table_(std::move(table)),
      variant_(table_->select(variant, force)),
      config_(config),
      engine_(std::move(engine)),
      wanted_(wanted),
      shards_chosen_(shards == 0) {
  check_positive("num_experts", config.num_experts, kMostExtent);
  if (config.zero_experts > kMostExtent) {
    throw std::invalid_argument("zero_expert_num must be at most " + std::to_string(kMostExtent) +
                                ", got " + std::to_string(config.zero_experts));
  }
  check_positive("num_experts_per_tok", config.top_k, config.num_experts + config.zero_experts);
  check_positive("hidden_size", config.hidden, kMostExtent);
  check_positive("intermediate_size", config.intermediate, kMostExtent);
  check_shards(shards);
  if (static_cast<size_t>(shards) > config.intermediate) {
    throw std::invalid_argument("intermediate_size " + std::to_string(config.intermediate) +
                                " cannot be split into " + std::to_string(shards) + " shards");
  }
  nodes_ = shard_nodes(engine_->pool, static_cast<size_t>(shards));
  left_out_.resize(config.num_experts);
  counts_.resize(config.num_experts);
  ops();  // fails here rather than in the first call
}

// What the matrices of an expert are stored as: what the first one is, or what was wanted, or else
// the backend's choice.
Parts<ktk_format> Layer::stored_formats(const ExpertSource& source) const {
  const size_t h = config_.hidden, i = config_.intermediate;
  const auto choose = [&](const ktk_source& part, const std::optional<ktk_format>& wanted,
                          const ktk_format* first, size_t n, size_t k) {
    const ktk_format* fixed = first ? first : wanted ? &*wanted : nullptr;
    return table_->stored(part.format, fixed, n, k);
  };
  const Parts<ktk_format>* first = weights_ ? &weights_->formats() : nullptr;
  const ktk_format up = choose(source.up, wanted_.up, first ? &first->up : nullptr, i, h);
  return {
      config_.gated ? choose(source.gate, wanted_.gate, first ? &first->gate : nullptr, i, h) : up,
      up, choose(source.down, wanted_.down, first ? &first->down : nullptr, h, i)};
}

void Layer::load(size_t expert, const ExpertSource& source) {
  const auto turn = engine_->turn();
  const std::lock_guard change(changing_);
  const Parts<ktk_format> formats = stored_formats(source);
  const bool first = !weights_;
  std::vector<int> nodes = nodes_;
  if (first) {
    const size_t most =
        most_shards(config_.intermediate, cut_rules(variant_.tile, formats, source));
    if (shards_chosen_ && nodes.size() > most) nodes = shard_nodes(engine_->pool, most);
    weights_ = std::make_unique<Weights>(config_, variant_, formats, source, nodes);
    for (size_t e = 0; e < left_out_.size(); ++e) {
      if (left_out_[e]) weights_->discard(e, Weights::State::kLeftOut);
    }
  }
  const auto is_known = [&] {
    return left_out_[expert] || weights_->state(expert) == Weights::State::kLoaded;
  };
  const bool before = is_known();
  try {
    weights_->load(expert, source, engine_->pool);
  } catch (...) {
    loaded_ -= before && !is_known();
    if (first) weights_.reset();  // another expert may decide on formats, and on shards
    throw;
  }
  nodes_ = std::move(nodes);
  left_out_[expert] = 0;
  loaded_ += !before;
}

void Layer::leave_out(size_t expert) { discard(expert, Weights::State::kLeftOut); }
void Layer::unload(size_t expert) { discard(expert, Weights::State::kUnloaded); }

void Layer::discard(size_t expert, Weights::State state) {
  const auto turn = engine_->turn();
  const std::lock_guard change(changing_);
  loaded_ -= left_out_[expert] || (weights_ && weights_->state(expert) == Weights::State::kLoaded);
  if (weights_) weights_->discard(expert, state);
  left_out_[expert] = state == Weights::State::kLeftOut;
  loaded_ += left_out_[expert];
}

size_t Layer::shards() const {
  const Loaded lock = weights();  // the first load may change them
  return nodes_.size();
}

void Layer::check_loaded(const Request& request) const {
  if (loaded_ == config_.num_experts) return;
  const Choice& choice = request.choice;
  for (size_t token = 0; token < choice.tokens; ++token) {
    for (size_t slot = 0; slot < choice.top_k; ++slot) {
      const int64_t id = choice.id(token, slot);
      if (!config_.is_expert(id)) continue;
      const size_t e = static_cast<size_t>(id);
      if (left_out_[e] || (!request.skip.empty() && request.skip[e])) continue;
      if (loaded_ == 0) {
        throw std::runtime_error("no expert is loaded: call load() or load_expert() first");
      }
      if (!weights_ || weights_->state(e) != Weights::State::kLoaded) {
        throw std::runtime_error("expert " + std::to_string(e) + " is not loaded (token " +
                                 std::to_string(token) +
                                 " wants it): load it, or mask it if others compute it");
      }
    }
  }
}

void Layer::compute(const Request& request,
                    const std::function<void(const Weights*, const Request&)>& body) {
  const auto turn = engine_->turn();  // experts may be loaded meanwhile
  check_loaded(request);
  std::vector<uint8_t> skip = left_out_;
  for (size_t e = 0; e < request.skip.size(); ++e) skip[e] |= request.skip[e];
  Request merged = request;
  merged.skip = skip;
  body(weights_.get(), merged);
}

void Layer::forward(const Request& request) {
  compute(request, [this](const Weights* weights, const Request& merged) {
    if (weights) {
      ktk::forward(*engine_, config_, variant_, *weights, merged);
    } else if (merged.out.data) {
      // Nothing is loaded and no expert is wanted: zeros, or zero experts alone, need no pipeline.
      Route route;
      for (size_t begin = 0; begin < merged.choice.tokens; begin += kTokens) {
        const size_t end = std::min(begin + kTokens, merged.choice.tokens);
        route.build(merged.choice, begin, end, config_, merged.skip);
        pass_through(*engine_, config_, route, merged.hidden, merged.out, begin, end);
      }
    }
    count(merged.choice);
  });
}

// One thread writes at a time: no atomic addition, which takes longer, is needed.
void Layer::count(const Choice& choice) {
  for (size_t token = 0; token < choice.tokens; ++token) {
    for (size_t slot = 0; slot < choice.top_k; ++slot) {
      const int64_t id = choice.id(token, slot);
      if (id < 0 || id >= static_cast<int64_t>(counts_.size())) continue;
      const std::atomic_ref<int64_t> entry(counts_[static_cast<size_t>(id)]);
      entry.store(entry.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
  }
}

std::vector<int64_t> Layer::counts() const {
  std::vector<int64_t> found(counts_.size());
  for (size_t e = 0; e < found.size(); ++e) {
    const std::atomic_ref<int64_t> entry(const_cast<int64_t&>(counts_[e]));
    found[e] = entry.load(std::memory_order_relaxed);
  }
  return found;
}

void Layer::reset_counts() {
  const auto turn = engine_->turn();
  for (int64_t& entry : counts_) {
    std::atomic_ref(entry).store(0, std::memory_order_relaxed);
  }
}

}  // namespace ktk
