// Sizes, tasks and places in scratch memory for one chunk of tokens.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/carver.h"
#include "moe/config.h"
#include "moe/route.h"
#include "moe/schedule.h"
#include "moe/table.h"
#include "moe/weights.h"

namespace ktk {

struct Plan {
  // Rows of an expert that are multiplied at once: bounds a worker's panels.
  static constexpr size_t kMaxRows = 512;

  // Tokens are encoded for gate, and once more for up where that wants other activations, or their
  // columns in another order.
  static constexpr size_t kMaxActs = 2;
  size_t num_acts = 1;
  // Experts want columns of x in several orders: not tokens are encoded, but rows of the route.
  bool by_row = false;

  // Bytes of an encoded token, and per slice of an encoded intermediate.
  size_t x_strides[kMaxActs] = {};
  std::vector<size_t> h_strides;

  size_t tokens = 0;
  size_t encoded = 0;  // tokens, or rows of the route
  // So few encoded rows that every worker encodes them all for itself, which saves a barrier.
  bool private_x = false;
  size_t panel_columns = 0;                      // of gate and up that are computed at once
  size_t panel_stride = 0, down_stride = 0;      // floats between rows of panels
  std::vector<std::vector<GateUpTask>> gate_up;  // per slice
  std::vector<DownTask> down;                    // the same for every shard

  // Offsets in the memory that workers share: `h` per slice, `partial` per shard, empty for one.
  size_t x[kMaxActs] = {};
  std::vector<size_t> h, partial;
  Carver shared;

  // Offsets in a worker's own memory.
  struct {
    size_t row;               // one f32 token
    size_t sorted;            // the same, its columns in an order
    size_t x[kMaxActs];       // encoded tokens, when private
    size_t gather[kMaxActs];  // encoded rows of one expert
    size_t gate, up;          // f32 panels
    size_t product;           // f32 panel of the down projection
    size_t sums;              // f32 sums of the output columns of a task
    size_t scratch;           // the micro-kernel's
    Carver pieces;
  } own{};

  Plan(const Config& config, const Variant& variant, const Weights& weights);

  // The most tokens of `top_k` experts each that a chunk takes, so that memory stays bounded for
  // any number of them.
  size_t max_tokens(size_t top_k) const;

  // Plans for `count` tokens that go as `route` says.
  void make(const Route& route, size_t count, int workers);

 private:
  size_t pad(size_t rows) const;
  size_t kernel_scratch(size_t rows) const;
  void place_shared(size_t rows);
  void place_own(size_t block_rows);

  const Config& config_;
  const Variant& variant_;
  const std::vector<Slice>& slices_;
  size_t num_shards_;
  bool has_orders_;
};

}  // namespace ktk
