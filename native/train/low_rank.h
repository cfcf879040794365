// What an adapter has to do with a backward pass: rows of low rank, in both directions.
//
// With dz, the gradient of a product W x + scale * B (A x), the gradient of x is one product again,
// with the rows of A behind those of W:
//
//   dx = W^T dz + A^T q = [W; A]^T [dz; q]        q = scale * B^T dz
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "moe/lora_rows.h"
#include "ops/select.h"
#include "train/transposed.h"

namespace ktk {

class BackwardLora {
 public:
  // The matrices whose gradients add up to that of one input, as far as the adapter has factors
  // beside them: down; gate and up.
  using Beside = std::vector<LoraRows::Part>;

  // `lora` has one adapter, for all tokens.
  BackwardLora(const Lora& lora, const Config& config, const Weights& weights);

  // Memory for `route`, whose tokens are counted from `begin`.
  void place(const Route& route, size_t begin, Carver& shared);
  void use(char* shared);
  const Carver& own() const { return forward_.own(); }
  // Floats that a row takes.
  size_t width() const { return 6 * forward_.width(); }

  const Beside& down() const { return down_; }
  const Beside& gate_up() const { return gate_up_; }
  size_t rank() const { return adapter_.rank; }
  // Columns of q.
  size_t width(const Beside& beside) const { return beside.size() * adapter_.rank; }

  // Packs the factors A of an active expert, columns from `begin` on, as depth `at` of a matrix.
  void pack_a(const Beside& beside, size_t active, size_t begin, const Transposing& transposing,
              const TransposedMatrix& to, size_t at, char* memory, char* own) const;
  // Packs `rows` rows of a factor B, from `first` on, as depth [at, at + rows) of a matrix.
  struct RowsOfB {
    LoraRows::Part part;
    size_t first, at, rows;
  };
  void pack_b(size_t active, const RowsOfB& rows, const Transposing& transposing,
              const TransposedMatrix& to, char* memory, char* own) const;

  // Makes columns of q of the product B^T dz of one matrix, which it scales, and keeps them for the
  // gradients of factors. Both are `stride` floats apart.
  void keep(LoraRows::Part part, const RowBlock& block, float* product, float* q,
            size_t stride) const;

  // x A^T of gate or up for a row, as the forward pass left it, times the route's factor of input.
  void load(LoraRows::Part part, size_t row, const char* kept, float factor) const {
    std::memcpy(forward_.row(part, row), kept, adapter_.rank * sizeof(float));
    if (factor != 1) ops().scale(factor, 1, adapter_.rank, forward_.row(part, row), adapter_.rank);
  }
  // Multiplies q of down, as far as it was kept, by the routing weights.
  void weigh(const RowBlock& block, const Route& route) const;
  // h A^T of down for a block of rows: clear_down(), then columns [begin, end) of h one behind the
  // other, then finish().
  void clear_down(const RowBlock& block) const { forward_.clear_down(block); }
  void reduce_down(const RowBlock& block, size_t begin, size_t end, const float* h, size_t stride,
                   char* own) const {
    forward_.reduce_down(block, begin, end, h, stride, own);
  }
  void finish(const RowBlock& block, const Route& route) const;

  // x A^T of gate and up and h A^T of down; q of all three; all times the adapter's scale, the
  // first and the last also times the route's factors of input and output.
  const LoraRows& forward() const { return forward_; }
  const LoraRows& backward() const { return backward_; }

 private:
  const Adapter& adapter_;
  const Config& config_;
  Beside down_, gate_up_;
  LoraRows forward_, backward_;
};

}  // namespace ktk
