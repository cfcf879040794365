// What an adapter has to do with a backward pass: rows of low rank, in both directions.
#pragma once

#include <cstddef>

#include "moe/lora_rows.h"

namespace ktk {

// x A^T and dy B of a chunk's rows for the one adapter of all tokens. The functions with a block of
// rows are called in this order for each: start(), then add_down(), add_gate_up() and reduce()
// column by column, finish(); add_hidden() when all are done.
class BackwardLora {
 public:
  BackwardLora(const Lora& lora, const Config& config)
      : adapter_(lora.adapters[0]),
        config_(config),
        forward_(lora, config),
        backward_(lora, config) {}

  // Memory for `route`, whose tokens are counted from `begin`.
  void place(const Route& route, size_t begin, Carver& shared);
  void use(char* shared);
  const Carver& own() const { return forward_.own(); }
  // Floats that a row takes.
  size_t width() const { return 6 * forward_.width(); }
  // Whether start() wants gradients of the output.
  bool wants_dy() const { return LoraRows::adapts(adapter_, LoraRows::kDown); }

  // x A^T of gate and up, for one of blocks().
  const std::vector<RowBlock>& blocks() const { return forward_.blocks(); }
  void reduce_hidden(const RowBlock& block, const Rows& hidden, char* own) const {
    forward_.reduce_hidden(block, hidden, own);
  }

  // `dy` [count][H] is not read without wants_dy().
  void start(const RowBlock& block, const float* dy, char* own) const;
  // Adds to columns [begin, end) of dh what goes through down's factors.
  void add_down(const RowBlock& block, size_t begin, size_t end, float* dh, size_t stride,
                char* own) const;
  // Adds up dz B of gate and up, and h A^T of down, over columns [begin, end) of these.
  void reduce(const RowBlock& block, size_t begin, size_t end, const float* gate, const float* up,
              const float* h, size_t stride, char* own) const;
  // Scales what was added up.
  void finish(const RowBlock& block, const Route& route) const;
  // Adds to columns [begin, end) of dx what goes through the factors of gate and up.
  void add_hidden(const RowBlock& block, size_t begin, size_t end, float* dx, size_t stride,
                  char* own) const;

  // x A^T of gate and up and h A^T of down; dz B of gate and up and dy B of down; all times the
  // adapter's scale, the first and the last also times the route's factors of input and output.
  const LoraRows& forward() const { return forward_; }
  const LoraRows& backward() const { return backward_; }

 private:
  const Adapter& adapter_;
  const Config& config_;
  LoraRows forward_, backward_;
};

}  // namespace ktk
