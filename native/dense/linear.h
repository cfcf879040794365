// A dense layer: out = x W^T + bias.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "dense/plan.h"
#include "dense/weights.h"
#include "moe/engine.h"
#include "moe/loaded.h"
#include "moe/rows.h"
#include "moe/table.h"

namespace ktk {

// Like BackendTable, its reference count must not be Python's.
class Linear : public std::enable_shared_from_this<Linear> {
 public:
  // Columns of x are k, those of the output n. `shards` are as of Layer. Throws
  // std::invalid_argument for sizes that make no sense, and what BackendTable::select throws.
  Linear(std::shared_ptr<const BackendTable> table, const std::string& variant, bool force,
         size_t k, size_t n, std::shared_ptr<Engine> engine, int shards);

  // Packs a weight that is given in parts, whose rows lie one behind the other. What was loaded
  // before goes, unless this throws.
  void load(std::vector<DensePart> parts);
  // Throws std::runtime_error where nothing is loaded. `out` may overlap `x`.
  void forward(const Rows& x, const Rows& out, size_t tokens);
  // Holds the turn on the pool and calls body(weights). Throws as forward().
  void compute(const std::function<void(const DenseWeights&)>& body);
  // As forward() of each layer, with the same input of few rows (DensePlan::kPrivateTokens), as one
  // region of the pool that they share. No output may overlap the input.
  static void forward_few(std::span<Linear* const> layers, const Rows& x,
                          std::span<const Rows> outs, size_t tokens);
  // Writes rows of the weight to rows of `out`. Throws std::out_of_range for an id that is no row.
  void look_up(std::span<const int64_t> ids, const Rows& out);

  size_t n() const { return n_; }
  size_t k() const { return k_; }
  const Variant& variant() const { return variant_; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }
  // How many weights were loaded so far: what was computed before another one is out of date.
  uint64_t loads() const { return loads_.load(std::memory_order_acquire); }
  // Waits for a load, as weights() does.
  size_t shards() const;

  using Loaded = ktk::Loaded<DenseWeights>;
  Loaded weights() const { return {process_, changing_, weights_}; }

 private:
  const DenseWeights& loaded() const;

  std::shared_ptr<const BackendTable> table_;
  const Variant& variant_;
  const size_t k_, n_;
  std::shared_ptr<Engine> engine_;
  const Process process_;
  const size_t wanted_shards_;  // 0: not the caller's choice
  // Guards weights_. Lock order: the engine's turn, then changing_. Calls take only the turn.
  mutable std::mutex changing_;
  std::unique_ptr<DenseWeights> weights_;
  std::unique_ptr<DensePlan> plan_;  // of the last call
  std::atomic<uint64_t> loads_{0};
};

}  // namespace ktk
