// What a call of a layer computes with adapters: rows of low rank, and what they add to panels.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/lora.h"
#include "moe/rows.h"

namespace ktk {

// Rows [first, first + count) of one active expert.
struct RowBlock {
  size_t active, first, count;
};

// The rows of each active expert in blocks of no more than `most`.
std::vector<RowBlock> row_blocks(const Route& route, size_t most);

// x A^T for the rows of a chunk of tokens, in memory that workers share. Any number of workers, and
// any division of the rows among them, gives the same bits.
class LoraRows {
 public:
  static constexpr size_t kMaxRows = 256;
  // Rows that are decoded to f32 at once: with a factor beside them they should stay in L2.
  static constexpr size_t kDecodedRows = 96;
  enum Part { kGate, kUp, kDown };

  LoraRows(const Lora& lora, const Config& config, const Weights& weights);

  // Memory for `route`, whose tokens are counted from `begin`.
  void place(const Route& route, size_t begin, Carver& shared);
  void use(char* shared) { shared_ = shared; }
  // A worker's scratch memory, which the functions below are given.
  const Carver& own() const { return own_; }
  const std::vector<RowBlock>& blocks() const { return blocks_; }

  // Fills the rows of gate and up for a block of them.
  void reduce_hidden(const RowBlock& block, const Rows& hidden, char* own) const;
  // Adds what columns [begin, end) of the intermediate activations make of the rows of down;
  // clear() comes before the first of them, finish() after the last.
  void clear_down(const RowBlock& block) const;
  void reduce_down(const RowBlock& block, size_t begin, size_t end, const float* h, size_t h_row,
                   char* own) const;
  void finish_down(const RowBlock& block) const;

  // Adds what adapters add to columns [begin, end) of a product, whose rows are those of a block.
  void add(Part part, const RowBlock& block, size_t begin, size_t end, float* panel, size_t stride,
           char* own) const;

  // Rows of low rank, times the adapter's scale.
  float* row(Part part, size_t row) const {
    return reinterpret_cast<float*>(shared_ + at_[part]) + row * width_;
  }
  size_t width() const { return width_; }

  // Whether an adapter has factors beside a matrix, and those of an active expert.
  static bool adapts(const Adapter& adapter, Part part);
  LowRank factors(const Adapter& adapter, Part part, size_t active) const;
  // The part of own() that is LowRank's.
  char* low_rank(char* own) const { return own + own_low_rank_; }

 private:
  // Adds what columns [begin, end) of the hidden states make of rows that have one adapter.
  void reduce_columns(const Adapter& adapter, const RowBlock& block, const Rows& hidden,
                      size_t begin, size_t end, char* own) const;

  const Lora& lora_;
  const Config& config_;
  const Weights& weights_;
  const Route* route_ = nullptr;
  size_t begin_ = 0, width_ = 0;
  std::vector<RowBlock> blocks_;
  Carver own_;
  size_t own_low_rank_, own_turned_, own_x_;
  size_t at_[3] = {};
  char* shared_ = nullptr;
};

}  // namespace ktk
