// Sizes, groups of experts and places in scratch memory for the backward pass of one chunk of
// tokens.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/config.h"
#include "moe/route.h"
#include "moe/schedule.h"
#include "moe/weights.h"
#include "train/low_rank.h"
#include "train/transposed.h"

namespace ktk {

struct BackwardPlan {
  // Rows of an expert that are multiplied at once: bounds a worker's panels.
  static constexpr size_t kMaxRows = 256;

  // What acts are encoded for: blocks of any slice's down, and of the gates or ups of all slices.
  std::vector<TransposedBlock> of_down, of_gate_up;

  size_t tokens = 0;
  std::vector<DownTask> columns;            // of dx
  std::vector<size_t> groups;               // the first active expert of each, and the end
  size_t panel_stride = 0, sum_stride = 0;  // floats between rows of panels

  // Offsets in the memory that workers share. Rows are those of a group, counted from its first.
  size_t dx = 0;              // f32 [tokens][H]
  size_t blocks = 0;          // of a group's experts
  std::vector<size_t> dy;     // encoded tokens, per block of rows of down
  std::vector<size_t> dz[2];  // encoded rows of gate and up, per block of their rows
  size_t rows[3] = {};        // f32 [rows][I]: gradients of gate and of up, h
  Carver shared;

  // Offsets in a worker's own memory.
  struct {
    size_t low_rank;             // of BackwardLora
    size_t row;                  // one f32 token
    size_t dots;                 // gradients of routing weights, two per row
    size_t panels[4];            // f32: gate, up, dh, h
    size_t sums[2];              // f32 panels of dx
    std::vector<size_t> gather;  // encoded rows of one expert, per block of rows of down
    size_t dy;                   // the same as f32
    size_t gradients;            // of Gradients
    size_t scratch;              // the micro-kernel's
    size_t pack;                 // of Transposing
    Carver pieces;
  } own{};

  // `lora` may be NULL. `keeps_rows`: f32 rows are kept for sums over them; `keeps_dy`: gradients
  // of the output are wanted as f32, too.
  BackwardPlan(const Config& config, const Weights& weights, const Transposing& transposing,
               const BackwardLora* lora, bool keeps_rows, bool keeps_dy);

  // The most tokens of `top_k` experts each that a chunk takes, where the products of gate and up
  // are kept or computed again.
  size_t max_tokens(size_t top_k, bool kept) const;

  // Plans for tokens [begin, end) that go as `route` says; `lora` is the constructor's.
  void make(const Route& route, size_t begin, size_t end, int workers, BackwardLora* lora);

  // Appends the blocks of an expert: those of down slice by slice, then gate's, if any, then up's.
  void add_blocks(size_t expert, Carver& memory, std::vector<TransposedBlock>& blocks) const;
  size_t blocks_of_down() const { return slices_.size() * of_down.size(); }
  size_t blocks_per_expert() const {
    return blocks_of_down() + config_.first_products() * of_gate_up.size();
  }

 private:
  // Rows and experts of the groups that have the most.
  struct Most {
    size_t rows = 0, experts = 0;
  };
  Most cut_groups(const Route& route, size_t block_bytes, int workers);
  void place_own(const std::vector<TransposedBlock>& expert);

  const Config& config_;
  const Weights& weights_;
  const std::vector<Slice>& slices_;
  const Transposing& transposing_;
  const size_t lora_width_;
  const Carver lora_own_;
  const bool keeps_rows_, keeps_dy_;
};

}  // namespace ktk
