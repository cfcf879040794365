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

  // The matrices of an expert. Those of all slices' down have one depth, and rows that are encoded
  // once: the gradient of the output, and q of down (train/low_rank.h). That of gate and up has
  // gates of all slices, ups of all slices, and q of both.
  std::vector<TransposedMatrix> down;
  TransposedMatrix gate_up;
  std::vector<size_t> depth[2];            // of each slice's gate and up in gate_up
  size_t down_tail = 0, gate_up_tail = 0;  // depth of q
  // What makes q: a factor B each, for rows that are encoded for the matrices above.
  struct FactorB {
    LoraRows::Part part;
    TransposedMatrix matrix;
    size_t depth;   // of what it is multiplied with, in a row
    size_t column;  // of q
    size_t at;      // in an expert's memory
  };
  std::vector<FactorB> b_down, b_gate_up;
  struct {
    std::vector<size_t> down;
    size_t gate_up = 0;
    Carver pieces;
  } expert;  // where they are in an expert's memory

  // A task of packing them.
  struct Piece {
    enum Of { kDown, kGate, kUp, kTailOfDown, kTailOfGateUp, kFactorsB } of;
    size_t slice;
    size_t begin, end;  // rows of the weight
  };
  std::vector<Piece> pieces;

  size_t tokens = 0;
  std::vector<DownTask> columns;            // of dx
  std::vector<size_t> groups;               // the first active expert of each, and the end
  size_t panel_columns = 0;                 // of gate and up that are computed at once
  size_t panel_stride = 0, sum_stride = 0;  // floats between rows of panels

  // Offsets in the memory that workers share. Rows are those of a group, counted from its first.
  size_t dx = 0;        // f32 [tokens][H]
  size_t matrices = 0;  // of a group's experts
  size_t dy = 0;        // tokens, encoded for down
  size_t dz = 0;        // rows, encoded for gate_up
  size_t rows[3] = {};  // f32 [rows][row_stride]: gradients of gate and of up, h
  size_t units = 0;     // of InnerSums
  size_t row_stride = 0;
  Carver shared;

  // Offsets in a worker's own memory.
  struct {
    size_t low_rank;   // of BackwardLora
    size_t row;        // one f32 token
    size_t dots;       // gradients of routing weights, two per row
    size_t panels[4];  // f32: gate, up, dh, h
    size_t sums;       // f32 panel of dx
    size_t gather;     // rows of one expert, encoded for down
    size_t dy;         // the same as f32
    size_t gradients;  // of Gradients
    size_t scratch;    // the micro-kernel's
    size_t pack;       // of Transposing
    Carver pieces;
  } own{};

  // What gradients of factors and weights want.
  struct Sums {
    size_t own_bytes;   // of Gradients
    bool keeps_rows;    // f32 rows are kept for sums over them
    size_t unit_bytes;  // of InnerSums
    bool keeps_dy;      // gradients of the output are wanted as f32, too
  };
  // `lora` may be NULL.
  BackwardPlan(const Config& config, const Weights& weights, const Transposing& transposing,
               const BackwardLora* lora, const Sums& sums);

  // The most tokens of `top_k` experts each that a chunk takes, with memory for products of gate
  // and up that are computed again. Where they were kept it is as many: how tokens are divided is
  // seen in the sums of gradients.
  size_t max_tokens(size_t top_k) const;

  // Plans for tokens [begin, end) that go as `route` says; `lora` is the constructor's.
  void make(const Route& route, size_t begin, size_t end, int workers, BackwardLora* lora);

 private:
  // Rows and experts of the groups that have the most.
  struct Most {
    size_t rows = 0, experts = 0;
  };
  void make_matrices(const BackwardLora* lora);
  void make_factors(const BackwardLora& lora);
  void cut_pieces(bool has_lora);
  Most cut_groups(const Route& route, int workers);
  void place_own();

  const Config& config_;
  const std::vector<Slice>& slices_;
  const Transposing& transposing_;
  const size_t lora_width_;
  size_t widest_q_ = 0;
  const Carver lora_own_;
  const Sums sums_;
};

}  // namespace ktk
