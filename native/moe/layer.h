// A layer of experts: configuration, packed weights and the pool that computes it.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "moe/config.h"
#include "moe/engine.h"
#include "moe/loaded.h"
#include "moe/request.h"
#include "moe/table.h"
#include "moe/weights.h"

namespace ktk {

// Like BackendTable, its reference count must not be Python's.
class Layer : public std::enable_shared_from_this<Layer> {
 public:
  // `shards` 0: one per NUMA node that has workers, or as many as the weights can be cut into,
  // which the first expert tells, where those are fewer. Throws std::invalid_argument for sizes
  // that make no sense, and what BackendTable::select throws.
  Layer(std::shared_ptr<const BackendTable> table, const std::string& variant, bool force,
        const Config& config, std::shared_ptr<Engine> engine, int shards,
        const Parts<std::optional<ktk_format>>& wanted);

  // Packs one expert. The first one decides the stored formats; later ones must fit them. Where
  // this throws, an expert that was there may be unloaded (Weights::load).
  void load(size_t expert, const ExpertSource& source);
  // Both give an expert's memory back. Rows routed to one that is left out contribute nothing; to
  // route a row to one that is unloaded is an error.
  void leave_out(size_t expert);
  void unload(size_t expert);
  // Throws std::runtime_error when a row would go to an expert that is not loaded.
  void forward(const Request& request);
  // Holds the turn on the pool, checks as forward() does, and calls body(weights, request), where
  // experts that are left out are skipped. The weights are NULL where nothing is loaded or wanted.
  void compute(const Request& request,
               const std::function<void(const Weights*, const Request&)>& body);

  const Config& config() const { return config_; }
  const BackendTable& table() const { return *table_; }
  const Variant& variant() const { return variant_; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }
  // Waits for a load, as weights() does.
  size_t shards() const;

  // How often tokens chose each expert in calls of forward() since the layer was made or this was
  // reset, whoever computes it: experts that a call skips and those that are left out count, too.
  // Calls that fail count nothing.
  std::vector<int64_t> counts() const;
  // Waits for a call.
  void reset_counts();

  using Loaded = ktk::Loaded<Weights>;
  Loaded weights() const { return {process_, changing_, weights_}; }

 private:
  Parts<ktk_format> stored_formats(const ExpertSource& source) const;
  void check_loaded(const Request& request) const;
  void count(const Choice& choice);
  void discard(size_t expert, Weights::State state);

  std::shared_ptr<const BackendTable> table_;
  const Variant& variant_;
  Config config_;
  std::shared_ptr<Engine> engine_;
  const Process process_;
  Parts<std::optional<ktk_format>> wanted_;
  bool shards_chosen_;      // not by the caller: may become fewer
  std::vector<int> nodes_;  // of each shard
  // Guards weights_. Lock order: the engine's turn, then changing_. forward() takes only the turn.
  mutable std::mutex changing_;
  std::unique_ptr<Weights> weights_;
  std::vector<uint8_t> left_out_;
  size_t loaded_ = 0;  // experts that are loaded or left out
  // Written with the engine's turn, and read at any time.
  std::vector<int64_t> counts_;
};

}  // namespace ktk
