// Sizes, tasks and places in scratch memory for one chunk of tokens.
#pragma once

#include <cstddef>
#include <vector>

#include "dense/weights.h"
#include "moe/carver.h"
#include "moe/table.h"

namespace ktk {

// Columns [begin, end) of a slice for rows [first, first + rows) of the chunk.
struct DenseTask {
  const DenseSlice* slice;
  size_t begin, end;
  size_t first, rows;
};

struct DensePlan {
  // So few tokens every worker encodes for itself, which saves a barrier.
  static constexpr size_t kPrivateTokens = 4;
  // Rows that are multiplied at once: bounds a worker's panel.
  static constexpr size_t kMaxRows = 512;

  size_t tokens = 0;
  bool private_x = false;                     // up to kPrivateTokens
  size_t panel_columns = 0;                   // that are computed at once
  size_t panel_stride = 0;                    // floats between rows of the panel
  std::vector<std::vector<DenseTask>> tasks;  // per shard

  std::vector<size_t> x_strides;  // bytes of a token, for each way of encoding
  std::vector<size_t> x;          // offsets of encoded tokens, in shared or in own memory
  Carver shared;

  // Offsets in a worker's own memory.
  struct {
    size_t row;      // one f32 token
    size_t sorted;   // the same, its columns in an order
    size_t panel;    // f32
    size_t scratch;  // the micro-kernel's
    Carver pieces;
  } own{};

  DensePlan(const Variant& variant, const DenseWeights& weights, int workers);

  // The most tokens that a chunk takes, so that memory stays bounded for any number of them.
  size_t max_tokens() const;

  // Plans for `count` tokens, unless that is what it did last.
  void make(size_t count);

 private:
  size_t pad(size_t rows) const;
  size_t kernel_scratch(size_t rows) const;
  void cut();
  void cut_shard(const DenseShard& shard, size_t row_blocks, std::vector<DenseTask>& out) const;
  void place();

  const Variant& variant_;
  const DenseWeights& weights_;
  const size_t workers_;
  bool made_ = false;
};

}  // namespace ktk
